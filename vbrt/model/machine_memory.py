"""Memory and disk of the machine in bytes, its GPUs, and checks of the ssd tier's directory."""

import contextlib
import functools
import os
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import psutil
import torch.distributed as dist

from vbrt.config import Machine, VBConfig
from vbrt.errors import ConfigError, TierError, describe_os_error
from vbrt.host import accelerator
from vbrt.host.host_memory import trim_heap
from vbrt.kernels.cpu import buffer_reuse
from vbrt.model.colocated_ranks import neighbours
from vbrt.tiers import SsdTier
from vbrt.tiers.storage.mapped_memory import mapped_bytes
from vbrt.tiers.storage.sharing_ranks import Sharers

__all__ = [
    "check_ssd_directory",
    "link_gpus",
    "passing_directory",
    "peer_gpus",
    "release_host_memory",
    "shared_directory",
    "sharers_of",
    "ssd_directory",
    "this_machine",
    "with_freed",
]


def this_machine(config: VBConfig) -> Machine:
    """Return the bytes of GPU and host memory, and the free bytes on the drive of `tiers.ssd.path`.

    Free host memory is divided among the ranks of a host, free GPU memory among the ranks on a GPU: see `neighbours`.

    Raises TierError: the system gives no numbers, such as when descriptors have run out.
    """
    try:
        memory, ssd_free = psutil.virtual_memory(), _disk_free(config)
    except OSError as error:
        raise TierError(
            f"this machine: the system does not say what memory and disks it has "
            f"({describe_os_error(error)}: {error.filename}); try again once that is mended"
        ) from error
    ranks = neighbours()
    has_gpu = accelerator.is_used(config.tiers.gpu.enabled or True)  # without the tier the GPU is there still
    gpu_free, gpu_total = _gpu_memory(ranks=ranks.on_gpu) if has_gpu else (None, None)
    peers = [_gpu_memory(peer) for peer in peer_gpus(config)]
    machine = Machine(
        gpu_total_bytes=gpu_total,
        gpu_free_bytes=gpu_free,
        cpu_total_bytes=memory.total,
        cpu_available_bytes=memory.available // ranks.here + _mapped(config),
        ssd_free_bytes=None if ssd_free is None else ssd_free // ranks.here,
        peers=len(peers),
        peer_total_bytes=min((total for _, total in peers), default=0),
        peer_free_bytes=min((free for free, _ in peers), default=0),
        ranks_here=ranks.here,
        ranks_on_gpu=ranks.on_gpu,
        ranks_said_by=ranks.said_by,
    )
    return _agreed(machine, sharers_of(config)) if config.tiers.cpu.shared and gpu_total is not None else machine


def _agreed(machine: Machine, sharers: Sharers) -> Machine:
    """Return the machine with the minimum over all ranks, so that all make the same plan."""
    known = {name: value for name, value in asdict(machine).items() if isinstance(value, int)}
    least = dict(zip(known, sharers.least(list(known.values())), strict=True))
    return replace(machine, **least | {"sharers": sharers.size, "ranks_here": max(1, least["ranks_here"])})


def sharers_of(config: VBConfig) -> Sharers:
    """Return the ranks that share host memory under a config. Raises ConfigError: there is no process group."""
    if not (dist.is_available() and dist.is_initialized()):
        raise ConfigError(
            f"{config.source}: tiers.cpu.shared = true; there is no process group: start the ranks with torchrun and "
            "call torch.distributed.init_process_group first"
        )
    return _sharers(dist.group.WORLD)


@functools.lru_cache(maxsize=1)
def _sharers(group: object) -> Sharers:
    return Sharers(group)


def _gpu_memory(*index: int, ranks: int = 1) -> tuple[int, int]:
    """Return (free, total) bytes of a GPU, by default the current one. Free: one of `ranks` shares, plus the unused
    part of torch's reserved memory."""
    free, total = accelerator.mem_get_info(*index)
    return free // ranks + accelerator.memory_reserved(*index) - accelerator.memory_allocated(*index), total


def peer_gpus(config: VBConfig) -> tuple[int, ...]:
    """Return the GPUs of the peer tier: none unless `tiers.peer` is enabled.

    Raises ConfigError: a named GPU does not exist, or is the computing one.
    """
    peer = config.tiers.peer
    if not (peer.enabled and accelerator.is_used(config.tiers.gpu.enabled)):
        return ()
    return _others(peer.devices, f"{config.source}: tiers.peer.devices")


