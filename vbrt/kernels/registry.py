"""Kernel registry: selects the implementation of an op for a backend, a device and a weight format.

    linear = resolve("linear", "auto", device, "nvfp4")      # once, at construction
    y = linear(x, planes, bias, "none")                      # hot paths keep linear.run, the bare function

Every implementation is one record, `Kernel`; `vbrt.kernels.entries` lists the package's. "reference" is plain torch,
runs anywhere and specifies the op; faster ones are "triton" for GPUs and "compiled" (C, built on first use) for CPUs.
Callers query the record's fields instead of its name.
"""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from vbrt.config import BACKENDS, known_formats
from vbrt.errors import KernelError
from vbrt.formats import PageLayout, WeightPlanes

__all__ = [
    "BACKENDS",
    "EXACT",
    "Kernel",
    "Needs",
    "PageOrder",
    "kernel_refusal",
    "register",
    "register_kernel",
    "resolve",
    "resolves_late",
]

#: pseudo-format for weights with a fine plane: the kernel restores the original weight, for any coarse format
EXACT = "exact"


class PageOrder(Protocol):
    """A kernel-specific order of the coarse plane in its page.

    Attributes:
        rows: rows of the weight per entry of the plane's fields, along their first dimension.
    """

    rows: int

    def layout(self, shape: tuple[int, int]) -> PageLayout:
        """Page layout for a weight (N, K); depends on nothing else."""

    def pack(self, coarse: dict[str, Tensor], shape: tuple[int, int]) -> dict[str, Tensor] | None:
        """Reorder the coarse tensors of `Format.encode`; None if that would not be exact."""

    def unpack(self, tensors: dict[str, Tensor], shape: tuple[int, int]) -> dict[str, Tensor]:
        """Exact inverse of `pack`."""


def _never_refuses(device: torch.device) -> None:
    return None


def _format_order(format: str) -> None:
    return None


def _merges_none(format: str, shape: tuple[int, int]) -> bool:
    return False


def _needs_pages(layout: PageLayout, device: torch.device) -> bool:
    return False


@dataclass(frozen=True, slots=True)
class Needs:
    """Requirements of device code on a GPU.

    Attributes:
        capability: lowest compute capability of an NVIDIA GPU, (major, minor).
        lacking: what older ones lack.
        nvidia: True for Gluon and PTX assembly, which compile for NVIDIA GPUs only; False for plain Triton, which
            compiles for AMD's, too (run on none yet).
    """

    capability: tuple[int, int]
    lacking: str
    nvidia: bool = True


