"""Construction of a plan's tier stack: tiers, policies and links from a config."""

import os
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import torch

from vbrt.config import VBConfig
from vbrt.config.tier_records import TIERS
from vbrt.errors import ConfigError
from vbrt.host import accelerator
from vbrt.kernels.cpu.reading import page_reader
from vbrt.model.machine_memory import link_gpus, peer_gpus, shared_directory, sharers_of, ssd_directory
from vbrt.residency.expert_room import largest_pages
from vbrt.residency.plan import Plan, Swap
from vbrt.residency.policy import Policy
from vbrt.residency.room_division import auto_prefetch, auto_scan
from vbrt.residency.routing_file import read_routing
from vbrt.residency.simulate import best_scope, make_policy
from vbrt.residency.token_cost import fitted
from vbrt.residency.user_policy import PolicyFactory
from vbrt.tiers import Level, MemoryTier, PeerTier, SsdTier, Tier, TierStack
from vbrt.tiers.storage.mapped_memory import MappedTier
from vbrt.tiers.storage.multi_link import open_lanes
from vbrt.tiers.storage.rank_shared_memory import SharedTier

__all__ = ["attach_stores", "build_stack", "policy_kind"]


def build_stack(plan: Plan, config: VBConfig, policy: PolicyFactory | None = None) -> TierStack:
    """Build the tiers of a plan, empty; stores only if they are home to pages.

    Args:
        policy: factory of the policy of each memory tier; default: the one that the config names.

    Raises:
        TierError: the ssd tier cannot be used.
    """
    levels = [
        Level(_tier(name, budget, plan, config), _policy(name, budget, plan, config, policy))
        for name, budget in plan.budgets.items()
        if TIERS[name].memory
    ]
    if plan.compute_tier == "gpu":
        _open_lanes(levels, config)
        levels[0].tier.fallbacks.extend(accelerator.LACKS.values())
    elif why := accelerator.unused(config.tiers.gpu.enabled):
        levels[0].tier.fallbacks.append(why)
    workers = min(4, max(level.policy.prefetch for level in levels if level.keeps_copies)) or 1
    stack = TierStack(levels, workers=workers, share_cores=plan.compute_tier == "cpu")
    try:
        if any(plan.home_bytes(name) for name in plan.budgets if not TIERS[name].memory):
            attach_stores(stack, config, plan.budgets)
    except BaseException:
        stack.close()
        raise
    return stack


def _open_lanes(levels: Sequence[Level], config: VBConfig) -> None:
    """Set up multi-link copies to the GPU, if the config asks for them."""
    top = levels[0]
    shared = next((level.tier for level in levels if isinstance(level.tier, SharedTier)), None)
    if shared is not None and top.stream is None:
        raise ConfigError(
            f"{config.source}: tiers.cpu.shared = true; {accelerator.LACKS['streams']}; set shared = false"
        )
    if shared is None:
        top.lanes = open_lanes(top.stream, link_gpus(config), top.tier.fallbacks)
        return
    if config.tiers.gpu.links != "own":
        top.tier.fallbacks.append("tiers.gpu.links: with tiers.cpu.shared every rank's pages come over its own link")
    shared.gathering.use(top.stream)
    top.lanes = shared.gathering


def _shared_tier(plan: Plan, config: VBConfig, budget: int) -> SharedTier:
    """Return the tier of sharded host memory. Raises ConfigError: training, or ranks that read different pages."""
    if config.mode != "infer":
        raise ConfigError(
            f'{config.source}: tiers.cpu.shared = true with mode = "{config.mode}"; pages that ranks share are not '
            "written again: set shared = false"
        )
    apart = next((swap for swap in plan.swaps if swap.experts or swap.by_rows), None)
    if apart is not None:
        raise ConfigError(
            f"{config.source}: tiers.cpu.shared = true; {apart.name} is read as each rank's own tokens need it, and "
            "ranks that share pages take them together: exclude it (weights.exclude), or set shared = false"
        )
    return SharedTier(sharers_of(config), budget, pinned=config.tiers.cpu.pinned)


