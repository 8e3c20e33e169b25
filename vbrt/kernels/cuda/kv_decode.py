"""Rounded pages of a KV cache are decoded in one kernel on a GPU, right to where the keys or values are wanted."""

import functools
from typing import NamedTuple

from torch import Tensor

from vbrt.kernels.cuda.devices import available
from vbrt.kernels.cuda.launcher import Launcher

__all__ = ["Groups", "decode", "serves"]

_BLOCK_VALUES = 4096


class Groups(NamedTuple):
    """Tokens and channels that share their bounds, and the bits of a code."""

    tokens: int
    channels: int
    bits: int


def serves(pages: Tensor) -> bool:
    """True if pages are where Triton runs."""
    return pages.is_cuda and available()


def decode(codes: Tensor, bounds: Tensor, groups: Groups, out: Tensor, rows: Tensor | None) -> None:
    """Write low + code * step, rounded from fp32 to its dtype, into `out`.

    Args:
        codes: uint8 [n, B, H, P, D * bits / 8], the n pages at any distance.
        bounds: bf16 [n, 2, B, H, P / groups.tokens, D / groups.channels], likewise: lows, then steps.
        out: [R, H, n P, D]; rows of D values side by side, tokens behind each other, rows and heads at any distance.
        rows: int64 [R], the sequence of each row; None: R = B, all in order.
    """
    launch(codes, bounds, groups, out, rows, _launcher())


def launch(codes: Tensor, bounds: Tensor, groups: Groups, out: Tensor, rows: Tensor | None, launcher: Launcher) -> None:
    """`decode` by any launcher."""
    pages, batch, heads, tokens, _ = codes.shape
    channels = out.shape[3]
    width = 1 << (channels - 1).bit_length()
    block = max(1, min(1 << (tokens - 1).bit_length(), _BLOCK_VALUES // width))
    launcher(
        out.device.index or 0,
        (-(-tokens // block) * pages, out.shape[0] * heads),
        (codes, bounds, bounds if rows is None else rows, out),
        (batch, heads, out.stride(0), out.stride(1)),
        warps=4,
        specialized=(out.dtype, max(out.stride()) >= 1 << 31),
        PAGE_BYTES=codes.stride(0),
        TOKENS=tokens,
        CHANNELS=channels,
        TOKEN_GROUP=groups.tokens,
        CHANNEL_GROUP=groups.channels,
        BITS=groups.bits,
        ROWS=rows is not None,
        BLOCK=block,
        WIDTH=width,
    )


@functools.cache
def _launcher() -> Launcher:
    from vbrt.kernels.cuda import kv_decode_triton as device

    return Launcher(device.decode_kernel)
