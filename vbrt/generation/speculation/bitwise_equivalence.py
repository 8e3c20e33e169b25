"""One launch in the place of several, where it gives the same bits.

Kernels sum in an order that follows from shapes, types and strides, not from the numbers. So a form whose results were
the same for enough numbers is computed in one launch from then on, and one that differed once never again. Sums in
another order round to another bfloat16 in about one of 10,000 cases, so that some hundred thousand numbers tell.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch

__all__ = ["Way", "comparisons", "first_that_agrees", "form_of"]

Way = Callable[[], torch.Tensor]

#: numbers that are compared until a way is trusted
_ENOUGH = 1 << 18
_agreed: dict[tuple, tuple[int, int]] = {}  # by form: the way that is tried or trusted, and the numbers compared
_counts: Counter[str] = Counter()


def comparisons() -> int:
    """Return how often something was computed in two ways until now: such a pass takes longer than the next one."""
    return _counts["compared"]


def form_of(argument: Any) -> Any:
    """Return what of an argument may decide how a kernel sums."""
    if not isinstance(argument, torch.Tensor):
        return repr(argument)
    return argument.device.type, argument.dtype, tuple(argument.shape), argument.stride()


def first_that_agrees(form: tuple, ways: Sequence[Way], certain: Way) -> torch.Tensor:
    """Return what `certain` computes, by the first of `ways` that has given its bits for calls of this form."""
    way, compared = _agreed.get(form, (0, 0))
    if way == len(ways):
        return certain()
    if compared >= _ENOUGH:
        return ways[way]()
    wanted = certain()
    _counts["compared"] += 1
    same = torch.equal(ways[way](), wanted)
    _agreed[form] = (way, compared + wanted.numel()) if same else (way + 1, 0)
    return wanted
