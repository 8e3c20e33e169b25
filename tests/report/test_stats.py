"""The table of a snapshot: within the width, every layer in it, and fast for models of many layers."""

import io
import time
from dataclasses import fields, replace

import pytest
from rich.console import Console

from vbrt.report.layer_groups import by_kind
from vbrt.report.stats import LayerStats, Stats, StepCounts, TierStats
from vbrt.report.training_counters import UpdateStats


def snapshot(layers):
    names = [f"model.layers.{n // 8}.block_sparse_moe.experts.{n % 8}.up_proj" for n in range(layers)]
    found = {name: layer(n) for n, name in enumerate(names)}
    cpu = TierStats(1 << 30, 1 << 29, 1 << 29, 0, layers)
    return Stats("scheduled", "cpu", 6, found, {"cpu": cpu}, 1 << 31, 1 << 28, 1 << 29)


def layer(n):
    return LayerStats(
        "nvfp4",
        "compiled",
        materialized=True,
        home="ssd" if n % 2 else "cpu",
        resident=False,
        plane_bytes={"coarse": 86016},
        forwards=6,
        weight_reads=0,
        hits=n % 7,
        misses=2,
        prefetched=1,
        bytes_moved={"ssd>cpu": 172032},
        wait_us=100 * n,
    )


def printed(stats, width):
    out = io.StringIO()
    Console(file=out, width=width, color_system=None).print(stats)
    return [line.rstrip() for line in out.getvalue().splitlines()]


@pytest.mark.parametrize("width", [20, 40, 60, 80, 100, 132])
def test_a_table_stays_within_the_width_and_names_every_layer(width):
    stats = snapshot(12)
    lines = stats.table(width=width, each=True).splitlines()
    assert max(map(len, [*lines, *printed(stats, width)])) <= width
    text = "".join(line[:width].split("  ")[0] for line in lines)  # the first column, folded names put together
    assert all(name.removeprefix("model.layers.") in text or name in text for name in stats.layers)
    assert any(line.startswith("12 layers") for line in lines)


def test_a_wide_table_has_every_column_aligned():
    lines = snapshot(3).table(width=132, each=True).splitlines()
    head, rule, *rows = lines[1:6]
    heads = ["layer", "home", "size", "hit", "prefetched", "waited", "hit", "rate", "moved", "wait", "ms"]
    assert head.split() == heads
    name, *cells = rows[1].split()
    assert name == "model.layers.0.block_sparse_moe.experts.1.up_proj"
    assert cells == ["ssd", "84.0", "KiB", "1", "1", "1", "66.7", "%", "168.0", "KiB", "0.1"]
    assert set(rule) == {"─"} and {len(line) for line in (head, rule, *rows, lines[7])} == {len(rule)}


def test_a_table_of_many_layers_does_not_keep_anyone_waiting():
    stats = snapshot(10_000)
    start = time.process_time()
    text = stats.table(each=True)
    assert time.process_time() - start < 2.5
    assert len(text.splitlines()) > 10_000


def test_layers_of_one_kind_are_one_row_the_longest_wait_first():
    stats = snapshot(16)  # every second layer has another home
    lines = [line for line in stats.table(width=132).splitlines() if "up_proj" in line]
    assert ["experts.1,3,5,7.up_proj × 8" in lines[0], "experts.0,2,4,6.up_proj × 8" in lines[1]] == [True, True]
    each = stats.layers.values()
    kinds = by_kind(stats)
    assert len(kinds.layers) == 2 and (kinds.hits, kinds.misses) == (stats.hits, stats.misses)
    assert kinds.bytes_moved == stats.bytes_moved and kinds.wait_us == stats.wait_us
    assert all(of.forwards == 6 for of in kinds.layers.values())
    assert sum(of.plane_bytes["coarse"] for of in kinds.layers.values()) == sum(of.plane_bytes["coarse"] for of in each)
    assert any(line.startswith("16 layers") for line in str(stats).splitlines())


def test_products_of_the_cpu_have_a_column_where_there_are_any():
    stats = snapshot(4)
    assert " computed " not in stats.table(width=132)
    layers = {name: replace(of, computed=n) for n, (name, of) in enumerate(stats.layers.items())}
    some = replace(stats, layers=layers)
    assert "  prefetched  waited  computed  hit rate  " in some.table(width=132)
    assert sorted(of.computed for of in by_kind(some).layers.values()) == [0 + 2, 1 + 3]
    data = some.to_dict()
    assert data["computed"] == 6 and Stats.from_dict(data) == some
    for layer in data["layers"].values():  # a snapshot of an earlier version
        del layer["computed"]
    assert Stats.from_dict(data).computed == 0
    assert sum("vbrt_page_computed_total{" in line for line in some.metrics().splitlines()) == 4


def test_a_notebook_shows_the_table_with_its_characters_escaped():
    stats = snapshot(1)
    odd = Stats("<script>", *(getattr(stats, f.name) for f in fields(Stats)[1:]))
    assert "<pre>" in odd._repr_html_() and "&lt;script&gt;" in odd._repr_html_()


INTERNALS = (
    "pages on cpu: 1 resident, 0 of them homes",
    "moving pages: not replayed as a programme: o_proj (pageable memory)",
    "missed experts: computed on the CPU",
    "computed by the CPU where they lie: 3 weights",
    "updates: 2 in flight",
    "C kernels: linear prebuilt (avx2)",
    "1 capture in 5 ms, holding 2.0 KiB",
    "fused in captures: 4 rotary",
    "not fused: 1 (attention: of three dimensions)",
    "compiled at first launch: 3 (OutOfMemoryError)",
)
ACTIONABLE = (
    "tier cpu: 512.0 MiB of 1.0 GiB, peak 512.0 MiB",
    "decode steps: 8 captured, 2 eager",
    "eager decode steps: 2 (compute.captures = false)",
    "updates: 3 steps by triton",
    "fallback: pinned memory is not there",
    "note: torch 99.1 is newer than the newest tested (2.13)",
)


def test_a_default_print_has_what_a_user_can_act_on_and_a_verbose_one_the_rest():
    brief = replace(
        snapshot(1),
        leases="not replayed as a programme: o_proj (pageable memory)",
        missed="computed on the CPU",
        hosted="3 weights",
        updates=UpdateStats("triton", steps=3, waiting=2),
        libraries={"linear": "prebuilt (avx2)"},
        steps=StepCounts(
            8,
            2,
            recordings=1,
            record_us=5000,
            reasons={"compute.captures = false": 2},
            joined={"rotary": 4},
            unjoined={"attention: of three dimensions": 1},
            held_bytes=2048,
            not_ahead={"OutOfMemoryError": 3},
        ),
        fallbacks=("pinned memory is not there",),
        untested=("torch 99.1 is newer than the newest tested (2.13)",),
    )
    verbose = replace(brief, verbose=True)
    for part in INTERNALS:
        assert part not in str(brief) and part in str(verbose), part
    for part in ACTIONABLE:
        assert part in str(brief) and part in str(verbose), part
    assert str(brief) == verbose.table(verbose=False) and str(verbose) == brief.table(verbose=True)
    assert printed(verbose, 100) == str(verbose).splitlines()
    assert verbose.to_dict() == brief.to_dict() and Stats.from_dict(verbose.to_dict()) == verbose == brief
