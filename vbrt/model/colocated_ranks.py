"""Colocated ranks: the number of ranks per machine and per GPU, among which memory is divided.

torchrun sets the number of ranks per machine (LOCAL_WORLD_SIZE). Without it, and for ranks that share a GPU, each rank
publishes its location in the store of torch.distributed and reads the others'. There is no collective: a rank that
never wraps a model cannot hang others.
"""

import contextlib
import functools
import json
import os
import socket
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

from vbrt.host import accelerator

__all__ = ["Neighbours", "neighbours"]

ANSWER_S = 5.0  # wait for other ranks' locations; silent ranks count as colocated


class Neighbours(NamedTuple):
    """Numbers of colocated ranks, this one included.

    Attributes:
        here: on this machine.
        on_gpu: on this rank's GPU; 1 without a GPU.
        said_by: source of the numbers; "" for a single process.
        index: of this rank among those on this machine.
    """

    here: int = 1
    on_gpu: int = 1
    said_by: str = ""
    index: int = 0


def neighbours() -> Neighbours:
    """Return how many ranks share this machine and this process's GPU.

    The first call in a process group waits for the calls of the other ranks, up to `ANSWER_S` seconds, unless the
    environment of torchrun suffices.
    """
    started, several = _launched("LOCAL_WORLD_SIZE"), _is_one_of_several()
    index = _launched("LOCAL_RANK")
    own_gpu = not accelerator.is_available() or _has_gpu_of_its_own(started)
    if started and (own_gpu or not several):
        return Neighbours(started, 1, "LOCAL_WORLD_SIZE", index) if started > 1 else Neighbours()
    if not several:
        return Neighbours()
    told = _told(dist.group.WORLD, _place())
    return told._replace(here=started, index=index) if started else told


def _launched(name: str) -> int:
    """Return a launcher's environment variable as a number; 0 without it."""
    said = os.environ.get(name, "")
    return int(said) if said.isdecimal() else 0


def _is_one_of_several() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _has_gpu_of_its_own(started: int) -> bool:
    """True if each local rank uses the GPU of its own local rank number, as usual under torchrun."""
    usual = os.environ.get("LOCAL_RANK") == str(accelerator.current_device())
    return usual and 0 < started <= accelerator.device_count()


def _place() -> tuple[str, str]:
    """Return unique names of this machine and of this process's GPU; "" without a GPU."""
    machine = socket.gethostname()
    with contextlib.suppress(OSError):  # the same in all containers of a machine
        machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    if not accelerator.is_available():
        return machine, ""
    index = accelerator.current_device()
    return machine, str(getattr(accelerator.get_device_properties(index), "uuid", index))


@functools.lru_cache(maxsize=1)
def _told(group: Any, place: tuple[str, str]) -> Neighbours:
    """Exchange locations over the group's store, and count colocated ranks."""
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    store = dist.PrefixStore("vbrt/places", dist.distributed_c10d._get_default_store())
    others = [str(other) for other in range(size) if other != rank]
    with contextlib.suppress(RuntimeError):  # the store is gone with its rank, or it took too long
        store.set(str(rank), json.dumps(place))
        store.wait(others, timedelta(seconds=ANSWER_S))
    places = [_said(store, other) for other in others]
    silent = [other for other, said in zip(others, places, strict=True) if said is None]
    known = [said for said in places if said is not None]
    here = 1 + len(silent) + sum(said[0] == place[0] for said in known)
    on_gpu = 1 + sum(said == place for said in known) if place[1] else 1
    why = "counted over the process group"
    if silent:
        why += f"; rank {', '.join(silent)} did not say in {ANSWER_S:g} s where it runs, so it is taken to run here"
    index = sum(said[0] == place[0] for said in places[:rank] if said is not None)
    return Neighbours(here, on_gpu, why, index)


def _said(store: Any, rank: str) -> tuple[str, str] | None:
    try:
        return tuple(json.loads(store.get(rank).decode())) if store.check([rank]) else None
    except RuntimeError:
        return None
