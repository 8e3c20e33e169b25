"""One place that knows which implementation of an op serves which backend and device.

    op = resolve("linear", "auto", device, "nvfp4")      # once, at construction
    y = op(x, planes, bias, "none")

`reference` is plain torch, runs anywhere and is the specification; faster implementations register beside it: "triton"
for GPUs, "compiled" (C, built on the spot) for CPUs, which "auto" takes where they serve.
"linear_fp8" is "linear" with leave to round activations and weights to FP8 where that is faster, "linear_fp4" with
leave to round activations to FP4.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from vbrt.errors import KernelError
from vbrt.formats import WeightPlanes
from vbrt.kernels import reference
from vbrt.kernels.cpu import linear as cpu_linear
from vbrt.kernels.cuda.e2m1 import fused as fused_linear
from vbrt.kernels.cuda.e2m1 import linear as fp4_linear
from vbrt.kernels.cuda.e2m1.fused import Norm
from vbrt.kernels.cuda.e2m1.linear import Packing
from vbrt.kernels.cuda.e2m1.tiles import TILES, page_of
from vbrt.kernels.cuda.fine import merge
from vbrt.kernels.cuda.rounded import fp4 as fp4_scaled
from vbrt.kernels.cuda.rounded import fp8 as fp8_linear
from vbrt.kernels.cuda.rounded.fp4 import fp4_refusal
from vbrt.kernels.cuda.rounded.fp8 import fp8_refusal, noted_refusal
from vbrt.kernels.cuda.table import linear as table_linear

__all__ = [
    "BACKENDS",
    "EXACT",
    "TILES",
    "Norm",
    "Packing",
    "decode_turned",
    "fp4_refusal",
    "fp8_refusal",
    "kernel_name",
    "kernel_refusal",
    "merges",
    "noted_refusal",
    "page_of",
    "page_packing",
    "prepare",
    "register",
    "resolve",
    "resolves_late",
    "runs_unpacked",
]

BACKENDS = ("auto", "reference", "triton", "compiled")
#: stands for any format with a fine plane: what is asked for is the original weight
EXACT = "exact"


@dataclass(frozen=True, slots=True)
class _Entry:
    fn: Callable[..., Any]
    devices: tuple[str, ...] | None
    rank: int
    refusal: Callable[[torch.device], str | None] | None

    def serves(self, device: torch.device) -> bool:
        if self.devices is not None and device.type not in self.devices:
            return False
        return self.refusal is None or self.refusal(device) is None


_REGISTRY: dict[str, dict[tuple[str, str | None], _Entry]] = {}


def register(
    op: str,
    backend: str,
    fn: Callable[..., Any],
    *,
    devices: tuple[str, ...] | None = None,
    rank: int = 0,
    formats: tuple[str, ...] | None = None,
    refusal: Callable[[torch.device], str | None] | None = None,
) -> None:
    """Offer `fn` as `backend`'s implementation of `op` on device types `devices`, for `formats` (None: any), unless
    `refusal` says why not.

    "auto" takes the highest rank that serves the device. Raises KernelError for a backend that config does not know.
    """
    if backend not in BACKENDS[1:]:
        raise KernelError(f"kernel backend {backend!r} for op {op!r}; expected one of {', '.join(BACKENDS[1:])}")
    fn.kernel_name = backend  # type: ignore[attr-defined]  # functions take attributes
    for format in formats or (None,):
        _REGISTRY.setdefault(op, {})[backend, format] = _Entry(fn, devices, rank, refusal)


def kernel_name(fn: Callable[..., Any]) -> str:
    """The backend that a resolved op belongs to, for statistics."""
    return getattr(fn, "kernel_name", "unregistered")


def page_packing(fn: Callable[..., Any], format: str) -> Packing | None:
    """How a resolved op wants a format's coarse plane to lie in its page, or None: as the format encodes it."""
    return fp4_linear.packing(format) if kernel_name(fn) == "triton" else None


def runs_unpacked(fn: Callable[..., Any], format: str) -> bool:
    """Whether a resolved op computes a format by its own kernels with the coarse plane as the format encodes it."""
    return kernel_name(fn) in ("reference", "compiled") or format in table_linear.FORMATS


def merges(fn: Callable[..., Any], format: str, shape: tuple[int, int]) -> bool:
    """Whether a resolved op restores weights of a format from both planes by a kernel of its own."""
    return kernel_name(fn) == "compiled" or (kernel_name(fn) == "triton" and merge.serves_shape(format, shape))


