"""Multiple-choice knapsack: one way per layer, with the least sum of losses within a byte budget.

Dynamic programming over the budget in units: exact where the unit is the sizes' common divisor, as for the equal layers
of a model. With coarser units sizes are rounded up, which keeps the budget, and the greedy solution (by loss saved per
byte) is taken where it is better.
"""

import functools
import math
from collections.abc import Sequence

import torch

__all__ = ["least_loss"]

_CELLS = 4096

Items = Sequence[Sequence[tuple[int, float]]]  # ways of each layer, the smallest first: bytes, loss


def least_loss(items: Items, room: int) -> list[int]:
    """Return the way of each layer for the least sum of losses; the first ways must fit into `room` together."""
    left = room - sum(ways[0][0] for ways in items)
    found = (_filled(items, left, start) for start in ([0] * len(items), _solved(items, left)))
    return min(found, key=lambda held: sum(ways[at][1] for ways, at in zip(items, held, strict=True)))


def _solved(items: Items, left: int) -> list[int]:
    """Return the optimum with sizes in units."""
    more = [[size - ways[0][0] for size, _ in ways] for ways in items]
    unit = max(functools.reduce(math.gcd, (n for row in more for n in row), 0), -(-left // _CELLS), 1)
    cells = left // unit + 1
    saved, taken = torch.zeros(cells, dtype=torch.float64, device="cpu"), []
    for ways, sizes in zip(items, more, strict=True):
        options = torch.full((len(ways), cells), -math.inf, dtype=torch.float64, device="cpu")
        for at, ((_, loss), size) in enumerate(zip(ways, sizes, strict=True)):
            units = -(-size // unit)
            if units < cells:
                options[at, units:] = saved[: cells - units] + (ways[0][1] - loss)
        saved, chosen = options.max(0)
        taken.append((chosen.tolist(), [-(-size // unit) for size in sizes]))
    held, cell = [], cells - 1
    for chosen, units in reversed(taken):
        held.append(chosen[cell])
        cell -= units[held[-1]]
    return held[::-1]


def _filled(items: Items, left: int, held: Sequence[int]) -> list[int]:
    """Take greedy steps, most loss saved per byte first, while they fit."""
    held = list(held)
    left -= sum(ways[at][0] - ways[0][0] for ways, at in zip(items, held, strict=True))
    while True:
        steps = [step for at, ways in enumerate(items) for step in _steps(at, ways, held[at], left)]
        gain, size, at, to = max(steps, default=(0.0, 0, 0, 0))
        if gain <= 0:
            return held
        left, held[at] = left - size, to


def _steps(at: int, ways: Sequence[tuple[int, float]], now: int, left: int) -> list[tuple[float, int, int, int]]:
    """Return a layer's larger ways: loss saved per byte, further bytes, layer and way."""
    size, loss = ways[now]
    larger = ((n - size, loss - other, to) for to, (n, other) in enumerate(ways) if to > now)
    return [(saves / max(1, more), more, at, to) for more, saves, to in larger if more <= left]
