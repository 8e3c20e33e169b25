"""Which phases passes have, what each has learned, and where the pass under way is in its order."""

from bisect import bisect_left
from collections.abc import Collection, Iterator, Sequence
from itertools import chain

from vbrt.residency.pass_order import Order
from vbrt.residency.policy import FORWARD

__all__ = ["Course", "Phases"]

_MOST_PHASES = 16  # orders that are remembered: users may name each request's phase
_MOST_REPEATS = 4  # times that a phase which repeats itself counts in a round


class Phases:
    """The learned order of each phase, and which phase follows which.

    What follows a phase is what followed it last, once that has happened twice in a row (at first: once), so that a
    single evaluation between training steps changes nothing. A phase that repeats itself is expected to do so as
    often as last time.

    Attributes:
        current: the phase of the pass under way.
        orders: by phase; a phase without one has not ended a pass yet.
        changed: whether `round` may give another result than before; to be cleared by who asks.
    """

    def __init__(self) -> None:
        self.current = FORWARD
        self.orders: dict[str, Order] = {}
        self._count = 1  # passes of the current phase in a row, the one under way included
        self._last_run: dict[str, int] = {}  # passes in the last completed row
        self._longest_run: dict[str, int] = {}
        self._after: dict[str, str] = {}
        self._latest: dict[str, str] = {}
        self.changed = False

    def begin(self, phase: str) -> None:
        """Note that a pass of `phase` follows the one under way."""
        before = self.current
        if phase == before:
            self._count += 1
            if self._count > self._longest_run.get(phase, 1):
                self._longest_run[phase], self.changed = self._count, self.changed or self._count <= _MOST_REPEATS
            return
        self._last_run[before] = self._count
        self.replace(phase)
        if self._latest.get(before) == phase or before not in self._after:
            self._after[before] = phase
        self._latest[before] = phase

    def replace(self, phase: str) -> None:
        """Note that the pass under way, which has no accesses yet, is one of `phase`."""
        self.current, self._count, self.changed = phase, 1, True

    def learn(self, order: Order) -> None:
        """Set the current phase's order; the phase learned first is forgotten where there are too many."""
        self.orders[self.current], self.changed = order, True
        if len(self.orders) > _MOST_PHASES:
            oldest = next(phase for phase in self.orders if phase != self.current)
            for known in (self.orders, self._last_run, self._longest_run, self._after, self._latest):
                known.pop(oldest, None)

    def expected(self) -> str:
        """Return the phase that the next pass should have."""
        return self._following(self.current, self._count)

    def _following(self, phase: str, count: int) -> str:
        return self._after.get(phase, phase) if count == self._last_run.get(phase) else phase

    def ahead(self) -> Iterator[Order | None]:
        """Yield the orders of the expected passes, nearest first, until one of the current phase or a repetition; None
        for a phase that has no order yet."""
        phase, count, seen = self.current, self._count, set()
        while phase not in seen:
            following = self._following(phase, count)
            phase, count = following, count + 1 if following == phase else 1
            yield self.orders.get(phase)
            if phase == self.current:
                return
            seen.add(phase)

    def round(self, guess: Order) -> tuple[str, ...]:
        """Return the accesses of one round: the phases that recur from here, each followed by the one that follows it.

        A phase that repeats itself counts up to four times; one without an order yet is expected to have the `guess`.
        Phases that all have one order are one pass of it.
        """
        orders = [(phase, self.orders.get(phase, guess).keys) for phase in self._recurring()]
        if all(keys == orders[0][1] for _, keys in orders):
            return orders[0][1]
        return tuple(chain(*(keys * min(self._longest_run.get(p, 1), _MOST_REPEATS) for p, keys in orders)))

    def _recurring(self) -> list[str]:
        """Return the phases that follow each other in a circle, the one that was learned first in front."""
        seen, phase = [], self.current
        while phase not in seen:
            seen.append(phase)
            phase = self._after.get(phase, phase)
        circle = seen[seen.index(phase) :]
        first = next((circle.index(known) for known in self.orders if known in circle), 0)
        return circle[first:] + circle[:first]


