"""`nvfp4`: E2M1 codes, block 16 along K, E4M3 block scales, one fp32 tensor scale: 4.5 bits per weight.

Elements and scales are those of NVIDIA's NVFP4 (E2M1: OCP Microscaling Formats v1.0, section 5.3.3; E4M3: OCP 8-bit
Floating Point v1.0), so published checkpoints load as they are. Two choices are vbrt's. The tensor scale is a power of
two, which makes every decoded weight exact in bf16 and encode(decode(w)) the identity on values (except for blocks 2^13
or more below the tensor's largest weight). Block scales minimize the squared error instead of being absmax / 6: 21.8 dB
instead of 20.4 dB on Gaussian weights.
"""

import torch
from torch import Tensor

from vbrt.formats.block_formats import E4M3Format, constant_levels, constant_quads, decode_blocks
from vbrt.formats.rounding import E2M1_LEVELS, E2M1Grid, E2M1Rounding, Grid, Rounding

__all__ = ["NVFP4"]


class NVFP4(E4M3Format):
    """Fields: codes uint8 [N, Kp/2], scales float8_e4m3fn [N, Kp/16], tensor_scale float32 [1]."""

    wide_codes = (0, 8)
    # absmax / 4 is the largest useful scale: above absmax / 3 every level has its double one octave down.
    # With it inside E4M3's normal range, re-encoding always finds the same scale.
    top, low_top = 6.0, 4.0
    # two E4M3 steps below absmax / 6 (clipping the largest weight) to beyond absmax / 4, four or five steps above
    offsets = range(-2, 7)

    def _levels(self, tensors: dict[str, Tensor]) -> Tensor:
        return constant_levels(E2M1_LEVELS, tensors["codes"].device)

    def _rounding(self, x_bB: Tensor, m_bB: Tensor | None = None, **extra: Tensor) -> Rounding:
        return E2M1Rounding(x_bB, m_bB)

    def _grid(self, tensors: dict[str, Tensor]) -> Grid:
        return E2M1Grid()

    def decode(self, tensors: dict[str, Tensor], shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        """See `Format.decode`; accepts any fp32 tensor scale."""
        scale_NB = self._scales(tensors)
        return decode_blocks(tensors["codes"], scale_NB, constant_quads(E2M1_LEVELS, scale_NB.device), shape, dtype)
