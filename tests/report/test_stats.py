"""The table of a snapshot: within the width, every layer in it, and fast for models of many layers."""

import io
import time

import pytest
from rich.console import Console

from vbrt.report.stats import LayerStats, Stats, TierStats


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
    lines = printed(stats, width)
    assert max(map(len, lines)) <= width
    text = "".join(line[:width].split("  ")[0] for line in lines)  # the first column, folded names put together
    assert all(name.removeprefix("model.layers.") in text or name in text for name in stats.layers)
    assert any(line.startswith("12 layers") for line in lines)


def test_a_wide_table_has_every_column_aligned():
    lines = str(snapshot(3)).splitlines()
    head, rule, *rows = lines[1:6]
    assert head.split() == ["layer", "home", "size", "hits", "misses", "hit", "rate", "ahead", "moved", "wait", "ms"]
    name, *cells = rows[1].split()
    assert name == "model.layers.0.block_sparse_moe.experts.1.up_proj"
    assert cells == ["ssd", "84.0", "KiB", "1", "2", "33.3", "%", "1/2", "168.0", "KiB", "0.1"]
    assert set(rule) == {"─"} and {len(line) for line in (head, rule, *rows, lines[7])} == {len(rule)}


def test_a_table_of_many_layers_does_not_keep_anyone_waiting():
    stats = snapshot(10_000)
    start = time.process_time()
    text = str(stats)
    assert time.process_time() - start < 2.5
    assert len(text.splitlines()) > 10_000
