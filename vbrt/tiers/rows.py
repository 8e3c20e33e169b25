"""Rows of pages, taken where the pages live: a lookup in a table moves the rows it needs, and the table stays.

    rows = page_rows(stack, "embed_tokens#coarse")
    codes = rows.take("codes", index)         # entries of a field along its first dimension, from memory or a file

Nothing is leased and no policy hears of it: what a table costs on its way is its rows, and pages that pass through the
tiers keep their places. A lookup is a hit where the page lives in the top tier, and a miss otherwise; the bytes of the
rows count as moved, over each link between the page's home and the top tier.
"""

from itertools import pairwise

import torch

from vbrt.errors import TierError
from vbrt.formats.page import DTYPES, Field
from vbrt.tiers.slots import Page
from vbrt.tiers.stack import TierStack

__all__ = ["PageRows", "page_rows"]


class PageRows:
    """One page, to take rows from.

    Attributes:
        page: the page.
    """

    def __init__(self, stack: TierStack, page: Page, tensors: dict[str, torch.Tensor] | None) -> None:
        self.page, self._stack, self._tensors, self._moves = page, stack, tensors, page.moves
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

    def _taken(self, field: Field, index: torch.Tensor) -> torch.Tensor:
        """The entries on the device where the page lives."""
        if self._tensors is not None:
            tensor = self._tensors[field.name]
            return _taken(tensor, index.to(tensor.device))
        index = index.cpu()
        dtype, inner = DTYPES[field.dtype], field.shape[1:]
        if len(index) and not 0 <= int(index.min()) <= int(index.max()) < field.shape[0]:
            raise IndexError("index out of range in self")  # torch's words
        nbytes = dtype.itemsize * _product(inner)
        try:
            entries = self._stack.ssd.read_items(self.page.key, field.offset + index * nbytes, nbytes)
        except TierError:
            if self.page.moves == self._moves:
                raise
            self._moves, self._tensors = self.page.moves, _tensors_at_home(self._stack, self.page)
            return self._taken(field, index)
        return entries.view(-1).view(dtype).view(len(index), *inner)

    def _count(self, nbytes: int) -> None:
        page, names = self.page, self._stack.names
        for high, low in pairwise(names[: page.home + 1]):
            link = f"{low}>{high}"
            page.bytes_moved[link] = page.bytes_moved.get(link, 0) + nbytes


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


def _product(sizes: tuple[int, ...]) -> int:
    total = 1
    for size in sizes:
        total *= size
    return total
