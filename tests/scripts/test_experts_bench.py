"""The benchmark of routed experts, as far as no GPU is needed."""

from scripts import bench_tables, experts_bench


def test_the_docs_have_the_table_of_the_committed_results():
    (path,) = bench_tables.RESULTS.glob("experts-nvidia-*.json")
    assert "\n".join(bench_tables.experts_table(path)) in bench_tables.DOCS.read_text()


def test_a_turn_around_the_layers_leaves_the_second_level_cache():
    for shape in experts_bench.SHAPES:
        weights = shape.k * 3 * shape.hidden * shape.inner
        for bits in (4.5, 16):
            assert experts_bench.layers_to_rotate(shape, bits) * weights * bits / 8 > 200 << 20
            assert experts_bench.layers_to_rotate(shape, bits, 4096) <= experts_bench.layers_to_rotate(shape, bits)
