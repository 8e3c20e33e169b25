"""Bitwise equivalence of fused launches: one launch instead of several where it gives the same bits, found by trial.

The reduction order of a kernel depends on shapes, dtypes and strides, not on values. So a signature is trusted once
enough values were bitwise equal, and rejected forever after one difference. Another order changes about one bfloat16
result in 10,000, so some hundred thousand values decide.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch

__all__ = ["Way", "comparisons", "first_that_agrees", "form_of"]

Way = Callable[[], torch.Tensor]

#: values to compare until a signature is trusted
_ENOUGH = 1 << 18
_agreed: dict[tuple, tuple[int, int]] = {}  # signature -> index of the current candidate, values compared
_counts: Counter[str] = Counter()


def comparisons() -> int:
    """Return the number of comparisons so far: a pass with one is slower, and its time is not representative."""
    return _counts["compared"]


def form_of(argument: Any) -> Any:
    """Return an argument's signature: what a kernel's reduction order may depend on."""
    if not isinstance(argument, torch.Tensor):
        return repr(argument)
    return argument.device.type, argument.dtype, tuple(argument.shape), argument.stride()


def first_that_agrees(form: tuple, ways: Sequence[Way], certain: Way) -> torch.Tensor:
    """Return `certain`'s result, through the first of `ways` that has been bitwise equal for this signature."""
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
