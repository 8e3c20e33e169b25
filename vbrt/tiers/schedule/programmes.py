"""Detection of recurring passes: a round that repeats is compiled into a programme and replayed.

A round is one pass that repeats, whatever its phase, or two alternating passes, as forward and backward. Requirements:
the computing tier's policy is a `ScheduledPolicy`, and each page arrives by one copy from memory (for a GPU: pinned)
without a copy in a tier in between. All other passes are decided lease by lease.
"""

from collections import deque
from collections.abc import Mapping, Sequence, Set

from vbrt.errors import TierError
from vbrt.residency.policy import Policy
from vbrt.residency.programme import PassOrder, Programme, compile_programme
from vbrt.tiers.schedule.programme_run import ProgrammeRun
from vbrt.tiers.stack.ledger import Ledger
from vbrt.tiers.stack.mover import Mover
from vbrt.tiers.stack.pass_counts import Passes
from vbrt.tiers.stack.slots import detour

__all__ = ["Programmes"]

_ROUNDS = (1, 2)  # passes of a round
_LONGEST_PASS = 1 << 14  # leases: longer or unmarked passes have no programme
_PHASES = 16  # phases whose lease order is remembered
_KEPT = 4  # cached programmes: of prompts and decode steps, and of earlier budgets
_LONGEST_WAIT = 64  # passes between attempts, after many failures


