"""Records of tiers, one per tier that a config may name.

Another tier needs: a record here; a section in `schema.TiersConfig` and its room on a machine in `budgets`; a class in
`vbrt/tiers` with the protocol `vbrt.tiers.protocols.tier.Tier`; and its factory in `vbrt.model.make_stack`. Plans,
placement, memory needs and budget changes follow the record.
"""

from dataclasses import dataclass

__all__ = ["TIERS", "TierRecord"]


@dataclass(frozen=True, slots=True)
class TierRecord:
    """Properties of a tier, known without opening one.

    Attributes:
        memory: True if pages are tensors there, and pass through it; False for a store, whose pages are read into the
            memory above.
        auto_percent: the share of what is free that `budget = "auto"` takes; the rest is for activations, the
            allocator and other programs.
        overhead_bytes: what a page costs there beside its own bytes.
        passes: True if pages from further down are copied into it on their way up; False: they pass by it.
        fills: True if it takes what it has room for before a tier below is asked to hold all pages.
    """

    memory: bool
    auto_percent: int
    overhead_bytes: int = 0
    passes: bool = True
    fills: bool = False


TIERS = {
    "gpu": TierRecord(memory=True, auto_percent=90),
    "peer": TierRecord(memory=True, auto_percent=90, passes=False, fills=True),
    "cpu": TierRecord(memory=True, auto_percent=80),
    "ssd": TierRecord(memory=False, auto_percent=90, overhead_bytes=4096, passes=False),  # the header of a page file
}
"""By name, the computing one first."""
