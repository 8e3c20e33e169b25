"""The watch for NaN and Inf: it names the first module and what of it was not finite."""

import pytest
import torch
from torch import nn

import vbrt
from tests.models import TOKENS, llama, mlp, wrap
from vbrt.errors import NonfiniteError, VBError


class Log(nn.Module):
    def forward(self, x):
        return (x - 1e9).log()


def found(model, x):
    with vbrt.watch_nonfinite(model) as watch:
        model(x)
    return watch.first


def test_a_finite_model_reports_nothing_and_keeps_no_hooks():
    model = mlp()
    assert found(model, torch.randn(2, 64)) is None
    assert not any(module._forward_hooks for module in model.modules())


def test_the_innermost_module_that_makes_nan_of_finite_values_is_named():
    model = nn.Sequential(mlp(), nn.Sequential(Log(), nn.Linear(64, 64)))
    first = found(model, torch.randn(2, 64))
    assert (first.module, first.cause, first.nan, first.inf, first.size) == ("1.0", "output", 128, 0, 128)
    assert str(first) == "1.0: its output holds 128 NaN of 128; inputs and parameters are finite"


def test_a_parameter_that_is_not_finite_is_named():
    model = mlp()
    with torch.no_grad():
        model[4].weight[0, :2] = torch.inf
    first = found(model, torch.ones(2, 64))
    assert (first.module, first.cause, first.inf) == ("4", "weight", 2)
    assert "4: its weight holds 2 Inf of 4096" in str(first)


def test_an_input_that_is_not_finite_is_named():
    x = torch.ones(2, 64)
    x[0, 0] = torch.nan
    first = found(mlp(), x)
    assert (first.module, first.cause, first.nan) == ("0", "input", 1)


def test_wrapped_models_are_watched_under_their_own_names():
    for vb in (
        wrap(llama(), "nvfp4"),
        vbrt.wrap(llama(), mode="train", weights={"min_parameters": 0}, tiers={"gpu": {"enabled": False}}),
    ):
        with torch.no_grad():
            vb.module.model.embed_tokens.weight[5] = torch.nan
        with vbrt.watch_nonfinite(vb) as watch:
            vb(input_ids=TOKENS)
        assert (watch.first.module, watch.first.cause) == ("model.embed_tokens", "weight")


def test_what_was_found_can_be_raised_and_hooks_go_when_the_block_raises():
    model = nn.Sequential(Log())
    with pytest.raises(ZeroDivisionError), vbrt.watch_nonfinite(model) as watch:
        model(torch.ones(1))
        raise ZeroDivisionError
    assert not model[0]._forward_hooks and issubclass(NonfiniteError, VBError)
    with pytest.raises(NonfiniteError, match=r"^0: its output"):
        watch.raise_first()
