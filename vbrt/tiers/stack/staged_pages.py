"""Staged pages: slots in page-locked host memory, and pages on a drive that are read into them beside the stack.

A device cache whose experts live in part on a drive has such slots. They are pages of the host memory's tier, reserved
from its budget; the pages on the drive are *put*, so that neither a budget change nor rehoming moves them. Leases of
the stack work as usual, in the room that is left. It ends with `close`, or when it is collected.
"""

from collections.abc import Sequence

import torch

from vbrt.errors import TierError
from vbrt.formats.page import build_layout
from vbrt.tiers.protocols.tier import Room, Tier
from vbrt.tiers.stack.host_lease import host_level
from vbrt.tiers.stack.page_stack import PageStack
from vbrt.tiers.stack.slots import Page

__all__ = ["StagedPages", "on_drive"]

_CHUNK_BYTES = 256 << 20  # of slots in one allocation


def on_drive(stack: PageStack, key: str) -> bool:
    """True if a page lives in a store, not in memory."""
    page = stack.pages.get(key)
    return page is not None and not stack.levels[page.home].tier.memory


class StagedPages:
    """Slots of one size, and the pages that may be read into them.

    Args:
        keys: of the pages on the drive.
        name: of the slots, as pages of the host memory's tier.
        spare_bytes: left in that tier for pages that pass through it.
        least, most: slots.

    Attributes:
        slots: uint8, in page-locked host memory.
        link: name of the link from the drive.

    Raises:
        TierError: there is no page-locked host memory above the drive, or no room in it.
    """

    def __init__(
        self, stack: PageStack, keys: Sequence[str], name: str, *, spare_bytes: int, least: int, most: int
    ) -> None:
        self._stack, self.keys = stack, tuple(keys)
        with stack.encoding:  # no page is rehomed meanwhile
            stack.ledger.check_open(name)
            stack.retire_unowned()  # slots of a collected one
            pages = [stack.pages[key] for key in keys]
            level = host_level(stack, pages[0])
            if level is None:
                raise TierError(
                    f"{keys[0]}: it lives in tiers.{stack.names[pages[0].home]}, without host memory above it; set "
                    "tiers.cpu.enabled = true"
                )
            taken = next((key for key, page in zip(keys, pages, strict=True) if page.put is not None), None)
            if taken is not None:
                raise TierError(f"{taken}: another device cache has it")
            self.slot_bytes = nbytes = max(page.nbytes for page in pages)
            count = min((level.free_bytes - spare_bytes) // nbytes, most)
            if count < least:
                raise TierError(
                    f"{keys[0]}: it lives in tiers.{stack.names[pages[0].home]}, and tiers.{level.tier.name} has room "
                    f"for {max(0, count)} such pages beside those that pass through, of {least} at least; raise "
                    f"tiers.{level.tier.name}.budget"
                )
            self.link = f"{stack.names[pages[0].home]}>{level.tier.name}"
            self._owner = owner = stack.share(keys)
            try:
                self._reserve(level.tier.name, name, count)
            except BaseException:
                self.close()
                raise
            with stack.guard.lock:
                for page in pages:
                    stack.ledger.put(page, owner.claim)
            self._files = [self._file(page) for page in pages]

    def _reserve(self, tier: str, name: str, count: int) -> None:
        self.slots: list[torch.Tensor] = []
        nbytes, at_once = self.slot_bytes, max(1, _CHUNK_BYTES // self.slot_bytes)
        for first in range(0, count, at_once):
            chunk = min(at_once, count - first)
            layout = build_layout("dense", "arena", [("arena", "uint8", (chunk * nbytes,))])
            page = self._stack.add(f"{name}-{first}", layout, tier, torch.Tensor.zero_, self._owner)
            page.passes = False
            slot = self._stack.levels[page.home].slots[page.key]
            if not slot.room.pinned:
                raise TierError(f"{page.key}: its memory is not page-locked; set tiers.{tier}.pinned = true")
            with self._stack.guard.lock:
                self._stack.ledger.put(page, self._owner.claim)
            self.slots += slot.view.split(nbytes)

    def _file(self, page: Page) -> tuple[Tier, Room, str, int]:
        level = self._stack.levels[page.home]
        return level.tier, level.slots[page.key].room, page.key, page.nbytes

    def view(self, number: int, slot: int) -> torch.Tensor:
        """Return the bytes of a page in a slot."""
        return self.slots[slot][: self._files[number][3]]

    def read(self, number: int, slot: int) -> None:
        """Read a page into a slot, verified; any thread may. Raises TierError: the file is missing or damaged."""
        tier, room, key, _ = self._files[number]
        tier.get(room, self.view(number, slot), key=key)

    def close(self) -> None:
        """Free the slots, which nobody reads any more, and let the pages move again. Idempotent."""
        self.slots = []
        self._stack.retire(self._owner)
        self._stack.retire_unowned()
