"""Launching a Triton kernel again without what `kernel[grid](...)` does on every call.

Triton binds arguments, specializes them and looks up its cache each time. Here the caller names everything that a
specialization can depend on in a key of its own; the first call with a key goes through Triton, later ones hand
pointers straight to the compiled kernel. Triton's launch hooks (profilers) see first calls only.
"""

import sys
from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

__all__ = ["Launcher", "alignment", "cuda_op", "tell_inductor"]

_current_device = getattr(torch._C, "_cuda_getDevice", None)
_raw_stream = getattr(torch._C, "_cuda_getCurrentRawStream", None)


def alignment(*tensors: Tensor) -> int:
    """One bit a tensor: whether its address is not a multiple of 16, which compiled kernels depend on."""
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
        self._compiled: dict[Hashable, Any] = {}

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
        """Run on the device's current stream. The key must name the device, dtypes, alignments, numbers, constants.

        Numbers, and descriptors of tensors among them, that nothing is specialized for need not be in the key.
        """
        if _current_device() != device:
            with torch.cuda.device(device):
                self(key, device, grid, tensors, numbers, constants, warps)
            return
        compiled = self._compiled.get(key)
        if compiled is None:
            self._compiled[key] = self._kernel[grid](*tensors, *numbers, *constants, num_warps=warps, **self._options)
            return
        compiled.run(
            grid[0], grid[1], 1, _raw_stream(device), compiled.function, compiled.packed_metadata, None, None, None,
            *[tensor.data_ptr() for tensor in tensors], *numbers, *constants,
        )  # fmt: skip


def cuda_op(name: str, launch: Callable[..., Any], schema: str, fake: Callable[..., Any]) -> Callable[..., Any]:
    """A launch as the operator vbrt::`name`, which torch.compile does not look into; `fake` makes empty outputs."""
    op = torch.library.custom_op(f"vbrt::{name}", launch, mutates_args=(), device_types="cuda", schema=schema)

    def traced(*args: Any, **kwargs: Any) -> Any:
        tell_inductor(op._opoverload)
        return fake(*args, **kwargs)

    op.register_fake(traced)
    return op


def tell_inductor(op: torch._ops.OpOverload) -> None:
    """Have inductor, where it is at work, call an operator that it has no code for, before it finds that out itself.

    For then torch 2.11 makes a text of all that leads up to the operator's inputs, for a log that is off, and that text
    doubles with each norm before it: for a model whose first such operator was behind 8 layers it took minutes on end.
    """
    lowering = sys.modules.get("torch._inductor.lowering")
    if lowering is not None and op not in lowering.lowerings:
        tag = torch._library.utils.get_layout_constraint_tag(op, with_default=True)
        lowering.make_fallback(op, lowering.tag_to_layout_constraint(tag))
