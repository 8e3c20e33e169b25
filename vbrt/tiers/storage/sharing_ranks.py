"""Ranks that share pages: process groups, and small exchanges between hosts."""

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from vbrt.errors import TierError
from vbrt.host import accelerator

__all__ = ["Sharers"]


class Sharers:
    """Ranks of a process group that hold the same weights.

    GPU traffic uses the group's own backend, host traffic an additional Gloo group.

    Args:
        group: of `torch.distributed`.
    """

    def __init__(self, group: "dist.ProcessGroup") -> None:
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.hosts = group
        if dist.get_backend(group) != "gloo":
            ranks = dist.get_process_group_ranks(group)
            self.hosts = dist.new_group(ranks, backend="gloo", use_local_synchronization=True, timeout=_timeout(group))

    def least(self, values: Sequence[int]) -> list[int]:
        """All-reduce by minimum: return the least of each value over all ranks."""
        return [min(column) for column in zip(*self.exchange(values, "what memory there is"), strict=True)]

    def exchange(self, values: Sequence[int], what: str) -> list[list[int]]:
        """All-gather integers, by rank. Raises TierError: a rank is gone or does not answer."""
        own = torch.tensor(list(values), dtype=torch.int64, device="cpu")
        every = torch.empty(self.size * len(own), dtype=torch.int64, device="cpu")
        self.together(what, lambda: dist.all_gather_into_tensor(every, own, group=self.hosts))
        return every.view(self.size, -1).tolist()

    def tell(self, value: Any, what: str) -> list[Any]:
        """All-gather an object, by rank. Raises TierError: a rank is gone or does not answer."""
        every: list[Any] = [None] * self.size
        self.together(what, lambda: dist.all_gather_object(every, value, group=self.hosts))
        return every

    def together(self, what: str, act: Callable[[], object]) -> None:
        """Run a collective. Raises TierError: a rank is gone or does not answer."""
        try:
            act()
        except RuntimeError as error:  # torch's backend errors are of this class
            raise self.lost(what, error) from error

    def lost(self, what: str, error: RuntimeError) -> TierError:
        """Return the TierError for a failed collective."""
        return TierError(
            f"tiers.cpu.shared, rank {self.rank} of {self.size}: {what} could not be shared, a rank has ended or does "
            f"not answer ({str(error).splitlines()[0]}); end all ranks and start them again"
        )


def _timeout(group: "dist.ProcessGroup") -> timedelta | None:
    return getattr(group._get_backend(torch.device(accelerator.TYPE)).options, "_timeout", None)
