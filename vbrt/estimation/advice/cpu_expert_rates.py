"""CPU rates for routed experts: pages of GPU misses, and matmuls with few rows per expert."""

import itertools
import time
from collections.abc import Callable

import torch
from torch import Tensor

from vbrt.errors import KernelError
from vbrt.formats import get_format
from vbrt.formats.joint_planes import join_layouts
from vbrt.formats.page import PageLayout
from vbrt.kernels.cpu.experts import experts_down, experts_up, most_pairs, takes_tiles
from vbrt.kernels.cpu.tiles import in_rows
from vbrt.kernels.cuda.e2m1.tiles import tile_layout
from vbrt.kernels.experts import ExpertPages, Gate
from vbrt.residency.miss_policy import CPU_GB_PER_S

__all__ = ["FEW_ROWS", "experts_gb_s", "few_rows"]

FEW_ROWS = 32  # rows per expert: 512 prompt tokens over 64 experts, four each

_FORMAT, _GATE = "nvfp4", Gate("silu")
_SHAPES = {"up": (2 * 768, 2048), "down": (2048, 768)}  # of Qwen3-30B-A3B
_AT_ONCE, _GROUPS, _TIMES = 8, 12, 9  # more bytes than caches hold
_LONG_S = 1.0  # runs of this total length suffice


def experts_gb_s() -> float:
    """Return the GB/s of 4-bit pages, in GPU tile order, at which the CPU computes experts for one token, eight at a
    time; the assumed rate where kernels cannot be built."""
    rows, layout = _layout(tiled=False), _layout(tiled=True)
    memory = _memory(_GROUPS, layout)
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


def few_rows() -> tuple[float, float, int]:
    """Return the TFLOP/s of matmuls of `FEW_ROWS` rows with eight experts' matrices in bf16, and with 4-bit ones
    decoded first (0 where kernels cannot be built); and the most pairs per expert that are computed without decoding.
    """
    matrices = [torch.ones(s, dtype=torch.bfloat16, device="cpu") for s in _SHAPES.values() for _ in range(_AT_ONCE)]
    rows = {k: torch.ones(FEW_ROWS, k, dtype=torch.bfloat16, device="cpu") for _, k in _SHAPES.values()}
    tflop = 2e-12 * FEW_ROWS * sum(w_NK.numel() for w_NK in matrices)
    plain = tflop / _least_seconds(lambda: [rows[w_NK.shape[1]] @ w_NK.t() for w_NK in matrices])
    layout = _layout(tiled=False)
    pages = ExpertPages(_FORMAT, torch.bfloat16, _SHAPES, layout, list(_memory(1, layout)[0]))
    ids = torch.arange(_AT_ONCE, dtype=torch.int64, device="cpu").repeat_interleave(FEW_ROWS)[:, None]

    def decoded() -> None:
        for part, (_, k) in _SHAPES.items():
            experts_up(rows[k].repeat(_AT_ONCE, 1), ids, pages, part=part)

    try:
        return plain, tflop / _least_seconds(decoded), most_pairs()
    except KernelError:
        return plain, 0.0, 0


def _layout(*, tiled: bool) -> PageLayout:
    """Return the page layout of an expert's planes, in GPU tile order or in rows."""
    plain = get_format(_FORMAT)
    parts = {p: tile_layout(_FORMAT, s) if tiled else plain.layout(s, torch.bfloat16) for p, s in _SHAPES.items()}
    return join_layouts(parts)


def _memory(groups: int, layout: PageLayout) -> Tensor:
    """Return pages, uint8 [groups, experts, bytes], of 0x38: near 1 as a scale byte, small as fp32."""
    return torch.full((groups, _AT_ONCE, layout.nbytes), 0x38, dtype=torch.uint8, device="cpu")


def _least_seconds(run: Callable[[], object]) -> float:
    spans: list[float] = []
    while len(spans) < _TIMES and sum(spans) < _LONG_S:
        start = time.perf_counter()
        run()
        spans.append(time.perf_counter() - start)
    return min(spans)
