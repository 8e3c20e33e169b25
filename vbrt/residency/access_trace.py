"""What a trace for `simulate` is made of, beside the keys of pages."""

from dataclasses import dataclass

from vbrt.residency.policy import FORWARD

__all__ = ["PASS", "Announce", "Pass"]


@dataclass(frozen=True, slots=True)
class Pass:
    """The start of a pass in a trace given to `simulate`."""

    phase: str = FORWARD


PASS = Pass()
"""The start of a pass of no particular phase."""


@dataclass(frozen=True, slots=True)
class Announce:
    """In a trace given to `simulate`: the pages that the next leases take once each, in this order."""

    keys: tuple[str, ...]
