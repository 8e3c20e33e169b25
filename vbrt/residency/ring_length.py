"""Search for the best ring length, by incremental simulation on the learned order, a few steps per access."""

from collections import deque
from collections.abc import Callable, Generator, Iterator
from itertools import islice

from vbrt.residency.room_division import Division

__all__ = ["RingSearch"]

_LONGEST_TRIAL = 8192  # longest round to search for, in accesses
_TRIAL_PACE = 32  # accesses simulated per real access: 0.1 ms; most searches end within a pass
_SAME_ROOM = 8  # a room changed by less than 1/_SAME_ROOM keeps its ring length


class RingSearch:
    """Search for the number of extra ring slots, beyond one lease and the prefetch depth, that moves the fewest bytes.

    For passes that use pages more than once, a longer ring may beat more pins: activation checkpointing recomputes a
    block just before its backward, and a ring with room for the block saves the second copy. The search starts once an
    order has repeated; its result is kept while the room changes little.

    Attributes:
        extra: extra slots in use.
        trial: the running search, or None.
        enabled: False for a policy that is itself a simulation.
    """

    def __init__(
        self, divided: Callable[[int], Division], steady_bytes: Callable[[Division], Generator[None, None, int]]
    ) -> None:
        """divided: extra slots -> division. steady_bytes: division -> generator that simulates one access per step and
        returns the bytes moved by a steady round."""
        self._divided, self._steady_bytes = divided, steady_bytes
        self.extra, self.enabled = 0, True
        self._room = 0  # that `extra` was found for; 0: not searched yet
        self._steady = 0  # repeated passes of this order in this room
        self.trial: Iterator[None] | None = None
        self._found: int | None = None  # result of the trial

    def restart(self, *, room: int | None = None) -> None:
        """Restart after a change of the order or the room. A `room` (bytes) close to that of the last search keeps its
        result."""
        self.trial, self._found, self._steady = None, None, 0
        if room is None or abs(room - self._room) * _SAME_ROOM >= self._room:
            self.extra = self._room = 0

    def skip_pass(self) -> None:
        """Exclude the current pass from the count: it began with another room."""
        self._steady -= 1

    def settle(self, order: tuple[str, ...], division: Division, room: int) -> bool:
        """Note that the order has repeated: apply the search's result, or start a search. True if `extra` changed."""
        self._steady += 1
        if self._found is not None:
            self.extra, self._room = self._found, room
            self.trial = self._found = None
            return self.extra > 0
        if self._steady == 1 and not self._room and self.enabled:
            self._begin(order, division)
        return False

    def _begin(self, order: tuple[str, ...], division: Division) -> None:
        distinct = len(set(order))
        if distinct < len(order) <= _LONGEST_TRIAL and len(division.pins) < distinct:
            self.trial = self._trials(order, division)

    def step(self) -> None:
        """Advance the search by `_TRIAL_PACE` accesses."""
        deque(islice(self.trial, _TRIAL_PACE), maxlen=0)

    def _trials(self, order: tuple[str, ...], division: Division) -> Iterator[None]:
        fewest, best, longer = (yield from self._steady_bytes(division)), 0, None
        for extra in (2**power for power in range(1, len(order).bit_length() + 1)):
            shorter, longer = longer, self._divided(extra)
            if longer == shorter:
                break  # no room for more
            moved = yield from self._steady_bytes(longer)
            if moved < fewest:
                fewest, best = moved, extra
        self._found = best
