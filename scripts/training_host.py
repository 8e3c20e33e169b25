"""What holds the host up in a step of full training: the loop of `typed_training.py`'s "vbrt, recomputed", varied.

    python -m scripts.training_host [--tokens 8192] [--threads 4 8 12 16] [--rounds 2] [--out FILE]

One model in one process, variants in turns: numbers of update threads; a shorter interval after which threads take the
GIL from each other; updates at the step only; no updates at all, which leaves both passes; and last updates that
compute nothing, which leaves what Python does for them, and takes cores and memory's rate from nobody. The resident
model, whose launches are those that anybody has, comes first. A row, milliseconds a step (medians):

- step: until the GPU is done; forward, backward, update: until the call returns;
- waited: of it, leases of layers, for their own update; computed: updates, in the background;
- by thread (the main one, autograd's, all others): on a core; runnable, without one; how often it went to sleep. What a
  thread that launches is neither of, it slept: for a GIL, for a lock, or until the GPU was done.
"""

import argparse
import contextlib
import dataclasses
import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from scripts.full_models import emptied, waited
from scripts.measuring import machine, markdown_table
from scripts.typed_training import DEVICE, LR, batch_of, in_tiers, recomputing
from vbrt.kernels.cpu.update import TeamPart
from vbrt.training.full.update_threads import Helpers, cores

_TASKS = Path("/proc/self/task")
_COLUMNS = ("step", "forward", "backward", "update", "waited", "computed")
_THREADS = ("main", "autograd", "others")


class Loop:
    """Steps of one model, each timed in its parts."""

    def __init__(self, model: Any, optimizer: torch.optim.Optimizer, batch: dict[str, torch.Tensor]) -> None:
        self.model, self.optimizer, self.batch = model, optimizer, batch
        self.steps = True  # False: gradients are dropped

    def step(self) -> dict[str, float]:
        waited()
        times, before, counted = [time.perf_counter()], thread_times(), self._counted()
        with torch.autocast(DEVICE, torch.bfloat16):
            loss = self.model(**self.batch).loss
        times.append(time.perf_counter())
        loss.backward()
        times.append(time.perf_counter())
        if self.steps:
            self.optimizer.step()
        self.optimizer.zero_grad()
        times.append(time.perf_counter())
        waited()
        spans = (until - since for since, until in itertools.pairwise(times))
        row = dict(zip(("forward", "backward", "update"), spans, strict=True))
        row |= {name: now - counted[name] for name, now in self._counted().items()}
        row |= {name: now - before.get(name, 0) for name, now in thread_times().items()}
        return {"step": time.perf_counter() - times[0], **row}

    def _counted(self) -> dict[str, float]:
        if not hasattr(self.model, "stats"):
            return {}
        found = self.model.stats().updates
        return {"waited": found.wait_us / 1e6, "computed": found.update_us / 1e6}


def thread_times() -> dict[str, float]:
    """Seconds on a core and in its queue, and sleeps, of the main thread, of autograd's and of all others together."""
    found = {f"{who}, {what}": 0.0 for who in _THREADS for what in ("on a core", "queued", "sleeps")}
    for task in _TASKS.iterdir() if _TASKS.exists() else ():
        with contextlib.suppress(OSError, ValueError):
            name = (task / "comm").read_text()
            who = (
                "main" if int(task.name) == os.getpid() else "autograd" if name.startswith("pt_autograd") else "others"
            )
            on_core, queued, _ = map(int, (task / "schedstat").read_text().split())
            status = dict(line.split(":", 1) for line in (task / "status").read_text().splitlines())
            found[f"{who}, on a core"] += on_core / 1e9
            found[f"{who}, queued"] += queued / 1e9
            found[f"{who}, sleeps"] += int(status["voluntary_ctxt_switches"])
    return found


@contextlib.contextmanager
def switched(seconds: float) -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(seconds)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


@contextlib.contextmanager
def with_threads(loop: Loop, threads: int) -> Iterator[None]:
    loop.model.settle()
    updater = loop.optimizer._vb_updater
    before, updater.helpers = updater.helpers, Helpers(threads)
    try:
        yield
    finally:
        loop.model.settle()
        before.busy_ns += updater.helpers.busy_ns
        updater.helpers.stop()
        updater.helpers = before


