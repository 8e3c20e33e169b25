"""`nf4`: the 16-entry NormalFloat table of QLoRA, block 64 along K, one-byte block scales, one fp32 tensor
scale: 4.125 bits per weight.

Scales minimize the squared error instead of following absmax: 21.3 dB instead of 20.7 on Gaussian weights.
"""

from functools import lru_cache

import torch
from torch import Tensor

from vbrt.formats.block_formats import UE4M4Format, constant_levels, constant_quads, decode_blocks
from vbrt.formats.rounding import Grid, Rounding, TableGrid, TableRounding

__all__ = ["NF4", "NF4_LEVELS"]

#: Dettmers et al., "QLoRA: Efficient Finetuning of Quantized LLMs" (2023), appendix E
NF4_LEVELS = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)


class NF4(UE4M4Format):
    """Fields: codes uint8 [N, Kp/2], scales uint8 [N, Kp/64], tensor_scale float32 [1]."""

    wide_codes = (7,)
    top, low_top = 1.0, 0.5
    offsets = range(-3, 3)

    def _levels(self, tensors: dict[str, Tensor]) -> Tensor:
        return constant_levels(NF4_LEVELS, tensors["codes"].device)

    def _rounding(self, x_bB: Tensor, m_bB: Tensor | None = None, **extra: Tensor) -> Rounding:
        return TableRounding(x_bB, *_tables(x_bB.device), m_bB)

    def _grid(self, tensors: dict[str, Tensor]) -> Grid:
        return _constant_grid(tensors["scales"].device)

    def decode(self, tensors: dict[str, Tensor], shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        """See `Format.decode`."""
        scale_NB = self._scales(tensors)
        return decode_blocks(tensors["codes"], scale_NB, constant_quads(NF4_LEVELS, scale_NB.device), shape, dtype)


@lru_cache(maxsize=8)
def _tables(device: torch.device) -> tuple[Tensor, Tensor]:
    level_16 = torch.tensor(NF4_LEVELS, dtype=torch.float32, device=device)
    return level_16, TableRounding.cells(level_16)


@lru_cache(maxsize=8)
def _constant_grid(device: torch.device) -> TableGrid:
    return TableGrid(torch.tensor(NF4_LEVELS, dtype=torch.float32, device=device))
