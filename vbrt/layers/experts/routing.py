"""Which experts a pass touches, and how many one token is sent to."""

from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["local_ids", "pairs_of", "top_k_of", "touched_experts"]

#: the names that the configs of models have for the number of experts a token is sent to
_NAMES = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "experts_per_token",
    "top_k_experts",
    "moe_top_k",
    "moe_topk",
    "moe_k",
    "num_selected_experts",
    "top_k",
)


def top_k_of(module: nn.Module) -> int:
    """Return how many experts a token is sent to, as the module's config says; all of them where it does not."""
    weight = next(parameter for parameter in module._parameters.values() if parameter is not None)
    experts = weight.shape[0]
    for holder in (module, getattr(module, "config", None)):
        for name in _NAMES:
            k = _whole(getattr(holder, name, None))
            if k is not None:
                return min(k, experts)
    return experts


def _whole(value: Any) -> int | None:
    """Return a number of experts; of a list, one for each layer, the largest."""
    values = value if isinstance(value, list | tuple) else [value]
    numbers = [v for v in values if type(v) is int and v > 0]
    return max(numbers, default=None)


def touched_experts(ids_Tk: Tensor, experts: int) -> list[int]:
    """Return the experts that any token is sent to, ascending; waits for the device."""
    return [e for e in ids_Tk.unique().tolist() if 0 <= e < experts]


def local_ids(ids_Tk: Tensor, experts: int, chosen: list[int]) -> Tensor:
    """Return the index in `chosen` of each id, int64 [T, k]; of an expert that is not among them, their number."""
    table = torch.full((experts + 1,), len(chosen), dtype=torch.int64, device="cpu")
    index = torch.tensor(chosen, dtype=torch.int64, device="cpu")
    table[index] = torch.arange(len(chosen), dtype=torch.int64, device="cpu")
    outside = (ids_Tk < 0) | (ids_Tk >= experts)
    return table.to(ids_Tk.device)[ids_Tk.long().masked_fill(outside, experts)]


def pairs_of(local_Tk: Tensor, count: int) -> Tensor:
    """Return the pairs (of T k, in their order) whose local id is below `count`, int64."""
    return (local_Tk.reshape(-1) < count).nonzero().squeeze(1)
