"""Lock of a stack, wake-up of waiting threads, and guarantees under Ctrl-C.

Interrupts
----------
Ctrl-C may abort the call that it interrupts, and may arrive late. It loses no page, and the next call works.

CPython raises KeyboardInterrupt in the main thread at function entries, after calls into C, and at loop back-edges, in
any code. It is not masked: that takes two system calls per lease, and does not help programs that raise on their own.
Instead:

- The lock is a `with` on an RLock, entered and left in C. A bell is a held lock, waited for without the stack's lock.
  Python code that takes locks (conditions, events, executors, an own `__enter__`) is not entered under it: of the
  interruptible places in one wait, a Condition leaves a lock held, or releases one twice, at 4, an Event at 6 (CPython
  3.11, 3.12; 3.13: 3 and 3), a bell at none. Waiting threads poll every second, in case a wake-up is lost.
- The ledger is written within `ledger.deciding` or `ledger.writing`. An interrupted block leaves it torn, and the next
  writer resets it: policies restart, copies are evicted once unused, a programme's run ends.
- Homes and rooms of pages are not reset. They change owner by stores with no call in between. `tier.reserve` does not
  return the room, since a signal may come before the caller stores it: it writes the room into its holder.
- Multi-step operations are completed or rolled back by the next access: a page between two homes, a load that its
  thread has left, a collected lease. So releasing is idempotent, and holders are sets.

One exception: after an interrupt at the very entry of `Lease.__exit__`, a kept traceback (in an interactive session:
`sys.last_traceback`) keeps the lease, and its room, as long as the traceback lives.

`scripts/torture.py` delivers Ctrl-C at every place of every operation and compares the counters of tiers with the bytes
of pages; tests run a sample.
"""

import threading
from collections import deque

from vbrt.report.routing_recorder import RoutingRecorder
from vbrt.tiers.stack.event_recorder import Recorder

__all__ = ["LOOK_SECONDS", "Guard"]

LOOK_SECONDS = 1.0  # polling interval of waiting threads: a lost lease or wake-up goes unnoticed otherwise


class Guard:
    """Guard of a stack's state.

    Attributes:
        lock: held while the ledger is read or written.
        bells: of threads that wait for a change.
        closed: True once the stack is closed.
        recorder: of a timeline, set under the lock; None without one.
        waiting: by thread, the time (`time.monotonic`) until which it waits at least.
        routing: recorder of expert routing, set under the lock; None without one.
    """

    __slots__ = ("bells", "closed", "lock", "recorder", "routing", "waiting")

    def __init__(self) -> None:
        self.closed = False
        self.reset()

    def reset(self) -> None:
        """Reset to the initial state, in a forked child: lock free, no thread waiting."""
        self.lock = threading.RLock()
        self.bells: deque[threading.Lock] = deque()
        self.waiting: dict[int, float] = {}
        self.recorder: Recorder | None = None
        self.routing: RoutingRecorder | None = None

    def ring(self) -> None:
        """Wake all waiting threads after a change. Call it under the lock."""
        while self.bells:
            self.bells.popleft().release()

    def listen(self) -> threading.Lock:
        """Return a bell that rings at the next change. Call it under the lock; wait for the bell without the lock."""
        bell = threading.Lock()
        bell.acquire()
        self.bells.append(bell)
        return bell
