"""The stack that models have: pages in tiers, with programmes for passes that recur."""

from collections.abc import Sequence

import torch

from vbrt.tiers.protocols.tier import Tier
from vbrt.tiers.schedule.programmes import Programmes
from vbrt.tiers.stack.page_stack import PageStack
from vbrt.tiers.stack.slots import Level
from vbrt.tiers.storage.memory_tiers import MemoryTier

__all__ = ["TierStack", "detached_stack"]


class TierStack(PageStack):
    """A `PageStack` whose schedule are programmes; see there for the arguments."""

    def __init__(self, tiers: Sequence[Level | Tier], *, workers: int = 2, share_cores: bool = False) -> None:
        super().__init__(tiers, Programmes, workers=workers, share_cores=share_cores)

    def __reduce__(self):
        return detached_stack, ()  # what is unpickled brings its pages along


def detached_stack(device: torch.device | str = "cpu") -> TierStack:
    """Return a stack of one device's memory without a budget, for layers that are apart from a model."""
    device = torch.device(device)
    return TierStack([MemoryTier("gpu" if device.type == "cuda" else "cpu", device, 1 << 62)])
