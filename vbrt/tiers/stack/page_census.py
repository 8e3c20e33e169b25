"""What is known of many pages together, without walking them: the family of a layer, and the census of a stack."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from vbrt.tiers.stack.page_counters import Tally
from vbrt.tiers.stack.slots import Page

__all__ = ["Census", "Family"]


@dataclass(frozen=True, slots=True)
class Family:
    """The pages of one layer.

    Attributes:
        pages: all of them.
        planes: by name, the pages of a plane in the order in which they were added, which is that of the experts.
        keys: of the pages of each plane, likewise.
        plane_bytes: of each plane.
        homes, links: those that any page has; 0 bytes by link.
    """

    pages: Sequence[Page]
    planes: Mapping[str, Sequence[Page]]
    keys: Sequence[Sequence[str]]
    plane_bytes: Mapping[str, int]
    homes: tuple[int, ...]
    links: Mapping[str, int]

    @classmethod
    def of(cls, pages: Sequence[Page]) -> "Family":
        """Return what pages these are."""
        planes: dict[str, list[Page]] = {}
        for page in pages:
            planes.setdefault(page.layout.plane, []).append(page)
        nbytes = {plane: sum(page.nbytes for page in own) for plane, own in planes.items()}
        homes = tuple(dict.fromkeys(page.home for page in pages))
        keys = [[page.key for page in own] for own in planes.values()]
        return cls(pages, planes, keys, nbytes, homes, {link: 0 for page in pages for link in page.bytes_moved})

    def tally(self) -> Tally | Page:
        """Return what the pages have counted; walks them only if they are few."""
        kept = self.pages[0].tally if self.pages else None
        if kept is None:
            return self.pages[0] if len(self.pages) == 1 else Tally(self.pages)
        return kept


class Census:
    """What pages a stack has, as long as none is added, rehomed or retired.

    Attributes:
        changes: of the ledger when it was taken.
        home_pages: how many pages live in each tier.
        counted: whose hits add up to those of all pages: tallies, and pages without one.
    """

    def __init__(self, pages: Mapping[str, Page], changes: int) -> None:
        every = list(pages.values())
        self.changes, self._pages = changes, pages
        self.home_pages = Counter(page.home for page in every)
        tallies = dict.fromkeys(page.tally for page in every if page.tally is not None)
        self.counted: list[Page | Tally] = [*tallies, *(page for page in every if page.tally is None)]
        self._families: dict[tuple[str, ...], Family] = {}

    def family(self, keys: tuple[str, ...]) -> Family:
        """Return the pages of a layer, those that there are."""
        family = self._families.get(keys)
        if family is None:
            pages = [page for page in map(self._pages.get, keys) if page is not None]
            family = self._families[keys] = Family.of(pages)
        return family
