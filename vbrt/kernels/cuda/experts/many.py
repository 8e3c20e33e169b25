"""Routed experts for many tokens: pairs sorted by expert, and one fused kernel for the matrices of all experts.

Nothing waits for the device: how many pairs an expert has, and where its page is, only the device knows. bf16
activations go in as they are; fp16 and fp32 are split into two and three bf16 summands, whose products are added.

Legend: T tokens, k experts a token, P = T k pairs, M rows of the input (T, or P with k = 1), S summands.
"""

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vbrt.errors import KernelError
from vbrt.kernels.cuda import devices
from vbrt.kernels.cuda.e2m1.launches import SUMMANDS
from vbrt.kernels.cuda.e2m1.tiles import COLUMNS, FORMATS, TILES
from vbrt.kernels.cuda.experts.pairs import Groups, group_pairs
from vbrt.kernels.cuda.launch_table import GroupedLaunch
from vbrt.kernels.cuda.launcher import Launcher
from vbrt.kernels.experts import ExpertPages, Gate, addresses_of, apply_gate

__all__ = ["products", "weighted_sums"]

_NO_GATE = Gate("none", gated=False)
_WARPS, _ROWS, _OUTPUT_ROWS = 4, 128, 16
_GATHER_WARPS, _SUM_COUNT = 2, 1024


class _Kernels(NamedTuple):
    gather: Launcher
    multiply: Launcher
    sum: Launcher
    describe: Any  # (matrix, pairs a box) -> its descriptor for the copy engine


@functools.cache
def _kernels() -> _Kernels:
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from vbrt.kernels.cuda.experts import grouped_gluon as device

    def describe(x_RK: Tensor, box: int) -> Any:
        swizzle = NVMMASharedLayout(128, 16, 2)
        return TensorDescriptor(x_RK, list(x_RK.shape), list(x_RK.stride()), [box, device.COLUMNS.value], swizzle)

    kernels = device.gather_kernel, device.grouped_kernel, device.sum_kernel
    return _Kernels(*(Launcher(kernel, dependent=True) for kernel in kernels), describe)


def products(
    x_MK: Tensor,
    ids_Tk: Tensor,
    pages: ExpertPages,
    *,
    part: str,
    gate: Gate | None,
    bias_EN: Tensor | None,
    config: GroupedLaunch,
) -> Tensor:
    """Return the gate of W x + b for each pair, [P, N] or, gated, [P, N / 2]; zero rows for sentinels.

    Row p // (P / M) of x is that of pair p.
    """
    n, k = pages.shapes[part]
    if x_MK.shape[1] != k:
        raise KernelError(f"experts, part {part!r}: x has shape {tuple(x_MK.shape)}; expected (..., {k})")
    if not ids_Tk.numel():
        return x_MK.new_empty(0, n if gate is None else gate.columns(n))
    groups = group_pairs(ids_Tk, pages.experts, config.tokens)
    call = _Call(x_MK, groups, pages, part, config)
    fused = SUMMANDS[x_MK.dtype] == 1 and _fuses(gate, n)
    y_PN = call.run(gate if fused and gate is not None else _NO_GATE, bias_EN)
    return y_PN.to(x_MK.dtype) if fused or gate is None else apply_gate(y_PN, gate).to(x_MK.dtype)


def _fuses(gate: Gate | None, n: int) -> bool:
    """True if the kernel applies a gate: its rows of gates and of values are whole tiles, or side by side."""
    return gate is None or not gate.gated or n % (2 if gate.interleaved else 2 * _OUTPUT_ROWS) == 0