def decode_turned(fn: Callable[..., Any], planes: WeightPlanes) -> torch.Tensor:
    """The weight as [K, N], contiguous, by a resolved "decode_weight"."""
    return cpu_linear.decode_turned(planes) if fn is cpu_linear.decode_weight else fn(planes).t().contiguous()


def prepare(fn: Callable[..., Any], device: torch.device) -> None:
    """Let a resolved op make on its device what must be there before a CUDA graph records it."""
    if fn is table_linear.linear:
        table_linear.prepare(device)


def kernel_refusal(device: torch.device) -> str | None:
    """Why no kernel but the reference serves a CUDA device or a CPU, or None if one does, or it is neither."""
    if device.type == "cpu":
        return cpu_linear.refusal(device)
    if device.type != "cuda":
        return None
    return _too_old(device) if fp4_linear.available() else "Triton with Gluon is not installed"


@functools.cache
def _too_old(device: torch.device) -> str | None:
    if (device.index or 0) >= torch.cuda.device_count():
        return f"{device} is not there"
    major, minor = torch.cuda.get_device_capability(device)
    return None if major >= fp4_linear.MIN_MAJOR else f"sm_{major}{minor} is older than sm_80"


def resolve(op: str, backend: str, device: torch.device, format: str | None = None) -> Callable[..., Any]:
    """The implementation of `op` for a backend ("auto", "reference", "triton"), device and weight format.

    Raises KernelError, naming op, backend, device and what would do, when there is none.
    """
    offered = _REGISTRY.get(op)
    if offered is None:
        raise KernelError(f"op {op!r}; expected one of {', '.join(sorted(_REGISTRY))}")
    serving = _serving(offered, BACKENDS if backend == "auto" else (backend,), device, format)
    if backend == "auto" and serving:
        return max(serving.values(), key=lambda entry: entry.rank).fn
    if backend not in serving:
        others = _serving(offered, BACKENDS, device, format)
        why = kernel_refusal(device)
        raise KernelError(
            f"op {op!r}: no {backend!r} implementation for device {str(device)!r}{f' ({why})' if why else ''}; "
            f"expected one of {', '.join(['auto', *sorted(others)])}"
        )
    return serving[backend].fn


def resolves_late(backend: str, device: torch.device) -> bool:
    """Whether `resolve` may take its time (the C kernels are built at their first use in a process), while it has no
    say in how pages lie: then it is for the first forward."""
    return backend == "auto" and device.type == "cpu"


def _serving(
    offered: dict[tuple[str, str | None], _Entry], backends: tuple[str, ...], device: torch.device, format: str | None
) -> dict[str, _Entry]:
    """What serves, by backend; entries of backends that are not asked for are left alone, some are built when asked."""
    serving: dict[str, _Entry] = {}
    for only in (None, format):  # what is registered for the format takes the place of what is for any
        serving |= {name: e for (name, f), e in offered.items() if f == only and name in backends and e.serves(device)}
    return serving


for _op, _fn in (
    ("decode_weight", reference.decode_weight),
    ("linear", reference.linear),
    ("linear_fp4", reference.linear),
    ("linear_fp8", reference.linear),
    ("norm_linear", fused_linear.norm_reference),
    ("gated_linear", fused_linear.gated_reference),
):
    register(_op, "reference", _fn)
for _op, _fn in (
    ("decode_weight", cpu_linear.decode_weight),
    ("linear", cpu_linear.linear),
    ("linear_fp4", cpu_linear.linear),
    ("linear_fp8", cpu_linear.linear),
):
    _formats = (*cpu_linear.FORMATS, EXACT)
    register(_op, "compiled", _fn, devices=("cpu",), rank=1, formats=_formats, refusal=cpu_linear.refusal)
if fp4_linear.available():
    for _op, _fn in (
        ("decode_weight", fp4_linear.decode_weight),
        ("linear", fp4_linear.linear),
        ("linear_fp4", fp4_scaled.linear),
        ("linear_fp8", fp8_linear.linear),
        ("norm_linear", fused_linear.norm_linear),
        ("gated_linear", fused_linear.gated_linear),
    ):
        register(_op, "triton", _fn, devices=("cuda",), rank=1, refusal=_too_old)
    for _op, _fn in (
        ("decode_weight", table_linear.decode_weight),
        ("linear", table_linear.linear),
        ("linear_fp4", table_linear.linear),
        ("linear_fp8", table_linear.linear),
    ):
        register(_op, "triton", _fn, devices=("cuda",), rank=1, formats=table_linear.FORMATS, refusal=_too_old)
