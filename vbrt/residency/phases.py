"""Phases of passes: learned orders, prediction of the next phase, and the cursor of the current pass."""

from bisect import bisect_left
from collections.abc import Collection, Iterator, Sequence
from itertools import chain

from vbrt.residency.pass_order import Order
from vbrt.residency.policy import FORWARD

__all__ = ["Course", "Phases"]

_MOST_PHASES = 16  # remembered orders: users may name a phase per request
_MOST_REPEATS = 4  # most repetitions of a phase in a round


class Phases:
    """Learned order of each phase, and transitions between phases.

    The predicted successor of a phase is its last successor, once seen twice in a row (the first one: once), so that a
    single evaluation between training steps changes nothing. A repeating phase is predicted to repeat as often as last
    time.

    Attributes:
        current: phase of the current pass.
        orders: by phase; a phase without an order has not completed a pass yet.
        changed: True if the result of `round` may have changed; the caller clears it.
    """

    def __init__(self) -> None:
        self.current = FORWARD
        self.orders: dict[str, Order] = {}
        self._count = 1  # consecutive passes of the current phase, the current one included
        self._last_run: dict[str, int] = {}  # passes in its last completed run
        self._longest_run: dict[str, int] = {}
        self._after: dict[str, str] = {}
        self._latest: dict[str, str] = {}
        self.changed = False

    def begin(self, phase: str) -> None:
        """Note that a pass of `phase` follows the current one."""
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
        """Change the phase of the current pass, which has no accesses yet."""
        self.current, self._count, self.changed = phase, 1, True

    def learn(self, order: Order) -> None:
        """Set the current phase's order; beyond the limit, forget the phase learned first."""
        self.orders[self.current], self.changed = order, True
        if len(self.orders) > _MOST_PHASES:
            oldest = next(phase for phase in self.orders if phase != self.current)
            for known in (self.orders, self._last_run, self._longest_run, self._after, self._latest):
                known.pop(oldest, None)

    def expected(self) -> str:
        """Return the predicted phase of the next pass."""
        return self._following(self.current, self._count)

    def _following(self, phase: str, count: int) -> str:
        return self._after.get(phase, phase) if count == self._last_run.get(phase) else phase

    def ahead(self) -> Iterator[Order | None]:
        """Yield the orders of the predicted passes, nearest first, up to the current phase or a repetition; None for a
        phase without an order."""
        phase, count, seen = self.current, self._count, set()
        while phase not in seen:
            following = self._following(phase, count)
            phase, count = following, count + 1 if following == phase else 1
            yield self.orders.get(phase)
            if phase == self.current:
                return
            seen.add(phase)

    def round(self, guess: Order) -> tuple[str, ...]:
        """Return the accesses of one round: the cycle of predicted phases.

        A repeating phase counts up to `_MOST_REPEATS` times; a phase without an order gets the `guess`. If all phases
        have the same order, the round is one pass of it.
        """
        orders = [(phase, self.orders.get(phase, guess).keys) for phase in self._recurring()]
        if all(keys == orders[0][1] for _, keys in orders):
            return orders[0][1]
        return tuple(chain(*(keys * min(self._longest_run.get(p, 1), _MOST_REPEATS) for p, keys in orders)))

    def _recurring(self) -> list[str]:
        """Return the cycle of phases, starting with the one learned first."""
        seen, phase = [], self.current
        while phase not in seen:
            seen.append(phase)
            phase = self._after.get(phase, phase)
        circle = seen[seen.index(phase) :]
        first = next((circle.index(known) for known in self.orders if known in circle), 0)
        return circle[first:] + circle[:first]


class Course:
    """Cursor of the current pass in its phase's order, and prediction of the next pages.

    The first pass of a new phase is predicted by the order of the previous phase, as long as it matches.

    Attributes:
        phases: all phases and their orders.
        order: the order that predicts the current pass.
        streams: True if any page of this pass or the next ones is unpinned.
    """

    def __init__(self) -> None:
        self.phases = Phases()
        self.order = Order()
        self.streams = False
        self._guessed = False  # True if the order is another phase's
        self._cursor = 0  # position in the order; its length at the end

    def advance(self, key: str, fresh: Collection[str]) -> Sequence[str]:
        """Advance the cursor past `key`; return the pages in `fresh` that are no longer needed soon."""
        order, cursor = self.order, self._cursor
        if cursor < len(order.keys) and order.keys[cursor] == key:  # the common case; the rest handles deviations
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
        """True if the current pass's phase has its own order."""
        return not self._guessed and bool(self.order.keys)

    def outlook(self) -> tuple:
        """Return the state of the prediction: position, and the predicted rest of this pass and next ones."""
        following = tuple(order.keys for order in self._following())
        return self.order.keys, self._cursor, self._guessed, self.streams, following

    def finish(self) -> Order:
        """Advance the cursor to the end of the order; return the order."""
        self._cursor = len(self.order.keys)
        return self.order

    @property
    def finished(self) -> bool:
        """True if the current pass is at the end of its order, or has none."""
        return not self._cursor % max(1, len(self.order.keys))

    def start(self, phase: str, *, after_accesses: bool) -> bool:
        """Begin a pass of the named phase, after the previous one has been learned.

        Args:
            phase: its name.
            after_accesses: False if the previous pass had no accesses: then this one replaces it.

        Returns:
            True if the pass has the predicted order.
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
        """Learn from the accesses of the completed pass.

        Returns:
            Whether they matched the predicted order, and whether the phase's order has changed.
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
        """Set the pinned pages in the orders of the current and the predicted passes."""
        orders = [self.order, *self._following()]
        for order in orders:
            order.stream(pinned)
        self.streams = any(order.streamed for order in orders)

    def _following(self) -> Iterator[Order]:
        """Yield the orders of the passes predicted after the current one."""
        return (order or self.order for order in self.phases.ahead())

    def upcoming(self) -> Iterator[str]:
        """Yield the streamed pages from the cursor on, across the end of the pass into the predicted ones."""
        order, cursor = self.order, self._cursor
        for at in range(bisect_left(order.streamed, cursor), len(order.streamed)):
            yield order.keys[order.streamed[at]]
        for following in self._following():
            for place in following.streamed:
                if place >= cursor and following is order:
                    break
                yield following.keys[place]
