"""The tier stack that a plan asks for."""

import os
from collections.abc import Mapping

import torch

from vbrt.config import VBConfig
from vbrt.model.machine import ssd_directory
from vbrt.residency.division import auto_prefetch
from vbrt.residency.plan import Plan
from vbrt.residency.simulate import make_policy
from vbrt.tiers import Level, MemoryTier, SsdTier, TierStack

__all__ = ["attach_ssd", "build_stack"]


def build_stack(plan: Plan, config: VBConfig) -> TierStack:
    """Build the tiers of a plan, empty, the ssd only if pages live there. Raises TierError: it cannot be used."""
    levels = [_level(name, budget, plan, config) for name, budget in plan.budgets.items() if name != "ssd"]
    workers = min(4, max(level.policy.prefetch for level in levels)) or 1
    stack = TierStack(levels, workers=workers, share_cores=plan.compute_tier == "cpu")
    try:
        if plan.home_bytes("ssd"):
            attach_ssd(stack, config, plan.budgets)
    except BaseException:
        stack.close()
        raise
    return stack


def _level(name: str, budget: int, plan: Plan, config: VBConfig) -> Level:
    device = torch.device("cuda", torch.cuda.current_device()) if name == "gpu" else torch.device("cpu")
    pinned = name == "cpu" and plan.compute_tier == "gpu" and config.tiers.cpu.pinned
    ahead = _prefetch(plan, config, from_drive=name != plan.compute_tier)
    room = budget - plan.home_bytes(name)
    policy = make_policy(config.policy.kind, room, prefetch=ahead, group=plan.group)
    return Level(MemoryTier(name, device, budget, pinned=pinned), policy)


def attach_ssd(stack: TierStack, config: VBConfig, budgets: Mapping[str, int]) -> None:
    """Open the ssd tier and put it below the others."""
    # a CPU that waits for a page has no other work; beside a GPU, several pages are read at a time
    helpers = min(4, os.cpu_count() or 1) - 1 if stack.device.type == "cpu" else 0
    ssd = SsdTier(ssd_directory(config), budgets["ssd"], io=config.tiers.ssd.io, helpers=helpers)
    try:
        stack.attach(ssd)
    finally:
        if stack.ssd is not ssd:  # Ctrl-C
            ssd.close()


def _prefetch(plan: Plan, config: VBConfig, *, from_drive: bool) -> int:
    if config.policy.prefetch != "auto":
        return config.policy.prefetch
    return auto_prefetch(plan.largest_page_bytes, group=plan.group, from_drive=from_drive)
