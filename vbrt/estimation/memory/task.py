"""Task: its kind, its sizes, and how the model runs."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from vbrt.config.argument_checks import check_instance, check_whole
from vbrt.errors import ArgumentError

__all__ = ["ATTENTION", "CHECKPOINTS", "GOALS", "TASKS", "Task"]

TASKS = ("decode", "prefill", "train")
GOALS = ("fastest", "exact", "throughput", "longest", "train")  # goals of `vbrt.advise`
ATTENTION = ("flash", "math")
CHECKPOINTS = (False, True)


@dataclass(frozen=True, slots=True)
class Task:
    """A task and the sizes that decide its memory.

    Attributes:
        kind: "decode": a prompt, then one token at a time with a KV cache; "prefill": one forward over all tokens;
            "train": forward, backward and optimizer step.
        batch: sequences, or images, at once.
        context: tokens per sequence; prompt tokens with "decode".
        new: tokens that "decode" adds.
        optimizer: a class of torch.optim, by name.
        checkpointing: activation checkpointing: blocks keep only their inputs and recompute in the backward pass.
        mixed: bf16 autocast over fp32 parameters.
        attention: "flash": torch's fused kernels; "math": the definition, with all scores.
        lora: rank of PEFT's adapters on all linear layers; 0: parameters with `requires_grad` train.
        experts: maximum of experts per layer that a prompt's tokens are routed to; 0: as expected of random routing.
        step: replaces the forward that the model's config suggests: takes the model, returns outputs, with "train" the
            loss.

    Raises:
        ArgumentError: an invalid value.
    """

    kind: str = "decode"
    batch: int = 1
    context: int = 2048
    new: int = 128
    optimizer: str = "AdamW"
    checkpointing: bool = False
    mixed: bool = False
    attention: str = "flash"
    lora: int = 0
    experts: int = 0
    step: Callable[[Any], Any] | None = None

    def __post_init__(self) -> None:
        for name, among in (("kind", TASKS), ("attention", ATTENTION), ("checkpointing", CHECKPOINTS)):
            if getattr(self, name) not in among:
                known = ", ".join(map(repr, among))
                raise ArgumentError(f"{name} = {getattr(self, name)!r}; expected one of {known}")
        for name, least in (("batch", 1), ("context", 1), ("new", 1), ("lora", 0), ("experts", 0)):
            check_whole(getattr(self, name), name, least=least)
        check_instance(self.optimizer, str, "optimizer", "the name of a class of torch.optim, such as 'AdamW'")
        check_instance(self.mixed, bool, "mixed", "True or False")
        check_instance(self.step, Callable | None, "step", "a function of the model, or None")

    @property
    def trains(self) -> bool:
        """True if there is a backward pass."""
        return self.kind == "train"

    def but(self, **changes: Any) -> "Task":
        """Return the task with other values."""
        return replace(self, **changes)
