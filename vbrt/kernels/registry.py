"""Which implementation of an op serves a backend, a device and a weight format, and what its callers must know of it.

    linear = resolve("linear", "auto", device, "nvfp4")      # once, at construction
    y = linear(x, planes, bias, "none")                      # hot paths keep linear.run, the bare function

Every implementation is one record, `Kernel`; `vbrt.kernels.entries` lists those of the package. "reference" is plain
torch, runs anywhere and specifies the op; there are faster ones: "triton" for GPUs and "compiled" (C, built at first
use) for CPUs. Callers ask the record, never for its name.
"""

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from vbrt.config import BACKENDS
from vbrt.errors import KernelError
from vbrt.formats import PageLayout, WeightPlanes

__all__ = ["BACKENDS", "EXACT", "Kernel", "PageOrder", "kernel_refusal", "register", "resolve", "resolves_late"]

#: the format to ask for where a weight has a fine plane: the kernel restores the original weight, whatever its format
EXACT = "exact"


class PageOrder(Protocol):
    """An order of the coarse plane in its page that suits a kernel better than the format's own.

    Attributes:
        rows: how many rows of the weight an entry of the plane's fields holds, along their first dimension.
    """

    rows: int

    def layout(self, shape: tuple[int, int]) -> PageLayout:
        """The page of a weight (N, K); depends on nothing else."""

    def pack(self, coarse: dict[str, Tensor], shape: tuple[int, int]) -> dict[str, Tensor] | None:
        """The coarse tensors of `Format.encode` in this order, or None if that would not be exact."""

    def unpack(self, tensors: dict[str, Tensor], shape: tuple[int, int]) -> dict[str, Tensor]:
        """The exact inverse of `pack`."""


def _never_refuses(device: torch.device) -> None:
    return None


def _format_order(format: str) -> None:
    return None


def _merges_none(format: str, shape: tuple[int, int]) -> bool:
    return False


def _needs_pages(layout: PageLayout, device: torch.device) -> bool:
    return False


@dataclass(frozen=True, slots=True)
class Kernel:
    """One implementation of an op.

    Attributes:
        op, backend: what it computes, and the name under which users choose it and statistics show it.
        run: the function; calling the record is the same, with one Python call more.
        devices, formats: device types and weight formats that it serves; None: any.
        rank: "auto" takes the highest rank that serves a device.
        refusal: why it does not serve a device of its types, or None if it does.
        builds: True if `refusal` takes long the first time, because it builds the kernel.
        rounded: by "fp8" or "int8", the function for callers that allow operands to be rounded so; without one `run`
            serves them.
        page_order: by format, the order of the coarse plane that `run` is fast on; None: as the format encodes it.
        runs_unpacked: True if it computes by its own kernels from a coarse plane as the format encodes it.
        merges: True if it restores weights of a format and shape (N, K) from both planes by a kernel of its own.
        turned: decodes to [K, N], contiguous, in one step; None: `run`, then a transposed copy.
        prepare: makes on a device what must be there before a CUDA graph records the kernel.
        code_of: (shape (N, K), dtype, tokens, device) -> what decides which code a product compiles on a GPU, beside
            format and shape; None where it only decodes the weight. Without one, nothing is compiled ahead.
        few: prepares, for planes that never move, products of few tokens by `run`, see `layers/weights/small_batch.py`;
        None where it
            does not serve them. It takes a key of `rounded`, too.
        by_address: True if it computes from pages of a layout of which it has the addresses alone, on a device.
        reads_resident_planes: True if compiled graphs may hold the planes of pages that never move and run it on them.
    """

    op: str
    backend: str
    run: Callable[..., Any]
    devices: tuple[str, ...] | None = None
    formats: tuple[str, ...] | None = None
    rank: int = 0
    refusal: Callable[[torch.device], str | None] = _never_refuses
    builds: bool = False
    rounded: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    page_order: Callable[[str], PageOrder | None] = _format_order
    runs_unpacked: bool = False
    merges: Callable[[str, tuple[int, int]], bool] = _merges_none
    turned: Callable[[WeightPlanes], Tensor] | None = None
    prepare: Callable[[torch.device], None] = _never_refuses
    reads_resident_planes: bool = False
    by_address: Callable[[PageLayout, torch.device], bool] = _needs_pages
    few: Callable[..., Any] | None = None
    code_of: Callable[[tuple[int, int], torch.dtype, int, torch.device], Hashable] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(*args, **kwargs)

    def serves(self, device: torch.device) -> bool:
        """True if it runs on a device; builds the kernel if need be."""
        return self.is_for(device) and self.refusal(device) is None

    def is_for(self, device: torch.device) -> bool:
        """True if the device is of a type that it was written for."""
        return self.devices is None or device.type in self.devices

    def rounding(self, to: str | None) -> "Kernel":
        """The same implementation where operands may be rounded so (None: not at all)."""
        if to not in self.rounded:
            return self
        few = None if self.few is None else partial(self.few, rounded=to)
        return replace(self, run=self.rounded[to], few=few)

    def decode_turned(self, planes: WeightPlanes) -> Tensor:
        """The weight as [K, N], contiguous; of an implementation of "decode_weight"."""
        return self.run(planes).t().contiguous() if self.turned is None else self.turned(planes)


