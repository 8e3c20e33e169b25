"""Counters of what a model's blocks keep for the backward pass."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

__all__ = ["ActivationStats"]


@dataclass(frozen=True, slots=True)
class ActivationStats:
    """What the repeated blocks of a model keep from a forward to its backward pass.

    Attributes:
        asked: `training.activations`.
        modes: how many blocks keep everything, recompute, or offload: of the last pass with gradients.
        passes: with gradients, of the first block.
        input_bytes, inside_bytes: of one block, the largest: what it takes, and what it keeps if nothing is computed
            again (0: not measured; it is where a budget chooses).
        offloaded_bytes, returned_bytes: copied to host memory, and back.
        prefetched: inputs whose way back began before they were asked for; `late` ones began when they were.
        host_bytes, host_peak_bytes: page-locked memory, now and at most.
        wait_us: time for which the device has waited for these copies.
    """

    asked: str
    modes: Mapping[str, int] = field(default_factory=dict)
    passes: int = 0
    input_bytes: int = 0
    inside_bytes: int = 0
    offloaded_bytes: int = 0
    returned_bytes: int = 0
    prefetched: int = 0
    late: int = 0
    host_bytes: int = 0
    host_peak_bytes: int = 0
    wait_us: int = 0

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Read what `dataclasses.asdict` gives of it."""
        return cls(**data)

    def __str__(self) -> str:
        modes = ", ".join(f"{count} {mode}" for mode, count in self.modes.items()) or "no pass with gradients yet"
        moved = ""
        if self.offloaded_bytes:
            moved = (
                f" · {self.offloaded_bytes / 2**20:.1f} MiB out, {self.returned_bytes / 2**20:.1f} MiB back, at most "
                f"{self.host_peak_bytes / 2**20:.1f} MiB in host memory · waited {self.wait_us / 1e3:.1f} ms"
            )
        return f"activations: {modes}{moved}"
