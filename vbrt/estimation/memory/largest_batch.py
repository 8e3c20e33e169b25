"""`vbrt.fit_batch`: the largest batch that fits, extrapolated from small ones and confirmed by a run."""

import gc
from collections.abc import Callable
from typing import Any

import torch

from vbrt.config import load_config
from vbrt.config.argument_checks import check_instance, check_whole
from vbrt.errors import ArgumentError
from vbrt.estimation.memory.live_bytes import Meter
from vbrt.host import accelerator
from vbrt.model.machine_memory import this_machine

__all__ = ["fit_batch"]

_ROOM = 0.97  # share of free memory to fill
_PROBES = (1, 2, 4)  # batches run to learn the bytes per sample


def fit_batch(step: Callable[[int], Any], *, room_bytes: int | None = None, at_most: int = 4096) -> int:
    """Return the largest batch whose step fits in free memory.

    Batches of 1, 2 and 4 give the bytes per sample; the extrapolated batch is run once, and reduced by a tenth each
    time it runs out of memory.

    Args:
        step: runs one whole step with a batch of that size; anything that it keeps must exist from the first call on.
        room_bytes: device memory beyond current allocations; default: what is free. Required on a CPU.
        at_most: largest batch to try.

    Raises:
        ArgumentError: not even a batch of 1 fits; or `room_bytes` is missing.
        torch.OutOfMemoryError: never; any other exception of the step propagates.
    """
    check_instance(step, Callable, "fit_batch(): step", "a function of the batch that runs one step")
    check_whole(at_most, "fit_batch(): at_most")
    if room_bytes is not None:
        check_whole(room_bytes, "fit_batch(): room_bytes")
    gpu = accelerator.is_used()
    if room_bytes is None and not gpu:
        raise ArgumentError("fit_batch needs room_bytes on a machine without a GPU: host memory has no such limit")
    measure = _on_gpu if gpu else _on_cpu
    room = int(_ROOM * this_machine(load_config("fp4")).gpu_free_bytes) if room_bytes is None else room_bytes
    taken: dict[int, int] = {}
    for batch in _PROBES:
        peak = _peak(measure, step, batch)
        if batch == 1:
            peak = _peak(measure, step, batch)  # the first step also allocates optimizer state and workspaces
        if peak is None or peak > room:
            break
        taken[batch] = peak
    if not taken:
        raise ArgumentError(f"a batch of 1 does not fit into {room} bytes")
    return _confirmed(measure, step, _extrapolated(taken, room, at_most), room, max(taken))


def _extrapolated(taken: dict[int, int], room: int, at_most: int) -> int:
    """Return the batch that fills the room, at the last measured bytes per sample."""
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
    """Return a step's peak bytes; None: out of memory."""
    try:
        return measure(step, batch)
    except torch.OutOfMemoryError:
        pass
    gc.collect()  # outside the handler, whose traceback holds the step's tensors
    if accelerator.is_used():
        accelerator.empty_cache()
    return None


def _on_gpu(step: Callable[[int], Any], batch: int) -> int:
    accelerator.synchronize()
    before = accelerator.memory_allocated()
    accelerator.reset_peak_memory_stats()
    step(batch)
    accelerator.synchronize()
    return accelerator.max_memory_allocated() - before


def _on_cpu(step: Callable[[int], Any], batch: int) -> int:
    meter = Meter()
    with meter:
        step(batch)
    return max(meter.peaks.values(), default=0)
