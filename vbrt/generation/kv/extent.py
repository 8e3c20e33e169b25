"""Extents: memory of a KV cache in the tiers of a runtime, as pages of the stack.

An *extent* is contiguous room for up to 16 MiB of sealed pages of one layer, and one page of the stack: one copy moves
many pages, at the link's full rate. Pages are written once, when they are sealed.

Extents are *put*: outside the policies and never rehomed, without effect on leases of weights.
"""

import itertools
import weakref
from collections.abc import Iterator
from typing import Generic, TypeVar

from torch import Tensor

from vbrt.formats.page import build_layout
from vbrt.generation.kv.quantized import PageCode
from vbrt.tiers import Level, Owner, Page, TierStack

__all__ = ["Alive", "Extent", "Memory"]

_serials = itertools.count()


class Memory:
    """Allocation of one page of the stack, which stays in place while this object lives."""

    __slots__ = ("__weakref__", "key", "owner", "page", "stack")

    def __init__(self, stack: TierStack, key: str, home: str, nbytes: int, content: Tensor | None = None) -> None:
        """Allocate `nbytes` in a tier; a file tier needs the content. Raises TierError: no room, or a failed write."""
        self.stack, self.key, self.owner = stack, key, Owner(stack)
        layout = build_layout("dense", "kv", [("pages", "uint8", (nbytes,))])

        def write(out: Tensor) -> None:
            if content is not None:
                out[: content.numel()].copy_(content.reshape(-1))
                out[content.numel() :].zero_()

        self.page: Page = stack.add(key, layout, home, write, self.owner)
        self.page.passes = False
        self.put()

    def put(self) -> None:
        """Pin the page to its home; a no-op if it is gone."""
        with self.stack.guard.lock:
            if self.stack.pages.get(self.key) is self.page and self.page.put is None:
                self.stack.ledger.put(self.page, self.owner.claim)

    def release(self) -> None:
        """Unpin the page, so that budget changes may move it; synchronizes with the device."""
        with self.stack.guard.lock:
            if self.stack.pages.get(self.key) is self.page and self.page.put is not None:
                self.stack.ledger.release_put(self.page)

    @property
    def level(self) -> Level:
        """The page's home tier. Raises TierError if the stack is closed."""
        self.stack.ledger.check_open(self.key)
        return self.stack.levels[self.page.home]

    @property
    def bytes(self) -> Tensor:
        """The page's bytes, in a memory tier."""
        return self.level.slots[self.key].view


class Extent(Memory):
    """Room for `capacity` pages of one layer, the first `filled` of them written; written pages are immutable.

    Attributes:
        code: encoding of the pages.
        serial: creation order.
        shared: True once a copy of the cache shares it: both append to new extents.
        written: event of the last D2H write; None if there is nothing to wait for.
    """

    __slots__ = ("capacity", "code", "filled", "serial", "shared", "written")

    def __init__(
        self, stack: TierStack, key: str, home: str, code: PageCode, capacity: int, content: Tensor | None = None
    ) -> None:
        self.code, self.capacity, self.shared = code, capacity, False
        self.filled, self.written, self.serial = 0, None, next(_serials)
        super().__init__(stack, key, home, capacity * code.page_bytes, content)
        self.filled = 0 if content is None else capacity

    @property
    def nbytes(self) -> int:
        """Bytes charged to the budget."""
        return self.page.nbytes

    def pages(self, count: int) -> Tensor:
        """Return the first `count` pages, uint8 [count, page_bytes], in a memory tier."""
        return self.bytes[: count * self.code.page_bytes].view(count, -1)


M = TypeVar("M", bound=Memory)


class Alive(Generic[M]):
    """Weak set of allocations; safe to iterate while other threads add."""

    def __init__(self) -> None:
        self._refs: weakref.WeakValueDictionary[str, M] = weakref.WeakValueDictionary()

    def add(self, memory: M) -> None:
        """Add an allocation."""
        self._refs[memory.key] = memory

    def __iter__(self) -> Iterator[M]:
        return (memory for ref in self._refs.valuerefs() if (memory := ref()) is not None)

    def __len__(self) -> int:
        return len(self._refs)
