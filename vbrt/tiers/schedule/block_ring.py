"""Ring of blocks: fixed places on the computing device for pages that CUDA graphs of single blocks read.

    ring = BlockRing(stack, [["0.q", "0.up"], ["1.q", "1.up"]], lease_bytes=...)   # raises TierError: `refusal`
    with Recording(stack, "forward", (), places=ring.places(0)):   # leases of this thread get tensors at their places
        ...                                                        # capture block 0
    while ring.run(0, "forward", graph.replay):                    # False once the room was given back
        ...

A programme's slots hold single pages in the order of their leases, of which a backward that computes its forward again
has three a page. Here a block's pages stay until its graph has run: two copies a page and training step, and none of
the pages that stay (`vbrt/residency/block_regions.py` divides the room). Blocks may run in any order; one that recurs
is prefetched, on the copy stream, while the block before it computes.

Pages that train are rewritten at home: a run waits for the rewrites of its pages that are due, and brings anew what was
rewritten since. Nothing of such pages stays, and a block is not prefetched while one of its pages is due.

The ring is one page of the computing tier, within its budget, and leaves the policy room for two of the largest leases,
with which eager passes stream all pages. It is given back, for good, as soon as a page is added, gets another home, or
the tier another budget.
"""

import itertools
import weakref
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch

from vbrt.errors import TierError
from vbrt.formats.page import build_layout, unpack
from vbrt.residency.block_regions import REGIONS, RegionOrder, divide_room
from vbrt.tiers.schedule.stream_link import Started, link_of
from vbrt.tiers.stack.bounded_waits import Waiting
from vbrt.tiers.stack.page_counters import Tally
from vbrt.tiers.stack.page_stack import PageStack
from vbrt.tiers.stack.scheduling import LeasedTensors
from vbrt.tiers.stack.slots import Owner, Page, detour, slot_below
from vbrt.tiers.storage.memory_tiers import Buffer

__all__ = ["BlockPlaces", "BlockRing", "refusal"]

_LEASES = 2  # of the largest size, left for passes that lease: one in use, one prefetched
_STAYING = REGIONS  # the link's slot of pages that stay
_numbers = itertools.count()

_Place = tuple[int | None, Page]  # the number of a block that streams, and a page of it


def refusal(stack: PageStack, keys: Sequence[str]) -> str:
    """Return why these pages cannot stream into a ring, naming the first such page; "" if they can."""
    for key in keys:
        page = stack.pages.get(key)
        why = detour(stack.ledger, page)
        if not why and stack.ledger.rewrites and not page.home:
            why = "rewritten where kernels read it"
        if not why and page.home and stack.levels[0].brings(slot_below(stack.ledger, page)):
            why = "copied over several links"
        if why:
            return f"{key.partition('#')[0]}: {why}"
    return ""


def _counters(page: Page) -> tuple[Page | Tally, ...]:
    """Return a page, and the tally of its layer, if it has one."""
    return (page,) if page.tally is None else (page, page.tally)


class BlockPlaces:
    """Places of one block's pages, for leases of its capture."""

    def __init__(self, ring: "BlockRing", block: int, keys: Sequence[str]) -> None:
        self._ring, self._block, self._keys = ring, block, frozenset(keys)

    def lease(self, keys: Sequence[str]) -> AbstractContextManager[LeasedTensors] | None:
        """Return a lease of pages of this block; None for other pages."""
        return nullcontext(self._ring.tensors(self._block, tuple(keys))) if self._keys.issuperset(keys) else None


class _Block(NamedTuple):
    """Pages of a block, in lower tiers. `number`: among the blocks that stream; None if all of its pages stay."""

    keys: Sequence[str]
    number: int | None
    staying: Sequence[Page]
    streamed: Mapping[Page, int]  # and their offsets in the region


