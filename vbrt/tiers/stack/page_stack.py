"""Page stack: an inclusive cache hierarchy of tiers, such as gpu, cpu and ssd, driven by residency policies.

Every page has one home: the tier that holds it until it is rehomed or retired. Tiers above the home cache copies as
their policies decide; weights are read-only, so eviction needs no write-back. Kernels compute in the top tier.

    with stack.lease(("layers.0.q_proj#coarse",)) as (tensors,):   # tensors: field name -> view into the page
        y = op(x, tensors)

Three classes do the work: `decider.py` decides, `mover.py` copies bytes, `page_homes.py` places pages in their homes.
They share one lock (`guard`) and one state (`ledger`). `stack_lock.py` has the guarantees under Ctrl-C; each file with
waits says why they cannot deadlock.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager

import torch

from vbrt.errors import TierError
from vbrt.formats.page import PageLayout
from vbrt.host import accelerator
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
from vbrt.tiers.stack.scheduling import LeasedTensors, Schedule
from vbrt.tiers.stack.slots import Level, Owner, Page
from vbrt.tiers.stack.unencoded_pages import Shells

__all__ = ["PageStack"]


class PageStack:
    """Stack of tiers from the computing one down; any class with the `Tier` protocol may be one of them.

    Args:
        tiers: as `Level`s, with their policies, or bare, without cached copies. The computing tier, a memory, is first.
        workers: number of prefetch threads.
        schedule: factory of the schedule that serves recurring passes.
        share_cores: True where the CPU computes: copies by workers would compete for its cores, so workers only ask
            the system to read files ahead, and the leasing thread copies the page.

    Attributes:
        levels, names: the tiers, and their names.
        pages: stored pages, by key.
        retired: claims of retired owners, which pages lose at the next access; may be appended to.
        guard: the lock, and the recorder of a timeline.
        announce: announces a scan, see `Decider.announce`.
        passes: counters of phases, and the phase that the first lease of a backward begins.
        rewriter: changes the bytes of pages in place, see `page_rewrites.py`.
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
        self.passes = passes = Passes(ledger)
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
        """Device of the top tier, where leased pages are and kernels compute."""
        return self.ledger.device

    @property
    def encoding(self):
        """Lock: one weight is encoded at a time, which bounds scratch memory and avoids encoding a weight twice."""
        return self.ledger.encoding

    @property
    def closed(self) -> bool:
        """True once the stack is closed."""
        return self.guard.closed

    @property
    def at_rest(self) -> bool:
        """True if every page's home is the top tier and none is leaving: then pages may be used without a lease, and
        the user counts the hit. False while a timeline records leases."""
        ledger = self.ledger
        return not (ledger.travellers or ledger.retired or ledger.lost or self.guard.recorder)

    # -- pages --------------------------------------------------------------------------------------------------------

    def add(
        self,
        key: str,
        layout: PageLayout,
        home: str,
        write: Write,
        owner: Owner,
        *,
        local: bool = False,
        frozen: bool = False,
        unseen: bool = False,
    ) -> Page:
        """Store a new page in its home; `write` fills the uint8 tensor that it is given with the page's bytes.

        Args:
            local: True for a page that the host uses in place: it is never copied to other tiers nor pinned.
            frozen: True for a page that is not written again: `tiers.cpu.path` shares it with other processes.
            unseen: True for memory that no lease reads and no capture has the address of: adding and retiring it is no
                change of the stack.

        Raises:
            TierError: no room within the budget, the ssd cannot be written, the key is taken, or the stack is closed;
                the page leaves no trace.
        """
        page = Page(
            key,
            layout,
            self.names.index(home),
            passes=not local,
            pinned=not local,
            frozen=frozen,
            unseen=unseen,
            tally=owner.tally,
        )
        return self._homes.add(page, write, owner)

    def share(self, keys: Collection[str]) -> Owner:
        """Return an additional owner of these pages."""
        owner = Owner(self)
        for key in keys:
            self._homes.share(owner, self.pages[key])
        return owner

    def retire(self, owner: Owner) -> None:
        """Retire an owner: its pages lose it at the next access. Takes no lock, so that finalizers may call it."""
        self.retired.append(owner.claim)

    def retire_unowned(self) -> None:
        """Retire pages without owners now instead of at the next access."""
        with self.guard.lock:
            self.decider.catch_up()

    # -- tiers --------------------------------------------------------------------------------------------------------

    def attach(self, tier: Level | Tier) -> None:
        """Add a tier below the others."""
        self.ledger.attach(tier)

    def set_budget(self, name: str, nbytes: int, lease_bytes: int = 0) -> None:
        """Change a tier's budget; safe while forwards run.

        Pages at home there that no longer fit, besides slots for streamed pages, are rehomed in a tier below, routed
        experts first; the others stay, evenly spread. If the top tier has room for all pages, all are rehomed there.

        Args:
            lease_bytes: largest lease; pages at home leave that much room, if it is more than four pages.

        Raises:
            TierError: no tier below has room for the pages that must move, a CUDA graph holds their addresses, or no
                tier has this name; the budget stays.
        """
        self._homes.set_budget(name, nbytes, lease_bytes)

    def rehome(self, homes: Mapping[str, str]) -> None:
        """Rehome stored pages, by key; safe while forwards run. Unknown keys are ignored.

        Raises:
            TierError: a tier has no room, a page cannot be read or written, or a CUDA graph holds its address; each
                page is then either in its old home or in its new one.
        """
        self._homes.rehome(homes)

    def close(self) -> None:
        """Retire every page, stop the threads, remove the files. Idempotent.

        Threads that wait for a page get a TierError; open leases stay valid to their end.
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
        """True if this thread's stream is under CUDA graph capture; pages may not be rehomed from then on.

        Args:
            keys: of pages that the captured work needs in the top tier.

        Raises:
            TierError: pages move, so their addresses cannot be captured.
        """
        if self.levels[0].stream is None or not accelerator.is_current_stream_capturing():
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
            phase: "prompt", "decode", "forward" or any other name; policies learn one access order per phase.
            backward: phase that begins at the first lease within autograd's backward; none by default.
        """
        self.levels[0].check()
        self.decider.begin_pass(phase, backward=backward)
        if self.guard.routing is not None:
            self.guard.routing.begin_pass(phase)

    def phases(self) -> dict[str, PhaseCounts]:
        """Return passes, hits and misses by phase. Accesses between two passes count for the first one."""
        return self.decider.phases()

    def lease(self, keys: Sequence[str]) -> Lease | AbstractContextManager[LeasedTensors]:
        """Lease pages in the top tier: `with stack.lease(keys) as tensors` yields one dict of views per key.

        The views are valid inside the `with` block only, unless the page's home is the top tier.

        Raises:
            TierError: (on entering) a page cannot be read or verified, does not fit besides this thread's other
                leases, or was retired.
        """
        recording = self.ledger.recording
        return (None if recording is None else recording.lease(keys)) or Lease(self, keys)

    def after_fork(self) -> None:
        """Reset the stack in a forked child: pages at home stay, threads of the parent are replaced."""
        self.ledger.after_fork()
        self.mover.after_fork()
        self._homes.after_fork()
