"""Small-batch products on resident planes, with prepared arguments.

    q = few(planes)              # of one layer; None if C does not support it
    q(x)                         # y, bit-exact with `linear`; None if only that can compute it
    q.together([k, v], x)        # [q(x), k(x), v(x)], bit-exact, in one C call: x is prepared once

With small layers, a token's latency is dominated by host overhead per call: here a result, its address and one C call.
"""

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from vbrt.formats import WeightPlanes
from vbrt.kernels.cpu.build import NUMBERS, FewProducts, library
from vbrt.kernels.cpu.linear import THREAD_WORK, fused_tokens, prepared
from vbrt.kernels.cpu.prepared import Empty, Prepared, c_call

__all__ = ["Few", "few", "prepare_products", "products"]


class Few:
    """x @ w.T + bias for few tokens x [..., K] of the weight's own dtype; keeps the planes alive.

    rounded: "int8" if x may be quantized to it (`vbrt.kernels.cpu.int8`).
    Call it with bare tensors (`observers.is_bare`) and without gradients.
    """

    __slots__ = ("address", "form", "inputs", "most", "number", "outputs", "rounded", "weight")

    def __init__(self, planes: WeightPlanes, rounded: str | None = None) -> None:
        self.outputs, self.inputs = planes.shape
        self.rounded = rounded == "int8"
        self.weight = prepared(planes).weight
        self.address, self.form = ctypes.addressof(self.weight), (planes.format, self.inputs, planes.dtype)
        self.number, self.most = NUMBERS[planes.dtype], fused_tokens() * self.inputs

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor | None:
        """y [..., N] in x's dtype; None for unsupported x or bias."""
        ys = self.together((), x, bias)
        return None if ys is None else ys[0]

    def together(self, others: Sequence["Few"], x: Tensor, bias: Tensor | None = None) -> list[Tensor] | None:
        """Products with this weight and bias, and with those of `others`, which have no bias and must `suit` it."""
        size, numbers, dtype = x.shape, x.numel(), self.form[2]
        if x.dtype is not dtype or not size or size[-1] != self.inputs or not 0 < numbers <= self.most:
            return None
        if not x.is_contiguous() or not (bias is None or self._takes(bias)):
            return None
        weights, addresses = (self, *others), ctypes.c_void_p * (1 + len(others))
        ys = [x.new_empty((*size[:-1], of.outputs)) for of in weights]
        out, of = addresses(*[y.data_ptr() for y in ys]), addresses(*[few.address for few in weights])
        biases = None if bias is None else addresses(bias.data_ptr())
        given = _given(weights, of, x, biases, out)
        if not library().vbrt_few(ctypes.addressof(given)):
            raise MemoryError(_no_memory(given))
        return ys

    def _takes(self, bias: Tensor) -> bool:
        return bias.dtype is self.form[2] and bias.shape == (self.outputs,) and bias.is_contiguous()

    def suits(self, other: "Few") -> bool:
        """True if both accept the same inputs, so that one call can compute both."""
        return self.form == other.form and self.rounded == other.rounded


def _given(weights: Sequence[Few], of: Any, x: Tensor, biases: Any, out: Any) -> FewProducts:
    """C structure of products with several weights; `of`, `biases` (None: no weight has one), `out`: arrays of
    addresses, which must outlive it."""
    first, numbers = weights[0], x.numel()
    work = numbers * sum([few.outputs for few in weights])
    threads = max(1, min(torch.get_num_threads(), work // THREAD_WORK))
    arrays = None if biases is None else ctypes.addressof(biases), ctypes.addressof(out)
    size = numbers // first.inputs, first.inputs, len(weights), first.number
    return FewProducts(ctypes.addressof(of), x.data_ptr(), *arrays, *size, first.rounded, threads)


def _no_memory(given: FewProducts) -> str:
    return f"linear: no memory for {given.tokens} rows of {given.inputs} inputs"


def few(planes: WeightPlanes, rounded: str | None = None) -> Few | None:
    """Prepare products with a weight (see `Few`); None if C does not support it, or if it has a fine plane."""
    if prepared(planes) is None or planes.fine is not None or planes.dtype not in NUMBERS:
        return None
    return Few(planes, rounded)


def products(layers: Sequence[Few], x: Tensor, biases: Sequence[Tensor | None]) -> list[Tensor]:
    """x @ w.T + bias for several layers of one form; x of few tokens, contiguous."""
    ys = [layer(x, bias) for layer, bias in zip(layers, biases, strict=True)]
    assert all(y is not None for y in ys), "callers ask `prepare_products`, or look at forms"
    return ys


def prepare_products(args: tuple, forms: Any, empty: Empty) -> Prepared | None:
    """Return `products` on static tensors; None for an unsupported x.

    Args:
        args: of `products`.
        forms: of its results.
        empty: allocates them.
    """
    layers, x, biases = args
    first, given = layers[0], [bias for bias in biases if bias is not None]
    dtype, numbers = first.form[2], x.numel()
    if not 0 < numbers <= first.most or any(t.dtype is not dtype or not t.is_contiguous() for t in (x, *given)):
        return None
    results = tuple(map(empty, forms))
    if not all(y.is_contiguous() and y.dtype is dtype for y in results):
        return None
    array = ctypes.c_void_p * len(layers)
    addresses = [None if bias is None else bias.data_ptr() for bias in biases]
    of, out = array(*[layer.address for layer in layers]), array(*[y.data_ptr() for y in results])
    biased = array(*addresses)
    given = _given(layers, of, x, biased, out)
    call = functools.partial(library().vbrt_few, ctypes.addressof(given))

    def run() -> None:
        if not call():
            raise MemoryError(_no_memory(given))

    return Prepared(run, results, (args, of, biased, out, given), c_call(library().vbrt_few, given), _no_memory(given))
