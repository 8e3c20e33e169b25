"""Backward passes on resident pages: without leases, counted as with them, and never on pages that have moved."""

import weakref
from unittest import mock

import pytest
import torch

import vbrt
from tests.layers.holdings import inputs
from tests.models import config, dtype_of, mlp, wrap


def gradient(vb, x):
    x = x.detach().requires_grad_()
    vb(x).sum().backward()
    return x.grad


def leases_of(vb, x):
    """Leases of a backward, and its gradient."""
    with mock.patch.object(vb.stack, "lease", wraps=vb.stack.lease) as lease:
        x = x.detach().requires_grad_()
        loss = vb(x).sum()
        before = lease.call_count
        loss.backward()
    return lease.call_count - before, x.grad


def counted(vb):
    """Passes, hits and misses, forward and backward."""
    phases = vb.stats().phases
    return [torch.tensor([phases[name].passes, phases[name].hits, phases[name].misses]) for name in phases]


@pytest.mark.parametrize("trainable", [True, False])
def test_a_backward_on_resident_pages_leases_once_and_counts_as_if_it_always_did(format, trainable, tmp_path):
    with wrap(mlp(dtype=dtype_of(format)).requires_grad_(trainable), format).materialize() as vb:
        x = inputs(vb)
        gradient(vb, x)
        start = counted(vb)
        leases, gradient_without = leases_of(vb, x)
        without = counted(vb)
        with vb.timeline(tmp_path / "timeline.json"):  # it records leases, so every product takes one
            all_leases, gradient_with = leases_of(vb, x)
        assert (leases, all_leases) == (1, 6)  # the first in a backward begins its phase
        assert torch.equal(gradient_without, gradient_with)
        for first, second, third in zip(start, without, counted(vb), strict=True):
            assert (second - first).tolist() == (third - second).tolist() == [1, len(vb.stack.pages), 0]


def test_a_backward_that_a_graph_captures_leases_so_that_pages_stay(format):
    with wrap(mlp(dtype=dtype_of(format)), format).materialize() as vb:
        gradient(vb, inputs(vb))
        with mock.patch.object(vb.stack, "capturing", return_value=True):
            leases, _ = leases_of(vb, inputs(vb))
        assert leases == 6


def test_a_backward_follows_budgets(format, tmp_path):
    settings = config(format)
    settings["tiers"]["ssd"] = {"enabled": True, "path": str(tmp_path)}
    with vbrt.wrap(mlp(dtype=dtype_of(format)), settings).materialize() as vb:
        x, page, weights = inputs(vb), vb.plan.swaps[0].page_bytes, [layer.handle for layer in vb.module[::2]]
        resident = gradient(vb, x)
        views = [[weakref.ref(tensor) for tensor in weight.held.planes.coarse.values()] for weight in weights]
        loss = vb(x.requires_grad_()).sum()
        vb.set_budget("cpu", 3 * page)  # between forward and backward
        before = vb.stats().misses
        loss.backward()
        assert torch.equal(x.grad, resident) and vb.stats().misses > before
        assert leases_of(vb, x)[0] == 6
        moved = [refs for refs, weight in zip(views, weights, strict=True) if weight.pages[0].home]
        assert moved and not [ref for refs in moved for ref in refs if ref() is not None]  # their memory is free
        vb.set_budget("cpu", 100 * page)
        assert torch.equal(gradient(vb, x), resident)
        leases, again = leases_of(vb, x)
        assert leases == 1 and torch.equal(again, resident)


def test_a_backward_follows_loaded_weights(format):
    with (
        wrap(mlp(dtype=dtype_of(format)), format).materialize() as vb,
        wrap(mlp(dtype=dtype_of(format)), format) as fresh,
    ):
        x = inputs(vb)
        before = gradient(vb, x)
        assert torch.equal(gradient(vb, x), before)
        other = {name: -value for name, value in vb.state_dict().items()}
        vb.load_state_dict(other)
        fresh.load_state_dict(other)
        expected = gradient(fresh, x)
        assert not torch.equal(expected, before)
        for _ in range(2):
            assert torch.equal(gradient(vb, x), expected)
