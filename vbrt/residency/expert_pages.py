"""Residency policy "experts": pages of routed experts, with keys such as `model.layers.0.mlp.experts#coarse.17`.

Three files: `expert_pool.py` has the eviction rule, `expert_room.py` divides the room among layers, and the policy here
adds announced scans, and the pages of other layers.

Every pass needs the pages of other layers, so they have priority: room for all of them, less the widest lease of
experts in recent passes; `ScheduledPolicy` decides on them. Each side yields room that a lease of the other side needs.

`announce(pages)` announces a scan: the pages of the next leases, in order. They are prefetched, `prefetch` at a time,
and their leases count as a scan (see `expert_pool.py`). An announcement ends with its last page, with the next
announcement, and with the pass. `passed` takes experts that the CPU computes in host memory.
"""

from collections.abc import Collection, Mapping

from vbrt.residency.bypassed_experts import Passed
from vbrt.residency.expert_pool import ExpertPage
from vbrt.residency.expert_room import ExpertRoom, split_key
from vbrt.residency.policy import FORWARD, Decision
from vbrt.residency.scheduled import Foresight, ScheduledPolicy

__all__ = ["SCOPES", "ExpertsPolicy", "pages_of_scan"]

SCOPES = ("layer", "model")
_SCAN_PART = 6  # a lease of a scan takes 1/_SCAN_PART of the room, its prefetched pages as much again
_FORGET = 8  # room kept for a wide lease decays by 1/_FORGET per pass without one


