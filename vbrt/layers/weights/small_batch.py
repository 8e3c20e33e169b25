"""Small-batch fast path of a layer's product, on resident planes with prepared kernel arguments.

Layers called in a row with the same x, such as the projections of queries, keys and values, are fused into one call:
the first computes the others *ahead*. Groups are observed, not configured by name: a layer called with the identical
tensor object of the previous layer becomes its follower. A result computed ahead is used once, and only for an x with
the same bits, so it equals the layer's own call even if x was written in between. Groups with few used results are
dissolved.
"""

import ctypes
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol, Self

import torch

__all__ = ["Prepared", "SmallBatch"]

_MOST_FOLLOWERS = 3
_PATIENCE = 8  # unused results before a group is dissolved


class Prepared(Protocol):
    """Small-batch product with prepared arguments, as `Kernel.few` makes it."""

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor | None:
        """x Wᵀ + bias; None if x is not supported."""

    def together(
        self, others: Sequence[Self], x: torch.Tensor, bias: torch.Tensor | None = None
    ) -> list[torch.Tensor] | None:
        """Fused products with this weight and others, without bias, bit for bit."""

    def suits(self, other: Self) -> bool:
        """True if one call can compute both."""


class _Ahead(NamedTuple):
    """Result computed ahead, with its input."""

    shape: torch.Size
    dtype: torch.dtype
    bits: bytes
    y: torch.Tensor

    def is_of(self, x: torch.Tensor) -> bool:
        """True if the result belongs to x: the same bits."""
        same = x.shape == self.shape and x.dtype is self.dtype and x.is_contiguous()
        return same and _bits(x) == self.bits


class _Last(threading.local):
    """Last input of a thread, and the first layer called with it."""

    leader: Callable[[], "SmallBatch | None"] = staticmethod(lambda: None)
    x: Callable[[], torch.Tensor | None] = staticmethod(lambda: None)


_last = _Last()


class SmallBatch:
    """Small-batch products of one layer and its followers.

    Attributes:
        few: computes them.
        followers: layers computed together with this one; weak references, as their pages may be retired.
        leader: layer that computes this one, a weak reference; None: it follows none.
    """

    __slots__ = ("__weakref__", "_ahead", "_asked", "_given", "_given_up", "_me", "few", "followers", "leader")

    def __init__(self, few: Prepared) -> None:
        self.few, self._me = few, weakref.ref(self)
        self.followers: tuple[weakref.ref[SmallBatch], ...] = ()
        self.leader: weakref.ref[SmallBatch] | None = None
        self._ahead: dict[None, _Ahead] = {}  # one result or none; `pop` gives it to one thread
        self._given = self._asked = 0  # results per follower; results of the leader that were used
        self._given_up = False

    def __call__(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor | None:
        """x Wᵀ + bias, or None if the kernel does not support x; x is a plain tensor, without gradients."""
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
        """Follow the layer that this thread just called with the identical tensor, if one call can compute both."""
        leader = _last.leader() if _last.x() is x else None
        if leader is None or leader is self:
            _last.leader, _last.x = self._me, weakref.ref(x)
        elif bias is None and self._is_free() and leader.takes(self):
            self.leader, self._asked = leader._me, leader._given
            leader.followers = (*(ref for ref in leader.followers if ref() is not None), self._me)

    def _is_free(self) -> bool:
        return not self.followers and (self.leader is None or self.leader() is None)

    def takes(self, other: "SmallBatch") -> bool:
        """True if this layer accepts another follower."""
        free = not self._given_up and len(self.followers) < _MOST_FOLLOWERS and self.leader is None
        return free and self.few.suits(other.few)


def _bits(x: torch.Tensor) -> bytes:
    return ctypes.string_at(x.data_ptr(), x.numel() * x.element_size())
