"""`vbrt plan --ranks N`: ways over several GPUs, compared."""

from typing import TYPE_CHECKING

from rich.console import Console

from vbrt.cli.screen import add_row, table_of
from vbrt.errors import VBError
from vbrt.residency.plan import Plan

if TYPE_CHECKING:
    from vbrt.estimation.ranks import Comparison

__all__ = ["print_ways", "ways_on"]


def ways_on(ranks: int, plan: Plan, link_gb_s: float) -> "Comparison":
    """Compare the ways on N GPUs: by what was measured on this machine, or by the figures of H200s."""
    from dataclasses import replace

    from vbrt.estimation.group_rates import kept_group_rates, nvlink_rates
    from vbrt.estimation.ranks import compare_ways
    from vbrt.estimation.rates import SHEETS, kept_rates

    if ranks < 2:
        raise VBError(f"--ranks {ranks}: expected 2 or more; one GPU is among the ways that are compared")
    rates, group = kept_rates(), kept_group_rates(ranks)
    if rates is None or not rates.link_gb_s:
        rates = replace(SHEETS["H200"], link_gb_s=link_gb_s)
    group = nvlink_rates(ranks) if group is None else group
    return compare_ways(plan, rates, replace(group, link_gb_s=min(group.link_gb_s, rates.link_gb_s)))


def print_ways(console: Console, found: "Comparison") -> None:
    """Print a row for each way, and what they say."""
    head = (">1 token ms", ">by", f">{found.tokens} tokens ms", ">by", ">tokens/s in all", ">streamed GB", ">host GB")
    table = table_of(f"on {found.ranks} GPUs", *head)
    for way in found.ways:
        one, many = way.pass_ms
        add_row(
            table,
            way.name,
            f"{one:.1f}",
            way.bound[0],
            f"{many:.0f}",
            way.bound[1],
            f"{way.tokens_s[1]:,.0f}",
            f"{way.streamed_gb:.1f}",
            f"{way.host_gb:.1f}",
        )
    console.print()
    console.print(table)
    console.print(f"rates: {found.source}", style="dim")
    for line in found.advice:
        console.print(line, highlight=False, soft_wrap=True)
