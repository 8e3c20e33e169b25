"""Routed experts on trellis codes: what `row_experts` launches for `t3`.

Each expert has its own scales of columns, so inputs are rotated pair by pair, in one launch; the fused kernel reads
them, and codes by page addresses. The rotated input of a pair in fp16 or fp32 is two or three numbers of bf16.

Legend: T tokens, k experts per token, P = T k pairs, E experts, N rows of a matrix, K its columns.
"""

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from vbrt.formats.t3 import TILE, block_of
from vbrt.kernels.cuda.e2m1.launches import SUMMANDS
from vbrt.kernels.cuda.experts.pairs import Groups, group_pairs
from vbrt.kernels.cuda.launch_table import pairs_are_alone
from vbrt.kernels.cuda.launcher import Launcher
from vbrt.kernels.cuda.trellis.linear import largest, rotation, rotation_back
from vbrt.kernels.experts import ExpertPages, addresses_of

__all__ = ["decode", "multiply"]

_WARPS = 4
_UNROLL = 2  # as of `linear`
#: numbers of bf16 that a scaled input is the sum of: 4 bits more than its dtype has, of fp32 rounded
_SCALED = {torch.bfloat16: 2, torch.float16: 2, torch.float32: 3}


class _Kernels(NamedTuple):
    rotate: Launcher
    multiply: Launcher
    decode: Launcher


@functools.cache
def _kernels() -> _Kernels:
    from vbrt.kernels.cuda.trellis import decode_triton, linear_gluon

    return _Kernels(
        Launcher(decode_triton.rotate_pairs_kernel),
        Launcher(linear_gluon.experts_kernel),
        Launcher(decode_triton.decode_experts_kernel),
    )


def _warps_for(groups: int) -> int:
    """Warps that share a row's groups of 64 columns: about two steps each."""
    return max(2, min(8, 1 << max(1, groups // (2 * _UNROLL)).bit_length() - 1))


def multiply(
    x_MK: Tensor, ids: Tensor, pages: ExpertPages, part: str, bias: Tensor | None, per_row: int, y_PN: Tensor
) -> None:
    """W x + b of each pair into y_PN, fp32; per_row: pairs per row of x."""
    (n, k), offsets, device, pairs = pages.shapes[part], pages.offsets(part), x_MK.device.index, ids.numel()
    x_MK = x_MK if x_MK.stride(1) == 1 else x_MK.contiguous()
    tokens, whole = pages.counts_of(ids)
    mean = whole / pages.experts
    token_groups = 1 if mean <= 8 else 2 if mean <= 16 else 4
    grouped = not pairs_are_alone(tokens, whole, pages.experts)
    groups = group_pairs(ids, pages.experts, 8 * token_groups) if grouped else Groups(ids, ids, ids, ids, 1)
    blocks = len(groups.experts) if grouped else pairs
    block, columns, terms = block_of(k), -(-k // 64), SUMMANDS[x_MK.dtype]
    addresses, table = addresses_of(pages, x_MK.device), rotation(block, x_MK.device)
    rotated = x_MK.new_empty(terms, pairs, columns * 64, dtype=torch.bfloat16)
    _kernels().rotate(
        device,
        (blocks, columns * 64 // block),
        (x_MK, ids, *groups[:4], addresses, table, rotated),
        (pairs, pages.experts, k, columns, per_row, x_MK.stride(0), offsets["columns"]),
        warps=_WARPS,
        specialized=(x_MK.dtype, ids.dtype, k, x_MK.stride(0)),
        GROUPED=grouped,
        ROWS=max(16, 8 * token_groups),
        BLOCK=block,
        SUMMANDS=_SCALED[x_MK.dtype],
        TERMS=terms,
    )
    warps = _warps_for(columns)
    _kernels().multiply(
        device,
        (-(-n // TILE), blocks),
        (rotated, ids, *groups[:4], addresses, rotated if bias is None else bias, y_PN),
        (pairs, pages.experts, n, columns, offsets["codes"], offsets["scales"], offsets["tensor_scale"]),
        warps=warps,
        specialized=(ids.dtype, None if bias is None else bias.dtype),
        GROUPED=grouped,
        TOKEN_GROUPS=token_groups if grouped else 1,
        TERMS=terms,
        K_WARPS=warps,
        UNROLL=_UNROLL,
        BLOCK=block,
        HAS_BIAS=bias is not None,
        WHOLE=columns % (warps * _UNROLL) == 0,
    )


def decode(pages: ExpertPages, part: str, offsets_E: Tensor, first: int, count: int) -> Tensor:
    """See `decoded_experts.Decode`."""
    (n, k), offsets, device = pages.shapes[part], pages.offsets(part), offsets_E.device
    w_GNK = torch.empty(count, n, k, dtype=torch.bfloat16, device=device)
    block = block_of(k)
    starts = (offsets[name] for name in ("codes", "scales", "columns", "tensor_scale"))
    _kernels().decode(
        device.index,
        (-(-n // TILE), count),
        (addresses_of(pages, device), offsets_E, rotation_back(block, device), w_GNK),
        (first, n, k, -(-k // 64), largest(w_GNK.dtype), *starts),
        warps=_WARPS,
        specialized=(k,),
        BLOCK=block,
    )
    return w_GNK
