"""The one lock of a stack, and the bells of threads that wait for a change.

Ctrl-C may come anywhere: CPython raises it where a Python function begins, where a call into C has returned and where
a loop jumps back, in the main thread. So the lock and the bells are entered in C, nothing that takes a lock in Python
code (executors, conditions, semaphores) is entered under the lock, and a thread that waits looks again every second in
case nobody rang.
"""

import threading
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vbrt.report.routing_recorder import RoutingRecorder
    from vbrt.tiers.schedule.graph_capture import Recording
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
        recording: of a pass as a CUDA graph, while it is captured; None without one.
        waiting: threads that wait, and until when at least they do.
        routing: recorder of which experts tokens go to, set under the lock; None without one.
    """

    __slots__ = ("bells", "closed", "lock", "recorder", "recording", "routing", "waiting")

    def __init__(self) -> None:
        self.closed = False
        self.reset()

    def reset(self) -> None:
        """Return to the initial state, as a forked child must: nobody holds the lock and nobody waits."""
        self.lock = threading.RLock()
        self.bells: deque[threading.Lock] = deque()
        self.waiting: dict[int, float] = {}
        self.recorder: Recorder | None = None
        self.recording: Recording | None = None
        self.routing: RoutingRecorder | None = None

    def ring(self) -> None:
        """Wake all that wait: something has changed. Call it under the lock."""
        while self.bells:
            self.bells.popleft().release()

    def listen(self) -> threading.Lock:
        """Return a bell that rings at the next change. Call it under the lock; wait for the bell without the lock.

        A bell is a held lock. A condition or an event has locks of its own, which Ctrl-C between two lines of
        `threading` leaves held, or releases twice: at 4 and 6 of the places in one wait where CPython 3.11 and 3.12
        raise it, at 3 and 3 in 3.13; at none in a wait for a bell.
        """
        bell = threading.Lock()
        bell.acquire()
        self.bells.append(bell)
        return bell
