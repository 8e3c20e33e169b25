"""Routing of a live model: recorded, simulated with the same counts, and read again by the policy's scope."""

import pytest
import torch

import vbrt
from tests.models import TOKENS, mlp, qwen3_moe
from vbrt.errors import ArgumentError, ConfigError, WrapError
from vbrt.residency.routing_file import read_routing, write_routing
from vbrt.residency.routing_trace import Routed, generate_routing
from vbrt.residency.simulate import Pass, simulate


def streamed(tmp_path, times=1, *, format="dense", policy=None, budget=None):
    """A model whose experts are at home on the ssd, with memory for `times` as many as a token goes to beside the rest,
    or `budget` bytes for everything; and the bytes that one token's experts take."""
    model = qwen3_moe()
    settings = {
        "weights": {"format": format, "min_parameters": 0},
        "tiers": {"gpu": {"enabled": False}, "ssd": {"enabled": True, "path": str(tmp_path)}},
        "policy": policy or {},
    }
    plan = vbrt.make_plan(model, vbrt.load_config(settings))
    every = sum(swap.page_bytes for swap in plan.swaps if not swap.experts)
    token = max(sum(page.nbytes for page in swap.leased) for swap in plan.routed)
    settings["tiers"]["cpu"] = {"budget": budget or every + token * times}
    return vbrt.wrap(model, settings), token


@torch.no_grad()
def generate(vb, tokens=6):
    return vb.generate(TOKENS[:, :2], max_new_tokens=tokens, do_sample=False, min_new_tokens=tokens)


def test_a_model_with_routed_experts_gets_their_policy_and_what_every_pass_needs_lives_on_top(tmp_path):
    vb, token = streamed(tmp_path, 2)
    with vb:
        policy = vb.stack.levels[0].policy
        assert (policy.kind, policy.scope, policy.capacity_bytes) == ("experts", "layer", 2 * token)
        assert {swap.pages[0].home for swap in vb.plan.swaps if not swap.experts} == {"cpu"}
        assert {page.home for swap in vb.plan.routed for page in swap.pages} == {"ssd"}
    with vbrt.wrap(mlp(), {"tiers": {"gpu": {"enabled": False}}}) as vb:
        assert vb.stack.levels[0].policy.kind == "scheduled"
    for kind in ("lru", "scheduled"):
        vb, _ = streamed(tmp_path, policy={"kind": kind})
        with vb:
            assert vb.stack.levels[0].policy.kind == kind


@pytest.mark.sample(1)
@pytest.mark.parametrize("format", ["dense", "nvfp4"])
def test_one_tokens_experts_are_room_enough_and_less_is_refused(tmp_path, format):
    model = qwen3_moe()
    with vbrt.wrap(
        model, {"weights": {"format": format, "min_parameters": 0}, "tiers": {"gpu": {"enabled": False}}}
    ) as vb:
        expected = generate(vb)
    vb, token = streamed(tmp_path, format=format)
    with vb:
        assert torch.equal(generate(vb), expected)
        assert vb.stats().tiers["cpu"].peak_bytes <= vb.runtime.budgets["cpu"]
    vb, _ = streamed(tmp_path, format=format, budget=token)
    with vb:  # what every pass needs shares that room
        assert torch.equal(generate(vb), expected) and vb.plan.largest_layer_bytes == token
        assert vb.stats().tiers["cpu"].peak_bytes <= token
    with pytest.raises(ConfigError, match="of the 2 experts that one token goes to"):
        streamed(tmp_path, format=format, budget=token - 1)


@pytest.mark.sample(3)
@pytest.mark.parametrize("scope", ["layer", "model"])
@pytest.mark.parametrize("budget", [1, 3, 5])
def test_live_counts_are_those_of_the_recorded_routing(tmp_path, scope, budget):
    vb, token = streamed(tmp_path, budget, policy={"scope": scope})
    with vb:
        vb.materialize()
        with vb.record_routing(tmp_path / "trace") as recorder:
            generate(vb)
        routing = read_routing(tmp_path / "trace")
        assert recorder.routing == routing and routing.tokens == 2 + 5
        policy, stats = vb.stack.levels[0].policy, vb.stats()
        counts = simulate("experts", routing, token * budget, scope=scope, prefetch=policy.prefetch)
        assert {name: (phase.passes, phase.misses, phase.prefetched) for name, phase in stats.phases.items()} == {
            name: (phase.passes, phase.misses, phase.prefetched) for name, phase in counts.phases.items()
        }
        assert {record.phase for record in routing.records if isinstance(record, Pass)} == {"prompt", "decode"}
        layer = routing.layers[0]
        live = [vb.stack.pages[layer.keys(e)[0]].misses for e in range(layer.experts)]
        assert live == [counts.misses[layer.keys(e)[0]] for e in range(layer.experts)]


