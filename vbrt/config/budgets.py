"""Resolution of a config's tier budgets to bytes on a machine."""

from dataclasses import dataclass, replace

from vbrt.config.parse_budgets import parse_budget
from vbrt.config.schema import VBConfig
from vbrt.config.tier_records import TIERS
from vbrt.config.value_checks import wrong
from vbrt.errors import ConfigError

__all__ = ["CONTEXT_BYTES", "Machine", "compute_tier", "resolve_budget", "resolve_budgets", "with_tier_budget"]


#: device memory outside torch's allocator: CUDA's context and loaded kernels, 0.4 to 0.6 GiB on an H200
CONTEXT_BYTES = 614 << 20


@dataclass(frozen=True, slots=True)
class Machine:
    """Memory of a machine, in bytes: totals are the machine's, free and available bytes one rank's share.

    Attributes:
        gpu_total_bytes, gpu_free_bytes: None without a GPU.
        ssd_free_bytes: None without an ssd tier.
        peers: number of other GPUs for the peer tier.
        peer_total_bytes, peer_free_bytes: of the smallest of these.
        sharers: number of ranks that share pages in host memory.
        ranks_here, ranks_on_gpu: number of ranks on this machine, and on this GPU.
        ranks_said_by: source of these numbers; "" for a single rank.
    """

    gpu_total_bytes: int | None
    gpu_free_bytes: int | None
    cpu_total_bytes: int
    cpu_available_bytes: int
    ssd_free_bytes: int | None = None
    peers: int = 0
    peer_total_bytes: int = 0
    peer_free_bytes: int = 0
    sharers: int = 1
    ranks_here: int = 1
    ranks_on_gpu: int = 1
    ranks_said_by: str = ""


def resolve_budgets(config: VBConfig, machine: Machine) -> dict[str, int]:
    """Return the bytes of each tier that is enabled and exists here, by name, fastest first.

    "auto" is 90 % of the free device memory, 80 % of the available host memory, 90 % of the free space of the drive.
    A percentage is relative to the total (of the drive: to the free space). Ranks on one machine or GPU each have an
    equal share. The peer tier's bytes are per GPU, times the number of GPUs; those of shared host memory are per rank,
    times the number of ranks.

    Raises:
        ConfigError: more than the machine has; an ssd path with unknown free space; a required peer tier without
            another GPU; shared host memory while the CPU computes; see also `compute_tier`.
    """
    tiers = config.tiers
    on_gpu = compute_tier(config, machine) == "gpu"
    if tiers.cpu.shared and not on_gpu:
        raise wrong(f"{config.source}: tiers.cpu.shared", True, "ranks gather pages on GPUs, and here the cpu computes")
    here = {"gpu": on_gpu, "peer": _has_peers(config, machine) and on_gpu}
    here |= {"cpu": tiers.cpu.enabled, "ssd": tiers.ssd.enabled}
    return {name: resolve_budget(config, machine, name) for name, is_here in here.items() if is_here}


def compute_tier(config: VBConfig, machine: Machine) -> str:
    """Return the computing tier, "gpu" or "cpu".

    Raises ConfigError: a GPU is required and there is none, or no enabled tier can compute.
    """
    tiers, has_gpu = config.tiers, machine.gpu_total_bytes is not None
    if tiers.gpu.enabled is True and not has_gpu:
        raise wrong(
            f"{config.source}: tiers.gpu.enabled",
            True,
            'this machine has no GPU that torch can use; "auto" computes on the cpu where there is none',
        )
    if not tiers.cpu.enabled and not (tiers.gpu.enabled and has_gpu):
        why = "this machine has no GPU" if tiers.gpu.enabled else "tiers.gpu.enabled = false"
        raise ConfigError(
            f"{config.source}: tiers.cpu.enabled = false, and {why}; no tier is left to compute on, "
            "set tiers.cpu.enabled = true"
        )
    return "gpu" if tiers.gpu.enabled and has_gpu else "cpu"


def with_tier_budget(config: VBConfig, tier: str) -> VBConfig:
    """Return the config with `budget`, if it has one, as the budget of the computing tier."""
    if config.budget is None:
        return config
    section = replace(getattr(config.tiers, tier), budget=config.budget)
    return replace(config, tiers=replace(config.tiers, **{tier: section}), budget=None)


def _has_peers(config: VBConfig, machine: Machine) -> bool:
    if config.tiers.peer.enabled is True and not machine.peers:
        raise wrong(
            f"{config.source}: tiers.peer.enabled",
            True,
            'this process sees no other GPU that the computing one may use; "auto" goes without',
        )
    return bool(config.tiers.peer.enabled and machine.peers)


def resolve_budget(config: VBConfig, machine: Machine, name: str) -> int:
    """Return the bytes of one tier that is enabled and exists here, independent of the others."""
    shares = {"peer": machine.peers, "cpu": machine.sharers}.get(name, 1)
    return shares * _resolved(config, machine, name)


def _room(config: VBConfig, machine: Machine, name: str) -> tuple[int, int, int]:
    """Return (total, free, ranks) of a tier: bytes, and the number of ranks that share the total."""
    if name == "gpu":
        total, free = machine.gpu_total_bytes, machine.gpu_free_bytes
        return total, total if free is None else free, machine.ranks_on_gpu
    if name == "peer":
        return machine.peer_total_bytes, machine.peer_free_bytes, 1
    if name == "cpu":
        return machine.cpu_total_bytes, machine.cpu_available_bytes, machine.ranks_here
    if machine.ssd_free_bytes is None:
        raise wrong(
            f"{config.source}: tiers.ssd.path",
            config.tiers.ssd.path,
            "expected a directory on a drive whose free space is known",
        )
    return machine.ssd_free_bytes, machine.ssd_free_bytes, 1  # free bytes are per rank already


def _resolved(config: VBConfig, machine: Machine, name: str) -> int:
    """Return a budget in bytes, per GPU or rank if there are several."""
    where, value = f"{config.source}: tiers.{name}.budget", getattr(config.tiers, name).budget
    budget = parse_budget(value, where=where)
    total, free, ranks = _room(config, machine, name)
    if budget.kind == "auto":
        return free * TIERS[name].auto_percent // 100
    if budget.kind == "fraction":
        return int(total * budget.amount) // ranks
    most = total // ranks if machine.sharers > 1 else total  # sharing ranks have equal budgets
    if budget.amount > most:
        has = f"{most / 2**30:.2f} GiB ({most} bytes)" + (" free" if name == "ssd" else "")
        has += f" for each of its {machine.ranks_here} ranks" if most < total else ""
        raise wrong(where, value, f'this machine has {has}; expected no more than that, "auto" or a percentage')
    return int(budget.amount)
