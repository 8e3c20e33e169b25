"""What a `ScheduledPolicy` is going to decide, as long as passes keep to the orders that it has learned.

A policy is deterministic: from the same state the same accesses lead to the same decisions. So whoever has seen the
decisions of a pass once need not ask for them again when the state comes back, and tells the policy afterwards that the
pass has happened.
"""

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from vbrt.residency.scheduled import ScheduledPolicy

__all__ = ["Foresight", "Residents"]


class Residents(NamedTuple):
    """The pages that a policy holds resident beside its pins, with the room that each takes.

    Attributes:
        staged, fresh: evictable ones, and those staged ahead; in the policy's order.
        unused: those of them that were staged ahead and have not been used since.
        resident_bytes: of all resident pages, pins included.
    """

    staged: tuple[tuple[str, int], ...]
    fresh: tuple[tuple[str, int], ...]
    unused: frozenset[str]
    resident_bytes: int

    @property
    def keys(self) -> tuple[str, ...]:
        """The pages."""
        return tuple(key for key, _ in (*self.staged, *self.fresh))


class Foresight:
    """Looks into a policy at the beginning of a pass, and lets whole passes be skipped.

    Attributes:
        policy: which may decide on a part of the pages only, within another one.
    """

    def __init__(self, policy: "ScheduledPolicy") -> None:
        self.policy = policy

    @property
    def steady(self) -> bool:
        """True at the beginning of a pass whose order is known, while no division of the room is being tried out."""
        policy = self.policy
        return not policy._record.keys and policy._rings.trial is None and policy._course.knows_order

    @property
    def pinned(self) -> tuple[str, ...]:
        """Pages that stay resident."""
        return tuple(self.policy._pages.pinned)

    @property
    def slot_bytes(self) -> int:
        """Bytes of each slot that the other pages pass through; 0 if every page takes its own bytes."""
        return self.policy._division.slot_bytes

    def room(self) -> tuple:
        """Return the room, how it is divided, and the pages that stay."""
        policy = self.policy
        return policy.capacity_bytes, policy._division, tuple(policy._pages.pinned)

    def state(self) -> tuple:
        """Return all that the decisions of the pass depend on, beside its accesses; the room comes first."""
        policy = self.policy
        return *self.room(), self.residents(), frozenset(policy._gone), policy._course.outlook()

    def residents(self) -> Residents:
        """Return the resident pages beside the pins."""
        policy, pages = self.policy, self.policy._pages
        return Residents(
            tuple(pages.staged.items()), tuple(pages.fresh.items()), frozenset(pages.unused), policy.resident_bytes
        )

    def assume(self, residents: Residents) -> None:
        """Take these pages, in the place of those beside the pins, for resident."""
        policy, pages = self.policy, self.policy._pages
        for known, now in ((pages.staged, residents.staged), (pages.fresh, residents.fresh)):
            known.clear()
            known.update(now)
        pages.unused.clear()
        pages.unused.update(residents.unused)
        policy.resident_bytes = residents.resident_bytes

    def skip_pass(self, after: Residents) -> None:
        """Note that all accesses of the pass have happened, in its order. `after`: what was resident after them."""
        policy = self.policy
        policy._record.add_all(policy._course.finish())
        self.assume(after)
