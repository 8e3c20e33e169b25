"""The tier stack that a plan asks for."""

import os
from collections.abc import Callable, Mapping

import torch

from vbrt.config import VBConfig
from vbrt.config.tiers import TIERS
from vbrt.model.machine import ssd_directory
from vbrt.residency.custom import PolicyFactory
from vbrt.residency.division import auto_prefetch
from vbrt.residency.plan import Plan
from vbrt.residency.policy import Policy
from vbrt.residency.simulate import make_policy
from vbrt.tiers import Level, MemoryTier, SsdTier, Tier, TierStack

__all__ = ["attach_stores", "build_stack"]


def build_stack(plan: Plan, config: VBConfig, policy: PolicyFactory | None = None) -> TierStack:
    """Build the tiers of a plan, empty, stores only if pages live there.

    Args:
        policy: makes the policy of each memory tier; by default the one that the config names.

    Raises:
        TierError: the ssd tier cannot be used.
    """
    levels = [
        Level(_tier(name, budget, plan, config), _policy(name, budget, plan, config, policy))
        for name, budget in plan.budgets.items()
        if TIERS[name].memory
    ]
    workers = min(4, max(level.policy.prefetch for level in levels)) or 1
    stack = TierStack(levels, workers=workers, share_cores=plan.compute_tier == "cpu")
    try:
        if any(plan.home_bytes(name) for name in plan.budgets if not TIERS[name].memory):
            attach_stores(stack, config, plan.budgets)
    except BaseException:
        stack.close()
        raise
    return stack


def _tier(name: str, budget: int, plan: Plan, config: VBConfig) -> MemoryTier:
    device = torch.device("cuda", torch.cuda.current_device()) if name == "gpu" else torch.device("cpu")
    pinned = name == "cpu" and plan.compute_tier == "gpu" and config.tiers.cpu.pinned
    return MemoryTier(name, device, budget, pinned=pinned)


def _policy(name: str, budget: int, plan: Plan, config: VBConfig, policy: PolicyFactory | None) -> Policy:
    room = budget - plan.home_bytes(name)
    if policy is not None:
        return policy(room)
    ahead = _prefetch(plan, config, from_drive=name != plan.compute_tier)
    return make_policy(config.policy.kind, room, prefetch=ahead, group=plan.group)


def attach_stores(stack: TierStack, config: VBConfig, budgets: Mapping[str, int]) -> None:
    """Open the stores among the tiers, those that are not open yet, and put them below the others."""
    for name in [name for name in budgets if not TIERS[name].memory and name not in stack.names]:
        tier = _STORES[name](stack, config, budgets[name])
        try:
            stack.attach(tier)
        finally:
            if stack.levels[-1].tier is not tier:  # Ctrl-C
                tier.close()


def _ssd(stack: TierStack, config: VBConfig, budget: int) -> SsdTier:
    # a CPU that waits for a page has no other work; beside a GPU, several pages are read at a time
    helpers = min(4, os.cpu_count() or 1) - 1 if stack.device.type == "cpu" else 0
    return SsdTier(ssd_directory(config), budget, io=config.tiers.ssd.io, helpers=helpers)


_STORES: dict[str, Callable[[TierStack, VBConfig, int], Tier]] = {"ssd": _ssd}


def _prefetch(plan: Plan, config: VBConfig, *, from_drive: bool) -> int:
    if config.policy.prefetch != "auto":
        return config.policy.prefetch
    return auto_prefetch(plan.largest_page_bytes, group=plan.group, from_drive=from_drive)
