"""Prepared experts: routed experts of few tokens on static tensors and pages; see `vbrt.kernels.cpu.experts`."""

import ctypes
import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vbrt.kernels.cpu.build import NUMBERS, Gating, Task, library
from vbrt.kernels.cpu.experts import FORMATS, bank_of, gating_of, is_decoded, most_pairs, threads_for
from vbrt.kernels.cpu.prepared import Empty, Prepared
from vbrt.kernels.experts import ExpertPages, Gate

__all__ = ["Experts", "prepare_layer"]


class Experts(NamedTuple):
    """A layer of experts. Attributes: pages: of all; up, down: biases [E, N] or None; rounded: x may be quantized."""

    pages: ExpertPages
    gate: Gate
    up: Tensor | None
    down: Tensor | None
    rounded: bool


def prepare_layer(
    layer: Experts, x_TH: Tensor, routed: tuple[Tensor, Tensor], form: Any, empty: Empty
) -> Prepared | None:
    """Return the layer's weighted sums as prepared C calls; None if C does not support these tensors.

    Args:
        routed: ids, int64 [T, k], and weights [T, k].
        form: of the result, [T, H].
        empty: allocates it.
    """
    ids_Tk, weights_Tk = routed
    given = [t for t in (x_TH, layer.up, layer.down) if t is not None]
    fits = all(t.is_cpu and t.dtype in NUMBERS and t.is_contiguous() for t in (*given, weights_Tk))
    if not fits or ids_Tk.dtype is not torch.int64 or not ids_Tk.is_contiguous():
        return None
    if not layer.pages.formats.issubset(FORMATS) or is_decoded(len(ids_Tk), most_pairs()):
        return None
    biases = (("up", layer.up), ("down", layer.down))
    if not all(b is None or b.shape == (layer.pages.experts, layer.pages.shapes[part][0]) for part, b in biases):
        return None
    y = empty(form)
    if not y.is_contiguous() or y.dtype is not x_TH.dtype:
        return None
    h_PI = x_TH.new_empty(ids_Tk.numel(), layer.gate.columns(layer.pages.shapes["up"][0]))
    rows_PN = x_TH.new_empty(ids_Tk.numel(), layer.pages.shapes["down"][0])
    up = _product(layer, "up", layer.gate, layer.up, (x_TH, ids_Tk, h_PI))
    down = _product(layer, "down", Gate("none", gated=False), layer.down, (h_PI, ids_Tk.view(-1, 1), rows_PN))
    weights = weights_Tk if weights_Tk.dtype is torch.float32 else torch.empty_like(weights_Tk, dtype=torch.float32)
    sums = _sums(layer, rows_PN, ids_Tk, weights, y)

    def run() -> None:
        if weights is not weights_Tk:
            weights.copy_(weights_Tk)
        if not up.run() or not down.run():
            raise MemoryError(f"experts: no memory to sort {ids_Tk.numel()} pairs")
        sums()

    return Prepared(run, (y,), (layer, x_TH, ids_Tk, weights_Tk, up, down))


def _product(layer: Experts, part: str, gate: Gate, bias: Tensor | None, tensors: tuple[Tensor, ...]) -> Prepared:
    x, ids_Tk, out = tensors
    pages, (n, k) = layer.pages, layer.pages.shapes[part]
    bank, held = bank_of(pages, part, range(pages.experts))
    gating: Gating = gating_of(gate)
    task = Task(
        ids_Tk.data_ptr(), ids_Tk.numel(), ids_Tk.shape[1], ids_Tk.numel(),
        x.data_ptr(), None if bias is None else bias.data_ptr(), out.data_ptr(),
        k, NUMBERS[x.dtype], 0 if bias is None else NUMBERS[bias.dtype], NUMBERS[out.dtype], layer.rounded,
    )  # fmt: skip
    threads = threads_for(ids_Tk.numel() * n * k)
    call = functools.partial(library("experts").vbrt_experts_product, bank, gating, task, threads)
    return Prepared(call, (out,), (held, bank, gating, task, *tensors, bias))


def _sums(layer: Experts, rows_PN: Tensor, ids_Tk: Tensor, weights_Tk: Tensor, y: Tensor) -> Any:
    shape = (ctypes.c_int64 * 3)(*ids_Tk.shape, rows_PN.shape[1])
    given = rows_PN.data_ptr(), ids_Tk.data_ptr(), weights_Tk.data_ptr(), layer.pages.experts, shape, y.data_ptr()
    held = functools.partial(library("experts").vbrt_experts_sum, *given, NUMBERS[y.dtype], 1)
    return held
