"""Launching compiled Triton kernels with little work on the host, and launches as operators of torch.

A first call with a key goes through Triton; later ones hand pointers straight to the compiled kernel. The caller puts
everything that a specialization can depend on into the key.
"""

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from vbrt.kernels.cuda import private_api

__all__ = ["Launcher", "alignment", "cuda_op"]


def alignment(*tensors: Tensor) -> int:
    """A bit for each tensor: 1 if its address is not a multiple of 16, on which compiled kernels depend."""
    bits = 0
    for tensor in tensors:
        bits = bits << 1 | (tensor.data_ptr() & 15 != 0)
    return bits


class Launcher:
    """A jitted kernel whose arguments come first and whose constants come last in its signature."""

    __slots__ = ("_compiled", "_kernel", "_options")

    def __init__(self, kernel: Any, *, dependent: bool = False) -> None:
        """dependent: may start before the stream's last kernel has ended, for which it waits itself (sm_90)."""
        self._kernel = kernel
        self._options = {"launch_pdl": True} if dependent else {}
        self._compiled: dict[Hashable, private_api.Launch | None] = {}

    def __call__(
        self,
        key: Hashable,
        device: int,
        grid: tuple[int, int],
        tensors: tuple[Tensor, ...],
        numbers: tuple[Any, ...],
        constants: tuple[Any, ...],
        warps: int,
    ) -> None:
        """Launch on the device's current stream. The key must name the device, dtypes, alignments, numbers, constants.

        Numbers, and descriptors of tensors among them, that nothing is specialized for need not be in the key.
        """
        if private_api.current_device() != device:
            with torch.cuda.device(device):
                self(key, device, grid, tensors, numbers, constants, warps)
            return
        launch = self._compiled.get(key)
        if launch is None:
            compiled = self._kernel[grid](*tensors, *numbers, *constants, num_warps=warps, **self._options)
            self._compiled[key] = private_api.direct_launch(compiled)
            return
        addresses = [tensor.data_ptr() for tensor in tensors]
        launch(grid[0], grid[1], private_api.raw_stream(device), addresses, numbers, constants)


def cuda_op(name: str, launch: Callable[..., Any], schema: str, fake: Callable[..., Any]) -> Callable[..., Any]:
    """Register a launch as the operator vbrt::`name`, opaque to torch.compile; `fake` makes empty outputs."""
    op = torch.library.custom_op(f"vbrt::{name}", launch, mutates_args=(), device_types="cuda", schema=schema)

    def traced(*args: Any, **kwargs: Any) -> Any:
        private_api.never_lower(op._opoverload)
        return fake(*args, **kwargs)

    op.register_fake(traced)
    return op
