"""Models that transformers splits over processes: which of its ways layers in the tiers can take part in."""

from typing import Any

from vbrt.errors import ConfigError

__all__ = ["is_split"]


def is_split(distributed: Any) -> bool:
    """True if transformers splits the model over processes. Raises ConfigError for a way that leaves no rank whole
    parts of weights."""
    for size in ("fsdp_size", "pp_size"):
        count = getattr(distributed, size, None) or 1
        if count > 1:
            raise ConfigError(
                f"from_pretrained: distributed_config has {size} = {count}; weights in the tiers are split by a tensor "
                "or expert parallel plan (tp_size, ep_size) only. For FSDP2 load the model on each rank, "
                "materialize(), and fully_shard() what is left"
            )
    return distributed is not None
