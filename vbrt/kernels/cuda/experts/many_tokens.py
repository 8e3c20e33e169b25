"""MoE for many tokens: pairs sorted by expert, and one fused kernel for the matrices of all experts.

On sm_90 it is `grouped_gluon`, behind one that gathers the pairs' activations; from sm_80 on elsewhere
`grouped_mma_gluon`, which gathers them itself. There is no synchronization: pair counts and page addresses are known to
the device only. bf16 activations are used as they are; fp16 and fp32 are split into two and three bf16 summands, whose
products are added.

Legend: T tokens, k experts per token, P = T k pairs, M rows of the input (T, or P with k = 1), S summands.
"""

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vbrt.errors import KernelError
from vbrt.kernels.cuda import devices, tuned_configs
from vbrt.kernels.cuda.e2m1.launches import SUMMANDS, in_bf16
from vbrt.kernels.cuda.e2m1.tiles import COLUMNS, FORMATS, TILES
from vbrt.kernels.cuda.experts.gated_rows import gated_rows
from vbrt.kernels.cuda.experts.pairs import Groups, group_pairs
from vbrt.kernels.cuda.experts.token_sums import weighted_sums
from vbrt.kernels.cuda.launch_table import (
    WIDE,
    MmaLaunch,
    grouped_for,
    grouped_mma_for,
    grouped_mma_tokens,
    grouped_stages,
)
from vbrt.kernels.cuda.launcher import Launcher
from vbrt.kernels.experts import ExpertPages, Gate, addresses_of

__all__ = ["down", "products", "up"]

_NO_GATE = Gate("none", gated=False)
_WARPS, _ROWS, _OUTPUT_ROWS = 4, 128, 16
_GATHER_WARPS = 2
#: numbers per table entry; tile columns that the kernel takes together
_ENTRY, _PAIR = 4, 2


class _Kernels(NamedTuple):
    gather: Launcher
    multiply: Launcher
    describe: Any  # (matrix, pairs per box) -> TMA descriptor


@functools.cache
def _mma() -> Launcher:
    from vbrt.kernels.cuda.experts import grouped_mma_gluon

    return Launcher(grouped_mma_gluon.grouped_mma_kernel)


@functools.cache
def _kernels() -> _Kernels:
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from vbrt.kernels.cuda.experts import grouped_gluon as device

    def describe(x_RK: Tensor, box: int) -> Any:
        swizzle = NVMMASharedLayout(128, 16, 2)
        return TensorDescriptor(x_RK, list(x_RK.shape), list(x_RK.stride()), [box, device.COLUMNS.value], swizzle)

    kernels = device.gather_kernel, device.grouped_kernel
    return _Kernels(*(Launcher(kernel, dependent=True) for kernel in kernels), describe)


def up(
    x_TH: Tensor, ids_Tk: Tensor, pages: ExpertPages, *, part: str, gate: Gate | None, bias_EN: Tensor | None
) -> Tensor:
    """See `kernels.experts.experts_up`. Caches the sorted pairs for `down` with the same ids."""
    groups = _sorted(ids_Tk, pages)
    ids_Tk._vb_groups = groups, _version(ids_Tk)  # lives as long as the ids
    return products(x_TH, groups, pages, part=part, gate=gate, bias_EN=bias_EN)


def down(
    h_PI: Tensor, ids_Tk: Tensor, weights_Tk: Tensor | None, pages: ExpertPages, *, part: str, bias_EN: Tensor | None
) -> Tensor:
    """See `kernels.experts.experts_down`."""
    groups = _taken(ids_Tk, pages) or _sorted(ids_Tk, pages)
    rows = products(h_PI, groups, pages, part=part, gate=None, bias_EN=bias_EN)
    return rows if weights_Tk is None else weighted_sums(rows, ids_Tk, weights_Tk, pages.experts)


def _sorted(ids_Tk: Tensor, pages: ExpertPages) -> Groups:
    (_, pairs), experts, gpu = pages.counts_of(ids_Tk), pages.experts, devices.gpu(ids_Tk.device.index)
    if gpu.major not in WIDE:
        return group_pairs(ids_Tk, experts, grouped_mma_tokens(gpu, pairs, experts))
    found = tuned_configs.found(ids_Tk.device.index, "expert blocks", pairs, experts)
    return group_pairs(ids_Tk, experts, found.block if found else grouped_for(pairs, experts))


def _taken(ids_Tk: Tensor, pages: ExpertPages) -> Groups | None:
    """Take the pairs cached by `up`, once, if ids and number of experts are unchanged."""
    groups, version = ids_Tk.__dict__.pop("_vb_groups", (None, None))
    fits = groups is not None and len(groups.offsets) == pages.experts + 2 and version == _version(ids_Tk)
    return groups if fits else None


