"""The one lock of a stack, the bells of threads that wait for a change, and what holds when Ctrl-C comes.

Interrupts
----------
Ctrl-C may cost the call that it comes in, and may be late. It loses no page, and the next call works.

CPython raises it in the main thread: where a Python function begins, behind a call that went through C, where a loop
jumps back, in everybody's code. It is not held back: that takes two system calls a lease, and does nothing for programs
that raise by themselves. Instead:

- The lock is a `with` on an RLock, which C enters and leaves. A bell is a held lock, waited for without the stack's.
  Python code that takes locks (conditions, events, executors, an `__enter__` of one's own) is not entered under it: of
  the places in one wait where Ctrl-C can come, a Condition leaves a lock held, or releases one twice, at 4, an Event at
  6 (CPython 3.11, 3.12; 3.13: 3 and 3), a bell at none. A thread that waits looks every second in case nobody rang.
- Books are written within `ledger.deciding` or `ledger.writing`. What is left early is torn, and whoever writes next
  resets it: the policies begin again, copies go as soon as nobody uses them, a programme's run ends.
- Pages at home, and the room that a page has, are not reset. They change hands in stores with no call in between. Room
  is not returned, since a signal may come before the caller has stored it: `tier.reserve` writes it into its holder.
- What takes several steps is ended or undone by the next access: a page between two homes, a copy whose thread is not
  at it any more, a lease that was collected. So releasing is idempotent, and holders are sets.

One place costs more than the call: at the very entry of `Lease.__exit__`, where somebody keeps the traceback (an
interactive session does, as `sys.last_traceback`), the lease lasts as long as that, and its room is missing until then.

`scripts/torture.py` delivers Ctrl-C at every place of every operation and compares what tiers count with what pages
hold; tests run a sample.
"""

import threading
from collections import deque

from vbrt.report.routing_recorder import RoutingRecorder
from vbrt.tiers.stack.event_recorder import Recorder

__all__ = ["LOOK_SECONDS", "Guard"]

LOOK_SECONDS = 1.0  # a thread that waits looks this often: a lease may be collected, or a bell lost, unnoticed


class Guard:
    """Guards the decisions of a stack.

    Attributes:
        lock: held while the books are read or written.
        bells: of threads that wait for a change.
        closed: True once the stack is closed.
        recorder: of a timeline, set under the lock; None without one.
        waiting: threads that wait, and until when at least they do.
        routing: recorder of which experts tokens go to, set under the lock; None without one.
    """

    __slots__ = ("bells", "closed", "lock", "recorder", "routing", "waiting")

    def __init__(self) -> None:
        self.closed = False
        self.reset()

    def reset(self) -> None:
        """Return to the initial state, as a forked child must: nobody holds the lock and nobody waits."""
        self.lock = threading.RLock()
        self.bells: deque[threading.Lock] = deque()
        self.waiting: dict[int, float] = {}
        self.recorder: Recorder | None = None
        self.routing: RoutingRecorder | None = None

    def ring(self) -> None:
        """Wake all that wait: something has changed. Call it under the lock."""
        while self.bells:
            self.bells.popleft().release()

    def listen(self) -> threading.Lock:
        """Return a bell that rings at the next change. Call it under the lock; wait for the bell without the lock."""
        bell = threading.Lock()
        bell.acquire()
        self.bells.append(bell)
        return bell
