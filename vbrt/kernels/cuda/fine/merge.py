"""The original weight from its coarse and fine planes in one kernel on a GPU, without a synchronization."""

import torch
from torch import Tensor

from vbrt.formats import WeightPlanes, get_format
from vbrt.formats.fine import SPAN, WIDTH

__all__ = ["merge", "serves", "serves_shape"]


def serves(planes: WeightPlanes) -> bool:
    """True if `merge` takes these planes: on a GPU, with a fine plane, rows of whole blocks."""
    if planes.fine is None or not planes.fine["low"].is_cuda:
        return False
    return serves_shape(planes.format, planes.shape)


def serves_shape(format: str, shape: tuple[int, int]) -> bool:
    """True if the rows of a weight are whole blocks of its format."""
    return shape[1] % get_format(format).block == 0


def merge(planes: WeightPlanes) -> Tensor:
    """The weight [N, K], bit for bit what `formats.merge_fine` gives."""
    out = torch.empty(planes.shape, dtype=planes.dtype, device=planes.fine["low"].device)
    with torch.cuda.device(out.device):
        launch(planes, out)
    return out


def launch(planes: WeightPlanes, out: Tensor) -> None:
    """`merge` into `out`, on any device that Triton runs on."""
    from vbrt.kernels.cuda.fine.merge_triton import merge_kernel

    coarse, fine, fmt = planes.coarse, planes.fine, get_format(planes.format)
    levels, values, tensor_scale = fmt.tables(coarse)
    total, width = out.numel(), WIDTH[planes.dtype]
    merge_kernel[(-(-total // SPAN),)](
        coarse["codes"],
        coarse["scales"].view(torch.uint8),
        tensor_scale,
        levels,
        values,
        fine["low"],
        fine.get("nibbles", fine["low"]),
        fine["side"],
        fine["escapes"],
        fine["starts"],
        out.view(torch.int16),
        total,
        SPAN=SPAN,
        BLOCK=fmt.block,
        WIDE_CODES=sum(1 << code for code in fmt.wide_codes),
        WIDTH=width,
        num_warps=8,
    )
