"""Search for the best ring length, by incremental simulation on the learned order, a few steps per access."""

from collections import deque
from collections.abc import Callable, Generator, Iterator
from itertools import islice

from vbrt.residency.room_division import Division

__all__ = ["RingSearch"]

_LONGEST_TRIAL = 8192  # accesses of a round that is tried out
_TRIAL_PACE = 32  # accesses that are tried out with each that happens: 0.1 ms, and a pass is enough for most
_SAME_ROOM = 8  # a room that has changed by less than this part of it keeps the ring that was found for it


class RingSearch:
    """Searches the number of slots, beyond those of one lease and the pages staged ahead, that moves the fewest bytes.

    A pass that uses pages more than once may be served better by a longer ring than by more pins: activation
    checkpointing runs a block forward again just before it runs it backward, and a ring with room for the block saves
    the second read. The search begins once an order has repeated, and its result stays while the room changes little.

    Attributes:
        extra: the slots that are in use.
        trial: the search that is under way, or None.
        enabled: False for a policy that is itself a trial.
    """

    def __init__(
        self, divided: Callable[[int], Division], steady_bytes: Callable[[Division], Generator[None, None, int]]
    ) -> None:
        """divided: returns the division with so many extra slots. steady_bytes: a generator that returns the bytes
        that a steady round moves under a division; each step simulates one access."""
        self._divided, self._steady_bytes = divided, steady_bytes
        self.extra, self.enabled = 0, True
        self._room = 0  # that `extra` was found for; 0: not yet
        self._steady = 0  # passes of this round in this room
        self.trial: Iterator[None] | None = None
        self._found: int | None = None  # by the trial

    def restart(self, *, room: int | None = None) -> None:
        """Begin again, because the order or the room has changed. A `room` in bytes that is about the one of the last
        search keeps that one's result."""
        self.trial, self._found, self._steady = None, None, 0
        if room is None or abs(room - self._room) * _SAME_ROOM >= self._room:
            self.extra = self._room = 0

    def skip_pass(self) -> None:
        """Do not count the pass under way: it began in another room."""
        self._steady -= 1

    def settle(self, order: tuple[str, ...], division: Division, room: int) -> bool:
        """Note that the order has repeated: use what was found, or begin to search. True if `extra` has changed."""
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
        """Go on with the search for some accesses."""
        deque(islice(self.trial, _TRIAL_PACE), maxlen=0)

    def _trials(self, order: tuple[str, ...], division: Division) -> Iterator[None]:
        fewest, best, longer = (yield from self._steady_bytes(division)), 0, None
        for extra in (2**power for power in range(1, len(order).bit_length() + 1)):
            shorter, longer = longer, self._divided(extra)
            if longer == shorter:
                break  # there is no room for more
            moved = yield from self._steady_bytes(longer)
            if moved < fewest:
                fewest, best = moved, extra
        self._found = best