def _tier(name: str, budget: int, plan: Plan, config: VBConfig) -> MemoryTier | PeerTier | SharedTier:
    own = torch.device(accelerator.TYPE, accelerator.current_device()) if plan.compute_tier == "gpu" else None
    if name == "peer":
        return PeerTier([torch.device(accelerator.TYPE, index) for index in peer_gpus(config)], budget, computing=own)
    if name == "cpu" and config.tiers.cpu.shared:
        return _shared_tier(plan, config, budget)
    device = own if name == "gpu" else torch.device("cpu")
    pinned = name == "cpu" and plan.compute_tier == "gpu" and config.tiers.cpu.pinned
    if name == "cpu" and config.tiers.cpu.path is not None:
        return MappedTier(shared_directory(config), budget, pinned=pinned)
    return MemoryTier(name, device, budget, pinned=pinned)


def _policy(name: str, budget: int, plan: Plan, config: VBConfig, policy: PolicyFactory | None) -> Policy | None:
    if not TIERS[name].passes or (name == "cpu" and config.tiers.cpu.shared):
        return None
    room = budget - plan.home_bytes(name)
    if policy is not None:
        return policy(room)
    kind = policy_kind(plan, config)
    below = list(plan.budgets)[list(plan.budgets).index(name) + 1 :]
    pages = {page.key: page.nbytes for swap in plan.routed for page in swap.pages if page.home in below}
    swaps = plan.swaps if kind != "experts" else [swap for swap in plan.swaps if not swap.experts]
    ahead = _Ahead.of(plan, swaps, config, from_drive=name != plan.compute_tier)
    options = {"prefetch": ahead.pages, "scan": ahead.experts, "group": ahead.group}
    scope = _scope(plan, config, room) if pages and kind == "experts" else "layer"
    return make_policy(kind, room, scope=scope, layers=largest_pages(pages), **options)


def policy_kind(plan: Plan, config: VBConfig) -> str:
    """Return the kind of policy for a plan: the config's, with "auto" resolved."""
    if config.policy.kind != "auto":
        return config.policy.kind
    return "experts" if plan.routed else "scheduled"


def _scope(plan: Plan, config: VBConfig, room: int) -> str:
    """Return the scope of policy "experts": the config's, with "auto" resolved by the recorded routing.

    Raises:
        ArgumentError: the routing file cannot be read.
        ConfigError: the routing is of other layers.
    """
    policy = config.policy
    if policy.scope != "auto" or policy.routing is None:
        return "layer" if policy.scope == "auto" else policy.scope
    source = f"{config.source}: policy.routing = {policy.routing}"
    return best_scope(fitted(read_routing(policy.routing), plan, source=source), room)


def attach_stores(stack: TierStack, config: VBConfig, budgets: Mapping[str, int]) -> None:
    """Open the stores that are not open yet, and attach them below the other tiers."""
    for name in [name for name in budgets if not TIERS[name].memory and name not in stack.names]:
        tier = _STORES[name](stack, config, budgets[name])
        try:
            stack.attach(tier)
        finally:
            if stack.levels[-1].tier is not tier:  # Ctrl-C
                tier.close()


def _ssd(stack: TierStack, config: VBConfig, budget: int) -> SsdTier:
    # a CPU that waits for a page has no other work; beside a GPU, several pages are read at a time
    computes = stack.device.type == "cpu"
    helpers = min(4, os.cpu_count() or 1) - 1 if computes else 0
    read_page = page_reader(config.compute.backend) if computes else None
    return SsdTier(ssd_directory(config), budget, io=config.tiers.ssd.io, helpers=helpers, read_page=read_page)


_STORES: dict[str, Callable[[TierStack, VBConfig, int], Tier]] = {"ssd": _ssd}


class _Ahead(NamedTuple):
    """Prefetch depths in pages: for layers in order, and for scans through experts; and the pages per lease."""

    pages: int
    experts: int
    group: int

    @classmethod
    def of(cls, plan: Plan, swaps: Sequence[Swap], config: VBConfig, *, from_drive: bool) -> "_Ahead":
        """Return the depths for layers that every pass leases in the same order, and for the plan's routed experts."""
        group = max((len(swap.leased) for swap in swaps), default=0) or 1
        if config.policy.prefetch != "auto":
            return cls(config.policy.prefetch, config.policy.prefetch, group)
        largest = max((page.nbytes for swap in swaps for page in swap.leased), default=0)
        expert = max((page.nbytes for swap in plan.routed for page in swap.pages), default=0)
        pages = auto_prefetch(largest, group=group, from_drive=from_drive)
        return cls(pages, auto_scan(expert) if expert else 0, group)
