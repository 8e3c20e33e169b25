"""Tensor parallelism by transformers: which of its distributed modes work with layers in the tiers."""

from typing import Any

import torch.distributed as dist

from vbrt.errors import ConfigError
from vbrt.model.colocated_ranks import neighbours

__all__ = ["is_split", "share_of_files"]


def is_split(distributed: Any) -> bool:
    """True if transformers splits the model over processes. Raises ConfigError for FSDP and pipeline modes."""
    for size in ("fsdp_size", "pp_size"):
        count = getattr(distributed, size, None) or 1
        if count > 1:
            raise ConfigError(
                f"from_pretrained: distributed_config has {size} = {count}; weights in the tiers are split by a tensor "
                "or expert parallel plan (tp_size, ep_size) only. For FSDP2 load the model on each rank, "
                "materialize(), and fully_shard() what is left"
            )
    return distributed is not None


def share_of_files(*, split: bool) -> tuple[int, int] | None:
    """Return this process's share of the files to prefetch, as `ReadAhead` takes it: ranks of one machine share the
    page cache. None with ranks on other machines: then not all bytes are used here."""
    if not split:
        return 0, 1
    ranks = neighbours()
    return (ranks.index, ranks.here) if ranks.here == dist.get_world_size() else None
