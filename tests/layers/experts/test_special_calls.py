"""Experts that are called in ways of their own, or keep their matrices so."""

import copy
import pickle
from pathlib import Path

import pytest
import torch
from torch import nn

import vbrt
from tests.layers.experts.test_classes import settings
from tests.matrix import matrix
from tests.zoo.experts import EXPERTS, SPECIAL, Holder, called, special_module
from vbrt.layers.experts import VBExperts

TOKENS = (1, 12, 3)


def layer_of(model: nn.Module) -> VBExperts:
    return next(module for module in model.modules() if isinstance(module, VBExperts))


@pytest.mark.sample(6)
@matrix(format={"dense": torch.float32, "exact": torch.bfloat16}, name=tuple(SPECIAL), turns=2)
def test_they_give_the_bits_of_the_module(format: torch.dtype, name: str, tmp_path: Path) -> None:
    dtype, kind = format, "dense" if format is torch.float32 else "exact"
    model = Holder(special_module(name, dtype=dtype)).eval()
    inputs = [called(name, tokens, dtype=dtype, seed=tokens) for tokens in TOKENS]
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    with torch.no_grad():
        expected = [model(*args) for args in inputs]
        for where in (None, tmp_path):
            with vbrt.wrap(model, settings(model, kind, where)) as vb:
                got = [vb(*args) for args in inputs]
                assert layer_of(model).materialized
                assert all(torch.equal(value, weights[key]) for key, value in vb.state_dict().items())
                vb.unwrap()
            assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(expected, got, strict=True))
    assert all(torch.equal(value, weights[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize("name", SPECIAL)
def test_4_bits_give_what_the_decoded_weights_give(name: str, tmp_path: Path) -> None:
    model = Holder(special_module(name)).eval()
    inputs = [called(name, tokens, seed=tokens) for tokens in TOKENS]
    with torch.no_grad():
        vb = vbrt.wrap(model, settings(model, "nvfp4", tmp_path))
        got = [vb(*args) for args in inputs]
        vb.unwrap()
        expected = [model(*args) for args in inputs]
    for a, b in zip(expected, got, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", SPECIAL)
def test_gradients_are_those_of_the_module(name: str, tmp_path: Path) -> None:
    model = Holder(special_module(name)).eval()
    floats = [a.requires_grad_() for a in called(name, 5) if isinstance(a, torch.Tensor) and a.is_floating_point()]
    args = iter(floats)
    args = [next(args) if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in called(name, 5)]
    down = torch.randn_like(model(*args))
    expected = torch.autograd.grad(model(*args), floats, down)
    with vbrt.wrap(model, settings(model, "dense", tmp_path)) as vb:
        got = torch.autograd.grad(vb(*args), floats, down)
        vb.unwrap()
    for a, b in zip(expected, got, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", SPECIAL)
def test_copies_pickles_and_saves_compute_the_same(name: str, tmp_path: Path) -> None:
    model = Holder(special_module(name, dtype=torch.bfloat16)).eval()
    args = called(name, 4, dtype=torch.bfloat16)
    with torch.no_grad():
        expected = model(*args)
        vb = vbrt.wrap(model, settings(model, "exact"))
        vb.materialize()
        assert torch.equal(copy.deepcopy(vb)(*args), expected)
        assert torch.equal(pickle.loads(pickle.dumps(vb.module)).experts(*args), expected)
        vb.save(tmp_path)
        other = Holder(special_module(name, dtype=torch.bfloat16, seed=1)).eval()
        with vbrt.load(tmp_path, other) as loaded:
            assert torch.equal(loaded(*args), expected)
        vb.close()


@pytest.mark.parametrize("name", SPECIAL)
def test_experts_train_in_4_bits_or_say_that_they_cannot(name: str) -> None:
    model = Holder(special_module(name)).requires_grad_().train()
    config = {
        "mode": "train",
        "weights": {"format": "nvfp4", "min_parameters": 0},
        "tiers": {"gpu": {"enabled": False}},
    }
    plan = vbrt.make_plan(model, vbrt.load_config(config))
    if name != "DbrxExperts":
        assert [swap.name for swap in plan.swaps] == ["experts"]
    else:
        assert any('stay dense in mode = "train"' in skip.reason for skip in plan.skipped.values())


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["LongcatFlashExperts", "Llama4TextExperts", "InklingSharedExperts"])
def test_compiled_in_one_graph_they_compute_the_same(name: str) -> None:
    model = Holder(special_module(name)).eval()
    args = called(name, 5)
    with torch.no_grad(), vbrt.wrap(model, settings(model, "dense")) as vb:
        vb.materialize()
        expected = model(*args)
        torch._dynamo.reset()
        assert torch.equal(torch.compile(model, backend="aot_eager", fullgraph=True)(*args), expected)
        vb.unwrap()


def test_llama4_leases_only_the_experts_that_tokens_are_routed_to(tmp_path: Path) -> None:
    model = Holder(special_module("Llama4TextExperts")).eval()
    with torch.no_grad(), vbrt.wrap(model, settings(model, "dense", tmp_path)) as vb:
        vb(*called("Llama4TextExperts", 1))
        last = layer_of(model).handle.routing.last
        assert sum(pass_ > 0 for pass_ in last) == 1 and len(last) == EXPERTS
        vb.unwrap()


def test_matrices_that_nobody_picks_read_as_weights(tmp_path: Path) -> None:
    model = Holder(special_module("DbrxExperts")).eval()
    dense = model.experts.mlp.w1.clone()
    with torch.no_grad(), vbrt.wrap(model, settings(model, "dense", tmp_path)) as vb:
        vb.materialize()
        layer = layer_of(model)
        assert layer.w1.shape == dense.shape and torch.equal(layer.w1 + 0, dense)
        assert torch.equal(layer.w1.view(EXPERTS, -1, dense.shape[1])[3].sum(), dense.view(EXPERTS, -1, 64)[3].sum())
        layer.w1.mul_(2)
        vb(*called("DbrxExperts", 2))
        assert torch.equal(layer.w1 + 0, dense * 2)
        vb.unwrap()
    assert torch.equal(model.experts.mlp.w1, dense * 2)
