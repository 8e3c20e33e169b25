"""Activation policy of a model's repeated blocks (keep, recompute or offload), built from its config."""

import torch
from torch import nn

from vbrt.config import Machine, VBConfig
from vbrt.config.parse_budgets import Budget, parse_activations, parse_budget
from vbrt.host import accelerator
from vbrt.model.machine_memory import this_machine
from vbrt.model.repeated_blocks import stacks_of
from vbrt.residency.activation_plan import KEEP, RECOMPUTE
from vbrt.tiers import MemoryTier
from vbrt.training.activations.activation_offload import CudaLink, Offload
from vbrt.training.activations.checkpointing import Activations

__all__ = ["activations_of", "blocks_of"]

_LEAST_BLOCKS = 2  # in a list of repeated blocks


def activations_of(model: nn.Module, config: VBConfig, device: torch.device) -> Activations:
    """Return the activation policy of a model's blocks; patches the blocks in place unless all activations are kept."""
    asked = parse_activations(config.training.activations, where="training.activations")
    if asked == KEEP:
        return Activations(KEEP, [], [], None)
    blocks, kinds = blocks_of(model)
    offload = None
    if accelerator.has_streams(device) and asked != RECOMPUTE and blocks:
        room = _host_bytes(config, this_machine(config))
        offload = Offload(CudaLink(device), MemoryTier("activations", torch.device("cpu"), room, pinned=True), device)
    return Activations(asked if isinstance(asked, str) else int(asked.amount), blocks, kinds, offload)


def blocks_of(model: nn.Module) -> tuple[list[nn.Module], list[int]]:
    """Return a model's repeated blocks in execution order, and a kind number for each."""
    blocks, kinds = list[nn.Module](), list[int]()
    for stack in stacks_of(model, least=_LEAST_BLOCKS):
        first = max(kinds, default=-1) + 1
        blocks += model.get_submodule(stack.name)
        kinds += [first + kind for kind in stack.kinds]
    return blocks, kinds


def _host_bytes(config: VBConfig, machine: Machine) -> int:
    budget: Budget = parse_budget(config.training.activations_host, where="training.activations_host")
    if budget.kind == "auto":
        return machine.cpu_available_bytes // 2
    share = machine.cpu_total_bytes / machine.ranks_here
    return int(budget.amount if budget.kind == "bytes" else budget.amount * share)