class _Call(NamedTuple):
    """The products of one part."""

    x_MK: Tensor
    groups: Groups
    pages: ExpertPages
    part: str
    config: GroupedLaunch

    def run(self, gate: Gate, bias_EN: Tensor | None) -> Tensor:
        """Return [P, n_out] in x's dtype, or in fp32 if x is split into summands."""
        pairs, n = len(self.groups.order), self.pages.shapes[self.part][0]
        summands, n_out = SUMMANDS[self.x_MK.dtype], gate.columns(n)
        if summands == 1:
            y_PN = self.x_MK.new_empty(pairs, n_out)
            self._multiply(self._gathered(y_PN, summands), y_PN, gate, bias_EN)
            return y_PN
        y_SPN = self.x_MK.new_zeros(summands, pairs, n_out, dtype=torch.float32)
        x_SPK = self._gathered(None, summands).view(summands, pairs, -1)
        for x_PK, y_PN in zip(x_SPK, y_SPN, strict=True):
            self._multiply(x_PK, y_PN, gate, bias_EN)
            bias_EN = None
        return y_SPN.sum(0)

    def _gathered(self, y_PN: Tensor | None, summands: int) -> Tensor:
        """Return the sorted pairs' rows as the kernel reads them, [S * P, K]; clear the rows of y of sentinels."""
        x, (order, offsets, *_), k = self.x_MK, self.groups, self.x_MK.shape[1]
        pairs, columns = len(order), -(-k // COLUMNS)
        o = x.new_empty(summands * pairs, COLUMNS * columns, dtype=torch.bfloat16)
        repeats, experts = pairs // x.shape[0], self.pages.experts
        _kernels().gather(
            x.device.index,
            (pairs, -(-columns // (8 * _GATHER_WARPS))),
            (x, order, offsets, o, o if y_PN is None else y_PN),
            (pairs, x.shape[0], k, repeats, experts, columns, 0 if y_PN is None else y_PN.shape[1], *x.stride()),
            warps=_GATHER_WARPS,
            specialized=(x.dtype, k, repeats, experts, *x.stride()),
            SUMMANDS=summands,
            CLEARS=y_PN is not None,
            WARPS=_GATHER_WARPS,
        )
        return o

    def _multiply(self, x_PK: Tensor, y_PN: Tensor, gate: Gate, bias_EN: Tensor | None) -> None:
        pages, groups, tokens, device = self.pages, self.groups, self.config.tokens, y_PN.device
        n, offsets, n_out = pages.shapes[self.part][0], pages.offsets(self.part), y_PN.shape[1]
        tables = addresses_of(pages, device), groups.experts, groups.firsts, groups.offsets, groups.order
        row_blocks, columns = -(-n_out // (_ROWS // 2 if gate.gated else _ROWS)), x_PK.shape[1] // COLUMNS
        bias_or_y, box = y_PN if bias_EN is None else bias_EN.contiguous(), min(64, tokens)
        _kernels().multiply(
            device.index,
            (devices.gpu(device.index).processors, 1),
            (*tables, bias_or_y, y_PN),
            (
                _kernels().describe(x_PK, box),
                offsets[TILES],
                offsets["tensor_scale"],
                pages.experts,
                n,
                len(groups.experts),
                row_blocks,
                columns,
                n_out,
            ),
            warps=_WARPS,
            specialized=(offsets[TILES], offsets["tensor_scale"], y_PN.dtype, bias_or_y.dtype),
            TOKENS=tokens,
            BOX=box,
            STAGES=self.config.stages,
            E8M0_SCALES=FORMATS[pages.format].e8m0_scales,
            HAS_BIAS=bias_EN is not None,
            FUNCTION=gate.function,
            GATED=gate.gated,
            INTERLEAVED=gate.interleaved,
            ALPHA=gate.alpha,
            LIMIT=gate.limit,
            SHIFT=gate.shift,
        )


def weighted_sums(rows_PH: Tensor, ids_Tk: Tensor, weights_Tk: Tensor, experts: int) -> Tensor:
    """Return the sum over each token's experts, [T, H] in the rows' dtype, in fp32 and in the order of `ids_Tk`."""
    (tokens, k), n = ids_Tk.shape, rows_PH.shape[1]
    y_TH = rows_PH.new_empty(tokens, n)
    if tokens:
        ids, weights = ids_Tk.contiguous(), weights_Tk.contiguous()
        _kernels().sum(
            y_TH.device.index,
            (tokens, -(-n // _SUM_COUNT)),
            (rows_PH, ids, weights, y_TH),
            (experts, n),
            warps=_WARPS,
            specialized=(rows_PH.dtype, ids.dtype, weights.dtype),
            K_EXPERTS=k,
            COUNT=_SUM_COUNT,
            WARPS=_WARPS,
        )
    return y_TH
