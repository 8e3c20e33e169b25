"""Rounding of weights to a format's levels, and the search for the block scale with the least error.

Legend: b weights per block, B blocks, C candidate scales. Tensors are [b, B], so that block scales are a row vector.
m_bB, if given, weights the squared errors: the mean square of each weight's input, so that sums estimate the squared
error of the layer's output.
"""

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

__all__ = [
    "E2M1_LEVELS",
    "E2M1Grid",
    "E2M1Rounding",
    "Grid",
    "Int8Grid",
    "Int8Rounding",
    "Rounding",
    "TableGrid",
    "TableRounding",
    "block_sum",
    "divided",
    "least_error",
    "of_tile",
]

_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
#: value of each 4-bit E2M1 code; bit 3 is the sign (OCP Microscaling Formats v1.0, section 5.3.3)
E2M1_LEVELS = _MAGNITUDES + tuple(-m for m in _MAGNITUDES)


def divided(x: Tensor, divisor: float) -> Tensor:
    """Return x / divisor, correctly rounded on every device: torch on a GPU multiplies by the reciprocal of a Python
    number, which rounds twice."""
    return x / x.new_full((), divisor)


class Rounding(Protocol):
    """Rounding of a tile of weights x_bB under any scale."""

    def squared_error(self, scale_B: Tensor, out: Tensor) -> None:
        """Write the block sums of m (x / scale - level)^2, up to a constant factor, into out [B]."""

    def codes(self, scale_B: Tensor) -> Tensor:
        """Nearest codes of x / scale, as fp32 0..15 [b, B]; 8-bit integers are signed."""


def least_error(rounding: Rounding, scale_CB: Tensor) -> Tensor:
    """Return each block's candidate (int32 [B]) with the least squared error in weight units; the first among equals.

    The candidate's index replaces the error's last four mantissa bits, so that one vectorized integer minimum finds it
    (positive floats order like their bits); torch's argmin over C is fifty times slower. C <= 16.
    """
    error_CB = torch.empty_like(scale_CB)
    for scale_B, error_B in zip(scale_CB, error_CB, strict=True):
        rounding.squared_error(scale_B, error_B)
    error_CB.mul_(scale_CB).mul_(scale_CB)
    number_C = torch.arange(len(scale_CB), dtype=torch.int32, device=scale_CB.device)
    rank_CB = error_CB.view(torch.int32).bitwise_and_(-16).bitwise_or_(number_C.unsqueeze(1))
    return rank_CB.amin(0).bitwise_and_(15)


def block_sum(q_bB: Tensor, out: Tensor) -> None:
    """Sum each block into out [B]; q_bB is overwritten. b is a power of two.

    Pairwise halving: a summation order independent of device, shape and threads, unlike torch.sum's.
    """
    half = len(q_bB) // 2
    while half > 1:
        q_bB[:half].add_(q_bB[half : 2 * half])
        half //= 2
    torch.add(q_bB[0], q_bB[1], out=out)


