"""Kernels that are compiled ahead of the pass that launches them."""

import os
import threading
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import vbrt
from tests.kernels.cuda.compiling_cases import asked  # noqa: F401  # a fixture
from vbrt.formats import WeightPlanes
from vbrt.formats.page import new_page, unpack
from vbrt.generation.capture.session import Steps
from vbrt.kernels.cuda import devices, tuned_configs
from vbrt.kernels.cuda.compiling import FIRST, noters
from vbrt.kernels.cuda.e2m1 import launches, linear
from vbrt.kernels.cuda.e2m1.tiles import tile_layout, weight_of
from vbrt.kernels.cuda.launch_table import Gpu
from vbrt.layers.weights import precompile_kernels


def model(device="cpu", last=256):
    torch.manual_seed(1)
    sizes = ((256, 512), (512, 768), (768, last))
    return nn.Sequential(*(nn.Linear(k, n, bias=False) for k, n in sizes)).to(device, torch.bfloat16)


def handles(vb):
    return list(vb._attachment.registry.handles)


def compiling(vb, code_of, run, decode=linear.decode_weight):
    """The handles, with kernels that say what they compile, multiply by `run`, and decode by `decode`."""
    for handle in handles(vb):
        kernels = handle.kernels or handle.take_kernels()
        record = replace(kernels.kernel, code_of=code_of)
        handle.kernels = replace(kernels, kernel=record, linear=run, decode=decode, packing=linear.Packing("nvfp4"))
    return handles(vb)


def test_a_product_of_each_kind_is_asked_for_once(monkeypatch):
    monkeypatch.setattr(precompile_kernels, "_asked", set())
    ran, decoded = [], []

    def run(x, planes, bias):
        ran.append((planes.shape, *x.shape, bias, threading.get_ident() in noters, torch.is_grad_enabled()))

    def code_of(shape, dtype, tokens, device):
        return None if (tokens, shape) == (1, (512, 256)) else min(tokens, 4)

    with vbrt.wrap(model(), "fp4", tiers={"gpu": {"enabled": False}}, weights={"min_parameters": 0}) as vb:
        every = compiling(vb, code_of, run, lambda planes: decoded.append((planes.shape, planes.dtype)))
        precompile_kernels.compile_ahead(every, (5, 1, 0, 5), torch.device("cpu"))
        shapes = [(n, k, tokens) for n, k in ((256, 768), (512, 256), (768, 512)) for tokens in (1, 5)]
        shapes.remove((512, 256, 1))
        assert sorted(ran) == [((n, k), tokens, k, None, True, False) for n, k, tokens in shapes]
        assert [call[1] for call in ran] == [5, 5, 5, 1, 1]  # those of the next pass first
        assert decoded == [((512, 256), torch.bfloat16)]
        precompile_kernels.compile_ahead(every, (7, 1), torch.device("cpu"))  # the same code
        assert len(ran) == 5 and len(decoded) == 1


@pytest.mark.parametrize("tokens", [1, 13, 100, 700])
def test_a_product_launches_nothing_that_was_not_compiled_ahead(tokens, asked, monkeypatch):  # noqa: F811
    monkeypatch.setattr(precompile_kernels, "_asked", set())

    def run(x, planes, bias):
        return linear.multiply(x, weight_of(planes), bias, "none")

    def decode(planes):
        return launches.decode(weight_of(planes), planes.dtype)

    with vbrt.wrap(model(), "fp4", tiers={"gpu": {"enabled": False}}, weights={"min_parameters": 0}) as vb:
        every = compiling(vb, linear.code_of, run, decode)
        found = precompile_kernels.compile_ahead(every, (tokens,), torch.device("cpu"))
        assert len(found) >= len(every) == 3
        for handle in every:
            layout = tile_layout("nvfp4", handle.spec.shape)
            planes = unpack(new_page(layout, "cpu"), layout)
            x = torch.empty(tokens, handle.spec.shape[1], dtype=torch.bfloat16)
            run(x, WeightPlanes("nvfp4", handle.spec.shape, torch.bfloat16, planes), None)
        assert asked.ahead and not asked.by_launches
        assert {launch.how for launch in FIRST} <= {"ready", "waited", "compiled"} and len(FIRST) == len(set(found))


def test_nothing_is_compiled_ahead_by_kernels_that_do_not_say_what_and_for_weights_in_all_their_bits():
    for preset in ("fp4", "exact"):
        with vbrt.wrap(model(), preset, tiers={"gpu": {"enabled": False}}, weights={"min_parameters": 0}) as vb:
            assert not any(precompile_kernels._takes(handle, handle.device) for handle in handles(vb))
            before = set(precompile_kernels._asked)
            assert not precompile_kernels.compile_ahead(handles(vb), (5, 1), handles(vb)[0].device)
            assert precompile_kernels._asked == before


def test_counts_that_run_the_same_code_are_of_one_kind(monkeypatch):
    monkeypatch.setattr(devices, "gpu", lambda index: Gpu(9, 132))
    monkeypatch.setattr(tuned_configs, "tuned", lambda index: {})

    def kinds(counts, dtype=torch.bfloat16, shape=(4096, 4096)):
        return [linear.code_of(shape, dtype, count, torch.device("cuda", 0)) for count in counts]

    assert len(set(kinds((1, 5, 8)))) == 1 and len(set(kinds((1, 9, 17, 128)))) == 4
    assert len(set(kinds(range(65, 4097)))) < 40  # of 4032
    assert kinds((5000,)) == [None] and kinds((100,), torch.float64) == [None]
    assert kinds((1,)) != kinds((9,), torch.float32) == kinds((27,))

    sizes = []  # for a batch of sequences that come and go, all of them
    Steps.compile_for_batch(SimpleNamespace(compile_ahead=lambda size, *, soon: sizes.append(size)), 256, 4096)
    assert sizes[:2] == [4096, 256] and len(sizes) < 400
    for shape in ((4096, 4096), (1024, 4096), (14336, 4096), (4096, 14336)):
        assert set(kinds(sizes, shape=shape)) == set(kinds(range(1, 4097), shape=shape))


@pytest.mark.gpu
def test_a_pass_compiles_no_product_that_was_compiled_ahead(tmp_path, monkeypatch):
    from triton import knobs
    from triton.runtime import build

    compiled, in_c, compile_c = [], [], build._build
    monkeypatch.setattr(build, "_build", lambda *given: in_c.append(given[0]) or compile_c(*given))
    monkeypatch.setattr(knobs.cache, "dir", os.fspath(tmp_path))
    monkeypatch.setattr(knobs.compilation, "listener", lambda *, src, **_: compiled.append(threading.get_ident()))
    monkeypatch.setattr(precompile_kernels, "_asked", set())
    wide = model("cuda", last=1024)  # 200 tokens are multiplied by a fused kernel in each of its shapes
    with vbrt.wrap(wide, "fp4", weights={"min_parameters": 0}) as vb, torch.no_grad():
        vb.materialize()
        torch.cuda.synchronize()
        found = precompile_kernels.compile_ahead(handles(vb), (200, 1), handles(vb)[0].device)
        for each in found:
            each.finish()
        assert not [each.error for each in found if each.error]
        FIRST.clear()
        compiled.clear()
        in_c.clear()
        for tokens in (1, 200):
            vb(torch.randn(tokens, 256, device="cuda", dtype=torch.bfloat16))
        torch.cuda.synchronize()
        assert not compiled and not in_c and {launch.how for launch in FIRST} <= {"ready"}
        assert not precompile_kernels.compile_ahead(handles(vb), (200, 1), handles(vb)[0].device)
