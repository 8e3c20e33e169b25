"""A rank's shard of a model, by the model's own tensor-parallel plan.

The plan (`tp_plan` of transformers' models) maps modules and parameters to sharding styles. The shard is a plain meta
model with smaller matrices, as wrapping sees it on a rank (`layers/weights/weight_shards.py`), so that it can be
planned, traced and counted like any model. For sizes that do not divide it is the first rank's.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from vbrt.config import Machine, VBConfig
from vbrt.errors import ArgumentError, ConfigError
from vbrt.estimation.memory.representative_blocks import meta_copy
from vbrt.model.planner import shown_plan
from vbrt.model.repeated_blocks import configs_of
from vbrt.residency.plan import Plan

__all__ = ["part_of", "rank_of", "rank_plan"]

_GATHERED = ("colwise_gather_output", "colwise_rep", "embedding_colwise")  # styles with gathered outputs
_ROWS = ("colwise", "colwise_gather_output", "colwise_rep", "packed_colwise", "embedding_rowwise")
_COLUMNS = ("rowwise", "rowwise_split_input", "rowwise_rep", "packed_rowwise", "embedding_colwise")
#: unsharded parameters, and modules for whose parameters the plan has further entries
_WHOLE = (
    "replicate", "replicated_with_grad_allreduce", "mla_kv_a_proj", "moe_tp_experts", "moe_identity_expert",
    "local_params", "all_reduce", "sequence_parallel",
)  # fmt: skip
_HEADS = ("num_attention_heads", "num_key_value_heads")


def rank_of(machine: Machine, ranks: int) -> Machine:
    """Return a rank's share of a machine: a GPU of its own, and an equal part of free host memory and drive."""
    drive = machine.ssd_free_bytes
    shares = {"cpu_available_bytes": machine.cpu_available_bytes // ranks, "ranks_here": ranks}
    shares |= {"ssd_free_bytes": None if drive is None else drive // ranks}
    return replace(machine, **shares, ranks_said_by="ranks")


def part_of(model: nn.Module, ranks: int, config: VBConfig | None) -> nn.Module:
    """Return a meta copy of one rank's shard of a model.

    Raises:
        ArgumentError: fewer than two ranks; no plan, an unknown sharding style, or heads that do not divide.
        ConfigError: weights train in 4 bits or from the tiers, which needs whole ones.
    """
    if type(ranks) is not int or ranks < 2:
        raise ArgumentError(f"ranks = {ranks!r}; expected 2 or more")
    if config is not None and config.mode != "infer":
        raise ConfigError(f'{config.source}: mode = "{config.mode}" needs whole weights, which are not sharded')
    plan, name = getattr(model, "tp_plan", None), type(model).__name__
    if not plan:
        raise ArgumentError(f"ranks = {ranks}: {name} has no tp_plan to shard it by")
    _check_heads(model, ranks)
    part = meta_copy(model)
    styles = dict(_styles(part, plan))
    unknown = next(((at, style) for at, style in styles.items() if style not in _ROWS + _COLUMNS + _WHOLE), None)
    if unknown is not None:
        raise ArgumentError(f"ranks = {ranks}: the tp_plan of {name} has {unknown[0]} {unknown[1]!r}, not known here")
    _cut_(part, styles, ranks)
    return part


def rank_plan(model: nn.Module, ranks: int, config: VBConfig, machine: Machine) -> Plan | str:
    """Return one rank's plan on its share of a machine, or why there is none."""
    try:
        return shown_plan(part_of(model, ranks, config), config, rank_of(machine, ranks))
    except (ArgumentError, ConfigError) as error:
        return str(error)


def _check_heads(model: nn.Module, ranks: int) -> None:
    for config in configs_of(model):
        for name in _HEADS:
            heads = getattr(config, name, None) or 0
            if heads % ranks:
                raise ArgumentError(f"ranks = {ranks}: {name} = {heads} of {type(model).__name__} is not divisible")


def _styles(model: nn.Module, plan: Mapping[str, str]) -> Iterator[tuple[str, str]]:
    """Yield the parameters that a plan covers, by name or by module, with their styles."""
    for name, _ in model.named_parameters(remove_duplicate=False):
        general = re.sub(r"(?<=\.)\d+(?=\.)", "*", name)  # layer indices only, not digits within names
        style = plan.get(general) or plan.get(general.rpartition(".")[0])
        if style is not None:
            yield name, style


def _cut_(model: nn.Module, styles: Mapping[str, str], ranks: int) -> None:
    """Shard a model in place; tied parameters stay tied, and follow the style of the first."""
    parts: dict[int, nn.Parameter] = {}
    first: dict[int, str] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        first.setdefault(id(parameter), name)
    for name, style in styles.items():
        module, _, own = name.rpartition(".")
        owner = model.get_submodule(module)
        whole = owner._parameters[own]
        if first[id(whole)] not in styles:
            continue
        if id(whole) not in parts:
            parts[id(whole)] = _part(whole, style, ranks)
        owner._parameters[own] = parts[id(whole)]
        if own == "weight" and isinstance(owner, nn.Linear):
            owner.out_features, owner.in_features = owner.weight.shape  # adapters read them
        if own == "weight" and style in _GATHERED:
            owner.register_forward_hook(_Gather(ranks, whole.shape[0 if style in _ROWS else -1]))


def _part(whole: nn.Parameter, style: str, ranks: int) -> nn.Parameter:
    """Return the first rank's shard of a matrix [.., N, K] or of a bias [N]."""
    shape, flat = list(whole.shape), whole.dim() == 1
    if style in _ROWS or (style in _COLUMNS and not flat):  # row-parallel layers add the whole bias once
        at = -1 if flat or style in _COLUMNS else -2
        shape[at] = -(-shape[at] // ranks)
    return nn.Parameter(torch.empty(shape, dtype=whole.dtype, device="meta"), whole.requires_grad)


class _Gather:
    """Forward hook that gathers an output [.., n]: concatenates the ranks' shards."""

    def __init__(self, ranks: int, size: int) -> None:
        self._ranks, self._size = ranks, size

    def __call__(self, module: nn.Module, args: object, output: Tensor) -> Tensor:
        return torch.cat([output] * self._ranks, -1)[..., : self._size]