def test_the_recorded_routing_decides_the_scope(tmp_path, monkeypatch):
    vb, _ = streamed(tmp_path)
    with vb, vb.record_routing(tmp_path / "trace"):
        generate(vb)
    asked = []
    monkeypatch.setattr(
        "vbrt.model.make_stack.best_scope", lambda routing, room: asked.append((routing, room)) or "model"
    )
    vb, token = streamed(tmp_path, 3, format="nvfp4", policy={"routing": str(tmp_path / "trace")})
    with vb:
        assert vb.stack.levels[0].policy.scope == "model"
        (routing, room) = asked[0]
        assert room == 3 * token and max(routing.sizes.values()) * 2 == token  # bytes of this format
    with pytest.raises(ArgumentError, match="none: cannot read the routing"):
        streamed(tmp_path, policy={"routing": str(tmp_path / "none")})
    other = generate_routing([], tokens=1)
    write_routing(other, tmp_path / "other")
    with pytest.raises(ConfigError, match=r"other: it has no layer, this model has model\.layers\.0\."):
        streamed(tmp_path, policy={"routing": str(tmp_path / "other")})


def test_recording_is_refused_where_there_is_nothing_to_record_or_nowhere_to_write(tmp_path):
    with vbrt.wrap(mlp(), {"tiers": {"gpu": {"enabled": False}}}) as vb, pytest.raises(WrapError, match="no layer of"):
        vb.record_routing(tmp_path / "trace")
    vb, _ = streamed(tmp_path)
    with vb:
        with pytest.raises(ArgumentError, match="cannot write"), vb.record_routing(tmp_path / "missing" / "trace"):
            pass
        assert vb.stack.guard.routing is None
        with vb.record_routing(tmp_path / "a"):
            with pytest.raises(WrapError, match="recorded already"), vb.record_routing(tmp_path / "b"):
                pass
            vb(TOKENS[:, :1])
        vb(TOKENS[:, :1])
    assert sum(isinstance(record, Routed) for record in read_routing(tmp_path / "a").records) == len(vb.plan.routed)


def test_a_smaller_budget_sends_experts_down_before_what_every_pass_needs(tmp_path):
    vb, token = streamed(tmp_path, 16)
    with vb:
        expected = generate(vb)
        pages, every = vb.stack.pages, vb.runtime.budgets["cpu"] - 16 * token
        assert not any(page.home for page in pages.values())
        vb.set_budget("cpu", every + 7 * token)  # of the eight that all experts take
        assert {key for key, page in pages.items() if page.home} < {key for key in pages if "experts" in key}
        assert torch.equal(generate(vb), expected)
        vb.set_budget("cpu", every + token)
        assert {key for key, page in pages.items() if page.home} == {key for key in pages if "experts" in key}
        assert torch.equal(generate(vb), expected)
        vb.set_budget("cpu", token)
        assert torch.equal(generate(vb), expected)
        assert vb.stats().tiers["cpu"].peak_bytes <= token
        vb.set_budget("cpu", every + 16 * token)
        assert not any(page.home for page in pages.values())
        assert torch.equal(generate(vb), expected)


def test_a_model_with_experts_that_joins_others_brings_their_policy(tmp_path):
    first, x = mlp(), torch.ones(2, 64)
    with torch.no_grad():
        expected = first(x), qwen3_moe()(TOKENS).logits
    pages = sum(p.nbytes for p in first.parameters()) // 2
    tiers = {"gpu": {"enabled": False}, "cpu": {"budget": pages}, "ssd": {"enabled": True, "path": str(tmp_path)}}
    settings = {"weights": {"format": "dense", "min_parameters": 0}, "tiers": tiers}
    for kind, joined in (("auto", "experts"), ("scheduled", "scheduled")):
        with vbrt.wrap(mlp(), settings, policy={"kind": kind}) as vb:
            assert vb.stack.levels[0].policy.kind == "scheduled"
            assert torch.equal(vb(x), expected[0])
            with vbrt.wrap(qwen3_moe(), "dense", weights={"min_parameters": 0}, runtime=vb.runtime) as moe:
                assert moe.stack.levels[0].policy.kind == joined
                with torch.no_grad():
                    assert torch.equal(moe(TOKENS).logits, expected[1]) and torch.equal(vb(x), expected[0])
                assert vb.stats().tiers["cpu"].peak_bytes <= pages
