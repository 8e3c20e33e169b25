"""The tier stack of a model: a page stack whose recurring passes are replayed as programmes."""

from collections.abc import Sequence, Set

import torch

from vbrt.host import accelerator
from vbrt.tiers.protocols.tier import Tier
from vbrt.tiers.schedule.programmes import Programmes
from vbrt.tiers.stack.page_stack import PageStack
from vbrt.tiers.stack.slots import Level
from vbrt.tiers.storage.memory_tiers import MemoryTier

__all__ = ["TierStack", "detached_stack"]


class TierStack(PageStack):
    """A `PageStack` scheduled by `Programmes`; takes the arguments of `PageStack`."""

    def __init__(self, tiers: Sequence[Level | Tier], *, workers: int = 2, share_cores: bool = False) -> None:
        super().__init__(tiers, Programmes, workers=workers, share_cores=share_cores)

    def last_order(self, phase: str) -> list[str]:
        """See `Programmes.last_order`."""
        with self.guard.lock:
            return self.ledger.programmes.last_order(phase)

    def leave_out(self, phase: str, keys: Set[str]) -> None:
        """See `Programmes.leave_out`."""
        with self.guard.lock:
            self.ledger.programmes.leave_out(phase, keys)

    def __reduce__(self):
        return detached_stack, ()  # unpickled layers bring their pages along


def detached_stack(device: torch.device | str = "cpu") -> TierStack:
    """Return a single-tier stack without a budget on one device, for layers outside a wrapped model."""
    device = torch.device(device)
    return TierStack([MemoryTier("gpu" if device.type == accelerator.TYPE else "cpu", device, 1 << 62)])
