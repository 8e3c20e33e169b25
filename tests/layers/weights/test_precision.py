"""precision("coarse"): a draft computes with coarse planes only."""

import threading

import pytest
import torch
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import vbrt
from tests.models import config, gpt2, mlp, wrap, wrap_streamed
from vbrt.errors import ArgumentError, WrapError
from vbrt.kernels.cuda.e2m1.linear import Packing
from vbrt.kernels.cuda.e2m1.tiles import parts_of
from vbrt.layers.modules.compiled_forward import tiles_of_pass
from vbrt.layers.weights.linear_product import precision


def pair(backend="auto", format="nvfp4", model=mlp):
    """The same weights as `exact` and in 4 bits."""
    vbs = []
    for fine in ("exact", "none"):
        settings = config(format)
        settings["weights"]["fine"] = fine
        vbs.append(vbrt.wrap(model(dtype=torch.bfloat16), settings, compute={"backend": backend}))
    return vbs


@pytest.fixture
def exact():
    with wrap(mlp(depth=2, dtype=torch.bfloat16), "exact") as vb:
        yield vb.materialize()


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("format", ["nvfp4", "quantile"])
@torch.no_grad()
def test_a_coarse_pass_gives_the_bits_of_the_4_bit_layers(backend, format):
    exact, coarse = pair(backend, format)
    for tokens in (1, 40):
        x = torch.randn(tokens, 64, dtype=torch.bfloat16)
        full = exact(x)
        with precision("coarse"):
            for _ in range(2):  # leased first, then from planes that never move
                assert torch.equal(exact(x), coarse(x))
        assert torch.equal(exact(x), full) and not torch.equal(full, coarse(x))


@torch.no_grad()
def test_a_coarse_pass_of_transposed_layers_does_too():
    pytest.importorskip("transformers")
    exact, coarse = pair(model=gpt2)
    tokens = torch.arange(3, 9)[None]
    with precision("coarse"):
        assert torch.equal(exact(tokens).logits, coarse(tokens).logits)


@torch.no_grad()
def test_a_coarse_pass_moves_no_fine_page(tmp_path):
    x = torch.randn(2, 64, dtype=torch.bfloat16)
    with wrap_streamed(mlp(dtype=torch.bfloat16), "exact", tmp_path) as vb:
        vb.materialize()
        moved = [(key, page.hits + page.misses) for key, page in vb.stack.pages.items()]
        with precision("coarse"):
            vb(x)
        used = {key: page.hits + page.misses for key, page in vb.stack.pages.items()}
    assert all(used[key] - before == key.endswith("#coarse") for key, before in moved)


def test_the_backward_pass_takes_the_precision_of_its_forward():
    exact, coarse = pair()
    grads = []
    for vb in (exact, coarse):
        x = torch.ones(3, 64, dtype=torch.bfloat16, requires_grad=True)
        with precision("coarse"):
            y = vb(x)
        y.sum().backward()
        grads.append(x.grad)
    assert torch.equal(*grads)
    x = torch.ones(3, 64, dtype=torch.bfloat16, requires_grad=True)
    y = exact(x)
    with precision("coarse"):
        y.sum().backward()
    full = torch.ones(3, 64, dtype=torch.bfloat16, requires_grad=True)
    exact(full).sum().backward()
    assert torch.equal(x.grad, full.grad) and not torch.equal(x.grad, grads[0])


def test_other_threads_keep_their_own_precision(exact):
    x, got = torch.randn(2, 64, dtype=torch.bfloat16), []
    with torch.no_grad():
        full = exact(x)
        with precision("coarse"):
            thread = threading.Thread(target=torch.no_grad()(lambda: got.append(exact(x))))
            thread.start()
            thread.join()
            assert not torch.equal(exact(x), full)
    assert torch.equal(got[0], full)


def test_a_block_in_a_block_and_one_that_fails_end_in_the_precision_before(exact):
    x = torch.randn(2, 64, dtype=torch.bfloat16)
    with torch.no_grad():
        full = exact(x)
        with precision("coarse"):
            draft = exact(x)
            with pytest.raises(RuntimeError), precision("full"):
                assert torch.equal(exact(x), full)
                exact(x[:, :3])
            assert torch.equal(exact(x), draft)
        assert torch.equal(exact(x), full)
    with pytest.raises(ArgumentError, match="precision 'low'; expected one of full, coarse"):
        precision("low")


@torch.no_grad()
def test_layers_held_dense_compute_in_full_and_stats_say_so_once():
    with wrap(mlp(depth=2), "exact") as vb:  # float32: held dense
        x = torch.randn(2, 64)
        full = vb(x)
        with precision("coarse"):
            assert torch.equal(vb(x), full)
        assert [reason for reason in vb.stats().fallbacks if "precision" in reason] == [
            'precision("coarse"): layers that are held dense have no coarse plane and compute in full'
        ]


def test_compiled_graphs_follow_the_precision_of_the_call_and_refuse_a_coarse_gradient_by_name(exact):
    run = torch.compile(exact.module, backend="aot_eager", fullgraph=True)
    x = torch.randn(2, 64, dtype=torch.bfloat16)
    with torch.no_grad():
        full = run(x)
        with precision("coarse"):
            assert torch.equal(run(x), exact(x)) and not torch.equal(run(x), full)
    with precision("coarse"), pytest.raises(WrapError, match=r"^0: a compiled graph that computes gradients cannot"):
        run(x.clone().requires_grad_())


@torch.no_grad()
def test_a_traced_graph_refuses_by_name(exact):
    x = torch.randn(2, 64, dtype=torch.bfloat16)
    traced = make_fx(exact.module)(x)
    torch.testing.assert_close(traced(x), exact(x))
    with precision("coarse"), pytest.raises(WrapError, match=r'^0: a graph that reads .* precision\("coarse"\)'):
        traced(x)


@torch.no_grad()
def test_a_block_in_a_compiled_function_is_not_compiled_into_full_precision(exact):
    class Draft(nn.Module):
        def forward(self, x):
            with precision("coarse"):
                return exact.module(x)

    x = torch.randn(2, 64, dtype=torch.bfloat16)
    got = torch.compile(Draft(), backend="eager")(x)
    with precision("coarse"):
        assert torch.equal(got, exact(x))


def test_a_recorded_coarse_pass_may_hold_coarse_tiles_that_live_in_the_top_tier(tmp_path):
    for streamed in (False, True):
        model = mlp(dtype=torch.bfloat16)
        with wrap_streamed(model, "exact", tmp_path) if streamed else wrap(model, "exact") as vb:
            handle = next(iter(vb.registry.values())).handle
            handle.take_kernels()
            handle.encoder.packing = Packing("nvfp4")  # as beside a GPU
            vb.materialize()
            assert tiles_of_pass(handle) is None
            with precision("coarse"):
                held = tiles_of_pass(handle)
            assert (held is None) == bool(handle.pages[0].home)
            if held is not None:
                tiles, scale = parts_of(held.page, "nvfp4", (64, 64))
                stored = vb.stack.levels[0].slots[handle.keys[0]].tensors
                assert torch.equal(tiles, stored["mma_tiles_v1"]) and torch.equal(scale, stored["tensor_scale"])
                assert held.form == "nvfp4 64 64 bfloat16 cpu"