@dataclass(frozen=True, slots=True)
class Kernel:
    """One implementation of an op.

    Attributes:
        op, backend: the op, and the backend's name for users and statistics.
        run: the function; calling the record adds one Python call.
        devices, formats: supported device types and weight formats; None: any.
        rank: "auto" selects the highest rank that serves a device.
        refusal: returns why it does not serve a device of its types; None if it does.
        needs: requirements of its device code on a GPU, which `refusal` compares with a device; None: it has none.
        fused_needs: the same of its fused product; a device without decodes the weight for the vendor's matmul.
        builds: True if `refusal` builds the kernel, and so is slow the first time.
        rounded: by "fp8" or "int8": the function for callers that allow operands to be rounded to that; `run`
            without one.
        gradient: to a product's input, without autograd: (dY [..., N], planes) -> dY W [..., K]; None: the weight is
            decoded, and torch multiplies.
        page_order: by format, the order of the coarse plane that `run` is fast on; None: the format's own.
        runs_unpacked: True if its kernels read a coarse plane in the format's own order.
        merges: True if a kernel merges both planes for a format and shape (N, K).
        turned: decodes to contiguous [K, N] in one step; None: `run`, then a transposed copy.
        rows: decodes some rows of a coarse plane, (planes, indices within 0 .. N - 1) -> [indices, K]; None: none does.
        prepare: allocates on a device what must exist before CUDA graph capture.
        code_of: (shape (N, K), dtype, tokens, device) -> specialization key of a GPU product besides format and shape;
            None if it only decodes the weight. Without it, nothing is compiled ahead.
        unmeasured: what to know where launches were not measured on a device's kind of GPU; None where they were.
        few: prepares small-batch products on resident planes (`layers/weights/small_batch.py`), with an optional key of
            `rounded`; returns None where unsupported.
        by_address: True if it can compute from page addresses alone, for a layout and device.
        decode_pages: the matrices [E, N, K] of all experts of pages by address, in bf16, (pages, part); None: they are
            decoded one by one.
        reads_resident_planes: True if compiled graphs may hold resident planes and run it on them.
    """

    op: str
    backend: str
    run: Callable[..., Any]
    devices: tuple[str, ...] | None = None
    formats: tuple[str, ...] | None = None
    rank: int = 0
    refusal: Callable[[torch.device], str | None] = _never_refuses
    needs: Needs | None = None
    fused_needs: Needs | None = None
    builds: bool = False
    rounded: Mapping[str, Callable[..., Any]] = field(default_factory=dict)
    gradient: Callable[[Tensor, WeightPlanes], Tensor] | None = None
    page_order: Callable[[str], PageOrder | None] = _format_order
    runs_unpacked: bool = False
    merges: Callable[[str, tuple[int, int]], bool] = _merges_none
    turned: Callable[[WeightPlanes], Tensor] | None = None
    rows: Callable[[WeightPlanes, Sequence[int]], Tensor] | None = None
    prepare: Callable[[torch.device], None] = _never_refuses
    reads_resident_planes: bool = False
    by_address: Callable[[PageLayout, torch.device], bool] = _needs_pages
    decode_pages: Callable[..., Tensor] | None = None
    unmeasured: Callable[[torch.device], str | None] = _never_refuses
    few: Callable[..., Any] | None = None
    code_of: Callable[[tuple[int, int], torch.dtype, int, torch.device], Hashable] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.run(*args, **kwargs)

    def serves(self, device: torch.device) -> bool:
        """True if it runs on a device; may build the kernel."""
        return self.is_for(device) and self.refusal(device) is None

    def is_for(self, device: torch.device) -> bool:
        """True if it is written for the device's type."""
        return self.devices is None or device.type in self.devices

    def rounding(self, to: str | None) -> "Kernel":
        """Variant with operands rounded to this (None: not rounded)."""
        if to not in self.rounded:
            return self
        few = None if self.few is None else partial(self.few, rounded=to)
        return replace(self, run=self.rounded[to], few=few)

    def decode_turned(self, planes: WeightPlanes) -> Tensor:
        """The weight as contiguous [K, N]; for op "decode_weight"."""
        return self.run(planes).t().contiguous() if self.turned is None else self.turned(planes)


_REGISTRY: dict[str, dict[tuple[str, str | None], Kernel]] = {}


def register(kernel: Kernel) -> None:
    """Add an implementation; replaces one of the same op, backend and format.

    Raises KernelError for an unknown backend.
    """
    if kernel.backend not in BACKENDS[1:]:
        raise KernelError(
            f"kernel backend {kernel.backend!r} for op {kernel.op!r}; expected one of {', '.join(BACKENDS[1:])}"
        )
    for format in kernel.formats or (None,):
        _REGISTRY.setdefault(kernel.op, {})[kernel.backend, format] = kernel


