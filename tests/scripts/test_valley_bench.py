"""The sweep of fused layers at 65 to 4096 tokens: what is committed, and what docs/measurements.md says of it."""

import json

from scripts import bench_tables, valley_bench, valley_tables


def results():
    (path,) = bench_tables.RESULTS.glob("valley-*.json")
    return path, json.loads(path.read_text())


def test_the_committed_sweep_is_whole_and_its_summary_is_that_of_its_rows():
    _, result = results()
    for format, figures in result["summary"].items():
        points = {(row["k"], row["n"], row["m"]) for row in result["rows"] if row["format"] == format}
        assert points == {(*shape, m) for shape in valley_bench.SHAPES for m in valley_bench.TOKENS}
        assert figures == valley_bench.summary(result["rows"])[format]


def test_the_docs_have_the_sweep_and_what_ordered_activations_changed():
    path, _ = results()
    (ordered,) = bench_tables.RESULTS.glob("ordered-launches-*.json")
    tables = (
        valley_tables.valley_table(path),
        valley_tables.valley_table(ordered, "fused layers with ordered activations"),
    )
    assert all("\n".join(table) in bench_tables.DOCS.read_text() for table in tables)
