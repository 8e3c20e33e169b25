"""Calls in lockstep: each gives what it gives alone, on one lease of each weight."""

import functools

import pytest
import torch
from torch import nn

from tests.models import mlp, wrap, wrap_streamed
from vbrt.errors import WrapError
from vbrt.layers.weights.lockstep import in_lockstep

BF16 = torch.bfloat16


def inputs(count):
    torch.manual_seed(0)
    return [torch.randn(1, 64, dtype=BF16) for _ in range(count)]


@pytest.mark.parametrize("how", ["resident", "streamed"])
@torch.no_grad()
def test_calls_give_what_they_give_alone_and_lease_each_weight_once(how, tmp_path):
    model = mlp(dtype=BF16)
    with wrap(model, "exact") if how == "resident" else wrap_streamed(model, "exact", tmp_path) as vb:
        xs = inputs(5)
        alone = [vb(x) for x in xs]
        before = sum(page.hits + page.misses for page in vb.stack.pages.values())
        together = in_lockstep([functools.partial(vb, x) for x in xs])
        assert all(map(torch.equal, alone, together))
        assert sum(page.hits + page.misses for page in vb.stack.pages.values()) - before == len(vb.stack.pages)
        assert not vb.stack.levels[0].leased


class Chain(nn.Module):
    """Each call adds to a state that the next one reads, between its weights; a call may skip a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.skips = nn.ModuleList(nn.Linear(64, 64) for _ in range(4)), False
        self.state = [torch.zeros(1, 64, dtype=BF16) for _ in range(4)]

    def forward(self, x: torch.Tensor, call: int) -> torch.Tensor:
        for n, layer in enumerate(self.layers):
            if self.skips and n == 1 and call == 2:
                continue
            x = layer(x)
            self.state[n] = self.state[n] + x
            x = torch.tanh(x + self.state[n])
        return x


@torch.no_grad()
def test_what_a_call_writes_the_next_one_reads():
    torch.manual_seed(1)
    model = Chain().to(BF16).eval()
    with wrap(model, "exact") as vb:
        results = []
        for together in (False, True):
            model.state = [torch.zeros(1, 64, dtype=BF16) for _ in range(4)]
            calls = [functools.partial(vb, x, call) for call, x in enumerate(inputs(4))]
            results.append(in_lockstep(calls) if together else [call() for call in calls])
        assert all(map(torch.equal, *results))
        model.skips = True
        with pytest.raises(WrapError, match=r"layers\.2: passes in lockstep use other weights than the first"):
            in_lockstep(calls)
        assert not vb.stack.levels[0].leased


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
@torch.no_grad()
def test_an_error_in_one_call_ends_all_and_gives_the_weights_back(error):
    with wrap(mlp(dtype=BF16), "exact") as vb:
        xs, calls = inputs(4), []
        alone = [vb(x) for x in xs]

        def fail(module, args):
            calls.append(module)
            if len(calls) == 3:
                raise error("stop")

        hook = vb.module[3].register_forward_pre_hook(fail)
        with pytest.raises(error, match="stop"):
            in_lockstep([functools.partial(vb, x) for x in xs])
        hook.remove()
        assert len(calls) == 3 and not vb.stack.levels[0].leased
        assert all(map(torch.equal, in_lockstep([functools.partial(vb, x) for x in xs]), alone))


@torch.no_grad()
def test_threads_compute_under_the_callers_autocast_and_streams():
    with wrap(mlp(dtype=BF16), "exact") as vb, torch.autocast("cpu", torch.bfloat16):
        xs = [x.float() for x in inputs(2)]
        alone = [vb(x) for x in xs]
        together = in_lockstep([functools.partial(vb, x) for x in xs])
        assert all(map(torch.equal, alone, together)) and together[0].dtype is BF16
    assert all(not y.requires_grad for y in together)
