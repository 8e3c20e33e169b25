"""Kernels that are compiled ahead of the pass that launches them."""

import os
import threading
from dataclasses import replace

import pytest
import torch
from torch import nn

import vbrt
from vbrt.kernels.cuda import devices
from vbrt.kernels.cuda.e2m1 import linear
from vbrt.kernels.cuda.launch_table import Gpu
from vbrt.layers import ahead


def model(device="cpu", last=256):
    torch.manual_seed(1)
    sizes = ((256, 512), (512, 768), (768, last))
    return nn.Sequential(*(nn.Linear(k, n, bias=False) for k, n in sizes)).to(device, torch.bfloat16)


def handles(vb):
    return list(vb._attachment.registry.handles)


def compiling(vb, code_of, run):
    """The handles, with kernels that say what they compile, and multiply by `run`."""
    for handle in handles(vb):
        kernels = handle.kernels or handle.take_kernels()
        record = replace(kernels.kernel, code_of=code_of)
        handle.kernels = replace(kernels, kernel=record, linear=run, packing=linear.Packing("nvfp4"))
    return handles(vb)


def test_a_product_of_each_kind_runs_once_on_zeros_and_all_at_the_same_time(monkeypatch):
    monkeypatch.setattr(ahead, "_compiled", set())
    monkeypatch.setattr(ahead.os, "cpu_count", lambda: 9)
    together, ran = threading.Barrier(5), []

    def run(x, planes, bias):
        together.wait(10)
        words = [tensor.any() for tensor in planes.coarse.values()]
        ran.append((planes.shape, len(x), x.shape[1], bool(x.any()), any(words), bias))

    def code_of(shape, dtype, tokens, device):
        return None if (tokens, shape) == (1, (512, 256)) else min(tokens, 4)

    with vbrt.wrap(model(), "fp4", tiers={"gpu": {"enabled": False}}, weights={"min_parameters": 0}) as vb:
        every = compiling(vb, code_of, run)
        ahead.compile_ahead(every, (5, 1, 0, 5), torch.device("cpu"))
        shapes = [(n, k, tokens) for n, k in ((256, 768), (512, 256), (768, 512)) for tokens in (1, 5)]
        shapes.remove((512, 256, 1))
        assert sorted(ran) == [((n, k), tokens, k, False, False, None) for n, k, tokens in shapes]
        ahead.compile_ahead(every, (7, 1), torch.device("cpu"))  # the same code
        assert len(ran) == 5


def test_nothing_is_compiled_ahead_by_kernels_that_do_not_say_what_and_for_weights_in_all_their_bits():
    for preset in ("fp4", "exact"):
        with vbrt.wrap(model(), preset, tiers={"gpu": {"enabled": False}}, weights={"min_parameters": 0}) as vb:
            assert not any(ahead._takes(handle, handle.device) for handle in handles(vb))
            before = set(ahead._compiled)
            ahead.compile_ahead(handles(vb), (5, 1), handles(vb)[0].device)
            assert ahead._compiled == before


def test_counts_that_run_the_same_code_are_of_one_kind(monkeypatch):
    monkeypatch.setattr(devices, "gpu", lambda index: Gpu(9, 132))

    def kinds(counts, dtype=torch.bfloat16, shape=(4096, 4096)):
        return [linear.code_of(shape, dtype, count, torch.device("cuda", 0)) for count in counts]

    assert len(set(kinds((1, 5, 8)))) == 1 and len(set(kinds((1, 9, 17, 128)))) == 4
    assert len(set(kinds(range(65, 4097)))) < 40  # of 4032
    assert kinds((5000,)) == [None] and kinds((100,), torch.float64) == [None]
    assert kinds((1,)) != kinds((9,), torch.float32) == kinds((27,))


@pytest.mark.gpu
def test_a_pass_compiles_no_product_that_was_compiled_ahead(tmp_path, monkeypatch):
    from triton import knobs

    found, threads = [], []
    monkeypatch.setattr(knobs.cache, "dir", os.fspath(tmp_path))
    monkeypatch.setattr(knobs.compilation, "listener", lambda *, src, **_: found.append(src.name))
    run = ahead._run
    monkeypatch.setattr(ahead, "_run", lambda job, **how: (threads.append(job.tokens), run(job, **how)))
    monkeypatch.setattr(ahead, "_compiled", set())
    wide = model("cuda", last=1024)  # 200 tokens are multiplied by a fused kernel in each of its shapes
    with vbrt.wrap(wide, "fp4", weights={"min_parameters": 0}) as vb, torch.no_grad():
        vb.materialize()
        ahead.compile_ahead(handles(vb), (200, 1), handles(vb)[0].device)
        assert sorted(threads) == [1, 1, 1, 200, 200, 200]
        found.clear()
        for tokens in (1, 200):
            vb(torch.randn(tokens, 256, device="cuda", dtype=torch.bfloat16))
        assert not found
        ahead.compile_ahead(handles(vb), (200, 1), handles(vb)[0].device)
        assert len(threads) == 6
