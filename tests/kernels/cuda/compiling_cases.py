"""A GPU that is not there, for which Triton compiles nothing; which code a launch asks for, it decides as always."""

import contextlib
import threading
import types

import pytest
import torch

from vbrt.kernels.cuda import compiling, devices, step_ops, tuned_configs
from vbrt.kernels.cuda.e2m1 import fused_linear, launches
from vbrt.kernels.cuda.launch_table import Gpu
from vbrt.libraries import torch_api, triton_api

DEVICE = 77  # as Triton knows it


class Asked:
    """What Triton was asked to compile, by (name of the kernel, thread, ahead of a launch), what launches it, by (name,
    thread), and what was launched.

    What stands for compiled code can be launched, and does nothing. Kernels in `failing` cannot be compiled ahead.
    """

    def __init__(self):
        self.compiled, self.launchers, self.launched, self.failing, self.kernels = [], [], [], (), set()

    def compile(self, kernel, key, signature, device, constexprs, options, attrs, warmup):
        name = kernel.fn.__name__
        self.compiled.append((name, threading.get_ident(), warmup))
        self.kernels.add(kernel)
        if name in self.failing and warmup:
            raise RuntimeError("no room")
        made = types.SimpleNamespace(run=lambda *args: self.launched.append(name), function=0, packed_metadata=0)
        made.launch_metadata, made.src, made.metadata = lambda *args: None, name, None
        kernel.device_caches[DEVICE][0][key] = made
        return made

    @property
    def ahead(self):
        return sorted(name for name, _, ahead in self.compiled if ahead)

    @property
    def by_launches(self):
        return sorted(name for name, _, ahead in self.compiled if not ahead)


@pytest.fixture
def asked(monkeypatch, request):
    """What Triton is asked for by launches on tensors of the CPU, as on an H200.

    Launches are Triton's own: by their arguments it decides whether they need other code than was compiled. With the
    parameter "direct" they are vbrt's.
    """
    pytest.importorskip("triton.experimental.gluon")
    from triton.backends.compiler import GPUTarget
    from triton.runtime import driver
    from triton.runtime.jit import JITFunction

    found, gpu, products = Asked(), Gpu(9, 132), (launches._narrow, launches._wide, launches._persistent)
    kernels = (step_ops._kernels, fused_linear._kernels, launches._decoder, *products)
    device = {"get_current_device": DEVICE, "get_current_stream": 0, "get_current_target": GPUTarget("cuda", 90, 32)}
    said = {name: lambda *args, value=value: value for name, value in device.items()}
    monkeypatch.setattr(driver, "_active", types.SimpleNamespace(**said))
    monkeypatch.setattr(JITFunction, "_do_compile", lambda kernel, *given: found.compile(kernel, *given))
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    made = lambda compiled: found.launchers.append((compiled.src, threading.get_ident()))  # noqa: E731
    monkeypatch.setattr(triton_api, "make_launcher", made)
    monkeypatch.setattr(torch_api, "current_device", lambda: None)  # the index of the CPU
    monkeypatch.setattr(torch_api, "raw_stream", lambda device: 0)
    if getattr(request, "param", "") != "direct":
        monkeypatch.setattr(triton_api, "direct_launch", lambda compiled: None)
    monkeypatch.setattr(devices, "capability", lambda index: (9, 0))
    monkeypatch.setattr(devices, "gpu", lambda index: gpu)
    monkeypatch.setattr(tuned_configs, "tuned", lambda index: {})
    for cached in kernels:
        cached.cache_clear()
    compiling.FIRST.clear()
    yield found
    for kernel in found.kernels:
        kernel.device_caches.pop(DEVICE)
    for cached in kernels:
        cached.cache_clear()
