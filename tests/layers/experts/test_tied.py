"""Modules of routed experts that share their weights, as the encoder and the decoder of DiffusionGemma do."""

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

import vbrt
from tests.layers.experts.test_classes import settings
from tests.models import config
from tests.zoo.experts import experts_module, routed


class Two(nn.Module):
    """Two modules of experts, one behind the other, on the same parameters."""

    def __init__(self, name: str = "MixtralExperts", seed: int = 0) -> None:
        super().__init__()
        self.first, self.second = experts_module(name, seed=seed), experts_module(name, seed=seed + 1)
        for parameter in dict(self.first.named_parameters()):
            setattr(self.second, parameter, getattr(self.first, parameter))

    def forward(self, x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x, ids, weights), ids, weights)


@pytest.fixture
def model() -> Two:
    return Two().eval()


@pytest.fixture
def args(model: Two) -> tuple[torch.Tensor, ...]:
    return routed(model.first, 5)


def test_one_set_of_pages_serves_all(model: Two, args, tmp_path: Path) -> None:
    with torch.no_grad():
        expected = model(*args)
        with vbrt.wrap(model, settings(model, "dense", tmp_path)) as vb:
            assert [(swap.name, swap.aliases) for swap in vb.plan.swaps] == [("first", ("second",))]
            assert vb.plan.swapped_bytes == sum(p.nbytes for p in model.first.parameters())
            assert torch.equal(vb(*args), expected)
            assert model.first.handle is model.second.handle
            assert model.first.materialized and model.second.materialized
            with copy.deepcopy(vb) as twin:
                assert torch.equal(twin(*args), expected)
                assert twin.module.first.handle is twin.module.second.handle
            vb.unwrap()
        assert model.first.gate_up_proj is model.second.gate_up_proj
        assert model.first.down_proj is model.second.down_proj
        assert torch.equal(model(*args), expected)


def test_what_is_written_or_loaded_counts_for_all(model: Two, args) -> None:
    with torch.no_grad(), vbrt.wrap(model, settings(model, "dense")) as vb:
        vb.materialize()
        model.second.down_proj.mul_(2)
        vb(*args)
        assert torch.equal(model.first.down_proj + 0, model.second.down_proj + 0)
        other = Two(seed=7).eval()
        vb.load_state_dict(other.state_dict())
        assert torch.equal(vb(*args), other(*args))
        assert model.first.handle is model.second.handle


def test_a_weight_that_is_assigned_to_one_is_its_own(model: Two, args) -> None:
    with torch.no_grad(), vbrt.wrap(model, settings(model, "dense")) as vb:
        vb.materialize()
        model.second.down_proj = nn.Parameter(torch.zeros_like(model.first.down_proj))
        assert not vb(*args).any()
        assert model.first.down_proj.any()


def test_a_save_has_them_once(model: Two, args, tmp_path: Path) -> None:
    with torch.no_grad():
        expected = model(*args)
        with vbrt.wrap(model, settings(model, "dense")) as vb:
            vb.save(tmp_path)
        size = sum(file.stat().st_size for file in tmp_path.glob("*.safetensors"))
        assert size < 1.2 * sum(p.nbytes for p in Two().first.parameters())
        with vbrt.load(tmp_path, Two(seed=3).eval()) as loaded:
            assert torch.equal(loaded(*args), expected)
            assert loaded.module.first.handle is loaded.module.second.handle


def test_modules_that_share_a_part_only_stay(model: Two) -> None:
    model.second.down_proj = nn.Parameter(model.first.down_proj.clone(), requires_grad=False)
    plan = vbrt.make_plan(model, vbrt.load_config(config("dense")))
    assert not plan.swaps and "not the same layer of experts" in plan.skipped["first"].reason
