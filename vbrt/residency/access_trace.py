"""Markers in a trace for `simulate`: starts of passes, and announced scans."""

from dataclasses import dataclass

from vbrt.residency.policy import FORWARD

__all__ = ["PASS", "Announce", "Pass"]


@dataclass(frozen=True, slots=True)
class Pass:
    """Start of a pass, in a trace for `simulate`."""

    phase: str = FORWARD


PASS = Pass()
"""Start of a pass of the default phase."""


@dataclass(frozen=True, slots=True)
class Announce:
    """Announced scan, in a trace for `simulate`: the pages of the next leases, each once, in this order."""

    keys: tuple[str, ...]
