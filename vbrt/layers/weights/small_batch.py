"""The short way of a layer's product: few tokens, planes that never move, and a kernel with every argument prepared.

Layers that a model calls one after the other with one x, such as the projections of queries, keys and values, are
computed in one call: the first computes the others *ahead*. Which layers those are is seen, not known by name: a layer
that is called with the very tensor that the one before it got follows that one from then on. A result that was
computed ahead is given out once, and only for an x with the same bits: it is what the layer's own call would give,
whatever happened to x in between. Groups whose results are seldom asked for are given up.
"""

import ctypes
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, Self

import torch

__all__ = ["Prepared", "SmallBatch"]

_MOST_FOLLOWERS = 3
_PATIENCE = 8  # results that nobody asked for, before a group is given up


class Prepared(Protocol):
    """A product of few tokens whose arguments are prepared, as `Kernel.few` makes it."""

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor | None:
        """x Wᵀ + bias; None where it does not serve x."""

    def together(
        self, others: Sequence[Self], x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> list[torch.Tensor] | None:
        """The products with this weight and those of others, which have no bias, bit for bit."""

    def suits(self, other: Self) -> bool:
        """True if one call may compute both."""


class _Ahead(NamedTuple):
    """A result, and the input that it is of."""

    shape: torch.Size
    dtype: torch.dtype
    bits: bytes
    y: torch.Tensor

    def is_of(self, x: torch.Tensor) -> bool:
        """True if it is what x gives."""
        same = x.shape == self.shape and x.dtype is self.dtype and x.is_contiguous()
        return same and _bits(x) == self.bits


class _Last(threading.local):
    """The first layer that a thread has called with the last input, and that input."""

    leader: Callable[[], "SmallBatch | None"] = staticmethod(lambda: None)
    x: Callable[[], torch.Tensor | None] = staticmethod(lambda: None)


_last = _Last()


class SmallBatch:
    """The products of one layer, and those of its followers.

    Attributes:
        few: computes them.
        followers: layers that are computed with this one; held weakly, because their pages may go.
        leader: the layer that computes this one, weakly; None: it follows none.
    """

    __slots__ = ("__weakref__", "_ahead", "_asked", "_given", "_given_up", "_me", "few", "followers", "leader")

    def __init__(self, few: Prepared) -> None:
        self.few, self._me = few, weakref.ref(self)
        self.followers: tuple[weakref.ref[SmallBatch], ...] = ()
        self.leader: weakref.ref[SmallBatch] | None = None
        self._ahead: dict[None, _Ahead] = {}  # one result or none; `pop` gives it to one thread
        self._given = self._asked = 0  # results for each follower; results of the leader's that were asked for
        self._given_up = False

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor | None:
        """x Wᵀ + bias, or None where the kernel does not serve x; x is bare, and nobody wants gradients."""
        ahead = self._ahead.pop(None, None)
        if ahead is not None and bias is None and ahead.is_of(x):
            self._asked += 1
            return ahead.y
        y = self._with_followers(x, bias) if self.followers else self.few(x, bias)
        if y is not None:
            self._learn(x, bias)
        return y

    def _with_followers(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor | None:
        followers = [follower for ref in self.followers if (follower := ref()) is not None]
        if any(self._given - of._asked > _PATIENCE + self._given // 4 for of in followers):
            self.followers, self._given_up = (), True
            return self.few(x, bias)
        ys = self.few.together([of.few for of in followers], x, bias)
        if ys is None:
            return None
        self._given += 1
        bits = _bits(x)
        for of, y in zip(followers, ys[1:], strict=True):
            of._ahead[None] = _Ahead(x.shape, x.dtype, bits, y)
        return ys[0]

    def _learn(self, x: torch.Tensor, bias: torch.Tensor | None) -> None:
        """Follow the layer that this thread has just called with the very same tensor, if one call can compute both."""
        leader = _last.leader() if _last.x() is x else None
        if leader is None or leader is self:
            _last.leader, _last.x = self._me, weakref.ref(x)
        elif bias is None and self._is_free() and leader.takes(self):
            self.leader, self._asked = leader._me, leader._given
            leader.followers = (*(ref for ref in leader.followers if ref() is not None), self._me)

    def _is_free(self) -> bool:
        return not self.followers and (self.leader is None or self.leader() is None)

    def takes(self, other: "SmallBatch") -> bool:
        """True if another layer may follow this one."""
        free = not self._given_up and len(self.followers) < _MOST_FOLLOWERS and self.leader is None
        return free and self.few.suits(other.few)


def _bits(x: torch.Tensor) -> bytes:
    return ctypes.string_at(x.data_ptr(), x.numel() * x.element_size())
