"""Gradients through frozen experts, beside autograd through dense ones."""

import contextlib

import pytest
import torch
import torch.nn.functional as F

from tests.kernels.expert_cases import expert_pages, routing
from tests.matrix import matrix
from vbrt.kernels import KERNELS, resolve
from vbrt.kernels.experts import Gate, apply_gate
from vbrt.kernels.experts_grad import ExpertsProduct, FrozenExperts, routed_experts

CPU = torch.device("cpu")
E, H, INNER, K = 6, 40, 24, 3
GATES = {
    "silu": Gate("silu"),
    "gpt-oss": Gate("silu", interleaved=True, alpha=1.702, limit=0.7, shift=1.0),
    "relu2": Gate("relu2", gated=False),
}


def frozen(pages, part, leased):
    @contextlib.contextmanager
    def lease(ids):
        leased.append(part)
        yield pages

    up, back = (resolve(f"experts_{name}", "auto", CPU, pages.format).run for name in ("up", "back"))
    return FrozenExperts(part, pages.experts, lease, up, back)


def dense(x, ids, weights, matrices, gate, biases):
    """The same by autograd, one pair after the other."""
    y = torch.zeros_like(x)
    for t, j in ((t, j) for t in range(len(x)) for j in range(ids.shape[1]) if ids[t, j] < E):
        up, down = (matrices[part][ids[t, j]].float() for part in ("up", "down"))
        h = apply_gate(F.linear(x[t], up, biases[0][ids[t, j]])[None], gate)[0]
        y = y.index_add(0, torch.tensor([t]), (weights[t, j] * F.linear(h, down, biases[1][ids[t, j]]))[None])
    return y


@matrix(gate=GATES, format=["nvfp4", "dense", "nf4"])
def test_gradients_are_those_of_autograd_through_dense_experts(gate, format):
    rows = 2 * INNER if gate.gated else INNER
    pages, matrices = expert_pages(format, {"up": (rows, H), "down": (H, INNER)}, E, dtype=torch.float32)
    ids, weights = routing(7, K, E, sentinels=4)
    biases = torch.randn(E, rows) * 0.1, torch.randn(E, H) * 0.1
    results = []
    for run in (True, False):
        asked = [v.clone().requires_grad_() for v in (torch.manual_seed(0) and torch.randn(7, H), weights, *biases)]
        leased = []
        if run:
            parts = (frozen(pages, part, leased) for part in ("up", "down"))
            y = routed_experts(asked[0], ids, asked[1], *parts, gate=gate, biases=tuple(asked[2:]))
        else:
            y = dense(asked[0], ids, asked[1], matrices, gate, asked[2:])
        y.backward(torch.linspace(-1, 1, y.numel()).view_as(y))
        results.append([y, *(v.grad for v in asked)])
    for got, want in zip(*results, strict=True):
        torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)


def test_pages_are_leased_again_in_the_backward_pass_and_only_where_something_needs_it():
    pages, _ = expert_pages("nvfp4", {"up": (INNER, H), "down": (H, INNER)}, E, dtype=torch.float32)
    ids, weights = routing(4, K, E)
    leased = []
    up, down = (frozen(pages, part, leased) for part in ("up", "down"))
    x = torch.randn(4, H)
    routed_experts(x, ids, weights.requires_grad_(), up, down, gate=Gate("relu", gated=False)).sum().backward()
    assert leased == ["up", "down"]  # the routing weights need no matrix
    routed_experts(x.requires_grad_(), ids, weights, up, down, gate=Gate("relu", gated=False)).sum().backward()
    assert leased == ["up", "down"] * 2 + ["down", "up"]


def test_second_derivatives_are_those_of_a_linear_function():
    pages, _ = expert_pages("dense", {"up": (INNER, H)}, E, dtype=torch.float32)
    ids, _ = routing(3, 2, E, sentinels=1)
    up = frozen(pages, "up", [])
    x = torch.randn(3, H, requires_grad=True)
    y = ExpertsProduct.apply(x, None, ids, up, False)
    (dx,) = torch.autograd.grad(y.square().sum() / 2, x, create_graph=True)
    (twice,) = torch.autograd.grad((dx * dx.detach()).sum(), x)  # the same map, applied to dx
    again = ExpertsProduct.apply(dx.detach(), None, ids, up, False)
    torch.testing.assert_close(twice, ExpertsProduct.apply(again, None, ids, up, True))


def test_a_bias_gets_nothing_from_sentinels():
    pages, _ = expert_pages("dense", {"up": (INNER, H)}, E, dtype=torch.float32)
    ids, _ = routing(8, 3, E, sentinels=9)
    bias = torch.zeros(E, INNER, requires_grad=True)
    ExpertsProduct.apply(torch.randn(8, H), bias, ids, frozen(pages, "up", []), False).sum().backward()
    assert torch.equal(bias.grad[:, 0], ids.flatten().bincount(minlength=E)[:E].float())


@pytest.mark.parametrize("op", ["experts_up", "experts_down", "experts_back"])
def test_every_format_has_routed_experts_on_a_gpu_and_everywhere(op):
    known = {(kernel.backend, f) for kernel in KERNELS if kernel.op == op for f in kernel.formats or [None]}
    assert {("reference", None), ("triton", None)} <= known