class Course:
    """Follows the pass under way through the order of its phase, and knows which pages come next.

    The first pass of a further phase goes by the order of the phase before, as long as it follows it.

    Attributes:
        phases: all phases and their orders.
        order: the one that the pass under way goes by.
        streams: whether any page of this pass and the next ones is not pinned.
    """

    def __init__(self) -> None:
        self.phases = Phases()
        self.order = Order()
        self.streams = False
        self._guessed = False  # whether the order is another phase's
        self._cursor = 0  # positions of the order that are done; its length at the end

    def advance(self, key: str, fresh: Collection[str]) -> Sequence[str]:
        """Move the cursor past `key`; return those of the pages in `fresh` that are not needed soon any more."""
        order, cursor = self.order, self._cursor
        if cursor < len(order.keys) and order.keys[cursor] == key:  # nearly always; the rest is for other orders
            self._cursor = cursor + 1
            return ()
        if self._guessed:
            self.order, self._guessed, self.streams, self._cursor = Order(), False, False, 0
            return list(fresh)
        if key not in order.places:
            return ()
        jumped, late = order.distance(key, cursor), ()
        if jumped:
            own = [other for other in fresh if other != key and other in order.places]
            late = [other for other in own if order.distance(other, cursor) < jumped]
        self._cursor = (cursor + jumped) % len(order.keys) + 1
        return late

    @property
    def knows_order(self) -> bool:
        """True if the phase of the pass under way has an order of its own."""
        return not self._guessed and bool(self.order.keys)

    def outlook(self) -> tuple:
        """Return where the pass under way is, and what is expected of it and after it."""
        following = tuple(order.keys for order in self._following())
        return self.order.keys, self._cursor, self._guessed, self.streams, following

    def finish(self) -> Order:
        """Move the cursor to the end of the order of the pass under way; return the order."""
        self._cursor = len(self.order.keys)
        return self.order

    @property
    def finished(self) -> bool:
        """True if the pass under way is at the end of its order, or has none."""
        return not self._cursor % max(1, len(self.order.keys))

    def start(self, phase: str, *, after_accesses: bool) -> bool:
        """Begin a pass of the named phase; the one before has been learned.

        Args:
            phase: its name.
            after_accesses: whether the pass before had any; else this one takes its place.

        Returns:
            Whether the pass goes by the order that was expected.
        """
        phases = self.phases
        expected = phases.orders.get(phases.expected(), self.order)
        if after_accesses:
            phases.begin(phase)
        else:
            phases.replace(phase)
        self._cursor, self._guessed = 0, phase not in phases.orders
        self.order = phases.orders.get(phase, self.order)
        return self.order is expected or self.order.keys == expected.keys

    def learn(self, current: tuple[str, ...]) -> tuple[bool, bool]:
        """Learn from the accesses of the pass that has ended.

        Returns:
            Whether they were the order that it went by, and whether its phase has another order now.
        """
        order = self.order
        repeated = current == order.keys
        if not self._guessed:
            stopped, order.stopped = order.stopped, 0
            if repeated:
                return True, False
            if current == order.keys[: len(current)]:
                if not stopped:
                    order.stopped = len(current)
                    return False, False
                current = order.keys[: max(stopped, len(current))]
        self.order = Order(current)
        self.phases.learn(self.order)
        return repeated, True

    def keys(self) -> Iterator[str]:
        """Yield the pages of all orders."""
        return chain(*(order.places for order in self.phases.orders.values()))

    def stream(self, pinned: Collection[str]) -> None:
        """Note what the pass under way and those expected after it stream."""
        orders = [self.order, *self._following()]
        for order in orders:
            order.stream(pinned)
        self.streams = any(order.streamed for order in orders)

    def _following(self) -> Iterator[Order]:
        """Yield the orders of the passes that are expected after the one under way."""
        return (order or self.order for order in self.phases.ahead())

    def upcoming(self) -> Iterator[str]:
        """Yield the pages that are streamed, from the cursor on, across the end of the pass into the next ones."""
        order, cursor = self.order, self._cursor
        for at in range(bisect_left(order.streamed, cursor), len(order.streamed)):
            yield order.keys[order.streamed[at]]
        for following in self._following():
            for place in following.streamed:
                if place >= cursor and following is order:
                    break
                yield following.keys[place]
