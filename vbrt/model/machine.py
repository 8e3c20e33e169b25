"""The machine under a model: its memory and drives in bytes, and whether the ssd tier's directory can be used."""

import contextlib
import os
from dataclasses import replace
from pathlib import Path

import psutil
import torch

from vbrt.config import Machine, VBConfig
from vbrt.errors import TierError, describe_os_error
from vbrt.host.memory import trim_heap
from vbrt.kernels.cpu import recycle
from vbrt.tiers import SsdTier

__all__ = ["check_ssd_directory", "release_host_memory", "ssd_directory", "this_machine", "with_freed"]


def this_machine(config: VBConfig) -> Machine:
    """Return the bytes of GPU and host memory, and the room on the drive of `tiers.ssd.path`.

    Raises TierError: the system does not say, for want of descriptors for one.
    """
    try:
        memory, ssd_free = psutil.virtual_memory(), _disk_free(config)
    except OSError as error:
        raise TierError(
            f"this machine: the system does not say what memory and disks it has "
            f"({describe_os_error(error)}: {error.filename}); try again once that is mended"
        ) from error
    gpu_free, gpu_total = torch.cuda.mem_get_info() if torch.cuda.is_available() else (None, None)
    if gpu_free is not None:
        gpu_free += torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
    return Machine(
        gpu_total_bytes=gpu_total,
        gpu_free_bytes=gpu_free,
        cpu_total_bytes=memory.total,
        cpu_available_bytes=memory.available,
        ssd_free_bytes=ssd_free,
    )


def with_freed(machine: Machine, tier: str, nbytes: int) -> Machine:
    """Return the machine as if `nbytes` that a tier holds were free."""
    if tier == "gpu":
        return replace(machine, gpu_free_bytes=machine.gpu_free_bytes + nbytes)
    if tier == "cpu":
        return replace(machine, cpu_available_bytes=machine.cpu_available_bytes + nbytes)
    return replace(machine, ssd_free_bytes=machine.ssd_free_bytes + nbytes)


def ssd_directory(config: VBConfig) -> Path:
    """Return the directory of the ssd tier as an absolute path."""
    return Path(config.tiers.ssd.path).expanduser().absolute()


def _disk_free(config: VBConfig) -> int | None:
    if not config.tiers.ssd.enabled:
        return None
    path = ssd_directory(config)
    existing = next(p for p in (path, *path.parents) if os.path.exists(p))  # Path.exists() raises where it may not look
    return psutil.disk_usage(str(existing)).free


def check_ssd_directory(config: VBConfig) -> None:
    """Raise TierError if the ssd tier's directory cannot be made or written; leave the drive as it was."""
    if config.mode == "train" or not config.tiers.ssd.enabled:
        return
    path = ssd_directory(config)
    made = [folder for folder in (path, *path.parents) if not os.path.lexists(folder)]
    tier = None
    try:
        tier = SsdTier(path, 0)
        tier.close()
    finally:
        if tier is not None:
            tier.close()  # again, if Ctrl-C came the first time
        for folder in made:
            with contextlib.suppress(OSError):  # was not made, or somebody else has put something there
                folder.rmdir()


def release_host_memory() -> None:
    """Give freed host memory back to the system: kept blocks for decoded weights, and the C library's heap."""
    recycle.trim()
    trim_heap()
