"""Streamed and hosted weights in `vbrt plan`: a decode step by link and CPU."""

from dataclasses import dataclass
from typing import Any, Self

from rich.console import Console

from vbrt.config import VBConfig
from vbrt.config.tier_records import TIERS
from vbrt.residency.hosted_share import CALL_S, MORE, HostRates, Sides, planned_sides
from vbrt.residency.plan import Plan, format_bytes

__all__ = ["StreamingReport"]


@dataclass(frozen=True, slots=True)
class StreamingReport:
    """Bytes and seconds of a token's pass with link and CPU together, and with the link alone; rates in GB/s."""

    together: Sides
    alone: Sides
    link_gb_per_s: float
    cpu_gb_per_s: float

    @classmethod
    def of(cls, plan: Plan, config: VBConfig, link_gb_per_s: float, cpu_gb_per_s: float) -> Self | None:
        """Make a plan's report; None if nothing streams, if slower links than that of host memory do, or with routed
        experts, which `ExpertReport` is for."""
        top = plan.compute_tier
        homes = {page.home for swap in plan.swaps for page in swap.leased} - {top}
        if plan.routed or plan.mode != "infer" or TIERS[top].hosts or not all(TIERS[home].hosts for home in homes):
            return None
        rates = HostRates(1e9 * link_gb_per_s, 1e9 * cpu_gb_per_s, MORE, CALL_S)
        together, alone = (
            planned_sides(plan, rates, where=where, prefetch=config.policy.prefetch)[1]
            for where in (config.compute.where, "device")
        )
        return cls(together, alone, link_gb_per_s, cpu_gb_per_s) if alone.streamed_bytes else None

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return {
            "streamed_bytes": self.together.streamed_bytes,
            "hosted_bytes": self.together.hosted_bytes,
            "link_ms": 1e3 * self.together.link_s,
            "cpu_ms": 1e3 * self.together.cpu_s,
            "ms": 1e3 * self.together.pass_s,
            "link_alone_ms": 1e3 * self.alone.pass_s,
            "assumed_gb_per_s": {"link": self.link_gb_per_s, "cpu": self.cpu_gb_per_s},
        }

    def print(self, console: Console) -> None:
        """Print it as a paragraph."""
        both, link = self.together, f"{self.link_gb_per_s:g} GB/s over the link"
        copied = f"{format_bytes(both.streamed_bytes)} are copied to the GPU"
        takes = f"{1e3 * both.pass_s:.1f} ms, {1 / both.pass_s:.3g} tokens/s at most, with {link}"
        console.print()
        if both.hosted_bytes:
            console.print(
                f"For each token, {format_bytes(both.hosted_bytes)} of weights are computed by the CPU where they lie, "
                f"while {copied}: {takes} and {self.cpu_gb_per_s:g} on the CPU. The link alone takes "
                f'{1e3 * self.alone.pass_s:.1f} ms (compute.where = "device").'
            )
        else:
            console.print(f"For each token, {copied}: {takes}.")
        console.print("By link and CPU alone; computing on the GPU comes on top.")
