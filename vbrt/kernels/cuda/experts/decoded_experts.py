"""MoE products of many pairs with decoded weights and torch's grouped matmul: where no fused kernel is faster.

Matrices of all experts with pairs are decoded into scratch memory through the address table, without a synchronization.
bf16 only, with rows in multiples of 16 bytes; see `serves`.

Legend: T tokens, k experts per token, P = T k pairs, E experts, G experts decoded at a time, N rows of a matrix, K its
columns.
"""

import functools
import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from vbrt.host import accelerator
from vbrt.kernels.cuda import devices
from vbrt.kernels.cuda.e2m1.tiles import FORMATS, TILES, tile_shape
from vbrt.kernels.cuda.experts.gated_rows import gated_rows
from vbrt.kernels.cuda.experts.pairs import Groups, group_pairs
from vbrt.kernels.cuda.launcher import Launcher
from vbrt.kernels.experts import ExpertPages, Gate, addresses_of

__all__ = ["all_experts", "decode_pages", "products", "serves"]

#: bytes of decoded weights at a time, at most a share of the GPU's memory; in several passes, work is repeated
_SCRATCH_BYTES, _SCRATCH_SHARE = 1 << 30, 1 / 32
_WARPS, _BLOCK = 4, 128
_WITHOUT_WAITING = (9, 10)  # major capabilities with a grouped matmul in torch

#: matrices [G, N, K] of G experts from one on that have pairs, undefined for others: of pages, part, offsets of groups,
#: first, G
Decode = Callable[[ExpertPages, str, Tensor, int, int], Tensor]


def serves(x_MK: Tensor, pages: ExpertPages, part: str) -> bool:
    """True if torch's grouped matmul supports these operands; on other GPUs than sm_90's and sm_100's it waits for the
    device, so not in a capture."""
    if x_MK.dtype is not torch.bfloat16 or any(size % 8 for size in pages.shapes[part]):
        return False
    waits = x_MK.is_cuda and devices.major(x_MK.device.index) not in _WITHOUT_WAITING
    return not (waits and accelerator.is_current_stream_capturing())


def products(
    x_MK: Tensor,
    ids_Tk: Tensor,
    pages: ExpertPages,
    *,
    part: str,
    gate: Gate | None,
    bias_EN: Tensor | None,
    decode: Decode | None = None,
) -> Tensor:
    """See `many_tokens.products`. decode: of pages in another order than that of tiles."""
    groups = group_pairs(ids_Tk, pages.experts, _BLOCK)
    x_PK = x_MK[groups.order // (ids_Tk.numel() // max(1, len(x_MK)))]
    rows = _multiply(x_PK, groups, pages, part, decode or _decode)
    y_PN = _unsorted(rows, groups, pages.experts)
    if bias_EN is not None:
        ids_P = ids_Tk.reshape(-1).long()
        routed = (ids_P >= 0) & (ids_P < pages.experts)
        y_PN += torch.where(routed[:, None], bias_EN[torch.where(routed, ids_P, 0)], 0)
    return y_PN if gate is None else gated_rows(y_PN, gate, y_PN.dtype)


def _unsorted(rows_PN: Tensor, groups: Groups, experts: int) -> Tensor:
    """Return the rows in pair order, zeros for sentinels."""
    place = _places(rows_PN)
    rows_PN = rows_PN.masked_fill((place >= groups.offsets[experts])[:, None], 0)
    return torch.empty_like(rows_PN).index_copy_(0, groups.order.long(), rows_PN)


def _places(rows_PN: Tensor) -> Tensor:
    return torch.arange(len(rows_PN), dtype=torch.int32, device=rows_PN.device)


def _multiply(x_PK: Tensor, groups: Groups, pages: ExpertPages, part: str, decode: Decode) -> Tensor:
    """Return x W of sorted pairs; undefined for sentinels.

    A grouped matmul starts at the first row, so each pass recomputes rows of the experts before it and discards them.
    """
    n, k = pages.shapes[part]
    step = max(1, _scratch_bytes(x_PK.device) // (2 * n * k))
    place, y = _places(x_PK), None
    for first in range(0, pages.experts, step):
        count = min(step, pages.experts - first)
        w_GNK = decode(pages, part, groups.offsets, first, count)
        ends = groups.offsets[first + 1 : first + count + 1]
        rows = F.grouped_mm(x_PK, w_GNK.mT, offs=ends)
        y = rows if y is None else torch.where((place >= groups.offsets[first])[:, None], rows, y)
        del w_GNK, rows  # reused by the next pass
    return y


def _scratch_bytes(device: torch.device) -> int:
    total = accelerator.get_device_properties(device).total_memory if device.type == accelerator.CUDA else math.inf
    return int(min(_SCRATCH_BYTES, total * _SCRATCH_SHARE))


def decode_pages(pages: ExpertPages, part: str) -> Tensor:
    """See `Kernel.decode_pages`: pages in the order of tiles."""
    return _decode(pages, part, all_experts(pages.experts, pages.addresses.device), 0, pages.experts)


def all_experts(experts: int, device: torch.device) -> Tensor:
    """Return offsets of groups of one pair each, int32 [E + 1]."""
    return torch.arange(experts + 1, dtype=torch.int32, device=device)


def _decode(pages: ExpertPages, part: str, offsets_E: Tensor, first: int, count: int) -> Tensor:
    """Return matrices in the order of tiles, see `Decode`."""
    shape, offsets = pages.shapes[part], pages.offsets(part)
    row_tiles, columns, _ = tile_shape(pages.format, shape)
    device = offsets_E.device
    w_GNK = torch.empty(count, *shape, dtype=torch.bfloat16, device=device)
    _decoder()(
        device.index,
        (row_tiles * -(-columns // _WARPS), count),
        (addresses_of(pages, device), offsets_E, w_GNK),
        (offsets[TILES], offsets["tensor_scale"], first, *shape, columns),
        warps=_WARPS,
        specialized=(offsets[TILES], offsets["tensor_scale"], shape[1]),
        E8M0_SCALES=FORMATS[pages.format].e8m0_scales,
        WARPS=_WARPS,
    )
    return w_GNK


@functools.cache
def _decoder() -> Launcher:
    from vbrt.kernels.cuda.experts import decode_gluon as device

    return Launcher(device.decode_kernel)
