"""Measured effect of options on this machine: attention kernels, torch.compile, memory savers."""

import copy
import gc
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from vbrt.errors import ArgumentError
from vbrt.estimation.memory.example_inputs import inputs_of
from vbrt.estimation.memory.live_bytes import Meter
from vbrt.estimation.memory.task import Task
from vbrt.host import accelerator
from vbrt.libraries.transformers_api import checkpointing_name, checkpointing_switch

__all__ = ["KERNELS", "Measured", "attention", "compiling", "memory"]

KERNELS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}


@dataclass(frozen=True, slots=True)
class Measured:
    """Measurement: case, median milliseconds, peak bytes beyond earlier allocations, seconds of the first call.

    A figure that was not requested or is unavailable is None; `why` gives the reason.
    """

    case: str
    ms: float | None = None
    peak_bytes: int | None = None
    first_s: float | None = None
    why: str = ""


def device() -> torch.device:
    """Return the device to measure on: the GPU, if there is one."""
    return torch.device(accelerator.TYPE if accelerator.is_used() else "cpu")


def attention(
    lengths: Sequence[int],
    *,
    batch: int = 1,
    heads: int = 16,
    width: int = 64,
    dtype: torch.dtype = torch.bfloat16,
    backward: bool = False,
    times: int = 7,
) -> Iterator[Measured]:
    """Measure causal attention with each of torch's kernels, [batch, heads, length, width], for each length."""
    for length in lengths:
        for name, backend in KERNELS.items():
            shape = (batch, heads, length, width)
            q, k, v = (
                torch.randn(shape, dtype=torch.float32, device=device()).to(dtype).requires_grad_(backward)
                for _ in range(3)
            )

            def run(q: Tensor = q, k: Tensor = k, v: Tensor = v, backend: SDPBackend = backend) -> None:
                with sdpa_kernel(backend):
                    y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
                if backward:
                    y.sum().backward()

            yield _measured(f"{name}, {length} tokens", run, times)


def compiling(model: nn.Module, task: Task, *, times: int = 7) -> Iterator[Measured]:
    """Measure forward, and forward with backward, eagerly and under torch.compile; the first call is separate."""
    inputs = inputs_of(model, task, device=device())
    for word, backward in (("forward", False), ("forward + backward", True)):
        for how, made in (("eager", lambda m: m), ("torch.compile", torch.compile)):
            torch.compiler.reset()
            called = made(model)

            def run(called: Callable[..., Any] = called, backward: bool = backward) -> None:
                with torch.set_grad_enabled(backward):
                    out = called(**inputs)
                if backward:
                    _loss(out).backward()
                    model.zero_grad()

            yield _measured(f"{word}, {how}", run, times)


def memory(model: nn.Module, task: Task, *, times: int = 3) -> Iterator[Measured]:
    """Measure training steps with memory savers added one at a time: each row adds one option to the previous."""
    steps: dict[str, dict[str, Any]] = {
        "as it is": {},
        "+ bf16 autocast": {"mixed": True},
        "+ checkpointing": {"checkpointing": True},
        "+ optimizer without state (SGD)": {"optimizer": "SGD"},
    }
    for name, changes in steps.items():
        task = task.but(**changes)
        if task.checkpointing and checkpointing_switch(model) is None:
            yield Measured(name, why=f"{type(model).__name__} has no {checkpointing_name()}()")
            continue
        trained = copy.deepcopy(model).train()
        yield _measured(name, _training_step(trained, task), times)
        del trained


def _training_step(model: nn.Module, task: Task) -> Callable[[], None]:
    kind = getattr(torch.optim, task.optimizer, None)
    if kind is None:
        raise ArgumentError(f"optimizer = {task.optimizer!r}; expected a class of torch.optim, such as 'AdamW'")
    optimizer = kind(model.parameters(), lr=1e-4)
    switch = checkpointing_switch(model) if task.checkpointing else None
    if switch is not None:
        switch({"use_reentrant": False})
    inputs = inputs_of(model, task, device=device())

    def run() -> None:
        with torch.autocast(device().type, torch.bfloat16, enabled=task.mixed):
            loss = _loss(model(**inputs))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return run


def _loss(out: Any) -> Tensor:
    out = getattr(out, "logits", out)
    out = out[0] if isinstance(out, tuple) else out
    return out.float().square().mean()


def _measured(case: str, run: Callable[[], None], times: int) -> Measured:
    """Return a function's median time and peak, the first call separately; an unsupported kernel gives a row with
    `why`."""
    try:
        first = _seconds(run)
        run()  # warm-up
        spans = [_seconds(run) for _ in range(times)]
        return Measured(case, 1e3 * statistics.median(spans), _peak(run), first)
    except torch.OutOfMemoryError:
        why = "out of memory"
    except RuntimeError as error:  # "No available kernel"; unsupported by torch.compile
        why = (str(error).strip().splitlines() or ["RuntimeError"])[0].partition(". ")[0]
    gc.collect()
    return Measured(case, why=why)


def _seconds(run: Callable[[], None]) -> float:
    _wait()
    start = time.perf_counter()
    run()
    _wait()
    return time.perf_counter() - start


def _wait() -> None:
    if device().type == accelerator.TYPE:
        accelerator.synchronize()


def _peak(run: Callable[[], None]) -> int:
    if device().type == accelerator.TYPE:
        before = accelerator.memory_allocated()
        accelerator.reset_peak_memory_stats()
        run()
        accelerator.synchronize()
        return accelerator.max_memory_allocated() - before
    meter = Meter()
    with meter:
        run()
    return max(meter.peaks.values(), default=0)
