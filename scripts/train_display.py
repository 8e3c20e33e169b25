"""What a run of scripts/train shows: a bar on a terminal, plain lines elsewhere; and what each tier holds."""

import sys
from typing import Any

import psutil
import torch

from vbrt.report.progress import Progress
from vbrt.residency.plan import format_bytes


class Display:
    """A bar on a terminal; elsewhere a plain line for each step."""

    def __init__(self, first: int, steps: int) -> None:
        self._terminal, self._at, self._steps = sys.stderr.isatty(), first, steps
        self._work = Progress("training", steps, unit="steps", show=self._terminal)
        self._work.skip(first)

    def __enter__(self) -> "Display":
        self._work.__enter__()
        return self

    def __exit__(self, *exc_info: Any) -> None:
        self._work.__exit__(*exc_info)

    def step(self, record: dict[str, Any], speed: dict[str, Any]) -> None:
        """What a log line says."""
        self._work.done(record["step"] - self._at)
        self._at = record["step"]
        memory = ", ".join(f"{tier} {format_bytes(nbytes)}" for tier, nbytes in speed["memory_bytes"].items())
        now = f"loss {record['loss']:.4f}  {speed['tokens_per_s']:,.0f} tokens/s  {memory}"
        self._work.at(now)
        if not self._terminal:
            print(f"step {record['step']}  {now}  {100 * self._at / self._steps:.0f} %", flush=True)

    def say(self, text: str) -> None:
        """A line that stays."""
        with self._work.paused():
            print(text, flush=True)


def memory_bytes(device: torch.device) -> dict[str, int]:
    """What each tier holds now, and the GPU's peak."""
    memory = {"cpu": psutil.Process().memory_info().rss}
    if device.type == "cuda":
        return {"gpu": torch.cuda.memory_allocated(), "gpu peak": torch.cuda.max_memory_allocated(), **memory}
    return memory
