"""Layers of one input are computed in one call on a CPU; results are those of a call for each."""

import gc
import sys
import threading

import pytest
import torch
from torch import nn

from tests.kernels.cpu.test_cpu_linear import built
from tests.models import wrap
from vbrt.kernels.cpu.small_batch_linear import Few

pytestmark = built


class Heads(nn.Module):
    """Projections of one input; `between` runs behind the first, `left_out` ones are not called."""

    def __init__(self, bias=False):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(64, n, bias=bias and n == 48) for n in (48, 16, 32))
        self.between, self.left_out = lambda x: None, ()

    def forward(self, x):
        ys = [self.q(x)]
        self.between(x)
        return [*ys, *(layer(x) for layer in (self.k, self.v) if layer not in self.left_out)]


@pytest.fixture
def calls(monkeypatch):
    """How many layers each call of C code computed."""
    numbers, together = [], Few.together
    monkeypatch.setattr(
        Few, "together", lambda few, others, *rest: numbers.append(1 + len(others)) or together(few, others, *rest)
    )
    return numbers


@pytest.fixture(params=[False, True], ids=["", "bias"])
def vb(request):
    vb = wrap(Heads(request.param).eval(), "nvfp4")
    vb.materialize()
    with torch.no_grad():
        vb(torch.randn(2, 64))  # planes that never move are kept
    return vb


def alone(vb, x):
    """What each layer gives by itself."""
    with torch.enable_grad():
        return [layer(x).detach() for layer in (vb.module.q, vb.module.k, vb.module.v)]


def same(ys, wanted):
    return len(ys) == len(wanted) and all(torch.equal(y, of) for y, of in zip(ys, wanted, strict=True))


@torch.no_grad()
def test_layers_that_get_the_same_tensor_are_computed_in_one_call_from_then_on(vb, calls):
    for x in torch.randn(4, 1, 64):
        assert same(vb(x), alone(vb, x))
    assert calls == [1, 1, 1, 3, 3, 3]
    assert [layer.forwards for layer in vb.stats().layers.values()] == [9, 9, 9]


@torch.no_grad()
def test_an_input_that_changed_in_between_is_computed_anew_though_no_version_says_so(vb):
    vb(torch.randn(1, 64))
    vb.module.between = lambda x: x.data.mul_(2)
    x = torch.randn(1, 64)
    doubled = alone(vb, 2 * x)
    assert same(vb(x)[1:], doubled[1:])
    vb.module.between = lambda x: x.data.mul_(2)
    with torch.inference_mode():
        assert same(vb(torch.ones(1, 64))[1:], [y.clone() for y in alone(vb, 2 * torch.ones(1, 64))[1:]])


@torch.no_grad()
def test_results_that_nobody_asks_for_end_the_group(vb, calls):
    vb(torch.randn(1, 64))
    vb.module.left_out = (vb.module.v,)
    for x in torch.randn(30, 1, 64):
        assert same(vb(x), alone(vb, x)[:2])
    assert 3 in calls and calls[-2:] == [1, 1]


@torch.no_grad()
def test_a_weight_that_is_replaced_between_layers_is_the_one_that_counts(vb):
    vb(torch.randn(1, 64))

    def replace(x):
        vb.module.k.weight = nn.Parameter(torch.eye(16, 64))

    vb.module.between = replace
    x = torch.randn(1, 64)
    assert torch.allclose(vb(x)[1], x[:, :16], atol=0.2)


def test_threads_get_their_own_results(vb):
    xs, wrong = torch.randn(4, 60, 1, 64), []
    wanted = [[alone(vb, x) for x in of] for of in xs]

    @torch.no_grad()
    def run(of, expected):
        wrong.extend(i for i, x in enumerate(of) if not same(vb(x), expected[i]))

    threads = [threading.Thread(target=run, args=pair) for pair in zip(xs, wanted, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


@torch.no_grad()
def test_a_resident_layer_takes_few_calls_of_python(vb, request):
    request.addfinalizer(gc.enable)
    gc.disable()  # finalizers of what earlier tests left would be counted
    x, entered = torch.randn(1, 64), []
    vb.module.q(x)
    sys.setprofile(lambda frame, event, arg: entered.append(arg or frame) if event in ("call", "c_call") else None)
    vb.module.v(x.clone())
    sys.setprofile(None)
    assert len(entered) < 75


@torch.no_grad()
def test_modes_and_autocast_go_the_long_way(vb, calls):
    x = torch.randn(1, 64)
    wanted = alone(vb, x)
    calls.clear()
    with torch.autocast("cpu", torch.bfloat16):
        assert vb(x)[0].dtype is torch.bfloat16
    assert calls == [] and same(vb(x), wanted)
