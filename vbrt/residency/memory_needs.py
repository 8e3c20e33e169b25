"""Memory needs of a plan, per tier of a machine."""

from collections.abc import Sequence
from dataclasses import dataclass

from vbrt.config import Machine
from vbrt.config.tier_records import TIERS
from vbrt.residency.plan import Plan

__all__ = ["TierNeed", "machine_bytes", "tier_needs"]


@dataclass(frozen=True, slots=True)
class TierNeed:
    """Memory need of a plan in one tier, in bytes.

    pages, home_bytes: number and bytes of the pages at home there. least_bytes: the minimum for the plan to work (pages
    at home, the largest layer if pages pass through, and in the computing tier unswapped parameters). most_bytes: upper
    bound. machine_bytes: free memory; None if unknown.
    """

    tier: str
    budget_bytes: int
    pages: int
    home_bytes: int
    least_bytes: int
    most_bytes: int
    machine_bytes: int | None

    @property
    def fits(self) -> bool:
        """True if the machine has `least_bytes` free, or its memory is unknown."""
        return self.machine_bytes is None or self.least_bytes <= self.machine_bytes


def tier_needs(plan: Plan, machine: Machine) -> list[TierNeed]:
    """Return the need of each tier in use, the computing one first."""
    has = machine_bytes(machine)
    largest = plan.largest_layer_bytes
    needs = []
    tiers = list(plan.budgets)
    for depth, tier in enumerate(tiers):
        pages = [page for swap in plan.swaps for page in swap.pages if page.home == tier]
        home = sum(page.nbytes + TIERS[tier].overhead_bytes for page in pages)
        below = TIERS[tier].passes * _passing_bytes(plan, tiers[depth + 1 :])
        kept = plan.unbudgeted_bytes if depth == 0 else 0
        needs.append(
            TierNeed(
                tier,
                plan.budgets[tier],
                len(pages),
                home,
                home + kept + (largest if below else 0),
                min(plan.budgets[tier], home + below) + kept,
                has[tier],
            )
        )
    return needs


def machine_bytes(machine: Machine) -> dict[str, int | None]:
    """Return the free memory of each tier; None if unknown."""
    has = {"gpu": machine.gpu_free_bytes, "peer": machine.peers * machine.peer_free_bytes}
    return has | {"cpu": machine.cpu_available_bytes, "ssd": machine.ssd_free_bytes}


def _passing_bytes(plan: Plan, tiers: Sequence[str]) -> int:
    """Return the bytes of the pages at home in the given tiers that pass through the tiers above."""
    pages = (page for swap in plan.swaps for page in swap.pages if page.home in tiers and not page.by_rows)
    return sum(page.nbytes for page in pages)
