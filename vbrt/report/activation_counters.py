"""Activation counters: tensors that blocks save for the backward pass, recompute or offload."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self

__all__ = ["ActivationStats"]


@dataclass(frozen=True, slots=True)
class ActivationStats:
    """Activations of a model's repeated blocks, saved from a forward to its backward pass.

    Attributes:
        asked: `training.activations`.
        modes: how many blocks keep everything, recompute, or offload: of the last pass with gradients.
        passes: with gradients, of the first block.
        input_bytes, inside_bytes: of the largest block: its input, and the activations that it saves without
            recomputation (0: not measured; measured if a budget chooses the mode).
        offloaded_bytes, returned_bytes: copied to host memory, and back.
        prefetched, late: offloaded inputs whose H2D copy began before they were needed, or only then.
        host_bytes, host_peak_bytes: pinned host memory, now and at most.
        wait_us: time that the device waited for these copies.
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
        """Inverse of `dataclasses.asdict`."""
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
