"""Protocol of an attached model, for the runtime and its live samples."""

from typing import Protocol

from vbrt.model.expert_cache import ExpertCache
from vbrt.model.hosting import Hosting
from vbrt.model.layer_registry import Registry
from vbrt.model.throughput import Work
from vbrt.report.speculation_counters import SpeculationCounts
from vbrt.report.stats import Stats
from vbrt.residency.plan import Plan

__all__ = ["Attached"]


class Attached(Protocol):
    """Attached model; implemented by `Attachment`, see there for the attributes."""

    name: str
    prefix: str
    passes: int
    work: Work
    registry: Registry
    expert_cache: ExpertCache
    hosting: Hosting
    speculation: SpeculationCounts

    @property
    def alive(self) -> bool:
        """True while the model exists and its planes are not freed."""

    @property
    def plan(self) -> Plan:
        """Plan of the model, with the runtime's present budgets."""

    @property
    def unpaged_bytes(self) -> int:
        """Bytes on the computing device outside the budgets."""

    def materialize(self) -> None:
        """Encode every layer now."""

    def stats(self, *, experts: bool = False) -> Stats:
        """Return a frozen snapshot of the model's counters."""

    def close(self) -> None:
        """Free the pages of the model. Idempotent."""
