"""Products of few tokens with weights whose planes never move, every argument prepared.

    q = few(planes)              # of one layer; None where the C code does not serve it
    q(x)                         # y, with the bits of `linear`; None where that has to compute
    q.together([k, v], x)        # [q(x), k(x), v(x)], the same bits, by one call of C code: x is prepared once

A token of a model with small layers waits for what a call costs the host: here a result, its address and one C call.
"""

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from vbrt.formats import WeightPlanes
from vbrt.kernels.cpu.build import NUMBERS, library
from vbrt.kernels.cpu.linear import THREAD_WORK, fused_tokens, prepared
from vbrt.kernels.cpu.prepared import Empty, Prepared

__all__ = ["Few", "few", "prepare_products", "products"]


class Few:
    """x @ w.T + bias for few tokens x [..., K] of the weight's own dtype; it keeps the planes.

    rounded: "int8" if x may be rounded to that (`vbrt.kernels.cpu.int8`).
    To be called with bare tensors (`watched.is_bare`), where nobody wants gradients.
    """

    __slots__ = ("address", "form", "inputs", "most", "number", "outputs", "rounded", "weight")

    def __init__(self, planes: WeightPlanes, rounded: str | None = None) -> None:
        self.outputs, self.inputs = planes.shape
        self.rounded = rounded == "int8"
        self.weight = prepared(planes).weight
        self.address, self.form = ctypes.addressof(self.weight), (planes.format, self.inputs, planes.dtype)
        self.number, self.most = NUMBERS[planes.dtype], fused_tokens() * self.inputs

    def __call__(self, x: Tensor, bias: Tensor | None = None) -> Tensor | None:
        """y [..., N] in x's dtype; None for an x or bias that this does not serve."""
        ys = self.together((), x, bias)
        return None if ys is None else ys[0]

    def together(self, others: Sequence["Few"], x: Tensor, bias: Tensor | None = None) -> list[Tensor] | None:
        """The products with this weight and its bias, and with those of `others`, which have none and `suit` it."""
        size, numbers, dtype = x.shape, x.numel(), self.form[2]
        if x.dtype is not dtype or not size or size[-1] != self.inputs or not 0 < numbers <= self.most:
            return None
        if not x.is_contiguous() or not (bias is None or self._takes(bias)):
            return None
        weights, addresses = (self, *others), ctypes.c_void_p * (1 + len(others))
        ys = [x.new_empty((*size[:-1], of.outputs)) for of in weights]
        out, of = addresses(*[y.data_ptr() for y in ys]), addresses(*[few.address for few in weights])
        biases = None if bias is None else addresses(bias.data_ptr())
        work, tokens = numbers * sum([few.outputs for few in weights]), numbers // self.inputs
        threads = max(1, min(torch.get_num_threads(), work // THREAD_WORK))
        call, given = library().vbrt_few, (x.data_ptr(), biases, out, tokens, self.inputs, self.number)
        if not call(of, len(weights), *given, self.rounded, threads):
            raise MemoryError(f"linear: no memory for {tokens} rows of {self.inputs} inputs")
        return ys

    def _takes(self, bias: Tensor) -> bool:
        return bias.dtype is self.form[2] and bias.shape == (self.outputs,) and bias.is_contiguous()

    def suits(self, other: "Few") -> bool:
        """True if both multiply inputs of one form, so that one call may compute both."""
        return self.form == other.form and self.rounded == other.rounded


def few(planes: WeightPlanes, rounded: str | None = None) -> Few | None:
    """Prepare products with a weight (see `Few`); None where the C code does not multiply it, or restores it first."""
    if prepared(planes) is None or planes.fine is not None or planes.dtype not in NUMBERS:
        return None
    return Few(planes, rounded)


def products(layers: Sequence[Few], x: Tensor, biases: Sequence[Tensor | None]) -> list[Tensor]:
    """x @ w.T + bias of several layers of one form; x of few tokens, in memory order."""
    ys = [layer(x, bias) for layer, bias in zip(layers, biases, strict=True)]
    assert all(y is not None for y in ys), "callers ask `prepare_products`, or look at forms"
    return ys


def prepare_products(args: tuple, forms: Any, empty: Empty) -> Prepared | None:
    """Return `products` of tensors that stay where they are; None for an x not served.

    Args:
        args: of `products`.
        forms: of its results.
        empty: makes them.
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
    threads = max(1, min(torch.get_num_threads(), numbers * sum(layer.outputs for layer in layers) // THREAD_WORK))
    size = numbers // first.inputs, first.inputs, first.number, first.rounded, threads
    call = functools.partial(library().vbrt_few, of, len(layers), x.data_ptr(), array(*addresses), out, *size)

    def run() -> None:
        if not call():
            raise MemoryError(f"linear: no memory for {size[0]} rows of {first.inputs} inputs")

    return Prepared(run, results, args)
