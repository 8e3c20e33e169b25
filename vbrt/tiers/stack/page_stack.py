"""The stack: turns policies' decisions into movement between tiers, such as gpu, cpu and ssd.

Every page has one home: the tier that holds it until it is rehomed or retired. Tiers above the home hold copies while
the policy wants them; weights are read-only, so eviction never writes. The top tier is where kernels compute.

    with stack.lease(("layers.0.q_proj#coarse",)) as (tensors,):   # tensors: field name -> view into the page
        y = op(x, tensors)

Three classes do the work: one decides (`decider`), one moves bytes (`mover`), one gives pages their homes (`homes`).
They share one lock (`guard`) and one set of books (`ledger`). `stack_lock` says what holds when Ctrl-C comes, each file
why its waiting ends.
"""

from collections.abc import Callable, Collection, Mapping, Sequence

import torch

from vbrt.errors import TierError
from vbrt.formats.page import PageLayout
from vbrt.residency.access_counts import PhaseCounts
from vbrt.residency.policy import FORWARD
from vbrt.tiers.protocols.tier import Tier
from vbrt.tiers.stack.decider import Decider
from vbrt.tiers.stack.fork_safety import follow
from vbrt.tiers.stack.lease import Lease
from vbrt.tiers.stack.ledger import Ledger
from vbrt.tiers.stack.mover import Mover, Write
from vbrt.tiers.stack.page_homes import Homes
from vbrt.tiers.stack.page_rewrites import Rewriter
from vbrt.tiers.stack.pass_counts import Passes
from vbrt.tiers.stack.scheduling import Schedule
from vbrt.tiers.stack.slots import Level, Owner, Page
from vbrt.tiers.stack.unencoded_pages import Shells

__all__ = ["PageStack"]