class BlockRing:
    """Ring of the streamed pages of a model's blocks.

    Args:
        blocks: the pages of each block, in the order of a pass; those at home in the computing tier are used there.
        lease_bytes: of the largest lease of the stack.

    Attributes:
        ended: True once the room was given back.

    Raises:
        TierError: pages cannot stream into a ring, or the budget has no room for it.
    """

    def __init__(self, stack: PageStack, blocks: Sequence[Sequence[str]], *, lease_bytes: int) -> None:
        self._stack, self._level, self.ended = stack, stack.levels[0], False
        self._key = f"ring of blocks {next(_numbers)}"
        with stack.encoding:  # no page is rehomed meanwhile
            stack.ledger.check_open(self._key)
            stack.retire_unowned()
            why = refusal(stack, [key for keys in blocks for key in keys])
            if why:
                raise TierError(why)
            for loan in list(stack.ledger.loans):
                loan.give_back()  # before free bytes are asked for
            pages = [[stack.pages[key] for key in keys if stack.pages[key].home] for keys in blocks]
            room = self._level.free_bytes - _LEASES * lease_bytes
            sizes = [{page.key: page.nbytes for page in block} for block in pages]
            places = divide_room(sizes, room, stay=not stack.ledger.rewrites)
            if places is None:
                largest = max(sum(page.nbytes for page in block) for block in pages)
                raise TierError(
                    f"tiers.{self._level.tier.name}.budget has {max(0, room)} bytes left for pages of blocks, of which "
                    f"two at a time take {REGIONS * largest}; raise it"
                )
            self._owner = Owner(stack)
            layout = build_layout("dense", "arena", [("arena", "uint8", (places.nbytes,))])
            page = stack.add(self._key, layout, stack.names[0], torch.Tensor.zero_, self._owner)
            page.passes = False
            self._places, self._order = places, RegionOrder()
            self._leases: dict[tuple[int, tuple[str, ...]], LeasedTensors] = {}
            numbers = itertools.count()
            self._blocks = [
                _Block(
                    keys,
                    next(numbers) if offsets else None,
                    [page for page in own if page.key in places.staying],
                    {page: offsets[page.key] for page in own if page.key in offsets},
                )
                for keys, own, offsets in zip(blocks, pages, places.streamed, strict=True)
            ]
            self._streaming = [block for block in self._blocks if block.number is not None]
            with stack.guard.lock:
                self._room = self._level.slots[self._key].room
                self._link = link_of(self._level.stream, REGIONS + 1)
                self._sources = {page.key: slot_below(stack.ledger, page) for own in pages for page in own}
                self._starts: dict[_Place, weakref.WeakKeyDictionary[Buffer, Started]] = {}
                self._brought: dict[_Place, int] = {}  # number of the page's rewrites then
                self._bring_staying()
                self._changes = stack.ledger.changes
            stack.ledger.loans.add(self)

    # -- places -------------------------------------------------------------------------------------------------------

    def places(self, block: int) -> BlockPlaces:
        """Return the places of a block."""
        return BlockPlaces(self, block, self._blocks[block].keys)

    def tensors(self, block: int, keys: tuple[str, ...]) -> LeasedTensors:
        """Return the tensors of a lease of a block's pages, the same ones each time."""
        if (block, keys) not in self._leases:
            self._leases[block, keys] = LeasedTensors(self._views(key, self._blocks[block]) for key in keys)
        return self._leases[block, keys]

    def _views(self, key: str, block: _Block) -> dict[str, torch.Tensor]:
        if key not in self._sources:  # at home in the computing tier
            return self._level.slots[key].tensors
        page = self._stack.pages[key]
        return unpack(self._place(page, block), page.layout)

    def _place(self, page: Page, block: _Block) -> torch.Tensor:
        at = self._places.staying.get(page.key)
        if at is None:
            at = self._places.regions[block.number % REGIONS] + block.streamed[page]
        return self._room.tensor[at : at + page.nbytes]

    # -- copies -------------------------------------------------------------------------------------------------------

    def _bring(self, slot: int, page: Page, block: _Block) -> None:
        """Copy a page to its place. A rewritten page may have exchanged its memory with another one's."""
        source = self._sources[page.key]
        starts = self._starts.setdefault((block.number, page), weakref.WeakKeyDictionary())
        start = starts.get(source.room)
        if start is None:
            start = starts[source.room] = self._link.copying(slot, self._place(page, block), source.view)
        start()
        self._brought[block.number, page] = page.rewrites
        link = f"{source.tier.name}>{self._level.tier.name}"
        for counted in _counters(page):
            counted.bytes_moved[link] = counted.bytes_moved.get(link, 0) + page.nbytes

    def _bring_staying(self) -> None:
        staying = {page: block for block in self._blocks for page in block.staying}
        self._link.computed()
        for page, block in staying.items():
            self._bring(_STAYING, page, block)
        self._link.wait(_STAYING)
        self._fence(staying)

    def _load(self, number: int, *, ahead: bool) -> None:
        self._order.empty(number)
        self._link.computed()
        for page in self._streaming[number].streamed:
            self._bring(number % REGIONS, page, self._streaming[number])
        self._order.fill(number, ahead=ahead)

    def _drop_rewritten(self) -> None:
        for number in self._order.held:
            if any(self._brought[number, page] != page.rewrites for page in self._streaming[number].streamed):
                self._order.empty(number)

    def _fence(self, pages: Iterable[Page]) -> None:
        self._link.fence([self._room], (), [self._sources[page.key].room for page in pages])

    # -- runs ---------------------------------------------------------------------------------------------------------

    def holds(self) -> bool:
        """True while no page was added, moved or retired, and the room was not given back."""
        return not (self.ended or self._stack.closed or self._stack.ledger.changes != self._changes)

    def run(self, block: int, kind: Hashable, launch: Callable[[], object]) -> bool:
        """Launch what reads a block's pages at their places, on the current stream, and prefetch the next block's;
        False, with nothing launched, once the ring no longer holds.

        Args:
            kind: of the run, such as "backward": which block comes next depends on it.
        """
        of, waiting = self._blocks[block], None
        while True:
            with self._stack.guard.lock:
                due = next((page for page in of.streamed if page.due), None)
                if due is None or not self.holds():
                    return self._run(of, kind, launch)
                bell = self._stack.guard.listen()
            waiting = waiting or Waiting(self._stack.ledger, due.key, "its rewriting", by_step=True)
            waiting.look(bell)

    def _run(self, of: _Block, kind: Hashable, launch: Callable[[], object]) -> bool:
        """Run a block none of whose pages is due; call it under the lock."""
        if not self.holds():
            return False
        link = self._link
        if not link.follows():
            before = link.compute
            link.follow()
            link.compute.wait_stream(before)
        if self._stack.ledger.rewrites:
            self._drop_rewritten()
        loads = [] if of.number is None else self._order.visit(of.number, kind)
        loads = [each for each in loads if not any(page.due for page in self._streaming[each].streamed)]
        try:
            self._count(of, loads)
            for number in loads:
                self._load(number, ahead=number != of.number)
            if of.number is not None:
                link.wait(of.number % REGIONS)
            launch()
        finally:
            self._fence([page for number in loads for page in self._streaming[number].streamed])
        return True

    def _count(self, block: _Block, loads: Sequence[int]) -> None:
        for page in block.staying:
            for counted in _counters(page):
                counted.hits += 1
        if block.number is None:
            return
        ahead, missing = self._order.take_ahead(block.number), block.number in loads
        for page in block.streamed:
            for counted in _counters(page):
                counted.hits += not (missing or ahead)
                counted.misses += missing or ahead
                counted.prefetched += ahead
        if missing or ahead:
            self._stack.passes.count_misses(len(block.streamed), len(block.streamed) * ahead)

    # -- the end ------------------------------------------------------------------------------------------------------

    def give_back(self) -> None:
        """Free the room, after the kernels and copies that use it. Idempotent."""
        with self._stack.guard.lock:
            if self.ended:
                return
            self.ended = True
            self._leases.clear()  # views, which would keep the memory
            self._starts, self._room = {}, None
        self._stack.ledger.loans.discard(self)
        self._stack.retire(self._owner)
        self._stack.retire_unowned()
