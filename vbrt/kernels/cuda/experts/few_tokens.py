"""Launches of the grouped MoE kernels for few tokens: ops "experts_up" and "experts_down", weights in tile order.

If tokens rarely share experts, each pair has its own program; otherwise pairs are sorted by expert, so that an expert's
pairs share one read of its weights. There is no synchronization, and the pairs are known to the device only, so all
launches can be captured in a CUDA graph. fp16 and fp32 are split into two and three bf16 summands; sums are in fp32.

Legend: T tokens, k experts per token, P = T k pairs, E experts, N rows of a matrix, K its columns.
"""

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vbrt.errors import KernelError
from vbrt.kernels.cuda import devices, tuned_configs
from vbrt.kernels.cuda.e2m1.launches import SUMMANDS
from vbrt.kernels.cuda.e2m1.tiles import COLUMNS, FORMATS, ROWS, TILES
from vbrt.kernels.cuda.experts.gated_rows import gated_rows
from vbrt.kernels.cuda.experts.pairs import Groups, group_pairs
from vbrt.kernels.cuda.experts.token_sums import weighted_sums
from vbrt.kernels.cuda.launch_table import pairs_are_alone, rows_for, token_for
from vbrt.kernels.cuda.launcher import Launcher, rows_are_aligned
from vbrt.kernels.experts import ExpertPages, Gate, addresses_of

__all__ = ["down", "summands_of", "up"]

_SPLIT_WARPS, _SPLIT_SPAN = 4, 1024


