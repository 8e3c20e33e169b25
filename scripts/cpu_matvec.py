"""One matrix and one token, weights rotated past the last-level cache: layers of torch and vbrt, and ggml's products.

ggml computes a graph of one product a weight, by ctypes on the libraries that llama-cpp-python brings; layers are
called from Python, with all that a call takes.
"""

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

__all__ = ["WEIGHT_BYTES", "Products", "ggml_graph", "layers"]

#: of the weights in turn, together: four times the last-level cache of the machines that were measured
WEIGHT_BYTES = 128 << 20
_TYPES = {"Q4_0": 2, "MXFP4": 39, "NVFP4": 40}  # enum ggml_type


class Products:
    """What multiplies once by each of `count` weights."""

    def __init__(self, run: Callable[[], object], count: int, clock: Callable[[], float]) -> None:
        self._run, self._count, self._clock = run, count, clock
        for _ in range(3):
            run()

    def product(self, times: int) -> dict[str, Any]:
        """Return seconds of a product, one for each time that all weights took their turn."""
        spans = []
        for _ in range(times):
            start = self._clock()
            self._run()
            spans.append((self._clock() - start) / self._count)
        return {"seconds": spans}


def count_of(n: int, k: int, bits: float) -> int:
    """Return how many weights of so many bits an element make WEIGHT_BYTES."""
    return max(2, round(WEIGHT_BYTES / (n * k * bits / 8)))


def layers(
    n: int, k: int, dtype: torch.dtype, preset: str | None, clock: Callable[[], float], **sections: Any
) -> Products:
    """Return layers of torch, or wrapped ones."""
    import vbrt

    count = count_of(n, k, 4.5 if preset else 8 * dtype.itemsize)
    torch.manual_seed(0)
    weight = (torch.randn(n, k) * 0.02).to(dtype)
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(k, n, bias=False, dtype=dtype) for _ in range(count)))
    for layer in model:
        layer.weight = nn.Parameter(weight.clone(), requires_grad=False)
    if preset:
        vbrt.wrap(model, preset, weights={"keep_head": False}, **sections).materialize(progress=False)
    x = torch.randn(1, 1, k).to(dtype)

    def run() -> None:
        for layer in model:
            layer(x)

    with torch.no_grad():
        run()
    return Products(torch.no_grad()(run), count, clock)


class _Params(ctypes.Structure):
    """`ggml_init_params`."""

    _fields_ = (("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool))


def _ggml() -> tuple[ctypes.CDLL, ctypes.CDLL]:
    """Return ggml's libraries: of tensors, and of the CPU."""
    import llama_cpp

    folder = Path(llama_cpp.__file__).parent / "lib"
    base, cpu = (ctypes.CDLL(str(next(folder.glob(f"libggml-{name}.so*")))) for name in ("base", "cpu"))
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    base.ggml_init.argtypes, base.ggml_init.restype = (_Params,), pointer
    base.ggml_new_tensor_2d.argtypes = (pointer, ctypes.c_int, number, number)
    base.ggml_mul_mat.argtypes, base.ggml_new_graph.argtypes = (pointer, pointer, pointer), (pointer,)
    base.ggml_get_data.argtypes, base.ggml_build_forward_expand.argtypes = (pointer,), (pointer, pointer)
    for function in (base.ggml_new_tensor_2d, base.ggml_mul_mat, base.ggml_new_graph, base.ggml_get_data):
        function.restype = pointer
    base.ggml_build_forward_expand.restype = None
    cpu.ggml_graph_compute_with_ctx.argtypes = (pointer, pointer, ctypes.c_int)
    return base, cpu


def ggml_graph(n: int, k: int, kind: str, threads: int, clock: Callable[[], float]) -> Products:
    """Return ggml's own products of a type of weights, as files hold them."""
    import numpy as np

    from scripts.cpu_models import random_blocks

    base, cpu = _ggml()
    raw = random_blocks(np.random.default_rng(0), (n, k), kind)
    count = count_of(n, k, 4.5)
    context = base.ggml_init(_Params(count * (raw.nbytes + 8 * n + 4096) + (64 << 20), None, False))
    x = base.ggml_new_tensor_2d(context, 0, k, 1)
    ctypes.memmove(base.ggml_get_data(x), np.ones(k, np.float32).ctypes.data, 4 * k)
    graph = base.ggml_new_graph(context)
    for _ in range(count):
        weight = base.ggml_new_tensor_2d(context, _TYPES[kind], k, n)
        ctypes.memmove(base.ggml_get_data(weight), raw.ctypes.data, raw.nbytes)
        base.ggml_build_forward_expand(graph, base.ggml_mul_mat(context, weight, x))

    def run() -> None:
        code = cpu.ggml_graph_compute_with_ctx(context, graph, threads)
        if code:
            raise SystemExit(f"ggml_graph_compute_with_ctx returned {code}")

    return Products(run, count, clock)
