"""Statistics of all ranks of a group, merged on its first rank."""

from typing import Any

import torch.distributed as dist

from vbrt.config.argument_checks import check_instance
from vbrt.errors import ArgumentError
from vbrt.report.layer_groups import of_ranks
from vbrt.report.stats import Stats

__all__ = ["merged"]


def merged(own: Stats, group: Any) -> Stats:
    """Return the sums over a group's ranks on its first rank, and on the others their own; every rank calls it.

    Args:
        own: this rank's snapshot.
        group: a process group; True for the default one.
    """
    check_instance(group, dist.ProcessGroup | bool, "stats(): group", "a process group, or True for the default one")
    if not dist.is_initialized():
        raise ArgumentError(f"stats(): group = {group}; expected torch.distributed.init_process_group() before")
    group = None if group is True else group
    parts: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(parts, own.to_dict(), group=group)
    return own if dist.get_rank(group) else of_ranks([Stats.from_dict(part) for part in parts])
