"""What a GPU does in a step, as torch's profiler sees it: how long it computes, copies and idles, and between what."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from scripts.full_models import waited

__all__ = ["Ran", "profiled", "summary"]

KINDS = {
    "copies in": ("memcpy htod",),
    "copies out": ("memcpy dtoh",),
    "attention": ("flash", "fmha", "sdp", "attention"),
    "products": ("gemm", "cutlass", "nvjet", "xmma", "cublas"),
    "optimizer": ("adam", "multi_tensor"),
}
COPIES = ("copies in", "copies out")
GAP_NS = 100_000  # shorter ones are launches


class Ran(NamedTuple):
    """Something that a GPU has done."""

    name: str
    begin_ns: int
    end_ns: int


def profiled(step: Callable[[], object]) -> dict:
    """Do one step, and return `summary` of what the GPU did; its launches take longer than without a profiler."""
    waited()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        step()
        waited()
    found = profile.profiler.kineto_results.events()
    on_gpu = torch.autograd.DeviceType.CUDA
    ran = [Ran(e.name(), e.start_ns(), e.start_ns() + e.duration_ns()) for e in found if e.device_type() == on_gpu]
    return summary(ran)


def kind_of(name: str) -> str:
    """Return what a kernel is for."""
    small = name.lower()
    return next((kind for kind, parts in KINDS.items() if any(part in small for part in parts)), "others")


def summary(ran: Sequence[Ran]) -> dict:
    """Return seconds: from the first to the last; of each kind, which overlap; of the kernels that take longest; of the
    gaps in computing, with the largest: when it began, how long it was, and what came before and after it."""
    ran = sorted((one for one in ran if one.end_ns > one.begin_ns), key=lambda one: one.begin_ns)
    if not ran:
        return {}
    start, kinds = ran[0].begin_ns, dict.fromkeys([*KINDS, "others"], 0)
    computing = [one for one in ran if kind_of(one.name) not in COPIES]
    for one in ran:
        kinds[kind_of(one.name)] += one.end_ns - one.begin_ns
    gaps, until, before = [], start, "the begin"
    for one in computing:
        if one.begin_ns - until > GAP_NS:
            gaps.append((until - start, one.begin_ns - until, before[:50], one.name[:50]))
        if one.end_ns > until:
            until, before = one.end_ns, one.name
    largest = sorted(gaps, key=lambda gap: -gap[1])[:6]
    totals: dict[str, int] = {}
    for one in ran:
        totals[one.name[:60]] = totals.get(one.name[:60], 0) + one.end_ns - one.begin_ns
    longest = sorted(totals.items(), key=lambda total: -total[1])[:10]
    return {
        "seconds": (max(one.end_ns for one in ran) - start) / 1e9,
        "kinds": {kind: round(ns / 1e9, 4) for kind, ns in kinds.items()},
        "kernels": {name: round(ns / 1e9, 4) for name, ns in longest},
        "gaps_s": sum(gap[1] for gap in gaps) / 1e9,
        "gaps": len(gaps),
        "largest": [(round(at / 1e9, 4), round(ns / 1e9, 4), *names) for at, ns, *names in largest],
    }
