"""Launching compiled Triton kernels with little work on the host, and launches as operators of torch.

Triton binds arguments, specializes them and looks up its cache on every call. A `Launcher` does so once for all
arguments that compile to one kernel, and then hands pointers straight to it. A kernel's constants are given by name.
What a launch will need can be compiled before it, see `compiling`.
"""

import copy
import functools
import threading
import time
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from vbrt.errors import KernelError
from vbrt.kernels.cuda.compiling import FIRST, Compilation, FirstLaunch, noters
from vbrt.libraries import torch_api, triton_api

__all__ = ["Launcher", "cuda_op", "pairs_are_aligned", "rows_are_aligned"]


def rows_are_aligned(x_MK: Tensor) -> bool:
    """True if 16-bit rows start and end at multiples of 16 bytes, as kernels read them."""
    aligned = x_MK.stride(1) == 1 and x_MK.stride(0) % 8 == 0 and x_MK.shape[1] % 8 == 0
    return aligned and x_MK.data_ptr() % 16 == 0


def pairs_are_aligned(x_MK: Tensor) -> bool:
    """True if 16-bit rows are whole words of 4 bytes."""
    aligned = x_MK.stride(1) == 1 and x_MK.stride(0) % 2 == 0 and x_MK.shape[1] % 2 == 0
    return aligned and x_MK.data_ptr() % 4 == 0


class _Pointer:
    """What Triton asks of a tensor to compile code for it; does not hold the tensor's memory."""

    __slots__ = ("_address", "dtype")

    def __init__(self, tensor: Tensor) -> None:
        self._address, self.dtype = tensor.data_ptr(), tensor.dtype

    def data_ptr(self) -> int:
        """The address of the first element."""
        return self._address


def _without_memory(argument: Any) -> Any:
    """An argument for which Triton compiles the same code, of a launch that is not made."""
    if isinstance(argument, Tensor):
        return _Pointer(argument)
    if isinstance(getattr(argument, "base", None), Tensor):  # a descriptor
        argument = copy.copy(argument)
        argument.base = _Pointer(argument.base)
    return argument


class Launcher:
    """A jitted kernel whose signature has tensors first, then numbers, then constants."""

    __slots__ = ("_ahead", "_compiled", "_kernel", "_options")

    def __init__(self, kernel: Any, *, dependent: bool = False) -> None:
        """dependent: may start before the stream's last kernel has ended, for which it waits itself (sm_90)."""
        self._kernel = kernel
        self._options = {"launch_pdl": True} if dependent else {}
        self._compiled: dict[Hashable, triton_api.Launch | None] = {}
        self._ahead: dict[Hashable, Compilation] = {}  # not launched yet

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
        if torch_api.current_device() != device:
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
        if launch is None or noters:
            arguments, options = (*tensors, *numbers), self._with_options(constants, warps)
            if threading.get_ident() in noters:
                self._check(constants)
                self._note(key, device, arguments, options)
                return
            if launch is None:
                self._check(constants)
                launch = self._launch_first(key, grid, arguments, options)
                if launch is None:
                    return
        # a compiled kernel takes constants for their number alone, so any order does
        launch(grid[0], grid[1], torch_api.raw_stream(device), addresses, numbers, constants.values())

    def _with_options(self, constants: dict[str, Any], warps: int) -> dict[str, Any]:
        return {**constants, "num_warps": warps, **triton_api.fp_fusion(True), **self._options}

    def _note(self, key: Hashable, device: int, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Note what a launch needs, unless it is there."""
        if key in self._compiled:
            return
        triton_api.open_cache(self._kernel)
        compile = functools.partial(self._compile, device, tuple(map(_without_memory, arguments)), options)
        noters[threading.get_ident()].append(self._ahead.setdefault(key, Compilation(self._kernel.__name__, compile)))

    def _compile(self, device: int, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """What a launch with these arguments has Triton compile, and what launches it."""
        with torch.cuda.device(device):
            compiled = self._kernel.warmup(*arguments, grid=(1, 1), **options)
        triton_api.make_launcher(compiled)
        return compiled

    def _launch_first(
        self, key: Hashable, grid: tuple[int, int], arguments: tuple[Any, ...], options: dict[str, Any]
    ) -> triton_api.Launch | None:
        """What was compiled ahead, to be launched; None if Triton has launched, and compiled if it had to."""
        begun, ahead = time.perf_counter_ns(), self._ahead.pop(key, None)
        how, compiled, compile_us = ("unforeseen", None, None) if ahead is None else ahead.finished()
        launch = None if compiled is None else triton_api.direct_launch(compiled)
        if launch is None:
            compiled = self._kernel[grid](*arguments, **options)
        if key not in self._compiled:  # else these are Triton's own launches, each time
            self._compiled[key] = launch or triton_api.direct_launch(compiled)
            now = time.perf_counter_ns()
            wait_us = (now - begun) // 1000
            compile_us = wait_us if compile_us is None else compile_us
            FIRST.append(FirstLaunch(self._kernel.__name__, how, wait_us, compile_us, now))
        return launch

    def _check(self, constants: dict[str, Any]) -> None:
        wanted = triton_api.constant_names(self._kernel)
        if constants.keys() != set(wanted):
            raise KernelError(
                f"{self._kernel.__name__}: constants {', '.join(sorted(constants))}; expected {', '.join(wanted)}"
            )


def cuda_op(name: str, launch: Callable[..., Any], schema: str, fake: Callable[..., Any]) -> Callable[..., Any]:
    """Register a launch as the operator vbrt::`name`, opaque to torch.compile; `fake` makes empty outputs."""
    op = torch.library.custom_op(f"vbrt::{name}", launch, mutates_args=(), device_types="cuda", schema=schema)

    def traced(*args: Any, **kwargs: Any) -> Any:
        torch_api.never_lower(op._opoverload)
        return fake(*args, **kwargs)

    op.register_fake(traced)
    return op
