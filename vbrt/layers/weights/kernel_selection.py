"""Kernel selection for a weight: the single place that decides which kernel runs.

    kernels = choose_kernels(spec, device)       # plans size pages by `packing`, handles pack and compute by the rest

| planes | `resolve("linear", ...)` for | what it does |
| --- | --- | --- |
| `dense` | the format `dense` | torch's own product on the page |
| coarse and fine (`exact`) | the format EXACT | restores the weight, then torch's own product |
| coarse | the format, with rounding to FP8 or int8 where config and device allow | the format's fused kernel |

Of those registered for an op the backend named in `compute.backend` is taken; "auto" takes the fastest that serves the
device (`kernels/registry.py`).
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch

from vbrt.config import FORMATS
from vbrt.formats.format import WeightPlanes
from vbrt.formats.page import PageLayout
from vbrt.host import accelerator
from vbrt.kernels import (
    EXACT,
    Kernel,
    PageOrder,
    fp8_refusal,
    int8_refusal,
    kernel_refusal,
    noted_refusal,
    resolve,
    resolves_late,
)
from vbrt.kernels.cuda import devices
from vbrt.layers.weights.weight_spec import HandleSpec

__all__ = ["Kernels", "choose_kernels", "coarse_kernels", "notes", "planned_packing", "refusals", "rounding"]


@dataclass(frozen=True, slots=True)
class Kernels:
    """Kernels for the planes of one precision.

    Attributes:
        spec: of those planes; with precision "coarse", that of the 4-bit weight.
        lossless: `spec.lossless`.
        linear, decode: the functions of `kernel` and of the one that restores the weight.
        decode_turned: the weight as [K, N].
        gradient: as of `Kernel`, on planes; None: on the decoded weight.
        decode_rows: some rows of a coarse plane; None: no kernel takes them from the whole plane.
        packing: the order in which `linear` reads a coarse page fastest, or None: as the format encodes it. That of an
            `exact` weight is for passes over the coarse plane alone; what restores the weight reads it, too.
        precision: "full", or "coarse" for the coarse plane alone of an `exact` weight: the planes that a lease takes.
    """

    spec: HandleSpec
    lossless: bool
    kernel: Kernel
    linear: Callable[..., torch.Tensor]
    decode: Callable[..., torch.Tensor]
    decode_turned: Callable[..., torch.Tensor]
    packing: PageOrder | None
    gradient: Callable[[torch.Tensor, WeightPlanes], torch.Tensor] | None = None
    decode_rows: Callable[..., torch.Tensor] | None = None
    precision: str = "full"

    def packs(self, layout: PageLayout) -> bool:
        """True if a page of this layout is in the kernel's order."""
        return self.packing is not None and layout == self.packing.layout(self.spec.shape)

    def computes(self, layout: PageLayout) -> bool:
        """True if a kernel of its own computes with a page of this layout; else it is the reference that does."""
        spec = self.spec
        if spec.lossless:
            return spec.fine and self.kernel.merges(spec.format, spec.shape)
        return self.packs(layout) or self.kernel.runs_unpacked


def choose_kernels(spec: HandleSpec, device: torch.device) -> Kernels:
    """Return the kernels of a weight on a device. May build those of a CPU (`resolves_late`).

    A lossless weight is multiplied as torch does it; what restores it serves any format.

    Raises:
        KernelError: the backend that the spec names has none.
    """
    format = EXACT if spec.fine else spec.format
    kernel = resolve("linear", spec.backend, device, format, rounding=rounding(spec, device))
    decode = resolve("decode_weight", spec.backend, device, format)
    reads_order = kernel.merges(spec.format, spec.shape) if spec.fine else not spec.lossless
    coarse = resolve("linear", spec.backend, device, spec.format) if spec.fine else kernel
    packing = coarse.page_order(spec.format) if reads_order and not spec.by_rows else None
    functions = kernel.run, decode.run, decode.decode_turned, packing, kernel.gradient, decode.rows
    return Kernels(spec, spec.lossless, kernel, *functions)


def coarse_kernels(spec: HandleSpec, device: torch.device) -> Kernels:
    """Return the kernels for only the coarse plane of an `exact` weight."""
    return replace(choose_kernels(replace(spec, fine=False), device), precision="coarse")


def planned_packing(spec: HandleSpec, device: torch.device) -> PageOrder | None:
    """`choose_kernels(...).packing` without building anything: kernels that are built late read pages as encoded."""
    return None if resolves_late(spec.backend, device) else choose_kernels(spec, device).packing


def rounding(spec: HandleSpec, device: torch.device) -> str | None:
    """The type that operands may be rounded to: of long products on a GPU, of short ones on a CPU."""
    if spec.lossless:
        return None
    if spec.int8 and int8_refusal(device) is None:
        return "int8"
    return "fp8" if spec.fp8 else None


def refusals(spec: HandleSpec, device: torch.device) -> Iterator[str]:
    """Kernels that the config requests and the device does not support, each with reason and fallback."""
    if spec.dense or device.type not in (accelerator.TYPE, "cpu"):
        return
    format = EXACT if spec.fine else spec.format
    no_kernels = _without_kernels(device) or kernel_refusal(device, format=format) if spec.backend == "auto" else None
    asked = spec.backend != "reference" and not spec.lossless
    no_fp8 = fp8_refusal(device) if asked and spec.fp8 else None
    if no_kernels:
        yield f"kernels: {no_kernels}; {FORMATS[spec.format].bits}-bit layers are decoded and multiplied in plain torch"
    elif asked and device.type == accelerator.CUDA and (why := _no_fused_product(spec, device)):
        bits = FORMATS[spec.format].bits
        how = f"{bits}-bit layers are decoded by a kernel, and multiplied in torch"
        yield f"fused kernels of {spec.format}: {why}; {how}"
    if no_fp8:
        yield f"compute.fp8: {no_fp8}; long inputs are multiplied in {spec.dtype} instead"
    no_int8 = int8_refusal(device) if asked and spec.int8 else None
    if no_int8:
        yield f"compute.int8: {no_int8}; inputs are multiplied in {spec.dtype} instead"


def _no_fused_product(spec: HandleSpec, device: torch.device) -> str | None:
    """Return why a weight's kernel decodes on a device where it fuses on others, or None."""
    needs = resolve("linear", spec.backend, device, spec.format).fused_needs
    return None if needs is None else devices.refusal(device, needs)


def _without_kernels(device: torch.device) -> str | None:
    return None if device.type in (accelerator.CUDA, "cpu") else f"there are none for {device.type} devices"


def notes(spec: HandleSpec, device: torch.device, op: str = "linear") -> Iterator[str]:
    """What statistics say of a weight's kernels: a shape that the vendor refused when called, unmeasured launches."""
    refusal = noted_refusal(*spec.shape) if rounding(spec, device) == "fp8" else None
    if refusal:
        yield refusal
    if device.type == accelerator.TYPE and not spec.dense and not spec.lossless:
        unmeasured = resolve(op, spec.backend, device, spec.format).unmeasured(device)
        if unmeasured:
            yield unmeasured
