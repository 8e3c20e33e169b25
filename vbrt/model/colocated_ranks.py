"""The ranks that run on one machine, and those that compute on one GPU: among how many memory is divided.

torchrun says how many ranks it has started on a machine. Where nobody has said so, and for ranks that share a GPU, each
rank writes to the store of torch.distributed where it runs, and reads where the others do. Nothing is collective here:
a rank that never wraps a model cannot make others hang.
"""

import contextlib
import functools
import json
import os
import socket
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

__all__ = ["Neighbours", "neighbours"]

ANSWER_S = 5.0  # in which other ranks say where they run; who has not said it is taken to run here


class Neighbours(NamedTuple):
    """Ranks, this one among them.

    Attributes:
        here: on this machine.
        on_gpu: that compute on this one's GPU; 1 without one.
        said_by: how that is known; "" for a process that is alone.
        index: of this one among those on this machine.
    """

    here: int = 1
    on_gpu: int = 1
    said_by: str = ""
    index: int = 0


def neighbours() -> Neighbours:
    """Return how many ranks divide this machine and this process's GPU.

    The first call of a process group waits until the others have called, up to `ANSWER_S` seconds, unless torchrun has
    said all there is to know.
    """
    started, several = _launched("LOCAL_WORLD_SIZE"), _is_one_of_several()
    index = _launched("LOCAL_RANK")
    own_gpu = not torch.cuda.is_available() or _has_gpu_of_its_own(started)
    if started and (own_gpu or not several):
        return Neighbours(started, 1, "LOCAL_WORLD_SIZE", index) if started > 1 else Neighbours()
    if not several:
        return Neighbours()
    told = _told(dist.group.WORLD, _place())
    return told._replace(here=started, index=index) if started else told


def _launched(name: str) -> int:
    """Return what a launcher has said, 0 if none has."""
    said = os.environ.get(name, "")
    return int(said) if said.isdecimal() else 0


def _is_one_of_several() -> bool:
    return dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1


def _has_gpu_of_its_own(started: int) -> bool:
    """True if each rank that was started here computes on the GPU of its own number, as usual under torchrun."""
    usual = os.environ.get("LOCAL_RANK") == str(torch.cuda.current_device())
    return usual and 0 < started <= torch.cuda.device_count()


def _place() -> tuple[str, str]:
    """Return this machine and this process's GPU, "" for none: names that no other has."""
    machine = socket.gethostname()
    with contextlib.suppress(OSError):  # the same in all containers of a machine
        machine = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    has_gpu = torch.cuda.is_available()
    return machine, str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid) if has_gpu else ""


@functools.lru_cache(maxsize=1)
def _told(group: Any, place: tuple[str, str]) -> Neighbours:
    """Return what the ranks of a group say of where they run."""
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
