"""Budgets of tiers: what a user may write, and how many bytes that is on a machine."""

from __future__ import annotations

import re
from dataclasses import dataclass
from decimal import Decimal
from typing import TYPE_CHECKING, Literal

from vbrt.config.tier_records import TIERS
from vbrt.config.value_checks import MAX_INT, wrong
from vbrt.errors import ConfigError

if TYPE_CHECKING:
    from vbrt.config.schema import VBConfig

__all__ = [
    "Budget",
    "Machine",
    "compute_tier",
    "parse_activations",
    "parse_budget",
    "parse_weights_budget",
    "resolve_budget",
    "resolve_budgets",
]

_BUDGET_EXPECTED = 'expected "auto", bytes, "8GiB" or "40%"'
_UNIT_BYTES = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_SIZE = re.compile(r"([0-9]{1,19}(?:\.[0-9]{1,19})?) ?([kmgt]?i?b)?", re.IGNORECASE)
_BITS = re.compile(r"([0-9]{1,4}(?:\.[0-9]{1,9})?) ?bits?", re.IGNORECASE)
_PERCENT = re.compile(r"([0-9]{1,19}(?:\.[0-9]{1,19})?) ?%")


@dataclass(frozen=True, slots=True)
class Budget:
    """A parsed budget. amount: bytes (int) for kind "bytes", 0 < share <= 1 for "fraction", 0 for "auto", bits a weight
    for "bits"."""

    kind: Literal["auto", "bytes", "fraction", "bits"]
    amount: int | float = 0


@dataclass(frozen=True, slots=True)
class Machine:
    """Memory available on a machine, in bytes. gpu: None without a device; ssd: None where no ssd tier is asked for.
    peers: the number of other GPUs that a peer tier may use; peer_total_bytes, peer_free_bytes: of the smallest of
    them. sharers: the ranks that share pages in host memory. ranks_here, ranks_on_gpu: the ranks on this machine, and
    those that compute on this GPU; what is available or free is one rank's share, totals are the machine's.
    ranks_said_by: how they are known, "" for one that is alone."""

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


def parse_budget(value: object, *, where: str) -> Budget:
    """Parse `"auto"`, a number of bytes (8589934592, "8GiB", "8 GB", "512MiB") or a share ("40%").

    KB, MB, GB, TB count in thousands, KiB, MiB, GiB, TiB in 1024s; case does not matter. where: what the ConfigError
    names, e.g. "my.toml: tiers.gpu.budget".
    """
    if isinstance(value, str):
        if value == "auto":
            return Budget("auto")
        if match := _PERCENT.fullmatch(value):
            share = float(match[1]) / 100
            if not 0 < share <= 1:
                raise wrong(where, value, "expected more than 0% and at most 100%")
            return Budget("fraction", share)
        if match := _SIZE.fullmatch(value):
            return Budget("bytes", _bytes_in_range(int(Decimal(match[1]) * _unit(match[2])), value, where))
    elif isinstance(value, int) and not isinstance(value, bool):
        return Budget("bytes", _bytes_in_range(value, value, where))
    raise wrong(where, value, _BUDGET_EXPECTED)


def parse_weights_budget(value: object, *, where: str) -> Budget:
    """Parse the room for all pages of a model: bits a weight ("5 bits", "4.75 bits") or bytes (2147483648, "2GiB").

    where: what the ConfigError names, e.g. "my.toml: weights.budget".
    """
    expected = 'expected bits a weight, e.g. "5 bits", or bytes, e.g. "2GiB"'
    if isinstance(value, str) and (match := _BITS.fullmatch(value)) and float(match[1]) > 0:
        return Budget("bits", float(match[1]))
    return _parse_bytes(value, where, expected)


def parse_activations(value: object, *, where: str) -> Budget | str:
    """Parse what is kept of a pass for training: "keep", "recompute", "offload", or bytes of device memory ("6GiB").

    where: what the ConfigError names, e.g. "my.toml: training.activations".
    """
    if value in ("keep", "recompute", "offload"):
        return str(value)
    return _parse_bytes(value, where, 'expected "keep", "recompute", "offload" or bytes of device memory, e.g. "6GiB"')


