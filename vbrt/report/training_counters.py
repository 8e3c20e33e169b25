"""Counters of a model that trains from the tiers."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from vbrt.residency.byte_text import format_bytes

__all__ = ["UpdateStats"]


@dataclass(frozen=True, slots=True)
class UpdateStats:
    """What the updates of weights in the tiers cost a model.

    Attributes:
        kernel: what computes them.
        steps: of the weight that has had most.
        waiting: updates that are under way.
        wait_us: time for which layers have waited for their own update before they could be leased.
        clip_us: time that clipping took, which waits for all gradients.
        refreshed_bytes: copied into copies of pages that were rewritten.
        gradient_bytes: on the computing device, outside of the budgets, for gradients on their way.
    """

    kernel: str
    steps: int = 0
    waiting: int = 0
    wait_us: int = 0
    clip_us: int = 0
    refreshed_bytes: int = 0
    gradient_bytes: int = 0

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Read what `dataclasses.asdict` gives of it."""
        return cls(**data)

    def __str__(self) -> str:
        clipped = f", clipping {self.clip_us / 1e3:.1f} ms" if self.clip_us else ""
        return (
            f"updates: {self.steps} steps by {self.kernel} · layers waited {self.wait_us / 1e3:.1f} ms{clipped} · "
            f"gradients take {format_bytes(self.gradient_bytes)} of the device, outside the budgets"
        )

    def internals(self) -> str:
        """Return the counters that `str` leaves out, as text."""
        return f"updates: {self.waiting} in flight · {format_bytes(self.refreshed_bytes)} written to cached pages"