def of_tile(squares: Tensor, rows: slice, columns: slice, n: int, block: int) -> Tensor:
    """Return the mean squares of the inputs for a tile of a weight with n rows, as m_bB; squares (G, K) apply to N / G
    rows each."""
    own = squares[:, columns]
    own = F.pad(own, (0, -own.shape[1] % block))
    if len(own) > 1:
        row = torch.arange(rows.start, rows.stop, dtype=torch.int64, device=squares.device)
        own = own.index_select(0, row // (n // len(own)))
    return own.expand(rows.stop - rows.start, -1).reshape(-1, block).t().contiguous()


class E2M1Rounding:
    """Rounding to {0, .5, 1, 1.5, 2, 3, 4, 6} and their negatives; saturates at 6."""

    def __init__(self, x_bB: Tensor, m_bB: Tensor | None = None) -> None:
        self.x, self.a, self._m = x_bB, x_bB.abs(), m_bB
        self._y, self._t, self._q = (torch.empty_like(x_bB) for _ in range(3))

    def squared_error(self, scale_B: Tensor, out: Tensor) -> None:
        """See `Rounding`. With y = a / scale, adding and subtracting t = 2^22 max(y, 1) leaves two significant bits
        above 1 and steps of one half below, which is E2M1's grid: Veltkamp's splitting (Dekker, 1971) with the exponent
        clamped to E2M1's smallest. The factor 2^22 is folded into y, which saves a multiply."""
        y = torch.mul(self.a, 2.0**22 / scale_B, out=self._y)
        t = torch.clamp(y, min=2.0**22, out=self._t)
        q = torch.add(t, y, alpha=2.0**-22, out=self._q).sub_(t).clamp_(max=6.0)
        q.sub_(y, alpha=2.0**-22).mul_(q)
        block_sum(q if self._m is None else q.mul_(self._m), out)

    def codes(self, scale_B: Tensor) -> Tensor:
        """See `Rounding`. Ties go to the even code, as in hardware; zeros keep their sign bit.

        min(2y, y + 2, y/2 + 4) maps the magnitudes to 0..7 and is linear between neighbours, so rounding it rounds y.
        """
        y = torch.div(self.a, scale_B, out=self._y)
        code = torch.minimum(torch.mul(y, 2, out=self._t), torch.add(y, 2, out=self._q), out=self._t)
        torch.minimum(code, y.mul_(0.5).add_(4), out=code).round_().clamp_(max=7.0)
        return code.add_((self.x.view(torch.int32) >> 28).bitwise_and_(8))


class Int8Rounding:
    """Rounding to integers from -127 to 127, ties to even, under power-of-two scales."""

    def __init__(self, x_bB: Tensor, m_bB: Tensor | None = None) -> None:
        self.x, self._m = x_bB, m_bB
        self._y, self._q = torch.empty_like(x_bB), torch.empty_like(x_bB)

    def squared_error(self, scale_B: Tensor, out: Tensor) -> None:
        """See `Rounding`."""
        y = torch.div(self.x, scale_B, out=self._y)
        q = torch.clamp(y, -127, 127, out=self._q).round_().sub_(y)
        q.mul_(q)
        block_sum(q if self._m is None else q.mul_(self._m), out)

    def codes(self, scale_B: Tensor) -> Tensor:
        """See `Rounding`; codes are the integers themselves."""
        return torch.div(self.x, scale_B, out=self._y).clamp_(-127, 127).round_()


class TableRounding:
    """Rounding to 16 arbitrary levels in [-1, 1], given in code order.

    `cells` [CELLS] maps a position x / scale in [-1, 1] to the level nearest to its cell's centre, which is accurate
    enough to compare scales. Codes are found by the exact midpoints.
    """

    CELLS = 4096

    def __init__(self, x_bB: Tensor, level_16: Tensor, cells: Tensor, m_bB: Tensor | None = None) -> None:
        self.x, self._level_16, self._cells, self._m = x_bB, level_16, cells, m_bB

    @classmethod
    def cells(cls, level_16: Tensor) -> Tensor:
        """Search table of 16 levels, in units of cells from -1."""
        middle = (torch.arange(cls.CELLS, dtype=torch.float32, device=level_16.device) + 0.5) / (cls.CELLS / 2) - 1
        level, code = _nearest(level_16, middle)
        return (level[code] + 1) * (cls.CELLS / 2)

    def tables(self) -> tuple[Tensor, Tensor, Tensor]:
        """A kernel's operands: search table, 15 midpoints in ascending order, and uint8 [16]: code of each level in
        that order."""
        level, order = self._level_16.sort()
        return self._cells, (level[1:] + level[:-1]) / 2, order.to(torch.uint8)

    def squared_error(self, scale_B: Tensor, out: Tensor) -> None:
        """See `Rounding`."""
        half = self.CELLS / 2
        y = torch.mul(self.x, half / scale_B).add_(half)
        index = y.clamp(0, self.CELLS - 1).to(torch.int32)
        y.view(-1).sub_(self._cells.index_select(0, index.view(-1)))
        y.mul_(y)
        block_sum(y if self._m is None else y.mul_(self._m), out)

    def codes(self, scale_B: Tensor) -> Tensor:
        """See `Rounding`. Ties go to the lower level."""
        order = self._level_16.argsort()
        _, rank = _nearest(self._level_16, self.x / scale_B)
        return order.to(torch.float32).index_select(0, rank.view(-1)).view_as(self.x)


class Grid(Protocol):
    """Levels of a format, to round to under known scales. `reach`: end of the largest level's cell."""

    reach: float | Tensor

    def nearest(self, y: Tensor) -> Tensor:
        """Nearest level of each fp32 y, in a new tensor; arbitrary for NaN. `y` is overwritten."""

    def codes(self, level: Tensor) -> Tensor:
        """Codes of levels from `nearest`, as fp32 0..15; 8-bit integers are signed."""


class E2M1Grid:
    """{0, .5, 1, 1.5, 2, 3, 4, 6} and their negatives; ties go to the even code, as in `E2M1Rounding.codes`."""

    reach = 7.0

    def nearest(self, y: Tensor) -> Tensor:
        """See `Grid`. Adding and subtracting 1.5 * 2^22 times y's power of two, at least 1, leaves two significant bits
        above 1 and steps of one half below; the power of two is y's exponent field."""
        y.clamp_(-6, 6)
        t = y.view(torch.int32).bitwise_and(0x7F800000).clamp_(min=0x3F800000).add_((22 << 23) + (1 << 22))
        t = t.view(torch.float32)
        return y.add_(t).sub_(t)

    def codes(self, level: Tensor) -> Tensor:
        """See `Grid`."""
        a = level.abs()
        return torch.minimum(torch.minimum(a * 2, a + 2), a / 2 + 4).add_(level < 0, alpha=8)


class Int8Grid:
    """Integers from -127 to 127, ties to even; codes are the integers themselves."""

    reach = 127.5

    def nearest(self, y: Tensor) -> Tensor:
        """See `Grid`."""
        return y.clamp_(-127, 127).round_()

    def codes(self, level: Tensor) -> Tensor:
        """See `Grid`."""
        return level


class TableGrid:
    """16 arbitrary levels in [-1, 1], given in code order; ties go to the lower level.

    A lookup table over [-1, 1] has cells so narrow that at most one level boundary falls into each, for any useful
    table; a cell stores its lower level, the boundary and the level above.
    """

    _CELLS = 4096

    def __init__(self, level_16: Tensor) -> None:
        self._level, self._order = level_16.sort()
        self.reach = 1 + (self._level[-1] - torch.where(self._level < self._level[-1], self._level, -1).max()) / 2
        half, bounds = self._CELLS / 2, (self._level[1:] + self._level[:-1]) / 2
        start = torch.arange(self._CELLS, dtype=torch.float32, device=level_16.device) / half - 1
        # a y that rounds into the cell may be slightly outside
        low = torch.bucketize(start - 1e-6, bounds)
        high = torch.bucketize(start + 1 / half + 1e-6, bounds)
        self._low, self._high = self._level[low], self._level[high]
        self._bound = torch.where(low < high, bounds[low.clamp(max=14)], torch.inf)

    def nearest(self, y: Tensor) -> Tensor:
        """See `Grid`."""
        y, half = y.contiguous(), self._CELLS / 2  # a Conv1D's weight is transposed
        cell = y.add(1).mul_(half).clamp_(0, self._CELLS - 1).to(torch.int32)
        cell = cell.bitwise_and_(self._CELLS - 1).view(-1)  # NaN converts to an arbitrary integer
        low, high = self._low.index_select(0, cell), self._high.index_select(0, cell)
        above = y.view(-1) > self._bound.index_select(0, cell)
        return torch.where(above, high, low).view_as(y)

    def codes(self, level: Tensor) -> Tensor:
        """See `Grid`."""
        return self._order[torch.searchsorted(self._level, level)].float()


def _nearest(level_16: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """(levels in ascending order, index of the nearest one for each y)."""
    level = level_16.sort().values
    return level, torch.bucketize(y, (level[1:] + level[:-1]) / 2, out_int32=True)
