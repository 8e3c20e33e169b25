"""What a stack asks of a schedule, and a schedule of the stack's leases.

A schedule (`vbrt.tiers.schedule`) stands above the stack, which is given one as it is made. It watches the leases of
passes, and may serve those of a round that recurs by a run, without asking the policy.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch

from vbrt.tiers.stack.slots import Borrower, Slot

__all__ = ["Borrowing", "GraphRecording", "Leased", "LeasedTensors", "Run", "Schedule"]


class LeasedTensors(list):
    """The tensors of a lease that will be the very same when the lease comes again.

    Attributes:
        planes: what the borrower has made of them, for the next time; it is dropped with them.
    """

    __slots__ = ("planes",)

    def __init__(self, tensors: Iterable[dict[str, torch.Tensor]]) -> None:
        super().__init__(tensors)
        self.planes: Any = None


class Borrowing(Protocol):
    """Pages that are held, in whichever way.

    Attributes:
        keys: of the pages.
        slots: that are held; none where a run serves the pages.
        borrower: holds the slots.
    """

    keys: Sequence[str]
    slots: Sequence[Slot]
    borrower: Borrower


class Leased(Borrowing, Protocol):
    """A lease. run: that serves it; None where the policy decides."""

    run: "Run | None"


class Run(Protocol):
    """Serves the leases of a round that recurs. Takes the lock itself where it is not said to need it.

    Attributes:
        out: the lease that has not been released, if there is one.
        thread: that has it, or had the last one.
    """

    out: Leased | None
    thread: int

    def lease(self, lease: Leased) -> LeasedTensors | None:
        """Return a lease's tensors if it comes in its turn; else None: it is for the policy then."""

    def release(self, lease: Leased) -> bool:
        """End a lease; False if it is not this run's any more."""

    def begin_pass(self, phase: str, backward: str = "") -> bool:
        """Go on with the next pass of the round; False if the policy must see it. Under the lock."""


class Schedule(Protocol):
    """Watches passes, and begins and ends runs. Everything is called under the stack's lock.

    Attributes:
        reason: why nothing runs, as far as it is known; "" while something does.
        enabled: False to have the policy decide every lease.
        orders: the leases of the last pass of each phase.
        note: told the keys of each lease that the policy decides.
    """

    reason: str
    enabled: bool
    orders: Mapping[str, Sequence[tuple[str, ...]]]
    note: Callable[[Sequence[str]], None]

    def begin_pass(self, before: str, *, may_run: bool) -> None:
        """Note that the policies have begun a pass after one of the phase `before`; run one that recurs."""

    def end(self) -> None:
        """End the run: the policy decides again. Called within `ledger.deciding`."""

    def drop(self) -> None:
        """End the run without telling the policies, which are reset."""

    def hurry(self) -> None:
        """Do not wait for more passes before the next attempt."""

    def refusal(self) -> str | None:
        """Return why nothing can run here; None if something may, once passes recur."""

    def told(self) -> str:
        """Return who decides leases, for people; "" where no page moves."""


class GraphRecording(Protocol):
    """A pass that is recorded as a CUDA graph."""

    @property
    def mine(self) -> bool:
        """True in the thread that records."""

    def begin(self) -> bool:
        """Have what this thread leases from now on be recorded; False if that has been done."""