def _parse_bytes(value: object, where: str, expected: str) -> Budget:
    try:
        parsed = parse_budget(value, where=where)
    except ConfigError:
        raise wrong(where, value, expected) from None
    if parsed.kind != "bytes":
        raise wrong(where, value, expected)
    return parsed


def _unit(text: str | None) -> int:
    return _UNIT_BYTES[(text or "").lower()]


def _bytes_in_range(nbytes: int, value: object, where: str) -> int:
    if nbytes < 1:
        raise wrong(where, value, f"{_BUDGET_EXPECTED}; to switch a tier off set enabled = false")
    if nbytes > MAX_INT:
        raise wrong(where, value, f"{_BUDGET_EXPECTED}, and no more than the machine has")
    return nbytes


def resolve_budgets(config: VBConfig, machine: Machine) -> dict[str, int]:
    """Return the bytes of each tier that is enabled and exists here, by name, fastest first.

    "auto" is 90 % of the free device memory, 80 % of the available host memory, 90 % of the free space of the drive.
    A percentage counts from the total (of the drive: from the free space). Where several ranks are on one machine or
    one GPU, both are of a rank's equal share. What the peer tier has is that of one GPU
    times their number; of host memory that ranks share, that of one rank times theirs. Raises ConfigError for more than
    the machine has, for an ssd path whose free space is unknown, for a peer tier that is insisted on where there is no
    other GPU, for shared host memory where the CPU computes, and as `compute_tier`.
    """
    tiers = config.tiers
    on_gpu = compute_tier(config, machine) == "gpu"
    if tiers.cpu.shared and not on_gpu:
        raise wrong(f"{config.source}: tiers.cpu.shared", True, "ranks gather pages on GPUs, and here the cpu computes")
    here = {"gpu": on_gpu, "peer": _has_peers(config, machine) and on_gpu}
    here |= {"cpu": tiers.cpu.enabled, "ssd": tiers.ssd.enabled}
    return {name: resolve_budget(config, machine, name) for name, is_here in here.items() if is_here}


def compute_tier(config: VBConfig, machine: Machine) -> str:
    """Return "gpu" or "cpu": where kernels run.

    Raises ConfigError where a GPU is insisted on and there is none, and when no tier is left to compute on.
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


def _has_peers(config: VBConfig, machine: Machine) -> bool:
    if config.tiers.peer.enabled is True and not machine.peers:
        raise wrong(
            f"{config.source}: tiers.peer.enabled",
            True,
            'this process sees no other GPU that the computing one may use; "auto" goes without',
        )
    return bool(config.tiers.peer.enabled and machine.peers)


def resolve_budget(config: VBConfig, machine: Machine, name: str) -> int:
    """Return the bytes of one tier that is enabled and exists here, whatever the others ask for."""
    shares = {"peer": machine.peers, "cpu": machine.sharers}.get(name, 1)
    return shares * _resolved(config, machine, name)


def _room(config: VBConfig, machine: Machine, name: str) -> tuple[int, int, int]:
    """Return (total, free, ranks) of a tier: bytes, and among how many the total is divided."""
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
    return machine.ssd_free_bytes, machine.ssd_free_bytes, 1  # of a rank, as all that is free


def _resolved(config: VBConfig, machine: Machine, name: str) -> int:
    """Return what a budget asks for, of one neighbour or one rank where there are several."""
    where, value = f"{config.source}: tiers.{name}.budget", getattr(config.tiers, name).budget
    budget = parse_budget(value, where=where)
    total, free, ranks = _room(config, machine, name)
    if budget.kind == "auto":
        return free * TIERS[name].auto_percent // 100
    if budget.kind == "fraction":
        return int(total * budget.amount) // ranks
    most = total // ranks if machine.sharers > 1 else total  # ranks that share have equal budgets
    if budget.amount > most:
        has = f"{most / 2**30:.2f} GiB ({most} bytes)" + (" free" if name == "ssd" else "")
        has += f" for each of its {machine.ranks_here} ranks" if most < total else ""
        raise wrong(where, value, f'this machine has {has}; expected no more than that, "auto" or a percentage')
    return int(budget.amount)
