"""What the tests of the commands share."""

from dataclasses import replace

from vbrt.report.stats import LayerStats, Stats, TierStats


def errors(capsys) -> str:
    """Return stderr, which has one line of error; stdout has nothing."""
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("vbrt: error: ") and err.count("\n") == 1 and "Traceback" not in err
    return err


def some_stats(**changes) -> Stats:
    layer = LayerStats(
        format="nvfp4",
        kernel="reference",
        materialized=True,
        home="ssd",
        resident=False,
        plane_bytes={"coarse": 1 << 20},
        forwards=4,
        weight_reads=0,
        hits=1,
        misses=3,
        prefetched=2,
        bytes_moved={"ssd>cpu": 3 << 20},
        wait_us=1500,
    )
    layers = {f"model.layers.{n}.self_attn.{part}_proj": replace(layer, hits=n) for n in range(3) for part in "qkvo"}
    return replace(
        Stats(
            "scheduled",
            "cpu",
            4,
            layers,
            {"cpu": TierStats(9 << 20, 1 << 20, 2 << 20, 0, 1)},
            99 << 20,
            3 << 20,
            4 << 20,
            ("pinned memory is not there",),
        ),
        **changes,
    )
