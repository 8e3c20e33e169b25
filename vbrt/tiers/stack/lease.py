"""Leases: pages kept resident in the top tier for one `with` block."""

from collections.abc import Sequence
from typing import Protocol

import torch

from vbrt.host import accelerator
from vbrt.tiers.stack.decider import Decider
from vbrt.tiers.stack.event_recorder import LeaseNote
from vbrt.tiers.stack.ledger import Ledger
from vbrt.tiers.stack.mover import Mover
from vbrt.tiers.stack.scheduling import Run
from vbrt.tiers.stack.slots import Borrower, Slot, State
from vbrt.tiers.stack.stack_lock import Guard

__all__ = ["Lease", "Lender"]


class Lender(Protocol):
    """Stack that grants leases."""

    guard: Guard
    ledger: Ledger
    decider: Decider
    mover: Mover

    def capturing(self, keys: Sequence[str]) -> bool:
        """True if this thread's use of these pages is captured in a CUDA graph. Raises TierError: the pages move."""


class Lease:
    """Lease of pages, for one `with` block."""

    slots: Sequence[Slot] = ()
    note: LeaseNote | None = None
    run: Run | None = None

    def __init__(self, stack: Lender, keys: Sequence[str]) -> None:
        self.stack, self.keys = stack, keys

    def __enter__(self) -> list[dict[str, torch.Tensor]]:
        stack = self.stack
        running = stack.ledger.running
        if running is not None:
            tensors = running.lease(self)
            if tensors is not None:
                return tensors
        if stack.capturing(self.keys) and running is not None:
            tensors = running.lease(self)  # succeeds for the first captured lease
            if tensors is not None:
                return tensors
        recorder = stack.guard.recorder
        if recorder is not None:
            self.note = recorder.lease(self.keys)
        self.slots, self.borrower = [], Borrower()
        try:
            stack.decider.acquire(self)
            missing = [slot for slot in self.slots if slot.state is not State.READY]
            if missing:
                stack.mover.await_all(missing)
            for slot in self.slots:
                if slot.arrived is not None:
                    accelerator.current_stream(slot.level.tier.device).wait_event(slot.arrived)
            if self.note is not None:
                self.note.arrived(sum(slot.page.nbytes for slot in self.slots))
            return [slot.tensors for slot in self.slots]
        except BaseException:
            stack.decider.release(self)
            raise

    def __exit__(self, *exc_info: object) -> None:
        run = self.run
        if run is not None:
            try:
                if run.release(self):
                    return
            except BaseException:  # as below
                if run.out is self:
                    run.out = self.run = None
                raise
        if self.note is not None:
            self.note.done()
        if self.slots:
            try:
                self.stack.decider.release(self)
            except BaseException:  # Ctrl-C: a kept traceback would keep this lease alive
                self.stack.decider.release(self)
                raise

    def __del__(self) -> None:
        if self.slots or self.run is not None:  # Ctrl-C came between entering and the `with`, or before the exit began
            self.stack.ledger.lost.append(self)