def _version(tensor: Tensor) -> int | None:
    return None if tensor.is_inference() else tensor._version


def products(
    x_MK: Tensor, groups: Groups, pages: ExpertPages, *, part: str, gate: Gate | None, bias_EN: Tensor | None
) -> Tensor:
    """Return the gate of W x + b for each pair, [P, N] or, gated, [P, N / 2]; zero rows for sentinels.

    Pair p uses row p // (P / M) of x. Raises KernelError for an x of another width.
    """
    (n, k), pairs = pages.shapes[part], len(groups.order)
    if x_MK.shape[1] != k:
        raise KernelError(f"experts, part {part!r}: x has shape {tuple(x_MK.shape)}; expected (..., {k})")
    if not pairs:
        return x_MK.new_empty(0, n if gate is None else gate.columns(n))
    on_hopper = devices.major(x_MK.device.index) in WIDE
    call = (_WgmmaCall if on_hopper else _MmaCall)(x_MK, groups, pages, part)
    fused = SUMMANDS[x_MK.dtype] == 1 and _fuses(gate, n)
    y_PN = call.run(gate if fused and gate is not None else _NO_GATE, bias_EN)
    return y_PN.to(x_MK.dtype) if fused or gate is None else gated_rows(y_PN, gate, x_MK.dtype)


def _fuses(gate: Gate | None, n: int) -> bool:
    """True if the kernel can fuse a gate: its rows of gates and values are whole tiles, or interleaved."""
    return gate is None or not gate.gated or n % (2 if gate.interleaved else 2 * _OUTPUT_ROWS) == 0


