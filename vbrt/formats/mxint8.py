"""`mxint8`: 8-bit integers, block 32 along K, E8M0 scale bytes: 8.25 bits per weight.

MXINT8 of OCP Microscaling Formats v1.0, section 5.3.4: an element is code / 64; -128 is never written. For normally
distributed weights MXFP8 of the same size has three times the error: its exponent covers a much wider range than a
block's weights have, which costs four bits of precision. Every decoded weight is exact in bf16.
"""

from functools import lru_cache
from math import log2

import torch
from torch import Tensor

from vbrt.formats.block_formats import BlockFormat, Range, decode_blocks, powers_of_two
from vbrt.formats.rounding import Grid, Int8Grid, Int8Rounding, Rounding

__all__ = ["MXINT8"]

_BIAS = 127
_POINT = 6  # binary places of an element
_DEEPEST = 60  # octaves below the unit that the search covers; keeps its fp32 arithmetic normal


class MXINT8(BlockFormat):
    """Fields: codes int8 [N, Kp], scales uint8 [N, Kp/32], worth 2^(byte - 127) / 64 for each step of a code.

    Range: all of bf16's and fp16's; a block whose 127 * scale would not be finite in the weight's dtype takes half the
    scale and clips. Blocks more than 2^64 below the tensor's largest weight are zero.
    """

    code_dtype = "int8"
    scale_dtype = "uint8"
    wide_codes = ()  # no fine plane
    last_byte = 254
    top, low_top = 127.0, 127.0
    # the smallest power of two that clips nothing, and half of it, which clips weights slightly beyond
    offsets = range(-1, 1)

    def pack_codes(self, code_bB: Tensor) -> Tensor:
        """See `BlockFormat.pack_codes`."""
        return code_bB.to(torch.int8).t().contiguous()

    def _levels(self, tensors: dict[str, Tensor]) -> Tensor:
        return _every_level(tensors["codes"].device)

    def tables(self, tensors: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """See `BlockFormat.tables`: levels are integers, so the tensor scale is 1/64."""
        device = tensors["codes"].device
        return self._levels(tensors), self.byte_values(device), _step(device)

    def _rounding(self, x_bB: Tensor, m_bB: Tensor | None = None, **extra: Tensor) -> Rounding:
        return Int8Rounding(x_bB, m_bB)

    def _grid(self, tensors: dict[str, Tensor]) -> Grid:
        return Int8Grid()

    def _near_byte(self, scale_B: Tensor) -> Tensor:
        return (scale_B.view(torch.int32) + 0x007FFFFF) >> 23  # round up to a power of two

    def byte_bounds(self, known: Range) -> tuple[int, int]:
        """See `BlockFormat.byte_bounds`."""
        shift, _ = self.stored(known)
        highest = int(log2(known.limit / known.unit / self.top) // 1) + _BIAS
        return max(_BIAS - _DEEPEST, -shift), min(highest, self.last_byte - shift)

    def byte_values(self, device: torch.device) -> Tensor:
        """See `BlockFormat.byte_values`."""
        return powers_of_two(device)

    def stored(self, known: Range) -> tuple[int, float]:
        """See `BlockFormat.stored`: zero blocks have an ordinary scale."""
        return int(log2(known.unit)) + _POINT, -1.0

    def decode(self, tensors: dict[str, Tensor], shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        """See `Format.decode`: the product is rounded to fp32, then to `dtype`; all devices give the same bits."""
        return decode_blocks(tensors["codes"], self._scales(tensors), None, shape, dtype)

    def _scales(self, tensors: dict[str, Tensor]) -> Tensor:
        byte_NB = tensors["scales"]
        scale_NB = powers_of_two(byte_NB.device).index_select(0, byte_NB.view(-1).to(torch.int32))
        return scale_NB.mul_(2.0**-_POINT).view(byte_NB.shape)


@lru_cache(maxsize=8)
def _every_level(device: torch.device) -> Tensor:
    """Integer value of each code, fp32 [256]."""
    return torch.arange(256, dtype=torch.uint8, device=device).view(torch.int8).float()


@lru_cache(maxsize=8)
def _step(device: torch.device) -> Tensor:
    return torch.full((1,), 2.0**-_POINT, dtype=torch.float32, device=device)