class _Matrix(NamedTuple):
    """One part of all pages, in the form of the kernels."""

    addresses: Tensor
    experts: int
    n: int
    k: int
    tile_offset: int
    scale_offset: int
    e8m0_scales: bool
    pages: ExpertPages

    @property
    def columns(self) -> int:
        """Number of tile columns."""
        return -(-self.k // COLUMNS)


class _Gating(NamedTuple):
    """A kernel's epilogue on rows. matrices: a program multiplies a row tile of each."""

    kind: str
    matrices: int
    gate: Gate

    @property
    def constants(self) -> dict[str, Any]:
        """Constants of the kernel."""
        gate = self.gate
        return {
            "MATRICES": self.matrices,
            "GATING": self.kind,
            "FUNCTION": gate.function,
            "ALPHA": gate.alpha,
            "LIMIT": gate.limit,
            "SHIFT": gate.shift,
        }


_PLAIN = _Gating("none", 1, Gate("none", gated=False))


class _Kernels(NamedTuple):
    rows: Launcher
    token: Launcher
    split: Launcher


@functools.cache
def _kernels(dependent: bool) -> _Kernels:
    from vbrt.kernels.cuda.experts import few_tokens_gluon as device

    kernels = device.rows_kernel, device.token_kernel, device.split_kernel
    return _Kernels(*(Launcher(kernel, dependent=dependent) for kernel in kernels))


# -- ops ---------------------------------------------------------------------------------------------------------------


def up(
    x_TH: Tensor, ids_Tk: Tensor, pages: ExpertPages, part: str = "up", gate: Gate | None = None,
    bias_EN: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """g(W x + b) for each pair, see `vbrt.kernels.experts.experts_up`; one launch, or two with a sort."""
    matrix, k = _matrix(x_TH, pages, part), ids_Tk.shape[1]
    gating = _gating(gate, matrix.n)
    if gating is None:  # halves that are not aligned to tiles
        v_PN = x_TH.new_empty(ids_Tk.numel(), matrix.n, dtype=torch.float32)
        _rows(x_TH, ids_Tk, matrix, _PLAIN, bias_EN, v_PN, k)
        return gated_rows(v_PN, gate, x_TH.dtype)
    columns = matrix.n if gating.kind == "none" else matrix.n // 2
    y_PN = x_TH.new_empty(ids_Tk.numel(), columns)
    _rows(x_TH, ids_Tk, matrix, gating, bias_EN, y_PN, k)
    return y_PN


def down(
    h_PI: Tensor, ids_Tk: Tensor, weights_Tk: Tensor | None, pages: ExpertPages, part: str = "down",
    bias_EN: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """Weighted sums [T, H], or rows of pairs [P, H], see `vbrt.kernels.experts.experts_down`.

    Ids, addresses and pages must be older than the previous launch, the one of h: kernels may prefetch them.
    """
    matrix = _matrix(h_PI, pages, part)
    if weights_Tk is None:
        y_PH = h_PI.new_empty(ids_Tk.numel(), matrix.n)
        _rows(h_PI, ids_Tk, matrix, _PLAIN, bias_EN, y_PH, 1)
        return y_PH
    if _are_alone(ids_Tk, pages):
        y_TH = h_PI.new_empty(ids_Tk.shape[0], matrix.n)
        _tokens(h_PI, ids_Tk, weights_Tk, matrix, bias_EN, y_TH)
        return y_TH
    rows_PH = h_PI.new_empty(ids_Tk.numel(), matrix.n, dtype=torch.float32)
    if rows_PH.numel():
        _rows(h_PI, ids_Tk, matrix, _PLAIN, bias_EN, rows_PH, 1)
    return weighted_sums(rows_PH, ids_Tk, weights_Tk, matrix.experts, h_PI.dtype)


def _matrix(x_MK: Tensor, pages: ExpertPages, part: str) -> _Matrix:
    """Raises KernelError for an x of another width."""
    (n, k), offsets = pages.shapes[part], pages.offsets(part)
    if x_MK.shape[1] != k:
        raise KernelError(f"experts, part {part!r}: x has shape {tuple(x_MK.shape)}; expected (..., {k})")
    addresses, scales = addresses_of(pages, x_MK.device), FORMATS[pages.format].e8m0_scales
    return _Matrix(addresses, pages.experts, n, k, offsets[TILES], offsets["tensor_scale"], scales, pages)


def _gating(gate: Gate | None, n: int) -> _Gating | None:
    """The kernel's epilogue for a gate; None if unsupported."""
    if gate is None:
        return _PLAIN
    if not gate.gated:
        return _Gating("none", 1, Gate(gate.function, gated=False))
    if gate.interleaved:
        return _Gating("interleaved", 1, gate)
    return _Gating("halves", 2, gate) if n % (2 * ROWS) == 0 else None


def _are_alone(ids_Tk: Tensor, pages: ExpertPages) -> bool:
    """True if each pair is a block of its own."""
    return pairs_are_alone(*pages.counts_of(ids_Tk), pages.experts)


# -- launches ----------------------------------------------------------------------------------------------------------


def _rows(
    x_MK: Tensor, ids_Tk: Tensor, matrix: _Matrix, gating: _Gating, bias: Tensor | None, y_PN: Tensor, per_row: int
) -> None:
    """Fill y with g(W x + b) of each pair; per_row: pairs per row of x."""
    if y_PN.numel() == 0:
        return
    row_tiles = -(-matrix.n // gating.matrices // ROWS)
    shape = matrix.experts, row_tiles, matrix.columns, gating.matrices
    _, pairs = matrix.pages.counts_of(ids_Tk)
    launch = tuned_configs.found(x_MK.device.index, "expert rows", pairs, *shape) or rows_for(pairs, *shape)
    ids, x_SMK = ids_Tk.contiguous(), summands_of(x_MK)
    device, grouped = x_MK.device.index, not _are_alone(ids_Tk, matrix.pages)
    groups = group_pairs(ids, matrix.experts, 8 * launch.groups) if grouped else Groups(ids, ids, ids, ids, 1)
    dependent = devices.launches_dependents(device)
    bias_or_x = x_SMK if bias is None else bias.contiguous()
    blocks = len(groups.experts) if grouped else ids.numel()
    _kernels(dependent).rows(
        device,
        (-(-row_tiles // launch.row_tiles), blocks),
        (x_SMK, ids, *groups[:4], matrix.addresses, bias_or_x, y_PN),
        (
            matrix.experts, matrix.n, x_SMK.shape[2], matrix.columns, per_row, x_SMK.stride(1), x_SMK.stride(0),
            y_PN.shape[1], matrix.tile_offset, matrix.scale_offset,
        ),
        warps=launch.k_warps,
        specialized=(ids.dtype, bias_or_x.dtype, y_PN.dtype),
        GROUPED=grouped,
        ROW_TILES=launch.row_tiles,
        TOKEN_GROUPS=launch.groups if grouped else 1,
        K_WARPS=launch.k_warps,
        SUMMANDS=len(x_SMK),
        E8M0_SCALES=matrix.e8m0_scales,
        HAS_BIAS=bias is not None,
        DEPENDENT=dependent,
        **gating.constants,
    )  # fmt: skip


def _tokens(
    h_PI: Tensor, ids_Tk: Tensor, weights_Tk: Tensor, matrix: _Matrix, bias: Tensor | None, y_TH: Tensor
) -> None:
    """Fill y with the weighted sums over each token's experts, in one launch."""
    if y_TH.numel() == 0:
        return
    (tokens, k), device, h_SPI = ids_Tk.shape, h_PI.device.index, summands_of(h_PI)
    launch = tuned_configs.found(device, "expert sums", tokens, k, matrix.columns) or token_for(k, matrix.columns)
    dependent = devices.launches_dependents(device)
    bias_or_h = h_SPI if bias is None else bias.contiguous()
    ids, weights = ids_Tk.contiguous(), weights_Tk.contiguous()
    _kernels(dependent).token(
        device,
        (-(-matrix.n // (ROWS * launch.row_tiles)), tokens),
        (h_SPI, ids, weights, matrix.addresses, bias_or_h, y_TH),
        (
            matrix.experts, matrix.n, h_SPI.shape[2], k, matrix.columns, h_SPI.stride(1), h_SPI.stride(0),
            matrix.n, matrix.tile_offset, matrix.scale_offset,
        ),
        warps=launch.k_warps,
        specialized=(ids.dtype, weights.dtype, bias_or_h.dtype, y_TH.dtype),
        SIDE_BY_SIDE=launch.side_by_side,
        ROW_TILES=launch.row_tiles,
        K_WARPS=launch.k_warps,
        AHEAD=launch.ahead,
        SUMMANDS=len(h_SPI),
        E8M0_SCALES=matrix.e8m0_scales,
        HAS_BIAS=bias is not None,
        WEIGHTS_FIRST=ids is ids_Tk,
        DEPENDENT=dependent,
    )  # fmt: skip


def summands_of(x_MK: Tensor) -> Tensor:
    """bf16 [S, M, K] that add up to x, rows 16-byte aligned; K is rounded up to a multiple of 8."""
    summands = SUMMANDS[x_MK.dtype]
    if summands == 1 and rows_are_aligned(x_MK):
        return x_MK.unsqueeze(0)
    (rows, k), device = x_MK.shape, x_MK.device.index
    width, dependent = -(-k // 8) * 8, devices.launches_dependents(device)
    o_SMK = x_MK.new_empty(summands, rows, width, dtype=torch.bfloat16)
    _kernels(dependent).split(
        device,
        (rows, -(-width // _SPLIT_SPAN)),
        (x_MK, o_SMK),
        (k, width, *x_MK.stride(), rows * width),
        warps=_SPLIT_WARPS,
        specialized=(x_MK.dtype,),
        SUMMANDS=summands,
        WARPS=_SPLIT_WARPS,
        SPAN=_SPLIT_SPAN,
        DEPENDENT=dependent,
    )
    return o_SMK
