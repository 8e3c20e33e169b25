"""Launching compiled Triton kernels with little work on the host, and launches as operators of torch.

Triton binds arguments, specializes them and looks up its cache on every call. A `Launcher` does so once for all
arguments that compile to one kernel, and then hands pointers straight to it. A kernel's constants are given by name.
"""

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from vbrt.errors import KernelError
from vbrt.kernels.cuda import private_api

__all__ = ["Launcher", "cuda_op", "pairs_are_aligned", "rows_are_aligned"]


def rows_are_aligned(x_MK: Tensor) -> bool:
    """True if 16-bit rows start and end at multiples of 16 bytes, as kernels read them."""
    aligned = x_MK.stride(1) == 1 and x_MK.stride(0) % 8 == 0 and x_MK.shape[1] % 8 == 0
    return aligned and x_MK.data_ptr() % 16 == 0


def pairs_are_aligned(x_MK: Tensor) -> bool:
    """True if 16-bit rows are whole words of 4 bytes."""
    aligned = x_MK.stride(1) == 1 and x_MK.stride(0) % 2 == 0 and x_MK.shape[1] % 2 == 0
    return aligned and x_MK.data_ptr() % 4 == 0


class Launcher:
    """A jitted kernel whose signature has tensors first, then numbers, then constants."""

    __slots__ = ("_compiled", "_kernel", "_options")

    def __init__(self, kernel: Any, *, dependent: bool = False) -> None:
        """dependent: may start before the stream's last kernel has ended, for which it waits itself (sm_90)."""
        self._kernel = kernel
        self._options = {"launch_pdl": True} if dependent else {}
        self._compiled: dict[Hashable, private_api.Launch | None] = {}

    def __call__(
        self,
        device: int,
        grid: tuple[int, int],
        tensors: tuple[Tensor, ...],
        numbers: tuple[Any, ...],
        *,
        warps: int,
        specialized: tuple[Hashable, ...] = (),
        **constants: Any,
    ) -> None:
        """Launch on the device's current stream.

        specialized: dtypes that are not always the same, and numbers for which Triton compiles special code: all that
        are not in the kernel's `do_not_specialize`. numbers may have descriptors of tensors among them.
        constants: the kernel's, by name. Raises KernelError if they are not exactly those of its signature.
        """
        if private_api.current_device() != device:
            with torch.cuda.device(device):
                self(device, grid, tensors, numbers, warps=warps, specialized=specialized, **constants)
            return
        addresses, unaligned = [], 0
        for tensor in tensors:
            address = tensor.data_ptr()
            addresses.append(address)
            unaligned = unaligned << 1 | (address & 15 != 0)
        key = (device, unaligned, specialized, *constants.values())
        launch = self._compiled.get(key)
        if launch is None:
            self._check(constants)
            compiled = self._kernel[grid](*tensors, *numbers, **constants, num_warps=warps, **self._options)
            self._compiled[key] = private_api.direct_launch(compiled)
            return
        # a compiled kernel takes constants for their number alone, so any order does
        launch(grid[0], grid[1], private_api.raw_stream(device), addresses, numbers, constants.values())

    def _check(self, constants: dict[str, Any]) -> None:
        wanted = private_api.constant_names(self._kernel)
        if constants.keys() != set(wanted):
            raise KernelError(
                f"{self._kernel.__name__}: constants {', '.join(sorted(constants))}; expected {', '.join(wanted)}"
            )


def cuda_op(name: str, launch: Callable[..., Any], schema: str, fake: Callable[..., Any]) -> Callable[..., Any]:
    """Register a launch as the operator vbrt::`name`, opaque to torch.compile; `fake` makes empty outputs."""
    op = torch.library.custom_op(f"vbrt::{name}", launch, mutates_args=(), device_types="cuda", schema=schema)

    def traced(*args: Any, **kwargs: Any) -> Any:
        private_api.never_lower(op._opoverload)
        return fake(*args, **kwargs)

    op.register_fake(traced)
    return op
