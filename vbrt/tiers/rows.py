"""Rows of pages, taken where the pages live: a lookup in a table moves the rows it needs, and the table stays.

    rows = page_rows(stack, "embed_tokens#coarse")
    codes = rows.take("codes", index)         # entries of a field along its first dimension, from memory or a file

    with PagesAtHome(stack, keys) as (tensors,):    # whole pages, for whoever wants the dense table

Nothing is leased and no policy hears of it: what a table costs on its way is its rows, and pages that pass through the
tiers keep their places. A lookup is a hit where the page lives in the top tier, and a miss otherwise; the bytes of the
rows count as moved, over each link between the page's home and the top tier.
"""

from collections.abc import Sequence
from itertools import pairwise
from math import prod

import torch

from vbrt.errors import TierError
from vbrt.formats.page import DTYPES, Field, unpack
from vbrt.tiers.blocks import aligned_bytes
from vbrt.tiers.slots import Page
from vbrt.tiers.stack import TierStack

__all__ = ["PageRows", "PagesAtHome", "page_rows"]


class PageRows:
    """One page, to take rows from.

    Attributes:
        page: the page.
    """

    def __init__(self, stack: TierStack, page: Page, tensors: dict[str, torch.Tensor] | None) -> None:
        self.page, self._stack, self._tensors, self._moves = page, stack, tensors, page.moves
        self._copied: tuple[torch.Tensor | None, torch.Tensor | None] = None, None
        self._fields = {field.name: field for field in page.layout.fields}

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
        tensors = self._read() if self._tensors is None else self._tensors
        return {name: tensor.to(self._stack.device) for name, tensor in tensors.items()}

    def _read(self) -> dict[str, torch.Tensor]:
        page = aligned_bytes(self.page.nbytes)
        try:
            self._stack.ssd.read(self.page.key, page)
        except TierError:
            if not self._is_in_memory_by_now():
                raise
            return self._tensors
        return unpack(page, self.page.layout)

    def _is_in_memory_by_now(self) -> bool:
        """True if the page, which was a file, was rehomed in memory; it is read there then."""
        if self.page.moves == self._moves:
            return False
        self._moves, self._tensors = self.page.moves, _tensors_at_home(self._stack, self.page)
        return self._tensors is not None

    def _taken(self, field: Field, index: torch.Tensor) -> torch.Tensor:
        """The entries on the device where the page lives."""
        if self._tensors is not None:
            tensor = self._tensors[field.name]
            return _taken(tensor, self._at(index, tensor.device))
        index, dtype, inner = self._at(index, torch.device("cpu")), DTYPES[field.dtype], field.shape[1:]
        if len(index) and not 0 <= int(index.min()) <= int(index.max()) < field.shape[0]:
            raise IndexError("index out of range in self")  # torch's words
        nbytes = dtype.itemsize * prod(inner)
        try:
            entries = self._stack.ssd.read_items(self.page.key, field.offset + index * nbytes, nbytes)
        except TierError:
            if not self._is_in_memory_by_now():
                raise
            return self._taken(field, index)
        return entries.view(-1).view(dtype).view(len(index), *inner)

    def _at(self, index: torch.Tensor, device: torch.device) -> torch.Tensor:
        """The indices on a device; those of one lookup are copied once for all fields."""
        if index.device == device:
            return index
        if self._copied[0] is not index:
            self._copied = index, index.to(device)
        return self._copied[1]

    def _count(self, nbytes: int) -> None:
        page, names = self.page, self._stack.names
        for high, low in pairwise(names[: page.home + 1]):
            link = f"{low}>{high}"
            page.bytes_moved[link] = page.bytes_moved.get(link, 0) + nbytes


class PagesAtHome:
    """Whole pages that never pass through the tiers, for one `with` block: views where they live on the computing
    device, copies outside of the budgets otherwise."""

    def __init__(self, stack: TierStack, keys: Sequence[str]) -> None:
        self.stack, self.keys = stack, keys

    def __enter__(self) -> list[dict[str, torch.Tensor]]:
        """Return the fields of each page. Raises TierError: a page was retired, or cannot be read or verified."""
        return [page_rows(self.stack, key).all() for key in self.keys]

    def __exit__(self, *exc_info: object) -> None:
        """Nothing is held."""


def page_rows(stack: TierStack, key: str) -> PageRows:
    """Return the rows of a page where it lives now, and count a lookup.

    They stay readable while the page is rehomed; after it was retired, `take` raises TierError if it was a file.

    Raises:
        TierError: the page was retired, the stack closed, or a CUDA graph would record rows that are not on the GPU.
    """
    stack.capturing()
    with stack.guard.entered:
        stack.ledger.check_open(key)
        page = stack.pages.get(key)
        if page is None:
            raise TierError(f"{key}: its page was retired: the layer holds another weight now; run the forward again")
        tensors = _tensors_at_home(stack, page)
        if page.home:
            page.misses += 1
        else:
            page.hits += 1
    return PageRows(stack, page, tensors)


def _tensors_at_home(stack: TierStack, page: Page) -> dict[str, torch.Tensor] | None:
    """The page's fields in the memory where it lives; None for a file."""
    return stack.levels[page.home].slots[page.key].tensors if page.home < len(stack.levels) else None


def _taken(tensor: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """`tensor[index]`, for dtypes that torch cannot index too."""
    plain = tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor
    taken = torch.embedding(plain, index) if plain.dim() == 2 else plain.index_select(0, index)
    return taken.view(tensor.dtype) if plain is not tensor else taken
