"""Counters of optimizer updates in the tiers."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from vbrt.residency.byte_text import format_bytes

__all__ = ["UpdateStats"]


@dataclass(frozen=True, slots=True)
class UpdateStats:
    """Cost of optimizer updates of weights in the tiers.

    Attributes:
        kernel: backend of the update.
        steps: largest step count of any weight.
        waiting: updates in flight.
        wait_us: time that leases of layers waited for the layer's own update.
        clip_us: time of gradient clipping, which waits for all gradients.
        refreshed_bytes: written to cached copies of rewritten pages.
        gradient_bytes: on the computing device, outside the budgets, for gradients in transfer.
        ahead: updates made within the backward pass, before the step.
        discarded: updates made so that no step took: gradients, settings or states had changed.
        spare_bytes: of host memory, within the budgets, for updates before the step.
        update_us: time that updates computed, in the background.
    """

    kernel: str
    steps: int = 0
    waiting: int = 0
    wait_us: int = 0
    clip_us: int = 0
    refreshed_bytes: int = 0
    gradient_bytes: int = 0
    ahead: int = 0
    discarded: int = 0
    spare_bytes: int = 0
    update_us: int = 0

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Inverse of `dataclasses.asdict`."""
        return cls(**data)

    def __str__(self) -> str:
        clipped = f", clipping {self.clip_us / 1e3:.1f} ms" if self.clip_us else ""
        ahead = f" · {self.ahead} made before their step" if self.ahead else ""
        waited = f"layers waited {self.wait_us / 1e3:.1f} ms{clipped}"
        return (
            f"updates: {self.steps} steps by {self.kernel}{ahead} · {waited} · "
            f"gradients take {format_bytes(self.gradient_bytes)} of the device, outside the budgets"
        )

    def internals(self) -> str:
        """Return the counters that `str` leaves out, as text."""
        return (
            f"updates: {self.waiting} in flight · {self.discarded} made before their step and discarded · "
            f"{self.update_us / 1e3:.1f} ms of computing · {format_bytes(self.spare_bytes)} spare · "
            f"{format_bytes(self.refreshed_bytes)} written to cached pages"
        )
