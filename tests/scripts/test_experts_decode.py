"""The benchmark of decoding with routed experts: routing by a trace, its limit, and rows on a tiny model."""

import pytest
import torch

pytest.importorskip("transformers")

from scripts import experts_decode
from scripts.experts_decode import Run, Trace, build, cached_row, limit_seconds, routing_of, rows
from scripts.missed_breakdown import CROSSING, Spans
from tests.layers.experts.beside_gpu import wrap_beside
from vbrt.config import MISSES

CPU = torch.device("cpu")
TINY = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 32,
    "moe_intermediate_size": 32,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "num_experts": 8,
    "num_experts_per_tok": 2,
}


def test_a_model_follows_the_trace_whatever_its_routers_say():
    model, seen = build(2, CPU, **TINY), []
    trace = Trace(routing_of(model, 5), CPU)
    trace.lead(model)
    for layer, block in enumerate(model.model.layers):
        block.mlp.experts.register_forward_pre_hook(lambda module, args, n=layer: seen.append((n, args[1].tolist())))
    for token in (3, 1):
        trace.turn(token)
        model(input_ids=torch.ones(1, 1, dtype=torch.int64))
    assert seen == [(layer, trace.rows[token, layer].tolist()) for token in (3, 1) for layer in range(2)]
    assert trace.done == [3, 1] and trace.rows.shape == (5, 2, 1, 2)
    assert trace.rows[3].tolist() != trace.rows[1].tolist()


def test_the_limit_is_the_resident_step_and_the_missing_bytes_at_50_gb_s():
    assert limit_seconds(0.002, 1e8) == pytest.approx(0.004)


def test_a_tiny_model_has_rows(monkeypatch):
    monkeypatch.setattr(experts_decode, "WARM", 1)
    monkeypatch.setattr(experts_decode, "COUNTED", 2)
    done = list(rows(2, [], CPU, gpu="1GiB", how="joined", **TINY))
    assert [row["case"] for row in done] == [
        "bf16, resident, eager",
        "bf16, resident, joined",
        "4 bits, resident, joined",
    ]
    assert all(row["ms"] > 0 and row["tokens_s"] == pytest.approx(1e3 / row["ms"]) for row in done)


@torch.no_grad()
def test_missed_experts_are_fetched_computed_or_divided_side_by_side(monkeypatch):
    monkeypatch.setattr(experts_decode, "WARM", 1)
    monkeypatch.setattr(experts_decode, "COUNTED", 4)
    model = build(2, CPU, **TINY)
    trace = Trace(routing_of(model, 12), CPU)
    trace.lead(model)
    vb = wrap_beside(monkeypatch, model, room=4)
    monkeypatch.setattr(type(vb), "set_budget", lambda self, tier, nbytes: nbytes)  # the memory that stands for a GPU's
    found = {miss: cached_row(vb, trace, 0.25, Run(1e-3), how="joined", miss=miss, parts=True) for miss in MISSES}
    assert {row["decides"][0] for row in found.values()} == {"host"} and found["fetch"]["missed_mb"] > 0
    assert found["compute"]["computed"] > found["fetch"]["computed"] == 0 and "GB/s" in found["auto"]["rates"]
    assert found["auto"]["call_us"] > 0 and found["auto"]["host_us"] > 0 and "host_us" not in found["compute"]
    parts = found["compute"]["layer_us"]
    whole = parts["layer, in all"]
    team = parts["the team: from the post until it is done"]  # 0 where a busy machine let it end within the post
    assert 0 <= team < whole and parts[". of that waiting for the CPU"] < whole
    assert whole + parts["rest of the step"] == pytest.approx(found["compute"]["ms"] * 1e3 / 2)


def test_small_copies_are_timed_by_the_gpus_clock(monkeypatch):
    clock = iter((5.0, 5.25))

    class Event:
        def __init__(self, *, enable_timing):
            assert enable_timing

        def record(self):
            self.ms = next(clock)

        def elapsed_time(self, later):
            return later.ms - self.ms

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    spans, (line, *_) = Spans(), CROSSING[0]
    assert spans.crossed(line, abs)(-2) == 2
    assert spans.row(layers=5, tokens=1) == {line: pytest.approx(50)}


@torch.no_grad()
def test_a_share_of_the_experts_is_read_from_a_drive(monkeypatch, tmp_path):
    monkeypatch.setattr(experts_decode, "WARM", 1)
    monkeypatch.setattr(experts_decode, "COUNTED", 4)
    model = build(2, CPU, **TINY)
    trace = Trace(routing_of(model, 12), CPU)
    trace.lead(model)
    page = 4096
    vb = wrap_beside(monkeypatch, model, room=4, cpu={"budget": 9 * page}, ssd={"enabled": True, "path": str(tmp_path)})
    budgets = {}
    monkeypatch.setattr(type(vb), "set_budget", lambda self, tier, nbytes: budgets.setdefault(tier, nbytes))
    row = cached_row(vb, trace, 0.25, Run(1e-3), how="joined", drive=0.5, decides="host")
    pages = {p.nbytes for p in vb.stack.pages.values()}
    assert budgets["cpu"] == (8 + 2) * max(pages) and row["decides"] == ["host"]
    assert row["drive_mb"] > 0 and row["drive_pages"] == pytest.approx(row["drive_mb"] * 1e6 / max(pages))
    vb.close()
