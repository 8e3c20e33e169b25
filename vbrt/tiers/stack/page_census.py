"""Cached aggregates over pages, so that stats need not walk them: per layer (family) and per stack (census)."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vbrt.tiers.stack.page_counters import Tally
from vbrt.tiers.stack.slots import Page

__all__ = ["Census", "Family"]


@dataclass(frozen=True, slots=True)
class Family:
    """Pages of one layer.

    Attributes:
        pages: all of them.
        planes: pages by plane, in the order in which they were added: expert order.
        keys: of the pages of each plane, in the same order.
        plane_bytes: by plane.
        homes, links: union over all pages; links as zeroed byte counters.
    """

    pages: Sequence[Page]
    planes: Mapping[str, Sequence[Page]]
    keys: Sequence[Sequence[str]]
    plane_bytes: Mapping[str, int]
    homes: tuple[int, ...]
    links: Mapping[str, int]

    @classmethod
    def of(cls, pages: Sequence[Page]) -> "Family":
        """Group pages by plane."""
        planes: dict[str, list[Page]] = {}
        for page in pages:
            planes.setdefault(page.layout.plane, []).append(page)
        nbytes = {plane: sum(page.nbytes for page in own) for plane, own in planes.items()}
        homes = tuple(dict.fromkeys(page.home for page in pages))
        keys = [[page.key for page in own] for own in planes.values()]
        return cls(pages, planes, keys, nbytes, homes, {link: 0 for page in pages for link in page.bytes_moved})

    def tally(self) -> Tally | Page:
        """Return the counters of all pages together: the layer's tally, or a sum over the few pages without one."""
        kept = self.pages[0].tally if self.pages else None
        if kept is None:
            return self.pages[0] if len(self.pages) == 1 else Tally(self.pages)
        return kept


class Census:
    """Snapshot of a stack's pages, valid until one is added, rehomed or retired.

    Attributes:
        changes: of the ledger, when the snapshot was taken.
        home_pages: number of pages by home, without unseen ones.
        counted: tallies, and pages without one: their hits add up to the hits of all pages.
    """

    def __init__(self, pages: Mapping[str, Page], changes: int) -> None:
        every = [page for page in pages.values() if not page.unseen]
        self.changes, self._pages = changes, pages
        self.home_pages = Counter(page.home for page in every)
        tallies = dict.fromkeys(page.tally for page in every if page.tally is not None)
        self.counted: list[Page | Tally] = [*tallies, *(page for page in every if page.tally is None)]
        self._families: dict[tuple[str, ...], Family] = {}

    def family(self, keys: tuple[str, ...]) -> Family:
        """Return the stored pages of a layer."""
        family = self._families.get(keys)
        if family is None:
            pages = [page for page in map(self._pages.get, keys) if page is not None]
            family = self._families[keys] = Family.of(pages)
        return family
