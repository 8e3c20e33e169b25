"""Row gather on a GPU from a table in page-locked host memory: one launch, without waiting for the indices."""

import functools

import torch
from torch import Tensor

from vbrt.kernels.cuda import devices
from vbrt.kernels.cuda.launcher import Launcher
from vbrt.libraries import triton_api

__all__ = ["gather_rows", "launch", "serves"]

_BLOCK, _WARPS = 1024, 4
_WORDS = (torch.int64, torch.int32, torch.int16, torch.uint8)


@functools.cache
def serves(device: torch.device) -> bool:
    """True if a device's kernels gather rows from page-locked host memory."""
    return not devices.refusal(device, devices.TRITON)


def gather_rows(table: Tensor, index_T: Tensor) -> Tensor:
    """Return `table[index]`, [T, ...] on the GPU of the indices; the table must outlive the kernel.

    Args:
        table: [N, ...], contiguous, in page-locked host memory.
        index_T: int64 [T] on a GPU; a row that the table does not have comes as zeros.
    """
    out = torch.empty((len(index_T), *table.shape[1:]), dtype=table.dtype, device=index_T.device)
    if out.numel():
        launch(table, index_T.contiguous(), out)
    return out


def launch(table: Tensor, index_T: Tensor, out: Tensor) -> None:
    """`gather_rows` into `out`, on any device that Triton supports."""
    nbytes = out[0].nbytes
    word = next(word for word in _WORDS if nbytes % word.itemsize == 0 == table.data_ptr() % word.itemsize)
    words = nbytes // word.itemsize
    total = len(index_T) * words
    tensors = index_T, *(tensor.reshape(-1).view(torch.uint8).view(word) for tensor in (table, out))
    grid, numbers = (-(-total // _BLOCK), 1), (total, table.shape[0], words)
    if index_T.device.type == "cuda":
        _launcher()(index_T.device.index, grid, tensors, numbers, warps=_WARPS, specialized=(word,), BLOCK=_BLOCK)
    else:
        from vbrt.kernels.cuda.host_rows_triton import gather_rows_kernel

        gather_rows_kernel[grid](*tensors, *numbers, BLOCK=_BLOCK, **triton_api.fp_fusion(True))


@functools.cache
def _launcher() -> Launcher:
    from vbrt.kernels.cuda.host_rows_triton import gather_rows_kernel

    return Launcher(gather_rows_kernel)