_REGISTRY: dict[str, dict[tuple[str, str | None], Kernel]] = {}


def register(kernel: Kernel) -> None:
    """Offer an implementation; one of the same op, backend and format is replaced.

    Raises KernelError for a backend that config does not know.
    """
    if kernel.backend not in BACKENDS[1:]:
        raise KernelError(
            f"kernel backend {kernel.backend!r} for op {kernel.op!r}; expected one of {', '.join(BACKENDS[1:])}"
        )
    for format in kernel.formats or (None,):
        _REGISTRY.setdefault(kernel.op, {})[kernel.backend, format] = kernel


def resolve(
    op: str, backend: str, device: torch.device, format: str | None = None, *, rounding: str | None = None
) -> Kernel:
    """The implementation of `op` for a backend (one of BACKENDS), a device and a weight format (None: any).

    rounding: "fp8" or "int8" if operands may be rounded to that where it is faster.
    Raises KernelError, naming op, backend, device and what would do, when there is none.
    """
    offered = _REGISTRY.get(op)
    if offered is None:
        raise KernelError(f"op {op!r}; expected one of {', '.join(sorted(_REGISTRY))}")
    serving = _serving(offered, BACKENDS if backend == "auto" else (backend,), device, format)
    if not serving:
        raise _no_implementation(op, backend, device, format)
    return max(serving.values(), key=lambda kernel: kernel.rank).rounding(rounding)


def _no_implementation(op: str, backend: str, device: torch.device, format: str | None) -> KernelError:
    others = _serving(_REGISTRY[op], BACKENDS, device, format)
    why = kernel_refusal(device)
    what = f"device {str(device)!r}{f' and format {format!r}' if format else ''}{f' ({why})' if why else ''}"
    expected = ", ".join(["auto", *sorted(others)])
    return KernelError(f"op {op!r}: no {backend!r} implementation for {what}; expected one of {expected}")


def _serving(
    offered: dict[tuple[str, str | None], Kernel], backends: tuple[str, ...], device: torch.device, format: str | None
) -> dict[str, Kernel]:
    """The implementations that serve, by backend. Others than `backends` are not asked: asking may build them."""
    serving: dict[str, Kernel] = {}
    for only in (None, format):  # one for the format replaces one for any
        serving |= {name: k for (name, f), k in offered.items() if f == only and name in backends and k.serves(device)}
    return serving


def _on(device: torch.device, op: str = "linear") -> list[Kernel]:
    """The implementations of an op that were written for a device's type, whether they serve this one or not."""
    return [k for k in _REGISTRY.get(op, {}).values() if k.devices and k.is_for(device)]


def kernel_refusal(device: torch.device, op: str = "linear") -> str | None:
    """Why no implementation of an op but the reference serves a device that some were written for, or None."""
    refusals = [kernel.refusal(device) for kernel in _on(device, op) if kernel.rank > 0]
    return refusals[0] if refusals and all(refusals) else None


def resolves_late(backend: str, device: torch.device) -> bool:
    """True if `resolve` may have to build a kernel, which then is for the first forward and not for `wrap`.

    Such kernels have no order of pages of their own.
    """
    return backend == "auto" and any(kernel.builds for kernel in _on(device))
