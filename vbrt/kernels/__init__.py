"""One place that knows which implementation of an op serves which backend and device.

    op = resolve("linear", "auto", device)      # once, at construction
    y = op(x, planes, bias, "none")

`reference` is plain torch, runs anywhere and is the specification; faster implementations register beside it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from vbrt.errors import KernelError
from vbrt.kernels import fp4_linear, reference
from vbrt.kernels.fp4_linear import Packing

__all__ = ["BACKENDS", "Packing", "kernel_name", "page_packing", "register", "resolve"]

BACKENDS = ("auto", "reference", "triton")


@dataclass(frozen=True, slots=True)
class _Entry:
    fn: Callable[..., Any]
    devices: tuple[str, ...] | None
    rank: int


_REGISTRY: dict[str, dict[str, _Entry]] = {}


def register(
    op: str, backend: str, fn: Callable[..., Any], *, devices: tuple[str, ...] | None = None, rank: int = 0
) -> None:
    """Offer `fn` as `backend`'s implementation of `op` on device types `devices` (None: any).

    "auto" takes the highest rank that serves the device. Raises KernelError for a backend that config does not know.
    """
    if backend not in BACKENDS[1:]:
        raise KernelError(f"kernel backend {backend!r} for op {op!r}; expected one of {', '.join(BACKENDS[1:])}")
    fn.kernel_name = backend  # type: ignore[attr-defined]  # functions take attributes
    _REGISTRY.setdefault(op, {})[backend] = _Entry(fn, devices, rank)


def kernel_name(fn: Callable[..., Any]) -> str:
    """The backend that a resolved op belongs to, for statistics."""
    return getattr(fn, "kernel_name", "unregistered")


def page_packing(fn: Callable[..., Any], format: str) -> Packing | None:
    """How a resolved op wants a format's coarse plane to lie in its page, or None: as the format encodes it."""
    return fp4_linear.packing(format) if kernel_name(fn) == "triton" else None


def resolve(op: str, backend: str, device: torch.device) -> Callable[..., Any]:
    """The implementation of `op` for a backend ("auto", "reference", "triton") and device.

    Raises KernelError, naming op, backend, device and what would do, when there is none.
    """
    offered = _REGISTRY.get(op)
    if offered is None:
        raise KernelError(f"op {op!r}; expected one of {', '.join(sorted(_REGISTRY))}")
    serving = {name: e for name, e in offered.items() if e.devices is None or device.type in e.devices}
    if backend == "auto" and serving:
        return max(serving.values(), key=lambda entry: entry.rank).fn
    if backend not in serving:
        raise KernelError(
            f"op {op!r}: no {backend!r} implementation for device {str(device)!r}; "
            f"expected one of {', '.join(['auto', *sorted(serving)])}"
        )
    return serving[backend].fn


for _op, _fn in (("decode_weight", reference.decode_weight), ("linear", reference.linear)):
    register(_op, "reference", _fn)
if fp4_linear.available():
    for _op, _fn in (("decode_weight", fp4_linear.decode_weight), ("linear", fp4_linear.linear)):
        register(_op, "triton", _fn, devices=("cuda",), rank=1)
