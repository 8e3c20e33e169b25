"""What a run of scripts/train shows: a bar on a terminal, plain lines elsewhere; and what each tier holds."""

import sys
from typing import Any

import psutil
import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from vbrt.residency.plan import format_bytes


class Display:
    """A bar on a terminal; elsewhere plain lines without control codes."""

    def __init__(self, first: int, steps: int) -> None:
        self._terminal = sys.stdout.isatty()
        columns = (
            TextColumn("step {task.completed:.0f} of {task.total:.0f}"),
            BarColumn(20),
            TimeRemainingColumn(),
            TextColumn("{task.fields[now]}"),
        )
        self._bar = Progress(*columns, console=Console(), disable=not self._terminal)
        self._task = self._bar.add_task("", total=steps, completed=first, now="")

    def __enter__(self) -> "Display":
        self._bar.start()
        return self

    def __exit__(self, *exc_info: object) -> None:
        self._bar.stop()

    def step(self, record: dict[str, Any], speed: dict[str, Any]) -> None:
        """What a log line says."""
        memory = ", ".join(f"{tier} {format_bytes(nbytes)}" for tier, nbytes in speed["memory_bytes"].items())
        now = f"loss {record['loss']:.4f}  {speed['tokens_per_s']:,.0f} tokens/s  {memory}"
        self._bar.update(self._task, completed=record["step"], now=now)
        if not self._terminal:
            print(f"step {record['step']}  {now}", flush=True)

    def say(self, text: str) -> None:
        """A line that stays."""
        if self._terminal:
            self._bar.console.print(text, markup=False, highlight=False)
        else:
            print(text, flush=True)


def memory_bytes(device: torch.device) -> dict[str, int]:
    """What each tier holds now, and the GPU's peak."""
    memory = {"cpu": psutil.Process().memory_info().rss}
    if device.type == "cuda":
        return {"gpu": torch.cuda.memory_allocated(), "gpu peak": torch.cuda.max_memory_allocated(), **memory}
    return memory
