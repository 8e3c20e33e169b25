"""`vbrt.fit_batch`: the largest batch that runs, by estimate first and one confirmation."""

import gc
from collections.abc import Callable
from typing import Any

import torch

from vbrt.config import load_config
from vbrt.config.argument_checks import check_instance, check_whole
from vbrt.errors import ArgumentError
from vbrt.estimation.memory.live_bytes import Meter
from vbrt.model.machine_memory import this_machine

__all__ = ["fit_batch"]

_ROOM = 0.97  # of what is free
_PROBES = (1, 2, 4)  # batches that are run to learn what one more takes


def fit_batch(step: Callable[[int], Any], *, room_bytes: int | None = None, at_most: int = 4096) -> int:
    """Return the largest batch with which a step runs in the memory that is free.

    Batches of 1, 2 and 4 tell what a further one takes, the rest is extrapolated and the result run once; if that is
    out of memory, smaller ones, each nine tenths of the one before.

    Args:
        step: runs one whole step with a batch of that many; anything that it keeps must be there from the first on.
        room_bytes: of the computing device, beside what is allocated now; default: what is free. On a CPU it is needed.
        at_most: no larger batch is tried.

    Raises:
        ArgumentError: not even a batch of 1 fits; or `room_bytes` is missing.
        torch.OutOfMemoryError: never; whatever else the step raises is passed on.
    """
    check_instance(step, Callable, "fit_batch(): step", "a function of the batch that runs one step")
    check_whole(at_most, "fit_batch(): at_most")
    if room_bytes is not None:
        check_whole(room_bytes, "fit_batch(): room_bytes")
    gpu = torch.cuda.is_available()
    if room_bytes is None and not gpu:
        raise ArgumentError("fit_batch needs room_bytes on a machine without a GPU: host memory has no such limit")
    measure = _on_gpu if gpu else _on_cpu
    room = int(_ROOM * this_machine(load_config("fp4")).gpu_free_bytes) if room_bytes is None else room_bytes
    taken: dict[int, int] = {}
    for batch in _PROBES:
        peak = _peak(measure, step, batch)
        if batch == 1:
            peak = _peak(measure, step, batch)  # the first step makes what stays: state of an optimizer, workspaces
        if peak is None or peak > room:
            break
        taken[batch] = peak
    if not taken:
        raise ArgumentError(f"a batch of 1 does not fit into {room} bytes")
    return _confirmed(measure, step, _extrapolated(taken, room, at_most), room, max(taken))


def _extrapolated(taken: dict[int, int], room: int, at_most: int) -> int:
    """Return the batch that fills the room, if each further one takes as much as the last did."""
    batches = sorted(taken)
    if len(batches) == 1:
        return batches[0]
    one, other = batches[-2:]
    each = max(1, (taken[other] - taken[one]) // (other - one))
    return max(other, min(at_most, other + (room - taken[other]) // each))


def _confirmed(measure: Callable, step: Callable[[int], Any], batch: int, room: int, least: int) -> int:
    while batch > least:
        peak = _peak(measure, step, batch)
        if peak is not None and peak <= room:
            return batch
        batch = max(least, min(batch - 1, batch * 9 // 10))
    return batch


def _peak(measure: Callable, step: Callable[[int], Any], batch: int) -> int | None:
    """Return the bytes that a step takes; None: out of memory."""
    try:
        return measure(step, batch)
    except torch.OutOfMemoryError:
        pass
    gc.collect()  # outside the handler, whose traceback holds what the step held
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    return None


def _on_gpu(step: Callable[[int], Any], batch: int) -> int:
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    step(batch)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def _on_cpu(step: Callable[[int], Any], batch: int) -> int:
    meter = Meter()
    with meter:
        step(batch)
    return max(meter.peaks.values(), default=0)
