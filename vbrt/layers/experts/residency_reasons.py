"""Reasons why the host decides which experts are resident, why a pass waits for the device, and why it is not recorded
in training; for statistics."""

from dataclasses import replace

from vbrt.kernels import resolve
from vbrt.layers.experts.gathered_experts import may_gather, why_not_gathered
from vbrt.layers.experts.library_experts import UNHEARD, implementation_of
from vbrt.layers.experts.protocols import ExpertsWeights
from vbrt.layers.weights.linear_product import pass_precision

__all__ = ["why_host", "why_not_recorded", "why_waits"]


def why_host(handle: ExpertsWeights) -> str:
    """Return why the device cannot decide which experts are resident; "" if it can."""
    name, spec = handle.spec.name, handle.spec.first
    if spec.lossless:
        return why_not_gathered(handle)
    layout, down = handle.pages[0].layout, handle.spec.down_format
    parts = {spec.format: layout}
    if down:
        of_down = tuple(field for field in layout.fields if field.name.startswith("down."))
        others = tuple(field for field in layout.fields if field not in of_down)
        parts = {spec.format: replace(layout, fields=others), down: replace(layout, fields=of_down)}
    for format, own in parts.items():
        kernel = resolve("experts_up", spec.backend, handle.device, format)
        if not kernel.by_address(own, handle.device):
            return f"{name}: the {kernel.backend} kernels of {format} do not take pages by address here"
    return ""


def why_waits(handle: ExpertsWeights) -> str:
    """Return why a pass syncs with the device to learn the touched experts; "" if it does not."""
    name, label = handle.spec.name, handle.spec.first.label
    cached = handle.deciding.cache is not None
    coarse = pass_precision() == "coarse"
    if handle.spec.lossless and not (coarse and handle.spec.fine):
        why = why_not_gathered(handle)
        if why or cached or may_gather(handle):
            return why
    elif cached and not handle.spec.lossless:
        return ""
    if handle.spec.lossless or coarse:
        return f"{name}: held as {label}: the host leases the experts that tokens are sent to"
    return f"{name}: its pages move, and the host decides which" if handle.streams else ""


def why_not_recorded(handle: ExpertsWeights) -> str:
    """Return why a training pass of a layer's experts cannot be recorded with all of them leased; "" if it can."""
    others = {implementation_of(layer)[0] or "eager" for layer in handle.layers} - set(UNHEARD)
    if others:
        return f"{handle.spec.name}: the implementation {min(others)} asks which experts are touched"
    cached = handle.deciding.cache is not None
    return f"{handle.spec.name}: the GPU decides which experts are resident" if cached else ""
