"""Routed experts in `vbrt plan`: bytes of a cold token, and tokens a second by hit rate."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from rich.console import Console
from rich.table import Table

from vbrt.cli.screen import add_row, table_of
from vbrt.errors import ConfigError
from vbrt.residency.miss_policy import CPU_GB_PER_S, missed_gb_per_s
from vbrt.residency.plan import Plan, format_bytes
from vbrt.residency.routing_file import read_routing
from vbrt.residency.token_cost import HIT_RATES, TokenCost, fitted, simulated_hits, token_cost

__all__ = ["ExpertReport"]


@dataclass(frozen=True, slots=True)
class ExpertReport:
    """Cost of a token, assumed link rates, and hit rates: assumed ones, and simulated ones by policy. `cpu_gb_per_s`:
    assumed rate of experts computed by the CPU; `miss`: the config's `experts.miss`."""

    tier: str
    cost: TokenCost
    gb_per_s: Mapping[str, float]
    simulated: Mapping[str, float]
    miss: str = "fetch"
    cpu_gb_per_s: float = CPU_GB_PER_S

    @classmethod
    def of(cls, plan: Plan, gb_per_s: Mapping[str, float], routing: Path | None) -> Self | None:
        """Make a plan's report; None for a model without routed experts in the tiers.

        Raises:
            ArgumentError: the routing file cannot be read.
            ConfigError: the routing is of other layers.
        """
        cost = token_cost(plan)
        if cost is None:
            if routing is not None:
                raise ConfigError(f"--routing {routing}: no layer of routed experts goes into the tiers of this model")
            return None
        simulated = {}
        if routing is not None:
            recorded = fitted(read_routing(routing), plan, source=f"--routing {routing}")
            simulated = simulated_hits(recorded, cost.room_bytes) if cost.cold_bytes else {}
        rates = {tier: rate for tier, rate in gb_per_s.items() if tier in plan.budgets}
        return cls(plan.compute_tier, cost, rates, simulated)

    def to_dict(self) -> dict:
        """Return plain data for JSON."""
        cost, rates = self.cost, self.gb_per_s
        hits = {f"{rate:g}": rate for rate in HIT_RATES} | dict(self.simulated)
        return {
            "token_bytes": cost.experts_bytes,
            "cold_token_bytes": sum(cost.cold_bytes.values()),
            "streamed_bytes": sum(cost.streamed_bytes.values()),
            "room_bytes": cost.room_bytes,
            "assumed_gb_per_s": dict(rates),
            "simulated_hit_rates": dict(self.simulated),
            "tokens_per_s": {name: self._tokens_per_s(rate) for name, rate in hits.items() if cost.cold_bytes},
            "miss": self.miss,
        }

    @property
    def missed_gb_per_s(self) -> dict[str, float]:
        """Rates of missed experts by home, unless all are fetched."""
        if self.miss == "fetch" or self.tier == "cpu" or "cpu" not in self.gb_per_s:
            return {}
        return {"cpu": missed_gb_per_s(self.miss, self.gb_per_s["cpu"], self.cpu_gb_per_s)}

    def _tokens_per_s(self, hit_rate: float) -> float:
        return self.cost.tokens_per_s(hit_rate, self.gb_per_s, self.missed_gb_per_s)

    def print(self, console: Console) -> None:
        """Print it as tables."""
        cost = self.cost
        console.print()
        if not cost.cold_bytes:
            console.print(
                f"A token needs {format_bytes(cost.experts_bytes)} of experts; all live in the {self.tier} tier."
            )
            return
        share = min(1.0, cost.room_bytes / cost.all_bytes)
        console.print(
            f"A token needs {format_bytes(cost.experts_bytes)} of experts; the first one loads "
            f"{format_bytes(sum(cost.cold_bytes.values()))} of them. The {self.tier} tier has room for {share:.0%} of "
            f"the {format_bytes(cost.all_bytes)} that live below it."
        )
        if cost.streamed_bytes:
            streamed = format_bytes(sum(cost.streamed_bytes.values()))
            console.print(f"Every token also loads {streamed} of other layers, which that tier has no room for.")
        console.print()
        console.print(self._table())
        links = " and ".join(f"{self.gb_per_s[home]:g} GB/s from the {home} tier" for home in self._homes())
        console.print(f"By the links alone, with {links}; computing comes on top.")
        if self.missed_gb_per_s:
            together = f"{self.missed_gb_per_s['cpu']:g} GB/s of missed experts"
            console.print(f'experts.miss = "{self.miss}": {together}, with {self.cpu_gb_per_s:g} on the CPU.')

    def _homes(self) -> list[str]:
        return [home for home in self.gb_per_s if home in self.cost.cold_bytes or home in self.cost.streamed_bytes]

    def _table(self) -> Table:
        table = table_of("hit rate of experts", ">loads a token", ">tokens/s at most")
        rows = {f"{rate:.0%}": rate for rate in HIT_RATES}
        rows |= {f"{rate:.1%} simulated: {policy}": rate for policy, rate in self.simulated.items()}
        for name, rate in rows.items():
            loaded = self.cost.loaded_bytes(rate) + sum(self.cost.streamed_bytes.values())
            add_row(table, name, format_bytes(loaded), _rounded(self._tokens_per_s(rate)))
        return table


def _rounded(rate: float) -> str:
    return f"{rate:.0f}" if rate >= 100 else f"{rate:.3g}"