class _WgmmaCall(NamedTuple):
    """Operands of one part's products, for `grouped_gluon`."""

    x_MK: Tensor
    groups: Groups
    pages: ExpertPages
    part: str

    def run(self, gate: Gate, bias_EN: Tensor | None) -> Tensor:
        """Return [P, n_out] in x's dtype, or in fp32 if x is split into summands."""
        pairs, n = len(self.groups.order), self.pages.shapes[self.part][0]
        summands, n_out = SUMMANDS[self.x_MK.dtype], gate.columns(n)
        if summands == 1:
            y_PN = self.x_MK.new_empty(pairs, n_out)
            self._multiply(*self._gathered(y_PN, summands), y_PN, gate, bias_EN)
            return y_PN
        y_SPN = self.x_MK.new_zeros(summands, pairs, n_out, dtype=torch.float32)
        x_RK, table = self._gathered(None, summands)
        for x_PK, y_PN in zip(x_RK.view(summands, pairs, -1), y_SPN, strict=True):
            self._multiply(x_PK, table, y_PN, gate, bias_EN)
            bias_EN = None
        return y_SPN.sum(0)

    def _gathered(self, y_PN: Tensor | None, summands: int) -> tuple[Tensor, Tensor]:
        """Gather the sorted pairs' rows in kernel order, [S * P, K], and build the table of items.

        Clears the rows of y of sentinels.
        """
        x, groups, (_, k), device = self.x_MK, self.groups, self.x_MK.shape, self.x_MK.device
        pairs, blocks, columns = len(groups.order), len(groups.experts), -(-k // COLUMNS)
        o = x.new_empty(summands * pairs, COLUMNS * columns, dtype=torch.bfloat16)
        table = groups.order.new_empty(blocks, _ENTRY, dtype=torch.int64)
        sorted_pairs = groups.order, groups.offsets, groups.experts, groups.firsts
        repeats, experts = pairs // x.shape[0], self.pages.experts
        _kernels().gather(
            device.index,
            (pairs, -(-columns // (8 * _GATHER_WARPS))),
            (x, *sorted_pairs, addresses_of(self.pages, device), table, o, o if y_PN is None else y_PN),
            (
                pairs,
                x.shape[0],
                k,
                repeats,
                experts,
                blocks,
                columns,
                0 if y_PN is None else y_PN.shape[1],
                *x.stride(),
            ),
            warps=_GATHER_WARPS,
            specialized=(x.dtype, k, repeats, experts, *x.stride()),
            SUMMANDS=summands,
            CLEARS=y_PN is not None,
            TOKENS=groups.block,
            WARPS=_GATHER_WARPS,
        )
        return o, table

    def _multiply(self, x_PK: Tensor, table: Tensor, y_PN: Tensor, gate: Gate, bias_EN: Tensor | None) -> None:
        """Fill y with the gate of W x + b of each pair."""
        pages, tokens, device = self.pages, self.groups.block, y_PN.device
        n, offsets, n_out = pages.shapes[self.part][0], pages.offsets(self.part), y_PN.shape[1]
        row_blocks, columns = -(-n_out // (_ROWS // 2 if gate.gated else _ROWS)), x_PK.shape[1] // COLUMNS
        bias_or_y, box = y_PN if bias_EN is None else bias_EN.contiguous(), min(64, tokens)
        matrices = offsets[TILES], offsets["tensor_scale"]
        _kernels().multiply(
            device.index,
            (devices.gpu(device.index).processors, 1),
            (table, self.groups.order, bias_or_y, y_PN),
            (_kernels().describe(x_PK, box), *matrices, n, len(table), row_blocks, columns, n_out),
            warps=_WARPS,
            specialized=(*matrices, y_PN.dtype, bias_or_y.dtype),
            TOKENS=tokens,
            BOX=box,
            STAGES=grouped_stages(tokens),
            AHEAD=2 if columns > _PAIR else 1,
            E8M0_SCALES=FORMATS[pages.format].e8m0_scales,
            HAS_BIAS=bias_EN is not None,
            FUNCTION=gate.function,
            GATED=gate.gated,
            INTERLEAVED=gate.interleaved,
            ALPHA=gate.alpha,
            LIMIT=gate.limit,
            SHIFT=gate.shift,
        )


class _MmaCall(NamedTuple):
    """Operands of one part's products, for `grouped_mma_gluon`."""

    x_MK: Tensor
    groups: Groups
    pages: ExpertPages
    part: str

    def run(self, gate: Gate, bias_EN: Tensor | None) -> Tensor:
        """Return [P, n_out] in x's dtype, or in fp32 if x is split into summands."""
        (n, k), pairs = self.pages.shapes[self.part], len(self.groups.order)
        gpu, n_out, x_RK = devices.gpu(self.x_MK.device.index), gate.columns(n), in_bf16(self.x_MK)
        apart = gate.gated and not gate.interleaved
        launch = grouped_mma_for(gpu, self.groups.block, pairs, n, -(-k // COLUMNS), apart)
        summands = SUMMANDS[self.x_MK.dtype]
        if summands == 1:
            return self._multiply(x_RK, x_RK.new_empty(pairs, n_out), launch, gate, bias_EN)
        y_SPN = x_RK.new_empty(summands, pairs, n_out, dtype=torch.float32)
        for x_MK, y_PN in zip(x_RK.view(summands, *self.x_MK.shape[:1], -1), y_SPN, strict=True):
            self._multiply(x_MK, y_PN, launch, gate, bias_EN)
            bias_EN = None
        return y_SPN.sum(0)

    def _multiply(self, x_MK: Tensor, y_PN: Tensor, launch: MmaLaunch, gate: Gate, bias_EN: Tensor | None) -> Tensor:
        """Fill y with the gate of W x + b of each pair."""
        pages, groups, device, (tokens, k) = self.pages, self.groups, y_PN.device, x_MK.shape
        (pairs, n_out), n, offsets = y_PN.shape, pages.shapes[self.part][0], pages.offsets(self.part)
        rows = _OUTPUT_ROWS * launch.warps * launch.row_tiles // (2 if gate.gated else 1)
        row_blocks, repeats = -(-n_out // rows), pairs // tokens
        bias_or_y = y_PN if bias_EN is None else bias_EN.contiguous()
        matrices = offsets[TILES], offsets["tensor_scale"]
        _mma()(
            device.index,
            (len(groups.experts) * row_blocks, 1),
            (x_MK, *groups[:4], addresses_of(pages, device), bias_or_y, y_PN),
            (*matrices, n, k, -(-k // COLUMNS), row_blocks, pages.experts, repeats, n_out, x_MK.stride(0)),
            warps=launch.warps,
            specialized=(*matrices, n, k, n_out, x_MK.stride(0), y_PN.dtype, bias_or_y.dtype),
            TOKENS=launch.tokens,
            WARPS=launch.warps,
            ROW_TILES=launch.row_tiles,
            RING=launch.ring,
            CODES="e8m0" if FORMATS[pages.format].e8m0_scales else "e4m3",
            K_TAIL=k % COLUMNS != 0,
            HAS_BIAS=bias_EN is not None,
            FUNCTION=gate.function,
            GATED=gate.gated,
            INTERLEAVED=gate.interleaved,
            ALPHA=gate.alpha,
            LIMIT=gate.limit,
            SHIFT=gate.shift,
        )
        return y_PN
