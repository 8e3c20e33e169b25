"""Pages of one weight's gradient, in host memory or files: one per accumulation dtype."""

import torch
from torch import Tensor

from vbrt.formats.page import PageLayout, build_layout, unpack
from vbrt.host.host_memory import aligned
from vbrt.tiers import Owner, TierStack
from vbrt.tiers.stack.slots import Page

__all__ = ["GradientPages"]


class GradientPages:
    """Storage of a gradient.

    Args:
        name: of the weight.
        home: tier of the pages.

    Attributes:
        shape: of the gradient; set before the first one.
        fallbacks: deviations from the plan.
    """

    def __init__(self, name: str, stack: TierStack, home: str) -> None:
        self.shape: tuple[int, ...] = ()
        self.fallbacks: list[str] = []
        self._name, self._stack, self._home, self._owner = name, stack, home, Owner(stack)
        self._pages: dict[torch.dtype, Page] = {}

    def room(self, dtype: torch.dtype) -> Tensor | None:
        """Return the host memory for the gradient in a dtype, reused by further steps; None if it lives in a file.

        Raises TierError: the tiers have no room for it.
        """
        page = self._page(dtype)
        slot = self._stack.ledger.levels[page.home].slots[page.key]
        return unpack(slot.view, page.layout)["gradient"] if slot.level.tier.memory else None

    def holds(self, dtype: torch.dtype) -> bool:
        """True if there is a page for gradients of a dtype."""
        return dtype in self._pages

    def keep_until(self, event: torch.Event) -> None:
        """Fence the bf16 gradient's host memory until its copy's event completes: a budget change may re-home the page
        meanwhile."""
        page = self._pages[torch.bfloat16]
        slot = self._stack.ledger.levels[page.home].slots[page.key]
        if slot.level.tier.memory:
            slot.room.fences[id(self)] = event

    def put(self, value: Tensor) -> tuple[Tensor | None, Page | None]:
        """Store a value in the page of its dtype; return its memory, or the page if it lives in a file."""
        room = self.room(value.dtype)
        if room is None:
            return None, self.write(value)
        return (room if room.data_ptr() == value.data_ptr() else room.copy_(value)), None

    def write(self, value: Tensor) -> Page:
        """Write a value to the file of its dtype. Raises TierError."""
        page = self._page(value.dtype)
        with self._stack.rewriter.rewriting(page.key, fresh=True) as whole:
            unpack(whole, page.layout)["gradient"].copy_(value)
        return page

    def read(self, page: Page) -> Tensor:
        """Read back what `write` stored, verified. Raises TierError."""
        slot, staging = self._stack.ledger.levels[page.home].slots[page.key], aligned(page.nbytes)
        if slot.level.tier.memory:  # after a budget change
            staging.copy_(slot.view)
        else:
            slot.level.tier.get(slot.room, staging, key=page.key)
        return unpack(staging, page.layout)["gradient"]

    def retire(self) -> None:
        """Retire the pages. Idempotent."""
        self._stack.retire(self._owner)
        self._pages, self._owner = {}, Owner(self._stack)

    def _page(self, dtype: torch.dtype) -> Page:
        page = self._pages.get(dtype)
        if page is None:
            text = str(dtype).removeprefix("torch.")
            layout = build_layout("dense", "gradient", [("gradient", text, self.shape)])
            page = self._pages[dtype] = self._added(f"{self._name}#gradient.{text}", layout)
            page.passes = False
        return page

    def _added(self, key: str, layout: PageLayout) -> Page:
        """Return a new page; falls back to a file if its home is full (an fp32 sum next to a bf16 one, or a lowered
        budget)."""
        stack, last = self._stack, self._stack.levels[-1].tier
        if last.memory or last.name == self._home:
            return stack.add(key, layout, self._home, _as_it_is, self._owner, unseen=True)
        with stack.encoding:
            if layout.nbytes <= stack.ledger.spare_bytes(self._home):
                return stack.add(key, layout, self._home, _as_it_is, self._owner, unseen=True)
        reason = f"{key}: its home in the {self._home} tier has no room; it lives in files, which is slower"
        self.fallbacks.append(reason)
        return stack.add(key, layout, last.name, _as_it_is, self._owner, unseen=True)


def _as_it_is(page: Tensor) -> None:
    """Write nothing: a gradient is always stored before it is read."""
