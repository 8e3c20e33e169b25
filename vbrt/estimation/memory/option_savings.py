"""Savings of each memory option: the same task with and without it."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from vbrt.config import Machine, VBConfig, load_config
from vbrt.errors import ArgumentError, ConfigError
from vbrt.estimation.memory.estimate import estimate
from vbrt.estimation.memory.task import Task
from vbrt.residency.byte_text import format_bytes

__all__ = ["Option", "with_and_without"]


@dataclass(frozen=True, slots=True)
class Option:
    """Peak bytes in the computing tier with and without an option, all others as asked; `why`: it is unavailable
    here."""

    name: str
    without: int | None
    having: int | None
    why: str = ""

    def __str__(self) -> str:
        if self.without is None or self.having is None:
            return f"  {self.name:<26}not available: {self.why}"
        saved = self.without - self.having
        word = "saves" if saved >= 0 else "costs"
        figures = f"{format_bytes(self.without):>10} -> {format_bytes(self.having):>10}"
        return f"  {self.name:<26}{figures}   {word} {format_bytes(abs(saved))}"

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return asdict(self)


def with_and_without(
    model: nn.Module, task: Task, config: VBConfig | None, machine: Machine | None = None, ranks: int = 1
) -> tuple[Option, ...]:
    """Estimate a task with and without each applicable option. Raises as `estimate`."""
    found = []
    for name, (without, having) in _each(task, config):
        try:
            peaks = [
                estimate(model, each, how, machine=machine, ranks=ranks).peak_bytes for each, how in (without, having)
            ]
            found.append(Option(name, *peaks))
        except (ArgumentError, ConfigError) as error:
            found.append(Option(name, None, None, str(error)))
    return tuple(found)


_Case = tuple[Task, VBConfig | None]


def _each(task: Task, config: VBConfig | None) -> Iterator[tuple[str, tuple[_Case, _Case]]]:
    """Yield each option's cases without and with it."""
    packed = config or load_config("fp4", mode="train" if task.trains and not task.lora else "infer")
    yield "4-bit weights", ((task, None), (task, packed))
    if not task.trains or task.lora:
        budgets = {"gpu": {"budget": "auto"}}, {"gpu": {"budget": "10%"}}
        yield "weights in host memory", tuple((task, load_config(packed, tiers=budget)) for budget in budgets)
    yield "flash attention", ((task.but(attention="math"), config), (task.but(attention="flash"), config))
    if task.trains:
        yield "checkpointing", ((task.but(checkpointing=False), config), (task.but(checkpointing=True), config))
        yield "bf16 autocast", ((task.but(mixed=False), config), (task.but(mixed=True), config))
        if not task.lora:
            yield "LoRA, rank 16", ((task, config), (task.but(lora=16), config))