class Programmes:
    """Schedule that watches passes and starts and ends programme runs. All methods run under the stack's lock.

    Attributes:
        reason: why no programme runs, if known; "" while one does.
        enabled: False makes the policy decide every lease, for comparison; a current run ends at its next pass.
        orders: lease order of the last pass of each phase.
    """

    def __init__(self, ledger: Ledger, mover: Mover, passes: Passes) -> None:
        self._ledger, self._mover, self._passes = ledger, mover, passes
        self._history: deque[PassOrder] = deque(maxlen=2 * max(_ROUNDS))
        self._leases: deque[Sequence[str]] = deque(maxlen=_LONGEST_PASS)  # of the current pass
        self._known: deque[tuple[tuple[PassOrder, ...], Programme]] = deque(maxlen=_KEPT)
        self._round: tuple[PassOrder, ...] = ()
        self._wait = self._failures = 0
        self.reason = "no pass has repeated itself yet"
        self.enabled = True
        self.orders: dict[str, tuple[tuple[str, ...], ...]] = {}
        self.note = self._leases.append

    # -- watching -----------------------------------------------------------------------------------------------------

    def begin_pass(self, before: str, *, may_run: bool) -> None:
        """Note that the policies have begun a pass, after one of phase `before`; start a programme if one fits.

        may_run: False where the first lease of the pass has begun already.
        """
        self._end_pass(before)
        if not (may_run and self.enabled):
            return
        if self._ledger.rewrites:
            self.reason = "weights train, so pages are rewritten at home"
            return
        if self._wait:
            self._wait -= 1
        elif self._ledger.travellers and self._ledger.guard.recorder is None:
            self._run()

    def _end_pass(self, phase: str) -> None:
        if 0 < len(self._leases) < _LONGEST_PASS:
            self._remember(PassOrder(phase, tuple(map(tuple, self._leases))))
        self._leases.clear()

    def _remember(self, one: PassOrder) -> None:
        self._history.append(one)
        self.orders[one.phase] = one.leases
        if len(self.orders) > _PHASES:
            del self.orders[next(iter(self.orders))]

    def _run(self) -> None:
        policy = self._ledger.levels[0].policy
        if getattr(policy, "foresight", None) is None:
            self.reason = _without_foresight(policy)
            return
        round_ = self._recurring()
        sizes = {} if round_ is None else self._sizes(round_)
        if not sizes:
            return
        programme = self._programme(round_, sizes)
        if programme is None:
            self.reason = "evictions differ from pass to pass so far"
        elif self._begin(programme, round_):
            return
        self._back_off()

    def _recurring(self) -> tuple[PassOrder, ...] | None:
        """Return the round expected next, if the last passes were two repetitions of it."""
        passes = list(self._history)
        for length in _ROUNDS:
            last, before = passes[-length:], passes[-2 * length : -length]
            if len(before) == length and all(a.leases == b.leases for a, b in zip(last, before, strict=True)):
                return tuple(last)
        self.reason = "no pass has repeated itself yet"
        return None

    def _sizes(self, round_: tuple[PassOrder, ...]) -> Mapping[str, int]:
        """Return the bytes of each streamed page; empty, with `reason` set, if a programme cannot stream one."""
        ledger, sizes = self._ledger, {}
        overhead = ledger.levels[0].overhead_bytes
        for key in {key for one in round_ for keys in one.leases for key in keys}:
            page = ledger.pages.get(key)
            why = detour(ledger, page)
            if why:
                self.reason = f"{_layer(key)} ({why})"
                return {}
            if page.tally is not None:
                self.reason = f"{_layer(key)} (routed experts: tokens choose the pages)"
                return {}
            if page.home:
                sizes[key] = page.nbytes + overhead
        return sizes

    def last_order(self, phase: str) -> list[str]:
        """Return the pages of the last pass of a phase in order, repeats included; if it had none, those of the present
        pass or of another phase."""
        leases = self.orders.get(phase) or tuple(self._leases) or next(reversed(self.orders.values()), ())
        return [key for keys in leases for key in keys]

    def leave_out(self, phase: str, keys: Set[str]) -> None:
        """Expect no leases of some pages in passes of a phase."""
        self._history.clear()
        if phase in self.orders:
            self.orders[phase] = tuple(lease for lease in self.orders[phase] if not keys >= set(lease))

    def refusal(self) -> str | None:
        """Return why no programme can serve passes of this stack; None if one may, once they recur."""
        ledger = self._ledger
        policy = ledger.levels[0].policy
        if getattr(policy, "foresight", None) is None:
            return f"pages move, and {_without_foresight(policy)}"
        keys = tuple(page.key for page in list(ledger.pages.values()) if page.passes and page.put is None)
        before, self.reason = self.reason, ""
        self._sizes((PassOrder("", (keys,)),))
        found, self.reason = self.reason, before
        return found or None

    def told(self) -> str:
        """Return whether a programme is replayed, and why not, for people; "" where no page moves."""
        if not self._ledger.travellers:
            return ""
        replayed = self._ledger.running is not None
        return "replayed as a programme" if replayed else f"not replayed as a programme: {self.reason}"

    # -- programmes ---------------------------------------------------------------------------------------------------

    def _programme(self, round_: tuple[PassOrder, ...], sizes: Mapping[str, int]) -> Programme | None:
        """Return the programme of a round for the policy's state, cached or compiled now; None if decisions differ."""
        foresight = self._ledger.levels[0].policy.foresight
        if not foresight.steady:
            return None
        state = foresight.state()
        for known, programme in self._known:
            if programme.segments[0].state == state and [p.leases for p in known] == [p.leases for p in round_]:
                return programme
        programme = compile_programme(foresight.policy, round_, sizes)
        if programme is not None:
            self._known.append((round_, programme))
        return programme

    def _begin(self, programme: Programme, round_: tuple[PassOrder, ...]) -> bool:
        ledger = self._ledger
        if ledger.levels[0].leased or ledger.levels[0].pending:
            self.reason = "other passes are running"
            return False
        self._round = round_
        run = ledger.running = ProgrammeRun(ledger, self._mover, self._passes, programme)
        run.passed = self._passed
        try:
            if run.begin():
                self.reason = ""
                return True
            self.reason = "pages are in use by other passes"
        except TierError as error:  # device out of memory: fall back to lease by lease
            self.reason = str(error)
        self.end()
        return False

    def _passed(self, number: int) -> None:
        self._remember(self._round[number]._replace(phase=self._passes.phase))
        self._failures = 0

    def hurry(self) -> None:
        """Clear the back-off: attempt at the next pass."""
        self._wait = self._failures = 0

    def end(self) -> None:
        """End the run and hand decisions back to the policy. Call it within `ledger.deciding`."""
        ledger, run = self._ledger, self._ledger.running
        self._leases.clear()
        self._leases.extend(run.done())
        if ledger.guard.closed:
            run.drop()
        else:
            run.hand_over()
        run.unbind()
        ledger.running = None
        self._back_off()
        self.reason = self.reason or "the last pass used layers in another order"

    def drop(self) -> None:
        """End the run after an interrupted decision; the policies are reset."""
        self._ledger.running.drop()
        self._ledger.running.unbind()
        self._ledger.running = None
        self.forget()

    def forget(self) -> None:
        """Forget all passes."""
        self._history.clear()
        self._leases.clear()

    def _back_off(self) -> None:
        """Back off exponentially before the next attempt."""
        self._failures += 1
        self._wait = min(_LONGEST_WAIT, (1 << min(self._failures, 8)) >> 2)


def _without_foresight(policy: Policy) -> str:
    return f'policy "{policy.kind}" cannot predict its evictions ("scheduled" can)'


def _layer(key: str) -> str:
    return key.partition("#")[0]