def register_kernel(kernel: Kernel, *, replace: bool = False) -> None:
    """Add an implementation of an op of vbrt, for models that are wrapped from then on.

        register_kernel(
            Kernel("linear", "compiled", multiply, devices=("cpu",), formats=("int4",), rank=1, runs_unpacked=True)
        )

    `run` takes the arguments of the op's reference (`vbrt.kernels.reference`, `vbrt.kernels.experts`) and gives its
    result. The reference has rank 0, so "auto" takes a kernel of rank 1 or more.

    replace: True to take the place of an implementation of the same op, backend and format.

    Raises:
        KernelError: no such op, backend or format, nothing to call, or its place is taken.
    """
    if not isinstance(kernel, Kernel) or not callable(kernel.run):
        raise KernelError(f"kernel {kernel!r}; expected a vbrt.kernels.Kernel whose run is a function")
    if kernel.op not in _REGISTRY:
        raise KernelError(f"kernel for op {kernel.op!r}; expected one of {', '.join(sorted(_REGISTRY))}")
    for key, names in (("devices", kernel.devices), ("formats", kernel.formats)):
        if not (names is None or (isinstance(names, tuple) and names)):
            raise KernelError(f"kernel for op {kernel.op!r}: {key} = {names!r}; expected a tuple of names, or None")
    formats = (*known_formats(), EXACT)
    for format in kernel.formats or ():
        if format not in formats:
            raise KernelError(f"kernel for op {kernel.op!r}: format {format!r}; expected one of {', '.join(formats)}")
    there = _REGISTRY[kernel.op].keys() & {(kernel.backend, format) for format in kernel.formats or (None,)}
    if there and not replace:
        taken = ", ".join(sorted(format or "any" for _, format in there))
        raise KernelError(
            f"kernel for op {kernel.op!r}, backend {kernel.backend!r}, format {taken}: there is one; "
            "expected another backend or format, or replace=True"
        )
    register(kernel)


def resolve(
    op: str, backend: str, device: torch.device, format: str | None = None, *, rounding: str | None = None
) -> Kernel:
    """Select the implementation of `op` for a backend (one of BACKENDS), a device and a weight format (None: any).

    rounding: "fp8" or "int8" if operands may be rounded to that for speed.
    Raises KernelError, with op, backend, device and alternatives, if there is none.
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
    why = kernel_refusal(device, op, format)
    what = f"device {str(device)!r}{f' and format {format!r}' if format else ''}{f' ({why})' if why else ''}"
    expected = ", ".join(["auto", *sorted(others)])
    return KernelError(f"op {op!r}: no {backend!r} implementation for {what}; expected one of {expected}")


def _serving(
    offered: dict[tuple[str, str | None], Kernel], backends: tuple[str, ...], device: torch.device, format: str | None
) -> dict[str, Kernel]:
    """Serving implementations by backend. Backends not in `backends` are not queried, which might build them."""
    fitting = _for_format({key: k for key, k in offered.items() if key[0] in backends}, format)
    return {name: kernel for name, kernel in fitting.items() if kernel.serves(device)}


def _for_format(offered: dict[tuple[str, str | None], Kernel], format: str | None) -> dict[str, Kernel]:
    """Implementations by backend; a format-specific one overrides a generic one, also where it refuses the device."""
    return {name: k for only in (None, format) for (name, f), k in offered.items() if f == only}


def _on(device: torch.device, op: str = "linear") -> list[Kernel]:
    """Implementations of an op written for the device's type, whether or not they serve this device."""
    return [k for k in _REGISTRY.get(op, {}).values() if k.devices and k.is_for(device)]


def kernel_refusal(device: torch.device, op: str = "linear", format: str | None = None) -> str | None:
    """Return why only the reference serves a device that kernels were written for; None if another does.

    format: of the weight; None: why for no format another does.
    """
    kernels = _on(device, op) if format is None else _for_format(_REGISTRY.get(op, {}), format).values()
    refusals = [kernel.refusal(device) for kernel in kernels if kernel.rank > 0 and kernel.is_for(device)]
    return refusals[0] if refusals and all(refusals) else None


def resolves_late(backend: str, device: torch.device) -> bool:
    """True if `resolve` may have to build a kernel, which is deferred from `wrap` to the first forward.

    Such kernels have no page order of their own.
    """
    return backend == "auto" and any(kernel.builds for kernel in _on(device))
