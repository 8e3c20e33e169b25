"""Encoder of `t3` on GPUs: a kernel finds the paths of tiles; all else is the format's own.

Paths are as good as the reference's, not always the same: costs are rounded otherwise. In plain torch each step of all
states goes through memory several times; a program of the kernel keeps the costs of a tile in registers.
"""

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from vbrt.formats.format import EncodedGroup, Format
from vbrt.formats.t3 import T3, WARM, codebook, trellis_path
from vbrt.kernels.cuda import devices
from vbrt.libraries import triton_api

__all__ = ["codec", "encode_many"]

_TILES = 1 << 12  # at a time: 32 KiB each of bits that lead back
_WARPS = 8


def encode_many(
    format: Format, w_ENK: Tensor, amax_E: Sequence[float] | None = None, squares: Tensor | None = None
) -> Iterator[EncodedGroup]:
    """See `Format.encode_many`."""
    return codec(format).encode_many(w_ENK, amax_E, squares)


def codec(format: Format) -> Format:
    """Return a format that encodes by the kernel on a GPU; cached per format."""
    return format if isinstance(format, _OnGpu) else _codec(format)


@functools.cache
def _codec(format: Format) -> Format:
    return _OnGpu(format.record)


class _OnGpu(T3):
    """`t3` with paths found by the kernel for tiles on a GPU."""

    def path(self, x_TP2: Tensor) -> Tensor:
        """See `T3.path`."""
        if not (x_TP2.is_cuda and devices.serves(x_TP2.device.index, devices.TRITON)):
            return trellis_path(x_TP2)
        return paths(x_TP2)


def paths(x_TP2: Tensor, warm: int = WARM) -> Tensor:
    """States [T, P] of closed paths, by the kernel."""
    (tiles, pairs, _), x_TP2 = x_TP2.shape, x_TP2.contiguous()
    states = torch.empty(tiles, pairs, dtype=torch.int32, device=x_TP2.device)
    back = torch.empty(min(tiles, _TILES), pairs, 256, dtype=torch.uint8, device=x_TP2.device)
    table = codebook(x_TP2.device).bfloat16().view(torch.int32)
    with torch.cuda.device(x_TP2.device):
        for x_part, into in zip(x_TP2.split(_TILES), states.split(_TILES), strict=True):
            _kernels().path_kernel[(len(into),)](
                x_part, table, back, into, PAIRS=pairs, WARM=warm, num_warps=_WARPS, **triton_api.fp_fusion(True)
            )
    return states


@functools.cache
def _kernels() -> Any:
    from vbrt.kernels.cuda.trellis import viterbi_triton

    return viterbi_triton
