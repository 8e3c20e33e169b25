"""Kernels for weights whose columns are stored in another order (`vbrt.formats.ordered`), made of those for the others.

Products gather x's columns and go on with the other format's kernel; decoding puts the columns in their places.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from vbrt.config.format_records import FORMATS, ORDERED
from vbrt.formats import WeightPlanes
from vbrt.kernels import reference
from vbrt.kernels.registry import Kernel

__all__ = ["ordered"]


def ordered(kernel: Kernel) -> Kernel | None:
    """Return the kernel for weights with columns in another order; None where it serves no such format."""
    formats = tuple(ORDERED[format] for format in kernel.formats or () if format in ORDERED)
    make = {"linear": _linear, "decode_weight": _decode}.get(kernel.op)
    if not formats or make is None:
        return None
    rounded = {to: make(run) for to, run in kernel.rounded.items()}
    return replace(
        kernel,
        formats=formats,
        run=make(kernel.run),
        rounded=rounded,
        few=None,
        turned=None,
        gradient=None,
        reads_resident_planes=False,
    )


def _linear(run: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def linear(x: Tensor, planes: WeightPlanes, bias: Tensor | None = None, activation: str = "none") -> Tensor:
        reference.check(x, planes, activation)
        return run(x.index_select(-1, planes.coarse["order"]), _stored(planes), bias, activation)

    return linear


def _decode(run: Callable[[WeightPlanes], Tensor]) -> Callable[[WeightPlanes], Tensor]:
    def decode_weight(planes: WeightPlanes) -> Tensor:
        return run(_stored(planes)).index_select(1, torch.argsort(planes.coarse["order"]))

    return decode_weight


def _stored(planes: WeightPlanes) -> WeightPlanes:
    """The planes of the weight as it is stored, kept in `planes` with what kernels prepare for them."""
    kept: Any = planes.prepared
    if isinstance(kept, WeightPlanes) and kept.coarse["codes"] is planes.coarse["codes"]:
        return kept
    coarse = {name: field for name, field in planes.coarse.items() if name != "order"}
    kept = WeightPlanes(FORMATS[planes.format].base, planes.shape, planes.dtype, coarse)
    object.__setattr__(planes, "prepared", kept)
    return kept
