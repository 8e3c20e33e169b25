"""What the CPU of a machine reaches with pages of missed experts, for `experts.miss`."""

import itertools
import time
from collections.abc import Callable

import torch

from vbrt.errors import KernelError
from vbrt.formats import get_format
from vbrt.formats.experts import join_layouts
from vbrt.kernels.cpu.experts import experts_down, experts_up, takes_tiles
from vbrt.kernels.cpu.tiles import in_rows
from vbrt.kernels.cuda.e2m1.tiles import tile_layout
from vbrt.kernels.experts import ExpertPages, Gate
from vbrt.residency.missed import CPU_GB_PER_S

__all__ = ["experts_gb_s"]

_FORMAT, _GATE = "nvfp4", Gate("silu")
_SHAPES = {"up": (2 * 768, 2048), "down": (2048, 768)}  # of Qwen3-30B-A3B
_AT_ONCE, _GROUPS, _TIMES = 8, 12, 9  # more bytes than caches hold


def experts_gb_s() -> float:
    """Return the GB/s of 4-bit pages, in the order of a GPU's tiles, with which the CPU computes experts for one token,
    eight at a time; the assumed rate where kernels cannot be built."""
    layout = join_layouts({part: tile_layout(_FORMAT, shape) for part, shape in _SHAPES.items()})
    rows = join_layouts({part: get_format(_FORMAT).layout(shape, torch.bfloat16) for part, shape in _SHAPES.items()})
    # as bytes of scales and as one fp32, 0x38 is a number near 1 and a small one
    memory = torch.full((_GROUPS, _AT_ONCE, layout.nbytes), 0x38, dtype=torch.uint8, device="cpu")
    groups = itertools.cycle([ExpertPages(_FORMAT, torch.bfloat16, _SHAPES, layout, list(group)) for group in memory])
    x = torch.ones(1, _SHAPES["up"][1], dtype=torch.bfloat16, device="cpu")
    ids = torch.arange(_AT_ONCE, dtype=torch.int64, device="cpu")[None]

    def run() -> None:
        pages = next(groups)
        pages = pages if takes_tiles(pages, x.dtype, _GATE) else in_rows(pages, rows)
        experts_down(experts_up(x, ids, pages, gate=_GATE), ids, None, pages)

    try:
        run()
    except KernelError:
        return CPU_GB_PER_S
    return _AT_ONCE * layout.nbytes / _least_seconds(run) / 1e9


def _least_seconds(run: Callable[[], None]) -> float:
    spans = []
    for _ in range(_TIMES):
        start = time.perf_counter()
        run()
        spans.append(time.perf_counter() - start)
    return min(spans)