class PageStack:
    """Tiers from the computing one down; whatever keeps the protocol of tiers may be one of them.

    Args:
        tiers: with their policies, as levels, or bare: those keep no copies. The computing tier, a memory, comes first.
        workers: threads that move pages ahead of their use.
        schedule: makes what serves the leases of passes that recur.
        share_cores: where the CPU computes, workers would take the cores from it to copy pages out of the page cache:
            they only have the system read files ahead, and whoever needs a page copies it.

    Attributes:
        levels, names: the tiers, and their names.
        pages: by key, those that are stored.
        retired: claims of retired owners, which pages lose at the next access; may be appended to.
        guard: the lock, and the recorder of a timeline.
        announce: tells which pages the next leases take, see `Decider.announce`.
        rewriter: gives pages other bytes where they live, see `page_rewrites.py`.
        shells: weights that have no pages yet.
    """

    def __init__(
        self,
        tiers: Sequence[Level | Tier],
        schedule: Callable[[Ledger, Mover, Passes], Schedule],
        *,
        workers: int = 2,
        share_cores: bool = False,
    ) -> None:
        self.ledger = ledger = Ledger(tiers)
        self.guard, self.levels, self.names = ledger.guard, ledger.levels, ledger.names
        self.pages, self.retired = ledger.pages, ledger.retired
        self.mover = Mover(ledger, workers=workers, share_cores=share_cores)
        passes = Passes(ledger)
        ledger.programmes = schedule(ledger, self.mover, passes)
        self.decider = Decider(ledger, self.mover, passes)
        self.announce = self.decider.announce
        self._homes = Homes(ledger, self.mover, self.decider)
        self.rewriter = Rewriter(ledger, self.mover)
        self.shells = Shells()
        follow(self)

    def __deepcopy__(self, memo: dict) -> "PageStack":
        return self  # copies of a model share the pages: they are read-only

    @property
    def device(self) -> torch.device:
        """Where leased pages live and kernels compute."""
        return self.ledger.device

    @property
    def encoding(self):
        """A lock: one weight is encoded at a time, which bounds scratch and encodes no weight twice."""
        return self.ledger.encoding

    @property
    def closed(self) -> bool:
        """True once the stack is closed."""
        return self.guard.closed

    @property
    def at_rest(self) -> bool:
        """True if every page lives in the top tier and none is leaving: it may be used without a lease then, and
        whoever does counts the hit. False while a timeline is recorded, which notes leases."""
        ledger = self.ledger
        return not (ledger.travellers or ledger.retired or ledger.lost or self.guard.recorder)

    # -- pages --------------------------------------------------------------------------------------------------------

    def add(self, key: str, layout: PageLayout, home: str, write: Write, owner: Owner, *, local: bool = False) -> Page:
        """Store a new page in its home; `write` writes the page's bytes into the uint8 tensor it is given.

        Args:
            local: the page is used where it lives, by the host: it passes through no tier and is not page-locked.

        Raises:
            TierError: no room within the budget, the ssd cannot be written, the key is taken, or the stack was closed;
                nothing of the page stays behind.
        """
        page = Page(key, layout, self.names.index(home), passes=not local, pinned=not local, tally=owner.tally)
        return self._homes.add(page, write, owner)

    def share(self, keys: Collection[str]) -> Owner:
        """Return one more owner of these pages."""
        owner = Owner(self)
        for key in keys:
            self._homes.share(owner, self.pages[key])
        return owner

    def retire(self, owner: Owner) -> None:
        """Retire an owner: its pages lose it at the next access. Takes no lock, so that finalizers may call it."""
        self.retired.append(owner.claim)

    def retire_unowned(self) -> None:
        """Retire the pages that have no owner now, not at the next access."""
        with self.guard.lock:
            self.decider.catch_up()

    # -- tiers --------------------------------------------------------------------------------------------------------

    def attach(self, tier: Level | Tier) -> None:
        """Add a tier below the others."""
        self.ledger.attach(tier)

    def set_budget(self, name: str, nbytes: int, lease_bytes: int = 0) -> None:
        """Change a tier's budget, while forwards may run.

        Pages that live there and do not fit any more, beside slots for pages that pass through, are rehomed in a tier
        below, routed experts first; the others stay, evenly spread. When the top tier has room for all pages, they live
        there from now on.

        Args:
            lease_bytes: what one lease takes, at most: room that pages at home leave, where more than four pages.

        Raises:
            TierError: no tier below has room for what must move, a CUDA graph needs it where it is, or there is no tier
                of this name; the budget stays.
        """
        self._homes.set_budget(name, nbytes, lease_bytes)

    def rehome(self, homes: Mapping[str, str]) -> None:
        """Give stored pages, by key, homes in other tiers, while forwards may run. Keys of no page are ignored.

        Raises:
            TierError: a tier has no room, a page cannot be read or written, or a CUDA graph needs it where it is; each
                page is in its old home or in its new one.
        """
        self._homes.rehome(homes)

    def close(self) -> None:
        """Retire every page, stop the threads, remove the files. Idempotent.

        Threads that wait for a page get a TierError; a lease that is held stays valid to its end.
        """
        guard, ledger = self.guard, self.ledger
        with guard.lock:
            guard.closed = True
            guard.ring()
        self.mover.stop()
        with guard.lock, ledger.deciding:
            ledger.retired.clear()
            for page in list(self.pages.values()):
                self.decider.retire_page(page)
            for level in self.levels:
                level.tier.trim()
        for level in self.levels:
            level.tier.close()

    # -- passes and leases --------------------------------------------------------------------------------------------

    def capturing(self, keys: Collection[str] = ()) -> bool:
        """True if a CUDA graph records what this thread computes; pages stay where they are from then on.

        Args:
            keys: of pages that it needs in the top tier.

        Raises:
            TierError: pages move, so that a graph could not find them again.
        """
        if self.levels[0].stream is None or not torch.cuda.is_current_stream_capturing():
            return False
        recording = self.ledger.recording
        recorded = recording is not None and recording.mine
        if recorded and recording.begin():
            return True
        moving = [key for key in keys if key in self.pages and self.pages[key].home]
        if recorded and moving:
            raise TierError(
                f"{moving[0]}: the pass that a CUDA graph records leases it where the last pass of its phase took "
                "another page; run the phase once more and record it again"
            )
        if recorded:
            return True
        if self.ledger.travellers or moving:
            raise TierError(
                "a CUDA graph cannot record a pass whose pages move; give tiers.gpu.budget room for all "
                f"pages ({sum(page.nbytes for page in self.pages.values())} bytes), or record parts of the "
                "model without VB layers"
            )
        self.ledger.captured = True
        return True

    def begin_pass(self, phase: str = FORWARD, *, backward: str = "") -> None:
        """Start a new pass over the model with the next lease.

        Args:
            phase: "prompt", "decode", "forward" or any other name; each has an order that policies learn.
            backward: the phase that begins with the first lease within autograd's backward; none by default.
        """
        self.levels[0].check()
        self.decider.begin_pass(phase, backward=backward)
        if self.guard.routing is not None:
            self.guard.routing.begin_pass(phase)

    def phases(self) -> dict[str, PhaseCounts]:
        """Return passes, hits and misses of each phase. Accesses between two passes count for the first."""
        return self.decider.phases()

    def lease(self, keys: Sequence[str]) -> Lease:
        """Borrow pages in the top tier: `with stack.lease(keys) as tensors` yields one dict of views for each key.

        The views are valid inside the `with` block only, unless the page's home is the top tier.

        Raises:
            TierError: (on entering) a page cannot be read or verified, cannot fit beside what this thread has leased,
                or was retired.
        """
        return Lease(self, keys)

    def after_fork(self) -> None:
        """Make a forked child's copy usable: its pages are there, its parent's threads are not."""
        self.ledger.after_fork()
        self.mover.after_fork()
        self._homes.after_fork()
