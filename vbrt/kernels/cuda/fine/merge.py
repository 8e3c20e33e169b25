"""Fine plane merge on a GPU: the original weight from its coarse and fine planes in one kernel, without
synchronization.

The coarse plane may be in the format's order, or in the fused kernels' (`e2m1/tiles.py`), so that drafts, which read it
alone, can use those. A tile word has codes of two rows: it is read twice.
"""

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vbrt.formats import WeightPlanes, get_format
from vbrt.formats.fine_coding import CODED
from vbrt.formats.fine_plane import SPAN, WIDTH
from vbrt.kernels.cuda.e2m1.tiles import FORMATS, TILES, TOP_FIELD, is_tiled, relative_values
from vbrt.kernels.cuda.launcher import Launcher
from vbrt.libraries import triton_api

__all__ = [
    "CODED_FIELDS",
    "FIELDS",
    "READS",
    "launch_coded",
    "merge",
    "merge_experts",
    "serves",
    "serves_shape",
    "why_not_experts",
]

#: what a row of `merge_experts`' table has of a matrix: fields of its planes, and of its format's tables
FIELDS = ("codes", "scales", "tensor_scale", "levels", "values", "low", "nibbles", "side", "escapes", "starts")
#: how `coded_kernel` can read extra bits: by weight, or by eight
READS = (0, 1)
#: the same of coded planes
CODED_FIELDS = ("codes", "scales", "fours", "pairs", "extra", "escapes", "starts", CODED)
_WARPS, _CODED_WARPS = 4, 16


def serves(planes: WeightPlanes) -> bool:
    """True if `merge` supports these planes: on a GPU, with a fine plane, rows of whole blocks."""
    if planes.fine is None or not planes.fine["starts"].is_cuda:
        return False
    return serves_shape(planes.format, planes.shape)


def serves_shape(format: str, shape: tuple[int, int]) -> bool:
    """True if a weight's rows are whole blocks of its format."""
    return shape[1] % get_format(format).block == 0


def merge(planes: WeightPlanes) -> Tensor:
    """The weight [N, K], bit-exact with `formats.merge_fine`."""
    out = torch.empty(planes.shape, dtype=planes.dtype, device=planes.fine["starts"].device)
    with torch.cuda.device(out.device):
        launch(planes, out)
    return out


