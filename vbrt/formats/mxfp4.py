"""`mxfp4`: E2M1 codes, block 32 along K, E8M0 scale bytes (OCP Microscaling Formats v1.0, section 5.3.3): 4.25 bits.

Scales are powers of two, so the search has few candidates: the specification's floor(log2(absmax)) - 2, which clips up
to a quarter of the largest weight, and its neighbours.
"""

from math import log2

import torch
from torch import Tensor

from vbrt.formats.block_formats import BlockFormat, Range, constant_levels, constant_quads, decode_blocks, powers_of_two
from vbrt.formats.rounding import E2M1_LEVELS, E2M1Grid, E2M1Rounding, Grid, Rounding

__all__ = ["MXFP4"]

_BIAS = 127
_DEEPEST = 60  # octaves below the unit that the search covers; keeps its fp32 arithmetic normal


class MXFP4(BlockFormat):
    """Fields: codes uint8 [N, Kp/2], scales uint8 [N, Kp/32], worth 2^(byte - 127).

    Range: all of bf16's and fp16's; a block whose 6 * scale would not be finite in the weight's dtype takes half the
    scale and clips. Magnitudes below 2^-127 round to a multiple of 2^-128 or to zero, and blocks more than 2^70 below
    the tensor's largest weight become zero.
    """

    scale_dtype = "uint8"
    wide_codes = (0, 8)
    last_byte = 254
    top, low_top = 6.0, 4.0
    offsets = range(-1, 2)

    def _levels(self, tensors: dict[str, Tensor]) -> Tensor:
        return constant_levels(E2M1_LEVELS, tensors["codes"].device)

    def _rounding(self, x_bB: Tensor, m_bB: Tensor | None = None, **extra: Tensor) -> Rounding:
        return E2M1Rounding(x_bB, m_bB)

    def _grid(self, tensors: dict[str, Tensor]) -> Grid:
        return E2M1Grid()

    def _near_byte(self, scale_B: Tensor) -> Tensor:
        half_octave = 0x004AFB0D  # fp32 bits of 2^0.5 less those of 1, taken from 2: rounds to the nearest exponent
        return (scale_B.view(torch.int32) + half_octave) >> 23

    def byte_bounds(self, known: Range) -> tuple[int, int]:
        """See `BlockFormat.byte_bounds`."""
        shift = int(log2(known.unit))
        highest = int(log2(known.limit / known.unit / self.top) // 1) + _BIAS
        return max(_BIAS - _DEEPEST, -shift), min(highest, 254 - shift)

    def byte_values(self, device: torch.device) -> Tensor:
        """See `BlockFormat.byte_values`."""
        return powers_of_two(device)

    def stored(self, known: Range) -> tuple[int, float]:
        """See `BlockFormat.stored`: zero blocks have an ordinary scale."""
        return int(log2(known.unit)), -1.0

    def decode(self, tensors: dict[str, Tensor], shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        """See `Format.decode`."""
        scale_NB = self._scales(tensors)
        return decode_blocks(tensors["codes"], scale_NB, constant_quads(E2M1_LEVELS, scale_NB.device), shape, dtype)

    def _scales(self, tensors: dict[str, Tensor]) -> Tensor:
        byte_NB = tensors["scales"]
        return powers_of_two(byte_NB.device).index_select(0, byte_NB.view(-1).to(torch.int32)).view(byte_NB.shape)