def link_gpus(config: VBConfig) -> tuple[int, ...]:
    """Return the additional GPUs whose links carry pages.

    Raises ConfigError: a named GPU does not exist, or has no peer access to the computing one.
    """
    links = config.tiers.gpu.links
    if links == "own":
        return ()
    own, where = accelerator.current_device(), f"{config.source}: tiers.gpu.links"
    if links != "auto":
        links = tuple(index for index in links if index != own)
    others = _others(links, where) if links else ()
    reached = tuple(index for index in others if accelerator.can_device_access_peer(index, own))
    if links != "auto" and reached != others:
        gpu = f"{accelerator.TYPE}:{own}"
        raise ConfigError(f"{where} = {list(links)}; {gpu} cannot be reached directly from all of them")
    return reached


def _others(devices: tuple[int, ...] | str, where: str) -> tuple[int, ...]:
    """Return GPUs other than the current one: all, or the named ones."""
    own, count = accelerator.current_device(), accelerator.device_count()
    if devices == "auto":
        return tuple(index for index in range(count) if index != own)
    wrong = next((index for index in devices if index >= count or index == own), None)
    if wrong is not None:
        why = "it is the computing one" if wrong == own else f"this process sees {count} GPUs"
        raise ConfigError(f"{where} = {list(devices)}; {accelerator.TYPE}:{wrong} cannot be one of them: {why}")
    return devices


def with_freed(machine: Machine, tier: str, nbytes: int) -> Machine:
    """Return the machine with `nbytes` more free memory in a tier."""
    if tier == "gpu":
        return replace(machine, gpu_free_bytes=machine.gpu_free_bytes + nbytes)
    if tier == "peer":
        return replace(machine, peer_free_bytes=machine.peer_free_bytes + nbytes // max(1, machine.peers))
    if tier == "cpu":
        return replace(machine, cpu_available_bytes=machine.cpu_available_bytes + nbytes)
    return replace(machine, ssd_free_bytes=machine.ssd_free_bytes + nbytes)


def ssd_directory(config: VBConfig) -> Path:
    """Return the directory of the ssd tier as an absolute path."""
    return Path(config.tiers.ssd.path).expanduser().absolute()


def shared_directory(config: VBConfig) -> Path:
    """Return the directory of `tiers.cpu.path` as an absolute path.

    Raises ConfigError: training, which writes pages."""
    path = config.tiers.cpu.path
    if config.mode != "infer":
        raise ConfigError(
            f'{config.source}: tiers.cpu.path = "{path}" with mode = "{config.mode}"; pages that processes share are '
            "not written again: leave path out"
        )
    return Path(path).expanduser().absolute()


def _mapped(config: VBConfig) -> int:
    """Return the bytes of pages that this model may find in memory already."""
    return 0 if config.tiers.cpu.path is None else mapped_bytes(shared_directory(config))


def _disk_free(config: VBConfig) -> int | None:
    if not config.tiers.ssd.enabled:
        return None
    path = ssd_directory(config)
    existing = next(p for p in (path, *path.parents) if os.path.exists(p))  # Path.exists() raises without permission
    return psutil.disk_usage(str(existing)).free


def check_ssd_directory(config: VBConfig) -> None:
    """Raise TierError if the ssd tier's directory cannot be created or written; leaves no trace on the drive."""
    if config.mode == "train" or not config.tiers.ssd.enabled:
        return
    with passing_directory(ssd_directory(config)) as path:
        tier = None
        try:
            tier = SsdTier(path, 0)
            tier.close()
        finally:
            if tier is not None:
                tier.close()  # again, if Ctrl-C came the first time


@contextlib.contextmanager
def passing_directory(path: Path) -> Iterator[Path]:
    """Yield a directory that need not exist yet; folders created for it are removed afterwards, unless something was
    put there."""
    missing = [folder for folder in (path, *path.parents) if not os.path.lexists(folder)]
    try:
        yield path
    finally:
        for folder in missing:
            with contextlib.suppress(OSError):  # not created, or not empty
                folder.rmdir()


def release_host_memory() -> None:
    """Return freed host memory to the system: cached blocks for decoded weights, and the C heap."""
    buffer_reuse.trim()
    trim_heap()
