"""Kernel launcher with little host overhead, and launches as torch operators.

Triton binds and specializes arguments and looks up its cache on every call. A `Launcher` does so once per
specialization, and then passes pointers straight to the compiled kernel. Constants are passed by name. Specializations
can be compiled before their first launch, see `compiling`.
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
    """True if 16-bit rows start and end at multiples of 16 bytes, as kernels require."""
    aligned = x_MK.stride(1) == 1 and x_MK.stride(0) % 8 == 0 and x_MK.shape[1] % 8 == 0
    return aligned and x_MK.data_ptr() % 16 == 0


def pairs_are_aligned(x_MK: Tensor) -> bool:
    """True if 16-bit rows consist of aligned 4-byte words."""
    aligned = x_MK.stride(1) == 1 and x_MK.stride(0) % 2 == 0 and x_MK.shape[1] % 2 == 0
    return aligned and x_MK.data_ptr() % 4 == 0


class _Pointer:
    """Stand-in for a tensor in Triton's specialization, without holding its memory."""

    __slots__ = ("_address", "dtype")

    def __init__(self, tensor: Tensor) -> None:
        self._address, self.dtype = tensor.data_ptr(), tensor.dtype

    def data_ptr(self) -> int:
        """Address of the first element."""
        return self._address


def _without_memory(argument: Any) -> Any:
    """Replace tensors by stand-ins of the same specialization."""
    if isinstance(argument, Tensor):
        return _Pointer(argument)
    if isinstance(getattr(argument, "base", None), Tensor):  # a tensor descriptor
        argument = copy.copy(argument)
        argument.base = _Pointer(argument.base)
    return argument


class Launcher:
    """A jitted kernel whose signature has tensors, then numbers, then constants."""

    __slots__ = ("_ahead", "_compiled", "_fused", "_kernel", "_options")

    def __init__(self, kernel: Any, *, dependent: bool = False, fused: bool = True) -> None:
        """dependent: programmatic dependent launch: may start before the stream's last kernel ends; waits itself
        (sm_90). fused: products and sums may become one FMA, rounded once."""
        self._kernel = kernel
        self._fused = fused
        self._options = {"launch_pdl": True} if dependent else {}
        self._compiled: dict[Hashable, triton_api.Launch | None] = {}
        self._ahead: dict[Hashable, Compilation] = {}  # compiled ahead, not launched yet

    def __call__(
        self,
        device: int,
        grid: tuple[int, int],
        tensors: tuple[Tensor, ...],
        numbers: tuple[Any, ...],
        *,
        warps: int,
        registers: int | None = None,
        specialized: tuple[Hashable, ...] = (),
        **constants: Any,
    ) -> None:
        """Launch on the device's current stream.

        specialized: varying dtypes, and numbers that Triton specializes on: all that are not in the kernel's
        `do_not_specialize`. numbers may include tensor descriptors.
        registers: most of a thread; a function of the constants.
        constants: the kernel's, by name. Raises KernelError if they do not match its signature.
        """
        if torch_api.current_device() != device:
            with torch.cuda.device(device):
                self(
                    device, grid, tensors, numbers,
                    warps=warps, registers=registers, specialized=specialized, **constants,
                )  # fmt: skip
            return
        addresses, unaligned = [], 0
        for tensor in tensors:
            address = tensor.data_ptr()
            addresses.append(address)
            unaligned = unaligned << 1 | (address & 15 != 0)
        key = (device, unaligned, specialized, *constants.values())
        launch = self._compiled.get(key)
        if launch is None or noters:
            arguments, options = (*tensors, *numbers), self._with_options(constants, warps, registers)
            if threading.get_ident() in noters:
                self._check(constants)
                self._note(key, device, arguments, options)
                return
            if launch is None:
                self._check(constants)
                launch = self._launch_first(key, grid, arguments, options)
                if launch is None:
                    return
        # a compiled kernel only checks the number of constants, so their order does not matter
        launch(grid[0], grid[1], torch_api.raw_stream(device), addresses, numbers, constants.values())

    def _with_options(self, constants: dict[str, Any], warps: int, registers: int | None) -> dict[str, Any]:
        options = {"num_warps": warps, **triton_api.fp_fusion(self._fused), **self._options}
        return constants | options | ({} if registers is None else {"maxnreg": registers})

    def _note(self, key: Hashable, device: int, arguments: tuple[Any, ...], options: dict[str, Any]) -> None:
        """Note the compilation that a launch needs, unless it exists."""
        if key in self._compiled:
            return
        triton_api.open_cache(self._kernel)
        compile = functools.partial(self._compile, device, tuple(map(_without_memory, arguments)), options)
        noters[threading.get_ident()].append(self._ahead.setdefault(key, Compilation(self._kernel.__name__, compile)))

    def _compile(self, device: int, arguments: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Compile a specialization; return the kernel and its direct launch."""
        with torch.cuda.device(device):
            compiled = self._kernel.warmup(*arguments, grid=(1, 1), **options)
        triton_api.make_launcher(compiled)
        return compiled

    def _launch_first(
        self, key: Hashable, grid: tuple[int, int], arguments: tuple[Any, ...], options: dict[str, Any]
    ) -> triton_api.Launch | None:
        """Return a launch compiled ahead; None if Triton has launched, after compiling if needed."""
        begun, ahead = time.perf_counter_ns(), self._ahead.pop(key, None)
        how, compiled, compile_us = ("unforeseen", None, None) if ahead is None else ahead.finished()
        launch = None if compiled is None else triton_api.direct_launch(compiled)
        if launch is None:
            compiled = self._kernel[grid](*arguments, **options)
        if key not in self._compiled:  # else Triton launches each time
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
    """Register a launch as the operator vbrt::`name`, opaque to torch.compile; `fake` allocates empty outputs."""
    op = torch.library.custom_op(f"vbrt::{name}", launch, mutates_args=(), device_types="cuda", schema=schema)

    def traced(*args: Any, **kwargs: Any) -> Any:
        torch_api.never_lower(op._opoverload)
        return fake(*args, **kwargs)

    op.register_fake(traced)
    return op
