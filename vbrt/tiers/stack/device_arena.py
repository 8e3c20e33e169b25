"""Device arena: memory that kernels allocate from, for pages that they fetch from pinned host memory themselves.

An arena is one page of the computing tier: reserved from its budget as a whole, retired like any page. Its *sources*
are pages in pinned host memory, which kernels read by address (zero-copy). Both are *put*: neither a budget change nor
rehoming moves them while the arena lives, so a CUDA graph may capture their addresses; the host can still lease the
sources as usual. The arena ends with `close`, or when it is collected, after the kernels that read from it.

A *movable* arena is one whose address kernels read from a table: it comes and goes without ending captures.
"""

from collections.abc import Sequence

import torch

from vbrt.errors import TierError
from vbrt.formats.page import build_layout
from vbrt.tiers.stack.page_stack import PageStack
from vbrt.tiers.stack.slots import Page

__all__ = ["Arena", "refusal"]


def refusal(stack: PageStack, keys: Sequence[str]) -> str:
    """Return why kernels cannot read these pages in place, naming the first such page; "" if they can."""
    for key in keys:
        page = stack.pages.get(key)
        if page is None:
            return f"{key}: it is not stored"
        level = stack.levels[page.home]
        if page.home == 0 or not level.tier.memory or level.tier.device.type != "cpu":
            return f"{key}: it lives in tiers.{level.tier.name}; kernels fetch pages from page-locked host memory only"
        if not level.slots[key].room.pinned:
            return f"{key}: its memory is not page-locked; set tiers.{level.tier.name}.pinned = true, on a GPU machine"
        if page.put is not None:
            return f"{key}: another device cache has it"
    return ""


class Arena:
    """Arena of bytes on the computing device, and its sources in host memory.

    Attributes:
        memory: uint8 [nbytes] on the computing device.
        addresses: of the sources, in host memory, as kernels read them.
    """

    def __init__(
        self, stack: PageStack, key: str, sources: Sequence[str], nbytes: int, *, movable: bool = False
    ) -> None:
        """Reserve `nbytes`, at least one page's, under the name `key`.

        Args:
            movable: no CUDA graph has its address, nor those of `sources`.

        Raises:
            TierError: a source is not in pinned host memory, the budget has no room, or the stack is closed.
        """
        self._stack, self._key = stack, key
        with stack.encoding:  # no page is rehomed meanwhile
            stack.ledger.check_open(key)
            stack.retire_unowned()  # pages of a collected arena
            reason = refusal(stack, sources)
            if reason:
                raise TierError(reason)
            self._owner = owner = stack.share(sources)
            layout = build_layout("dense", "arena", [("arena", "uint8", (nbytes,))])
            page = stack.add(key, layout, stack.names[0], torch.Tensor.zero_, owner, unseen=movable)
            page.passes = False
            self.memory = stack.levels[0].slots[key].view
            self.addresses = [self._put(stack.pages[source]) for source in sources]
            self._put(page)

    def _put(self, page: Page) -> int:
        """Fix a page in its place; return its address."""
        stack = self._stack
        with stack.guard.lock:
            stack.ledger.put(page, self._owner.claim)
            return stack.levels[page.home].slots[page.key].view.data_ptr()

    def check_open(self) -> None:
        """Raise TierError if the stack is closed."""
        if self._stack.closed:
            self._stack.ledger.check_open(self._key)

    def close(self) -> None:
        """Free the arena and let its sources move again, after the kernels that use them. Idempotent."""
        self._stack.retire(self._owner)
        self._stack.retire_unowned()
