"""Routing of a pass: arguments, touched experts, experts per token."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from vbrt.host import accelerator
from vbrt.layers.modules.layer_kinds import KINDS
from vbrt.residency.weight_site import ROOT, WeightSite

__all__ = ["Routed", "local_ids", "pairs_of", "top_k_of", "touched_experts"]

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


@dataclass(frozen=True, slots=True)
class Routed:
    """The arguments of a layer's forward: x [T, H], ids and weights [T, k]."""

    x: Tensor
    ids: Tensor
    weights: Tensor


def top_k_of(site: WeightSite, modules: Mapping[str, nn.Module]) -> int:
    """Return how many experts of a site's module one token is sent to: as the module or its config says, or the config
    of the model and those within it, of which the largest number counts; all where nothing says it."""
    module, model = modules[site.module], modules[ROOT]
    holders = () if KINDS[site.kind].every else (module, getattr(module, "config", None))
    said = [k for holder in holders if (k := _said_by(holder)) is not None][:1]
    if holders and not said:
        said = [k for config in _configs(getattr(model, "config", None)) if (k := _said_by(config)) is not None]
    return min(max(said, default=site.matrices), site.matrices)


def _said_by(holder: Any) -> int | None:
    return next((k for name in _NAMES if (k := _whole(getattr(holder, name, None))) is not None), None)


def _configs(config: Any) -> Iterator[Any]:
    """Yield a config of transformers and its nested configs."""
    if hasattr(config, "model_type"):
        yield config
        for value in vars(config).values():
            yield from _configs(value)


def _whole(value: Any) -> int | None:
    """Return a number of experts; of a list, one for each layer, the largest."""
    values = value if isinstance(value, list | tuple) else [value]
    numbers = [v for v in values if type(v) is int and v > 0]
    return max(numbers, default=None)


def touched_experts(ids_Tk: Tensor, experts: int) -> list[int]:
    """Return the experts that any token is routed to, ascending; waits for the device."""
    return [e for e in ids_Tk.unique().tolist() if 0 <= e < experts]


def local_ids(ids_Tk: Tensor, experts: int, chosen: Sequence[int]) -> Tensor:
    """Return the index in `chosen`, ascending, of each id, int64 [T, k]; len(chosen) for other experts."""
    outside = (ids_Tk < 0) | (ids_Tk >= experts)
    if len(chosen) == experts:
        return ids_Tk.long().masked_fill(outside, experts)
    table = torch.full((experts + 1,), len(chosen), dtype=torch.int64, device="cpu")
    index = torch.tensor(list(chosen), dtype=torch.int64, device="cpu")
    table[index] = torch.arange(len(chosen), dtype=torch.int64, device="cpu")
    return accelerator.sent(table, ids_Tk.device)[ids_Tk.long().masked_fill(outside, experts)]


def pairs_of(local_Tk: Tensor, count: int) -> Tensor:
    """Return the pairs (of T k, in their order) whose local id is below `count`, int64."""
    return (local_Tk.reshape(-1) < count).nonzero().squeeze(1)
