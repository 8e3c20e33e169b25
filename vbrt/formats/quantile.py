"""`quantile`: 8 magnitudes fitted to the layer and a sign, block 64 along K, UE4M4 block scales: 4.125 bits per weight.

The fit starts from quantiles of |W| only: levels of equal probability concentrate near zero and are 2.6 dB worse than
NF4. Lloyd's iteration moves them to the centroids of their cells; then the block scales are searched, and both steps
are repeated with the weights under those scales.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from vbrt.formats.block_formats import Frame, Range, UE4M4Format, decode_blocks, quad_table
from vbrt.formats.format import tiles
from vbrt.formats.rounding import Grid, Rounding, TableGrid, TableRounding

__all__ = ["MAGNITUDES", "Quantile", "magnitude_quantiles"]

MAGNITUDES = 8
_SAMPLE = 1 << 16  # weights in the fit, besides quantiles; SQNR within 0.01 dB of four times as many
_LLOYD_STEPS = 40
_ROUNDS = 2
_FINITE = 0x7F80  # bf16 magnitude patterns below infinity


class Quantile(UE4M4Format):
    """Fields: codes uint8 [N, Kp/2] (bit 3: sign), scales uint8 [N, Kp/64], levels float32 [8]
    ascending in (0, 1], tensor_scale float32 [1]."""

    wide_codes = ()  # half of the lowest cell is within an octave of its level; the rest is cheaper as escapes
    extra = (("levels", "float32", (MAGNITUDES,)), *UE4M4Format.extra)
    top, low_top = 1.0, 0.5
    offsets = range(-3, 3)

    @torch.no_grad()
    def encode(
        self, w_NK: Tensor, squares: Tensor | None = None, levels: Tensor | None = None, amax: float | None = None
    ) -> dict[str, Tensor]:
        """See `Format.encode`. `levels` (fp32 [8], from an earlier `fit`) skips the fit, which ignores squares; `amax`:
        largest magnitude of the weight that this is a part of."""
        known = self._range(w_NK) if amax is None else self._range_of(amax, w_NK.dtype)
        levels = self.fit(w_NK) if levels is None else levels
        return self._encode(w_NK, known, None if squares is None else squares[None], levels=levels)

    def frame(self, w_NK: Tensor, levels: Tensor | None = None) -> Frame:
        """See `BlockFormat.frame`; `levels` as in `encode`."""
        return super().frame(w_NK, levels=self.fit(w_NK) if levels is None else levels)

    @torch.no_grad()
    def fit(self, w_NK: Tensor, count: int = MAGNITUDES) -> Tensor:
        """Fit `count` magnitudes (2..8) to a weight, ascending, the largest 1.0: fp32 [8], the largest repeated.

        Quantiles use the whole weight, the rest `_SAMPLE` weights from evenly spread rows.
        """
        unit = self._range(w_NK).unit
        n, k = w_NK.shape
        step = -(-n * min(k, _SAMPLE) // _SAMPLE)
        x_RK = w_NK[::step, :_SAMPLE].float()
        x_RK = F.pad(x_RK, (0, -x_RK.shape[1] % self.block))
        a_Bb = x_RK.reshape(-1, self.block).div_(unit).abs_()
        scale_B1 = a_Bb.amax(1, keepdim=True)
        if not scale_B1.any():
            return torch.linspace(1 / MAGNITUDES, 1, MAGNITUDES, dtype=torch.float32, device=w_NK.device)
        start = self._quantiles(w_NK, [(i + 0.5) / count for i in range(count)]) / unit
        level = start / scale_B1.mean()
        for _ in range(_ROUNDS):
            level = _lloyd(a_Bb, scale_B1, level)
            full = F.pad(level / level[-1], (0, MAGNITUDES - count), value=1.0)
            scale_B1 = self._searched(a_Bb, full)
        return full

    def _searched(self, a_Bb: Tensor, levels: Tensor) -> Tensor:
        """Block scales [B, 1] that the encoder would choose."""
        known = Range(torch.finfo(torch.float32).max, 1.0)
        _, _, byte_B = self._search(a_Bb.t().contiguous(), known, levels=levels)
        return self.byte_values(a_Bb.device).index_select(0, byte_B.int()).unsqueeze(1)

    def _levels(self, tensors: dict[str, Tensor]) -> Tensor:
        return _signed(tensors["levels"])

    def _rounding(self, x_bB: Tensor, m_bB: Tensor | None = None, **extra: Tensor) -> Rounding:
        level_16 = _signed(extra["levels"])
        return TableRounding(x_bB, level_16, TableRounding.cells(level_16), m_bB)

    def _grid(self, tensors: dict[str, Tensor]) -> Grid:
        return TableGrid(_signed(tensors["levels"]))

    def decode(self, tensors: dict[str, Tensor], shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        """See `Format.decode`."""
        table = quad_table(_signed(tensors["levels"]))
        return decode_blocks(tensors["codes"], self._scales(tensors), table, shape, dtype)

    def clipped_share(self, w_NK: Tensor, tensors: dict[str, Tensor]) -> float:
        """Share of weights beyond the cell of their block's largest level, 0..1. That cell is taken to be symmetric
        around its level, so a fitted codebook clips almost nothing."""
        reach = 1 + (tensors["levels"][-1] - tensors["levels"][-2]) / 2
        return self._beyond(w_NK, tensors, reach) / w_NK.numel()

    def _beyond(self, w_NK: Tensor, tensors: dict[str, Tensor], reach: Tensor) -> int:
        """Number of weights larger than `reach` times their block's scale."""
        scale_NB = self._scales(tensors).mul_(reach)
        clipped = torch.zeros((), dtype=torch.int64, device=w_NK.device)
        for rows, columns in tiles((w_NK.shape[0], w_NK.shape[1]), self.block):
            a_RK = F.pad(w_NK[rows, columns].abs().float(), (0, (columns.start - columns.stop) % self.block))
            limit_RB = scale_NB[rows, columns.start // self.block : -(-columns.stop // self.block)]
            clipped += (a_RK.view(len(a_RK), -1, self.block) > limit_RB.unsqueeze(-1)).sum()
        return int(clipped)

    def _quantiles(self, w_NK: Tensor, probabilities: Sequence[float]) -> Tensor:
        """See `magnitude_quantiles`."""
        return magnitude_quantiles(w_NK, probabilities)


def _signed(levels: Tensor) -> Tensor:
    return torch.cat((levels, -levels))


def magnitude_quantiles(
    w_NK: Tensor, probabilities: Sequence[float], count: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    """Quantiles of |W| as fp32 [P]: the value at rank ceil(p * size) of the sorted magnitudes.

    bf16 and fp16: exact, by a histogram of the 32,768 magnitude patterns, for any size (torch.quantile supports neither
    16-bit dtypes nor more than 2^24 elements). fp32: rounded to bf16 first, on about 2^20 weights from evenly spread
    rows (and columns, if there are few rows).

    count: histogram of a 16-bit weight's patterns, int64 [32768]; default: in plain torch.
    """
    if w_NK.dtype == torch.float32:
        step = -(-w_NK.numel() // (1 << 20))
        row_step = min(step, w_NK.shape[0])
        limit = torch.finfo(torch.bfloat16).max  # fp32's own limit would round to Inf
        w_NK = w_NK[::row_step, :: -(-step // row_step)].clamp(-limit, limit).bfloat16()
    rank = torch.tensor(probabilities, dtype=torch.float64, device=w_NK.device).mul_(w_NK.numel()).ceil_()
    pattern = torch.searchsorted((count or _count_patterns)(w_NK).cumsum(0), rank.long().clamp_(1, w_NK.numel()))
    return pattern.to(torch.int16).view(w_NK.dtype).float()


def _count_patterns(w_NK: Tensor) -> Tensor:
    count = torch.zeros(1 << 15, dtype=torch.int64, device=w_NK.device)
    for rows, columns in tiles((w_NK.shape[0], w_NK.shape[1]), 1, 1 << 20):
        bits = w_NK[rows, columns].contiguous().view(torch.int16) & 0x7FFF
        count += torch.bincount(bits.view(-1), minlength=1 << 15)
    return count


def _lloyd(a_Bb: Tensor, scale_B1: Tensor, level: Tensor) -> Tensor:
    """Lloyd's iteration ("Least squares quantization in PCM", 1982) on a / scale from an ascending initial guess.

    Errors are weighted by scale^2, that is measured in weight units. Runs on a histogram of bf16 patterns, so that a
    step costs the same for any sample size; empty cells keep their level.
    """
    pattern = (a_Bb / scale_B1.clamp(min=2.0**-60)).bfloat16().view(torch.int16).reshape(-1)
    mass = torch.bincount(pattern, (scale_B1 * scale_B1).double().expand_as(a_Bb).reshape(-1), minlength=_FINITE)
    value = torch.arange(_FINITE, dtype=torch.int64, device=a_Bb.device).to(torch.int16).view(torch.bfloat16).double()
    sums = F.pad(torch.stack((mass, mass * value)).cumsum(1), (1, 0))
    level = level.double()
    for _ in range(_LLOYD_STEPS):
        inner = torch.searchsorted(value, (level[1:] + level[:-1]) / 2)
        cell = sums.index_select(1, F.pad(inner, (0, 1), value=_FINITE)).diff(dim=1, prepend=sums[:, :1])
        level = torch.where(cell[0] > 0, cell[1] / cell[0], level)
    return level.float()