def launch(planes: WeightPlanes, out: Tensor) -> None:
    """`merge` into `out`, on any device that Triton supports."""
    if CODED in planes.fine:
        launch_coded(planes, out)
        return
    from vbrt.kernels.cuda.fine.merge_triton import merge_kernel

    fine, coarse = planes.fine, _coarse(planes)
    total = out.numel()
    merge_kernel[(-(-total // SPAN),)](
        *coarse.tensors,
        fine["low"],
        fine.get("nibbles", fine["low"]),
        fine["side"],
        fine["escapes"],
        fine["starts"],
        out.view(torch.int16),
        total,
        planes.shape[1],
        TILE_WORDS=coarse.tile_words,
        num_warps=_WARPS,
        **_constants(planes.format, planes.dtype, total),
        **triton_api.fp_fusion(True),
    )


def launch_coded(planes: WeightPlanes, out: Tensor, *, read: int = READS[-1], warps: int = _CODED_WARPS) -> None:
    """`launch` for a coded fine plane. `read`: how `coded_kernel` reads extra bits."""
    from vbrt.kernels.cuda.fine.coded_triton import coded_kernel

    fine, coarse = planes.fine, planes.coarse
    tiles, of = coarse.get(TILES), FORMATS.get(planes.format)
    codes, scales = (coarse["codes"], coarse["scales"]) if tiles is None else (tiles, tiles)
    total = out.numel()
    coded_kernel[(-(-total // SPAN),)](
        codes.view(torch.int32),
        scales.view(torch.uint8),
        coarse.get("tensor_scale", fine[CODED]),
        fine["fours"].view(torch.int32),
        fine["pairs"].view(torch.int16),
        fine["extra"].view(torch.int32),
        fine["escapes"],
        fine["starts"],
        fine[CODED],
        out.view(torch.int16),
        total,
        planes.shape[1],
        TILE_WORDS=0 if tiles is None else of.words,
        TOP_FIELD=TOP_FIELD if tiles is not None and of.e8m0_scales else 0,
        num_warps=warps,
        **_coded_constants(planes.format, total) | {"READ": read},
        **triton_api.fp_fusion(True),
    )


def _coded_constants(format: str, total: int) -> dict[str, int]:
    """Constants that both kernels of coded planes have, of a matrix of so many weights."""
    fmt = get_format(format)
    constants = {"SPAN": SPAN, "BLOCK": fmt.block, "MANTISSAS": fmt.scale_mantissas, "READ": READS[-1]}
    return constants | {"SIGNED": fmt.record.kernels != "e2m1", "WHOLE": total % SPAN == 0}


def _constants(format: str, dtype: torch.dtype, total: int) -> dict[str, int]:
    """Constants that both kernels have, of a matrix of so many weights."""
    fmt = get_format(format)
    wide = sum(1 << code for code in fmt.wide_codes)
    constants = {"SPAN": SPAN, "BLOCK": fmt.block, "WIDE_CODES": wide, "WIDTH": WIDTH[dtype]}
    return constants | {"E2M1": fmt.record.kernels == "e2m1", "WHOLE": total % SPAN == 0}


def why_not_experts(format: str, shape: tuple[int, int]) -> str:
    """Return why `merge_experts` takes no matrices of a format and shape; "" if it does."""
    if get_format(format).record.fitted:
        return f"{format} has levels of its own for each weight"
    return "" if serves_shape(format, shape) else f"rows of {shape[1]} weights are not whole blocks of {format}"


def merge_experts(
    places_EF: Tensor,
    experts_P: Tensor,
    shape: tuple[int, int],
    dtype: torch.dtype,
    format: str,
    *,
    first: int,
    coded: bool = False,
) -> Tensor:
    """Return one matrix of some experts, [P, N, K], in one launch without synchronization.

    Args:
        places_EF: int64, addresses of the fields of each expert's planes, which are in the format's order.
        experts_P: int64; -1 for zeros in the place of an expert's.
        first: the matrix has the columns of `FIELDS`, or of `CODED_FIELDS`, from this one on.
        coded: whether fine planes are.
    """
    out = torch.empty((len(experts_P), *shape), dtype=dtype, device=experts_P.device)
    if len(experts_P):
        total, tensors = shape[0] * shape[1], (places_EF, experts_P, out.view(torch.int16))
        grid, numbers = (-(-total // SPAN), len(experts_P)), (total, shape[1], first, places_EF.shape[1])
        constants = _coded_constants(format, total) if coded else _constants(format, dtype, total)
        _launch_experts(grid, tensors, numbers, constants, coded=coded)
    return out


def _launch_experts(
    grid: tuple[int, int],
    tensors: tuple[Tensor, ...],
    numbers: tuple[int, ...],
    constants: dict[str, int],
    *,
    coded: bool,
) -> None:
    device = tensors[0].device
    if device.type == "cuda":
        warps = _CODED_WARPS if coded else _WARPS
        _launcher(coded)(device.index, grid, tensors, numbers, warps=warps, specialized=numbers[:2], **constants)
    else:
        _experts_kernel(coded)[grid](*tensors, *numbers, **constants, **triton_api.fp_fusion(True))


def _experts_kernel(coded: bool) -> Any:
    if coded:
        from vbrt.kernels.cuda.fine.coded_triton import coded_experts_kernel

        return coded_experts_kernel
    from vbrt.kernels.cuda.fine.merge_triton import merge_experts_kernel

    return merge_experts_kernel


@functools.cache
def _launcher(coded: bool) -> Launcher:
    return Launcher(_experts_kernel(coded))


class _Coarse(NamedTuple):
    """A coarse plane in the form of the kernel: codes, scales, tensor scale, levels, values of scale bytes."""

    tensors: tuple[Tensor, ...]
    tile_words: int


def _coarse(planes: WeightPlanes) -> _Coarse:
    coarse, fmt = planes.coarse, get_format(planes.format)
    if not is_tiled(coarse):
        levels, values, scale = fmt.tables(coarse)
        return _Coarse((coarse["codes"], coarse["scales"].view(torch.uint8), scale, levels, values), 0)
    tiles, of = coarse[TILES], FORMATS[planes.format]
    levels, values, scale = fmt.tables({"codes": tiles, "tensor_scale": coarse["tensor_scale"]})
    values = relative_values(tiles.device) if of.e8m0_scales else values
    return _Coarse((tiles, tiles.view(torch.uint8), scale, levels, values), of.words)
