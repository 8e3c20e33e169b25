"""Row lookup (embedding gather) in a page's home tier: only the needed rows move, the table stays.

    rows = page_rows(stack, "embed_tokens#coarse")
    codes = rows.take("codes", index)         # entries of a field along its first dimension, from memory or a file

    rows = page_rows(stack, key, Gather(kernel, owner.claim))     # pinned host memory is read by the GPU, in place

    with PagesAtHome(stack, keys) as (tensors,):    # whole pages, for the dense table

There is no lease and no policy decision: traffic is the rows only, and no cached page is evicted. A lookup is a hit if
the page's home is the top tier, else a miss; the bytes of the rows count as moved over each link between the page's
home and the top tier.
"""

from collections.abc import Callable, Sequence
from math import prod
from typing import NamedTuple

import torch

from vbrt.errors import TierError
from vbrt.formats.page import DTYPES, Field, unpack
from vbrt.host.accelerator import is_device
from vbrt.host.host_memory import aligned
from vbrt.tiers.stack.page_stack import PageStack
from vbrt.tiers.stack.slots import Claim, Slot

__all__ = ["Gather", "PageRows", "PagesAtHome", "page_rows"]


class Gather(NamedTuple):
    """Kernel that reads rows of pinned host memory from a GPU.

    Attributes:
        rows: (table [N, ...] in pinned host memory, index int64 [n] on the GPU) -> entries [n, ...] on the GPU, without
            waiting for the index.
        claim: of the pages' owner: from the first lookup on, pages that the kernel reads stay where they are.
    """

    rows: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
    claim: Claim


class PageRows:
    """Row reader of one page.

    Attributes:
        page: the page.
    """

    def __init__(self, stack: PageStack, slot: Slot, gather: Gather | None = None) -> None:
        self.page, self._stack, self._gather = slot.page, stack, gather
        self._copied: tuple[torch.Tensor | None, torch.Tensor | None] = None, None
        self._use(slot)
        self._fields = {field.name: field for field in slot.page.layout.fields}

    def take(self, field: str, index: torch.Tensor) -> torch.Tensor:
        """Return entries [n, ...] of a field, on the device of `index`, int64 [n].

        Raises:
            IndexError: (not on a GPU) an index that the field does not have.
            TierError: the page's file cannot be read or verified.
        """
        entries = self._taken(self._fields[field], index)
        self._count(entries.nbytes)
        return entries.to(index.device)

    def all(self) -> dict[str, torch.Tensor]:
        """Return all fields on the computing device. Raises TierError: the page's file cannot be read or verified."""
        if self.page.home:
            self._count(self.page.nbytes)
        return {name: tensor.to(self._stack.device) for name, tensor in self._read().items()}

    def _read(self) -> dict[str, torch.Tensor]:
        tier = self._slot.level.tier
        if tier.memory:
            return self._tensors
        page = aligned(self.page.nbytes)
        try:
            tier.get(self._room, page, key=self.page.key)
        except TierError:
            if not self._finds_another_home():
                raise
            return self._read()
        return unpack(page, self.page.layout)

    def _use(self, slot: Slot) -> None:
        """Read from a slot; tensors in memory stay readable after the page is rehomed."""
        self._slot, self._room, self._tensors = slot, slot.room, slot.tensors

    def _finds_another_home(self) -> bool:
        """True if the page was rehomed; switches to its new home."""
        slot = self._stack.levels[self.page.home].slots.get(self.page.key)
        if slot is None or slot is self._slot:
            return False
        self._use(slot)
        return True

    def _taken(self, field: Field, index: torch.Tensor) -> torch.Tensor:
        """Return the entries on the device of the page's home."""
        tier = self._slot.level.tier
        if tier.memory:
            tensor = self._tensors[field.name]
            if self._gather is not None and self.page.put is not None and is_device(index):
                return self._gather.rows(tensor, index)
            return _taken(tensor, self._at(index, tensor.device))
        index, dtype, inner = self._at(index, torch.device("cpu")), DTYPES[field.dtype], field.shape[1:]
        if len(index) and not 0 <= int(index.min()) <= int(index.max()) < field.shape[0]:
            raise IndexError("index out of range in self")  # torch's words
        nbytes = dtype.itemsize * prod(inner)
        try:
            entries = tier.read_items(self._room, field.offset + index * nbytes, nbytes, key=self.page.key)
        except TierError:
            if not self._finds_another_home():
                raise
            return self._taken(field, index)
        return entries.view(-1).view(dtype).view(len(index), *inner)

    def _at(self, index: torch.Tensor, device: torch.device) -> torch.Tensor:
        """Return the indices on a device; one copy per lookup, shared by all fields."""
        if index.device == device:
            return index
        if self._copied[0] is not index:
            self._copied = index, index.to(device)
        return self._copied[1]

    def _count(self, nbytes: int) -> None:
        moved = self.page.bytes_moved
        for link in self._stack.ledger.links(self.page.home):
            moved[link] = moved.get(link, 0) + nbytes


class PagesAtHome:
    """Whole pages read from their homes for one `with` block, bypassing the tiers: views if the home is on the
    computing device, else copies outside the budgets."""

    def __init__(self, stack: PageStack, keys: Sequence[str]) -> None:
        self.stack, self.keys = stack, keys

    def __enter__(self) -> list[dict[str, torch.Tensor]]:
        """Return the fields of each page. Raises TierError: a page was retired, or cannot be read or verified."""
        return [page_rows(self.stack, key).all() for key in self.keys]

    def __exit__(self, *exc_info: object) -> None:
        """Do nothing: no page is held."""


def page_rows(stack: PageStack, key: str, gather: Gather | None = None) -> PageRows:
    """Return a row reader of a page in its present home, and count a lookup.

    It stays usable while the page is rehomed; after retirement, `take` raises TierError if the page was a file.

    Args:
        gather: what reads a page in pinned host memory, if the indices are on a GPU; None: rows are copied, after
            waiting for the indices.

    Raises:
        TierError: the page was retired, the stack is closed, or under CUDA graph capture, the rows must be copied.
    """
    with stack.guard.lock:
        stack.ledger.check_open(key)
        page = stack.pages.get(key)
        if page is None:
            raise TierError(f"{key}: its page was retired: the layer holds another weight now; run the forward again")
        slot = stack.levels[page.home].slots[key]
        if gather is not None and page.put is None and _is_pinned(slot):
            stack.ledger.put(page, gather.claim)
        stack.decider.count_lookup(page)
    stack.capturing(() if page.put is not None else (key,))
    return PageRows(stack, slot, gather)


def _is_pinned(slot: Slot) -> bool:
    """True if a GPU's kernels can read the slot's page in host memory."""
    tier = slot.level.tier
    return tier.memory and tier.device.type == "cpu" and slot.room.pinned


def _taken(tensor: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """`tensor[index]`, also for dtypes that torch cannot index."""
    plain = tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor
    taken = torch.embedding(plain, index) if plain.dim() == 2 else plain.index_select(0, index)
    return taken.view(tensor.dtype) if plain is not tensor else taken