def pages_of_scan(most: int, capacity_bytes: int, largest_bytes: int) -> int:
    """Return the pages per lease of a scan, at most `most` by the config, for a room of `capacity_bytes`."""
    return max(1, min(most, capacity_bytes // (_SCAN_PART * largest_bytes))) if largest_bytes else 1


class ExpertsPolicy:
    """Policy for models with routed experts: recency and frequency for experts, `ScheduledPolicy` for other layers.

    Attributes:
        passed: bypassed pages of the next lease; note them before it.

    Args:
        capacity_bytes: room for pages, in bytes.
        prefetch: most pages of other layers prefetched.
        scan: most pages of a scan prefetched, and leased together; 0: as many as `prefetch`.
        group: pages per lease of other layers.
        scope: "layer": one pool per layer and plane; "model": one pool for all.
        layers: bytes of the largest page by layer and plane, such as "model.layers.0.mlp.experts#coarse", in model
            order. Missing ones are learned at their first lease: shares then shrink during the first pass.
    """

    kind = "experts"

    def __init__(
        self,
        capacity_bytes: int,
        *,
        prefetch: int = 2,
        scan: int = 0,
        group: int = 1,
        scope: str = "layer",
        layers: Mapping[str, int] | None = None,
    ) -> None:
        if scope not in SCOPES:
            raise ValueError(f"policy.scope = {scope!r}; expected 'layer' or 'model'")
        self.capacity_bytes, self.scope, self._layers = capacity_bytes, scope, layers or {}
        self.prefetch, self._scan = max(prefetch, scan), scan or prefetch
        self._others = ScheduledPolicy(0, prefetch=prefetch, group=group)
        self.reset()

    def reset(self) -> None:
        """Return to the initial state."""
        self._others.reset()
        self._others.capacity_bytes = 0
        self._other_sizes: dict[str, int] = {}
        self._other_bytes = 0  # their sum
        self._experts = ExpertRoom(by_layer=self.scope == "layer", layers=self._layers)
        self._experts.resize(self.capacity_bytes)
        self.passed = Passed(self._experts)
        self._lease, self._lease_bytes = 1, 0  # of experts' pages
        self._widest_bytes = self._kept_bytes = 0  # widest lease of this pass, and of recent ones
        self._upcoming: dict[str, int] = {}  # announced, not leased yet; with sizes
        self._staged: set[str] = set()  # the prefetched ones of them

    @property
    def resident_bytes(self) -> int:
        """Bytes of resident pages."""
        return self._experts.resident_bytes + self._others.resident_bytes

    @property
    def scan_pages(self) -> int:
        """Pages per lease of a scan: leaves room to prefetch as many, and for most of decoding's working set."""
        return pages_of_scan(self._scan, self.capacity_bytes, self._experts.largest_bytes)

    @property
    def group(self) -> int:
        """Pages per lease of other layers."""
        return self._others.group

    @group.setter
    def group(self, pages: int) -> None:
        self._others.group = pages

    @property
    def foresight(self) -> Foresight | None:
        """Look-ahead on decisions for pages of other layers; None while experts compete for their room, or while the
        division between both may still change."""
        shared = self._experts.resident_bytes or self._upcoming
        changes = self._others.capacity_bytes < self._wanted_by_others()
        return None if shared or changes else self._others.foresight

    # -- Policy protocol ----------------------------------------------------------------------------------------------

    def begin_pass(self, phase: str = FORWARD) -> None:
        """Note that the next access starts a new pass of the named phase."""
        self._others.begin_pass(phase)
        self._kept_bytes = max(self._widest_bytes, self._kept_bytes - self._kept_bytes // _FORGET)
        self._widest_bytes = 0
        self.announce({})

    def announce(self, pages: Mapping[str, int]) -> None:
        """Announce a scan: the pages of the next leases, each once, in this order, with their bytes."""
        self._upcoming = {key: size for key, size in pages.items() if self._experts.page(key, size)}
        self._staged.clear()

    def access(self, key: str, size: int, busy: Collection[str] = ()) -> Decision | None:
        """Decide on a demanded page: see `Policy.access`."""
        page = self._experts.page(key, size)
        if page is None:
            return self._access_other(key, size, busy)
        scanned = key in self._upcoming
        if not scanned:
            page.pool.tick(self._lease)
        if page.place:  # most accesses
            decision = Decision(key, not page.unused, (), page.unused)
        else:
            decision = self._demand(page, busy, scanned=scanned)
            if decision is None:
                return None
        page.unused = False
        self._lease_bytes += size
        if self._lease_bytes > self._widest_bytes:
            self._widest_bytes = self._lease_bytes
        if scanned:
            del self._upcoming[key]
            self._staged.discard(key)
        else:
            page.pool.touch(page)
        return decision

    def ahead(self, busy: Collection[str] = ()) -> list[Decision]:
        """Return the pages to prefetch now: the next ones of the announcement, admitted bypassed ones, then pages of
        other layers."""
        self._lease, self._lease_bytes = self._lease + 1, 0
        decisions = self._stage(busy) if self._upcoming else []
        self.passed.lease = self._lease
        if len(self.passed):
            decisions += self.passed.admit({*busy, *self._staged})
        if self._other_sizes:
            decisions += self._others.ahead(busy)
        return decisions

    def remove(self, key: str) -> None:
        """Remove a page and its score: see `Policy.remove`."""
        self._upcoming.pop(key, None)
        self._staged.discard(key)
        self.passed.forget(key)
        if key in self._experts.pages:
            self._experts.remove(key)
        elif split_key(key) is None:
            self._others.remove(key)
            self._other_bytes -= self._other_sizes.pop(key, 0)

    def resize(self, capacity_bytes: int) -> tuple[str, ...]:
        """Set the room; return the evicted pages."""
        self.capacity_bytes = capacity_bytes
        victims = self._others.resize(min(self._others.capacity_bytes, self._wanted_by_others()))
        self._experts.resize(capacity_bytes - self._others.capacity_bytes)
        return victims + self._experts.shrink(self._experts.capacity_bytes)

    def resident(self) -> tuple[str, ...]:
        """Return the keys of resident pages, in unspecified order."""
        return tuple(key for key, page in self._experts.pages.items() if page.place) + self._others.resident()

    # -- experts ------------------------------------------------------------------------------------------------------

    def _demand(self, page: ExpertPage, busy: Collection[str], *, scanned: bool) -> Decision | None:
        """Decide on a missing page."""
        experts, given = self._experts, ()
        lacking = experts.lacks(page.size, busy)
        if lacking:
            given = self._take_from_others(lacking, busy)
            if given is None:
                return None
        stay = {*busy, *self._staged} if self._staged else busy
        if experts.lacks(page.size, stay):
            stay = busy
        victims = experts.load(page, stay, scanned=scanned)
        self._staged.difference_update(victims)
        return Decision(page.key, hit=False, evict=given + victims, charge=page.size)

    def _stage(self, busy: Collection[str]) -> list[Decision]:
        """Prefetch the next pages of the announcement; never evict a page for one that is needed later."""
        experts, decisions = self._experts, []
        stay, most = {*busy, *self._staged}, min(self._scan, self.scan_pages)
        for key, size in self._upcoming.items():
            if len(self._staged) >= most:
                break
            page = experts.page(key, size)
            if not page.place:
                if experts.lacks(size, stay):
                    break
                victims = experts.load(page, stay, scanned=True)
                page.unused = True
                self._staged.add(key)
                decisions.append(Decision(key, hit=False, evict=victims, prefetched=True, charge=size))
            stay.add(key)
        return decisions

    # -- room between experts and other layers ------------------------------------------------------------------------

    def _wanted_by_others(self) -> int:
        """Return the target room of other layers."""
        kept = max(self._kept_bytes, self._widest_bytes)
        return max(0, min(self._other_bytes, self.capacity_bytes - kept))

    def _access_other(self, key: str, size: int, busy: Collection[str]) -> Decision | None:
        others = self._others
        if self._other_sizes.get(key) == size and others.capacity_bytes >= self._wanted_by_others():
            decision = others.access(key, size, busy)
            if decision is not None:
                return decision
        if key in others.resident():
            return others.access(key, size, busy)
        needed = others.busy_bytes(busy) + size
        if needed + self._experts.busy_bytes(busy) > self.capacity_bytes:
            return None
        self._other_bytes += size - self._other_sizes.get(key, 0)
        self._other_sizes[key] = size
        victims = self._give_to_others(max(needed, self._wanted_by_others()), busy)
        decision = others.access(key, size, busy)
        return decision._replace(evict=victims + decision.evict)

    def _give_to_others(self, nbytes: int, busy: Collection[str]) -> tuple[str, ...]:
        """Grow other layers' room to `nbytes`, as far as busy experts allow; return the evicted experts."""
        experts = self._experts
        victims = experts.shrink(self.capacity_bytes - nbytes, busy)
        self._staged.difference_update(victims)
        room = min(nbytes, self.capacity_bytes - experts.resident_bytes)
        if room > self._others.capacity_bytes:
            victims += self._others.resize(room, busy)
            experts.resize(self.capacity_bytes - room)
        return victims

    def _take_from_others(self, nbytes: int, busy: Collection[str]) -> tuple[str, ...] | None:
        """Take room from other layers; return their evicted pages, or None if busy ones need it."""
        others = self._others
        room = others.capacity_bytes - nbytes
        if room < others.busy_bytes(busy):
            return None
        victims = others.resize(room, busy)
        self._experts.resize(self.capacity_bytes - room)
        return victims
