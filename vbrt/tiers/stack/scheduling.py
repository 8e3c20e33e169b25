"""Protocols between a stack and its schedule: leases, runs, and CUDA graph recordings.

A schedule (`vbrt.tiers.schedule`) is passed to the stack's constructor. It watches the leases of passes, and may serve
a recurring round by a run, without policy decisions.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from vbrt.tiers.stack.slots import Borrower, Slot

__all__ = ["Borrowing", "GraphRecording", "Leased", "LeasedTensors", "Loan", "Run", "Schedule"]


class LeasedTensors(list):
    """Tensors of a lease that are identical at each repetition of the lease.

    Attributes:
        planes: cache for the borrower's objects made from the tensors; dropped with them.
    """

    __slots__ = ("planes",)

    def __init__(self, tensors: Iterable[dict[str, torch.Tensor]]) -> None:
        super().__init__(tensors)
        self.planes: Any = None


class Borrowing(Protocol):
    """Held pages, by any kind of lease.

    Attributes:
        keys: of the pages.
        slots: the held slots; empty where a run serves the pages.
        borrower: holder of the slots.
    """

    keys: Sequence[str]
    slots: Sequence[Slot]
    borrower: Borrower


class Leased(Borrowing, Protocol):
    """Lease of a stack. run: the run that serves it; None where the policy decides."""

    run: "Run | None"


class Run(Protocol):
    """Run that serves the leases of a recurring round. Methods take the stack's lock themselves unless said otherwise.

    Attributes:
        out: the open lease; None without one.
        thread: of the open lease, or of the last one.
    """

    out: Leased | None
    thread: int

    def lease(self, lease: Leased) -> LeasedTensors | None:
        """Return a lease's tensors if it is the next one of the round; else None: the policy decides."""

    def release(self, lease: Leased) -> bool:
        """End a lease; False if this run no longer owns it."""

    def begin_pass(self, phase: str, backward: str = "") -> bool:
        """Advance to the next pass of the round; False if the policy must see it. Call it under the lock."""


class Schedule(Protocol):
    """Schedule that watches passes and starts and ends runs. All methods run under the stack's lock.

    Attributes:
        reason: why no run is active, if known; "" while one is.
        enabled: False makes the policy decide every lease.
        orders: lease order of the last pass of each phase.
        note: called with the keys of each lease that the policy decides.
    """

    reason: str
    enabled: bool
    orders: Mapping[str, Sequence[tuple[str, ...]]]
    note: Callable[[Sequence[str]], None]

    def begin_pass(self, before: str, *, may_run: bool) -> None:
        """Note that the policies have begun a pass, after one of phase `before`; start a run if passes recur."""

    def end(self) -> None:
        """End the run and hand decisions back to the policy. Called within `ledger.deciding`."""

    def drop(self) -> None:
        """End the run without telling the policies, which are reset."""

    def hurry(self) -> None:
        """Clear the back-off: attempt at the next pass."""

    def refusal(self) -> str | None:
        """Return why no run is possible on this stack; None if one may start, once passes recur."""

    def told(self) -> str:
        """Return how leases are decided, as text for stats; "" where no page moves."""


class GraphRecording(Protocol):
    """CUDA graph capture of a pass."""

    @property
    def mine(self) -> bool:
        """True in the recording thread."""

    def begin(self) -> bool:
        """Start to record this thread's leases; False if that has started before."""

    def lease(self, keys: Sequence[str]) -> AbstractContextManager[LeasedTensors] | None:
        """Return a lease of pages that the recorded pass reads at places of their own; None: the stack leases them."""


class Loan(Protocol):
    """Room of the top tier that holds copies outside the policy, until pages need other homes."""

    def give_back(self) -> None:
        """Free the room, after the kernels and copies that use it. Idempotent."""