@contextlib.contextmanager
def at_the_step(loop: Loop, *, steps: bool = True) -> Iterator[None]:
    """No updates ahead of the step; without `steps` none at all."""
    gradients = [p.weight.gradient for p in loop.model.parameters() if hasattr(p, "weight")]
    held = [gradient.ahead for gradient in gradients]
    for gradient in gradients:
        gradient.ahead = None
    loop.steps = steps
    try:
        yield
    finally:
        loop.steps = True
        for gradient, ahead in zip(gradients, held, strict=True):
            gradient.ahead = ahead


class _Nothing(TeamPart):
    """A part of an update that computes nothing, as quickly."""

    def __init__(self, *_: object) -> None:
        pass

    def by_team(self, team: object, count: int) -> None:
        pass


@contextlib.contextmanager
def computing_nothing(loop: Loop) -> Iterator[None]:
    """Updates compute nothing: the weights are none afterwards."""
    loop.model.settle()
    updater = loop.optimizer._vb_updater
    before, updater.kernel = updater.kernel, dataclasses.replace(updater.kernel, run=_Nothing)
    try:
        yield
    finally:
        loop.model.settle()
        updater.kernel = before


def variants(loop: Loop, threads: list[int]) -> dict[str, Callable[[], contextlib.AbstractContextManager]]:
    """By name, what holds while a variant's steps run."""
    found: dict[str, Callable[[], contextlib.AbstractContextManager]] = {"as it is": contextlib.nullcontext}
    found |= {f"{n} threads": lambda n=n: with_threads(loop, n) for n in threads}
    found["GIL after 0.1 ms"] = lambda: switched(1e-4)
    found["updates at the step"] = lambda: at_the_step(loop)
    return found | {"no updates": lambda: at_the_step(loop, steps=False)}


def medians(rows: list[dict[str, float]]) -> dict[str, float]:
    return {name: statistics.median(row[name] for row in rows) for name in rows[0]}


def measured(options: argparse.Namespace) -> dict[str, dict[str, float]]:
    """Medians of each variant."""
    batch = batch_of("full", options.tokens)
    model = recomputing(options)
    plain = Loop(model, torch.optim.AdamW(model.parameters(), LR, fused=True), batch)
    found = {"resident": medians([plain.step() for _ in range(2 + options.rounds * options.steps)][2:])}
    del plain, model
    emptied()
    loop = Loop(*in_tiers(options, "recompute"), batch)
    rows: dict[str, list[dict[str, float]]] = {}
    for _ in range(3):
        loop.step()
    for _ in range(options.rounds):
        for name, holds in variants(loop, options.threads).items():
            with holds():
                rows.setdefault(name, []).extend([loop.step() for _ in range(1 + options.steps)][1:])
    with computing_nothing(loop):
        rows["updates compute nothing"] = [loop.step() for _ in range(1 + options.rounds * options.steps)][1:]
    print(*loop.model.stats().fallbacks, sep="\n")
    return found | {name: medians(steps) for name, steps in rows.items()}


def table(found: dict[str, dict[str, float]]) -> list[str]:
    """The lines of a table, in milliseconds; by thread: on a core / queued / sleeps."""

    def cells(row: dict[str, float]) -> Iterator[str]:
        for name in _COLUMNS:
            yield f"{row[name] * 1e3:.0f}" if name in row else ""
        for who in _THREADS:
            busy, queued = (row[f"{who}, {what}"] * 1e3 for what in ("on a core", "queued"))
            yield f"{busy:.0f} / {queued:.0f} / {row[f'{who}, sleeps']:.0f}"

    return markdown_table(["", *_COLUMNS, *_THREADS], [[name, *cells(row)] for name, row in found.items()])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", type=int, default=8192 if DEVICE == "cuda" else 32)
    parser.add_argument("--threads", type=int, nargs="*", default=sorted({cores() // 4 * n or 1 for n in (1, 2, 3, 4)}))
    parser.add_argument("--steps", type=int, default=2, help="of a variant in a round, after one that is not counted")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    options.family = "full"
    found = measured(options)
    print(*table(found), sep="\n")
    if options.out is not None:
        options.out.write_text(
            json.dumps({"machine": machine(), "tokens": options.tokens, "rows": found}, indent=1) + "\n"
        )


if __name__ == "__main__":
    main()
