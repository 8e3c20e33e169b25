"""Layers that are asked to train, and tools that would replace their weight."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import prune

from tests.layers.weights.temporaries import HOLDINGS, holding, inputs, tied
from tests.models import mlp, wrap
from vbrt.errors import WrapError
from vbrt.layers import VBLinear


@pytest.fixture(params=HOLDINGS, ids="-".join)
def vb(request, tmp_path):
    yield from holding(*request.param, tmp_path)


# -- requires_grad -----------------------------------------------------------------------------------------------------


def ask_weight(layer):
    layer.weight.requires_grad_(True)


def ask_attribute(layer):
    layer.weight.requires_grad = True


def ask_layer(layer):
    layer.requires_grad_(True)


def ask_model(layer):
    nn.Sequential(layer).requires_grad_()


@pytest.mark.parametrize("ask", [ask_weight, ask_attribute, ask_layer, ask_model])
def test_a_layer_that_is_asked_to_train_says_so_and_trains(vb, ask):
    vb.materialize().requires_grad_(False)
    layer, x = vb.module[2], inputs(vb)
    y, before = layer(x), layer.weight
    with pytest.warns(UserWarning, match=r"requires_grad_\(True\).*: 2 left the tiers to train.*mode=\"train\""):
        ask(layer)
    assert type(layer) is nn.Linear and layer.weight is before and isinstance(layer.weight, nn.Parameter)
    assert torch.allclose(layer(x), y, atol=1e-2)
    optimizer = torch.optim.AdamW([before], lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        vb(x).float().square().sum().backward()
        optimizer.step()
    assert not torch.allclose(layer(x), y, atol=1e-2)
    assert "2" not in vb.registry and "2" not in vb.stats().layers
    vb.materialize(), vb.set_budget("cpu", "20%" if "ssd" not in vb.plan.budgets else vb.plan.budgets["cpu"])
    model = vb.unwrap()
    assert [type(module) for module in model[::2]] == [nn.Linear] * 6 and model[2].weight is before


def test_a_frozen_shell_that_is_asked_to_train_before_its_first_forward_trains():
    vb = wrap(mlp(depth=2).requires_grad_(False))
    vb.module[0].weight.requires_grad_(True)
    vb(inputs(vb)).sum().backward()
    assert type(vb.module[0]) is nn.Linear and vb.module[0].weight.grad is not None
    assert type(vb.module[2]) is VBLinear


def test_freezing_a_layer_changes_nothing(vb):
    vb.materialize()
    vb.requires_grad_(False)
    vb.module[0].requires_grad_(False)
    vb.module[0].weight.requires_grad_(False)
    vb.module[0].weight.detach().requires_grad_(True)  # a leaf of somebody else's
    assert all(isinstance(layer, VBLinear) for layer in vb.module[::2])


def test_a_compiled_model_computes_with_what_was_written():
    vb, x = wrap(mlp(depth=2)).materialize(), torch.randn(2, 64)
    run = torch.compile(vb.module, backend="eager")
    with torch.no_grad():
        run(x)
        held = vb.module[0].weight
        for write in (held.zero_, lambda: held.copy_(torch.eye(64)), lambda: held.data.fill_(0.5)):
            write()
            assert torch.allclose(run(x), vb(x), atol=1e-6)
            write()
            y = run(x)
            assert torch.allclose(y, vb(x), atol=1e-6)


def test_tied_layers_train_together():
    vb = wrap(tied()).materialize()
    with pytest.warns(UserWarning, match="left the tiers"):
        vb.module[2].requires_grad_(True)
    assert vb.module[0].weight is vb.module[2].weight and vb.module[0].weight.requires_grad


def test_a_copy_that_is_asked_to_train_leaves_the_original_alone(vb):
    vb.materialize()
    x = inputs(vb)
    y = vb.module[0](x)
    with pytest.warns(UserWarning, match="left the tiers"):
        clone = copy.deepcopy(vb.module[0]).requires_grad_(True)
    assert type(clone) is nn.Linear and clone.weight.requires_grad
    with torch.no_grad():
        clone.weight.zero_()
    assert type(vb.module[0]) is VBLinear and torch.equal(vb.module[0](x), y)


# -- what would replace the weight -------------------------------------------------------------------------------------


@pytest.mark.sample(8)
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(
    "change",
    [
        lambda layer: prune.l1_unstructured(layer, "weight", 0.5),
        lambda layer: prune.random_structured(layer, "weight", 0.5, dim=0),
        nn.utils.weight_norm,
        nn.utils.parametrizations.weight_norm,
        nn.utils.parametrizations.spectral_norm,
        nn.utils.parametrizations.orthogonal,
    ],
)
def test_pruning_and_norms_are_refused_by_name_and_the_layer_is_as_it_was(vb, change):
    layer, x = vb.module[0], inputs(vb)
    before = dict(layer._parameters)
    with torch.no_grad():
        y = copy.deepcopy(vb)(x)
    with pytest.raises(WrapError, match=r"^0[.:].*before wrapping"):
        change(layer)
    assert list(layer._parameters.items()) == list(before.items()) and not layer._forward_pre_hooks
    assert not layer._buffers and type(layer) is VBLinear
    with torch.no_grad():
        assert torch.equal(vb(x), y)


@pytest.mark.parametrize("materialized", [False, True])
def test_spectral_norm_by_a_hook_finds_no_parameter(materialized):
    vb, x = wrap(mlp(depth=1)), torch.randn(2, 64)
    if materialized:
        vb.materialize()
    with pytest.raises(ValueError, match="SpectralNorm"):
        nn.utils.spectral_norm(vb.module[0])
    assert torch.equal(vb(x), mlp(depth=1)(x)) and type(vb.module[0]) is VBLinear


def test_a_layer_lists_its_weight_among_its_own_parameters_and_a_model_does_not(vb):
    layer = vb.materialize().module[0]
    held = layer.weight
    assert [name for name, _ in layer.named_parameters()] == ["weight", "bias"]
    assert next(layer.parameters()) is held
    assert "0.weight" not in dict(vb.module.named_parameters())
