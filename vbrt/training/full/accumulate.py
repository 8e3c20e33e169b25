"""Gradient accumulation on the host: one pass over memory, multithreaded.

torch's `add_` of bf16 to fp32 converts element by element: 4.5 GB/s on two cores, a tenth of the memory bandwidth.
"""

import functools

import torch
from torch import Tensor

from vbrt.kernels import resolve
from vbrt.training.full.update_threads import Helpers, cores

__all__ = ["Sums"]


class Sums:
    """Gradient sums of one model. Its threads start with the first sum."""

    def __init__(self) -> None:
        self._helpers = Helpers(cores() - cores() // 4)  # a quarter of the cores launches the GPU's kernels

    def __call__(self, held: Tensor, more: Tensor, out: Tensor, factor: float = 1.0) -> Tensor:
        """Write held * factor + more into `out`, which may be `held`; return it. See
        `vbrt.kernels.update.gradient_sum`."""
        self._helpers.run(out.numel(), self._kernel(held, more, out, factor))
        return out

    @functools.cached_property
    def _kernel(self):
        return resolve("gradient_sum", "auto", torch.device("cpu")).run

    def close(self) -> None:
        """End the threads. Idempotent."""
        self._helpers.stop()
