"""Pairs (token, expert) sorted by expert on the GPU, without the host: the index of the grouped kernels.

Legend: T tokens, k experts per token, P = T k pairs, E experts, B blocks.
"""

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from vbrt.kernels.cuda import devices
from vbrt.kernels.cuda.launcher import Launcher

__all__ = ["Groups", "group_pairs", "most_blocks"]

#: pairs up to which each is compared with all, in one launch; beyond, a counting sort
_FEW_PAIRS = 2048
_WARPS, _RANKED, _SPAN, _PART = 4, 32, 256, 32


class Groups(NamedTuple):
    """Pairs grouped by expert; those of sentinels are the last group. All int32, on the GPU.

    Attributes:
        order: [P], pairs sorted by expert, ascending within each.
        offsets: [E + 2], start of each expert's pairs in `order`, then of the sentinels', then P.
        experts: [B], expert of each block; E: a block of sentinels; -1: unused.
        firsts: [B], start of each block in `order`; it ends with its expert or after `block` pairs.
        block: maximum pairs per block.
    """

    order: Tensor
    offsets: Tensor
    experts: Tensor
    firsts: Tensor
    block: int


def most_blocks(pairs: int, experts: int, block: int) -> int:
    """Return the maximum number B of blocks, of at most `block` pairs of one expert or of sentinels."""
    groups = min(pairs, experts + 1)
    return groups + (pairs - groups) // block


def group_pairs(ids_Tk: Tensor, experts: int, block: int) -> Groups:
    """Sort the pairs by expert: one launch, or two for many; no synchronization."""
    ids_P, pairs = ids_Tk.reshape(-1), ids_Tk.numel()
    blocks = most_blocks(pairs, experts, block)
    sizes = [pairs, experts + 2, blocks, blocks]
    groups = Groups(*ids_P.new_empty(sum(sizes), dtype=torch.int32).split(sizes), block)
    if pairs:
        _launch(ids_P, groups, experts)
    else:
        groups.offsets.zero_()
    return groups


def _launch(ids_P: Tensor, groups: Groups, experts: int) -> None:
    device, dependent = ids_P.device.index, devices.launches_dependents(ids_P.device.index)
    kernels, pairs, blocks = _kernels(dependent), len(ids_P), len(groups.experts)
    bins = 1 << (experts + 1).bit_length()
    shared = {"BINS": bins, "SPAN": _SPAN, "DEPENDENT": dependent}
    options = {"warps": _WARPS, "specialized": (ids_P.dtype,)}
    if pairs <= _FEW_PAIRS:
        grid, numbers = (1 + -(-pairs // _RANKED), 1), (pairs, experts, blocks)
        kernels.group(
            device, grid, (ids_P, *groups[:4]), numbers, **options, BLOCK=groups.block, RANKED=_RANKED, **shared
        )
        return
    spans = -(-pairs // _SPAN)
    counts = groups.order.new_empty(spans, bins)
    kernels.count(device, (spans, 1), (ids_P, counts), (pairs, experts), **options, **shared)
    numbers = pairs, experts, blocks, spans
    kernels.place(
        device, (spans, 1), (ids_P, counts, *groups[:4]), numbers, **options, BLOCK=groups.block, PART=_PART, **shared
    )


class _Kernels(NamedTuple):
    group: Launcher
    count: Launcher
    place: Launcher


@functools.cache
def _kernels(dependent: bool) -> _Kernels:
    from vbrt.kernels.cuda.experts import pairs_triton as device

    kernels = device.group_kernel, device.count_kernel, device.place_kernel
    return _Kernels(*(Launcher(kernel, dependent=dependent) for kernel in kernels))
