"""Records of tiers, one per tier that a config may name.

A new tier needs: a record here; a section in `schema.TiersConfig` and its room on a machine in `budgets`; a class in
`vbrt/tiers` with the protocol `vbrt.tiers.protocols.tier.Tier`; and its factory in `vbrt.model.make_stack`. Plans,
placement, memory needs and budget changes follow the record.
"""

from dataclasses import dataclass

__all__ = ["TIERS", "TierRecord"]


@dataclass(frozen=True, slots=True)
class TierRecord:
    """Properties of a tier, known without opening one.

    Attributes:
        memory: True if its pages are tensors; False for a store, whose pages are read into the memory tier above.
        auto_percent: share of the free memory that `budget = "auto"` takes; the rest is for activations, the allocator
            and other programs.
        overhead_bytes: bytes per page in addition to the page's own.
        passes: True if pages from lower tiers are copied through it on their way up.
        fills: True if it takes what fits even if a lower tier could hold all pages.
        hosts: True if the CPU can compute with its pages where they lie.
    """

    memory: bool
    auto_percent: int
    overhead_bytes: int = 0
    passes: bool = True
    fills: bool = False
    hosts: bool = False


TIERS = {
    "gpu": TierRecord(memory=True, auto_percent=90),
    "peer": TierRecord(memory=True, auto_percent=90, passes=False, fills=True),
    "cpu": TierRecord(memory=True, auto_percent=80, hosts=True),
    "ssd": TierRecord(memory=False, auto_percent=90, overhead_bytes=4096, passes=False),  # the header of a page file
}
"""Records by tier name, fastest first."""
