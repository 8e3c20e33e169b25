"""KV page kernels: copy or dequantize pages of a KV cache, or single tokens in them, directly into the result, in one
kernel on a GPU."""

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vbrt.kernels.cuda import devices
from vbrt.kernels.cuda.launcher import Launcher

__all__ = ["NEEDS", "Groups", "Launchers", "copy", "decode", "gather", "gathers", "serves"]

NEEDS = devices.TRITON
_BLOCK_VALUES = 4096
_BLOCK_WORDS = 1024
_WORD_BYTES = 8


class Groups(NamedTuple):
    """Group sizes along tokens and channels, one of them 1, and bits per code."""

    tokens: int
    channels: int
    bits: int


class Launchers(NamedTuple):
    """Launchers of the kernels."""

    copy: Any
    decode: Any
    gather: Any


def serves(pages: Tensor, out: tuple[Tensor, Tensor]) -> bool:
    """True if pages are on a GPU with what kernels need, and tokens [R, H, T, D] are contiguous in the result."""
    return gathers(pages) and all(x.stride(2) == x.shape[3] and x.stride(3) == 1 for x in out)


def gathers(codes: Tensor) -> bool:
    """True if codes are on a GPU with what `gather` needs."""
    return codes.is_cuda and not devices.refusal(codes.device, NEEDS)


def copy(part: Tensor, out: Tensor, rows: Tensor | None, launchers: Launchers | None = None) -> bool:
    """Copy keys or values of pages; False if they do not consist of 8-byte words.

    Args:
        part: [n, B, H, P, D], contiguous within a page, the n pages at any stride.
        out: [R, H, n P, D]; contiguous tokens, rows and heads at any stride.
        rows: int64 [R], the sequence of each row; None: R = B, identity.
        launchers: instead of this device's.
    """
    pages, _, heads, tokens, channels = part.shape
    row, head, distance = (stride * part.itemsize for stride in (out.stride(0), out.stride(1), part.stride(0)))
    nbytes = tokens * channels * part.itemsize
    addresses = part.data_ptr() | out.data_ptr()
    if (addresses | row | head | distance | nbytes) % _WORD_BYTES:
        return False
    words, paired = nbytes // _WORD_BYTES, (addresses | row | head | distance | nbytes) % (2 * _WORD_BYTES) == 0
    block = min(_BLOCK_WORDS, 1 << (words - 1).bit_length())
    _launch(
        (launchers or _launchers()).copy,
        (-(-words // block) * pages, out.shape[0] * heads),
        (_as_words(part), part if rows is None else rows, _as_words(out)),
        (heads, row // _WORD_BYTES, head // _WORD_BYTES),
        (),
        PAGE_WORDS=distance // _WORD_BYTES,
        WORDS=words,
        PAIRED=paired,
        ROWS=rows is not None,
        BLOCK=block,
    )
    return True


def decode(
    codes: Tensor, bounds: Tensor, groups: Groups, out: Tensor, rows: Tensor | None, launchers: Launchers | None = None
) -> None:
    """Dequantize low + code * step, rounded from fp32 to its dtype, into `out`.

    Args:
        codes: uint8 [n, B, H, P, D * bits / 8], the n pages at any stride.
        bounds: bf16 [n, 2, B, H, P / groups.tokens, D / groups.channels], likewise: lows, then steps.
        out, rows, launchers: see `copy`.
    """
    pages, batch, heads, tokens, _ = codes.shape
    channels = out.shape[3]
    members = groups.channels if groups.channels > 1 else channels
    width = 1 << (members - 1).bit_length()
    block = _tokens_of_a_program(tokens, groups.tokens, width)
    _launch(
        (launchers or _launchers()).decode,
        (-(-tokens // block) * pages, out.shape[0] * heads * (channels // members)),
        (codes, bounds, bounds if rows is None else rows, out),
        (batch, heads, out.stride(0), out.stride(1)),
        (out.dtype,),
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


def gather(
    codes: Tensor,
    bounds: Tensor,
    groups: Groups,
    out: Tensor,
    pages: Tensor,
    places: Tensor,
    launchers: Launchers | None = None,
) -> None:
    """Dequantize tokens of any pages, each rounded from fp32 to its dtype, into `out` [N, H, D], contiguous.

    Args:
        codes, bounds, launchers: see `decode`; of one sequence, B = 1.
        pages, places: int64 [N]: the page of each token, and where in the page it is.
    """
    if not len(out):
        return
    tokens, heads, channels = out.shape
    width = 1 << (channels - 1).bit_length()
    block = min(max(1, _BLOCK_VALUES // width), 1 << (tokens - 1).bit_length())
    _launch(
        (launchers or _launchers()).gather,
        (-(-tokens // block), heads),
        (codes, bounds, pages, places, out),
        (tokens, heads),
        (out.dtype,),
        PAGE_BYTES=codes.stride(0),
        TOKENS=codes.shape[3],
        CHANNELS=channels,
        TOKEN_GROUP=groups.tokens,
        CHANNEL_GROUP=groups.channels,
        BITS=groups.bits,
        BLOCK=block,
        WIDTH=width,
    )


def _tokens_of_a_program(tokens: int, group: int, width: int) -> int:
    """Return a power of two: tokens per program, within one group if tokens are grouped."""
    most = max(1, _BLOCK_VALUES // width)
    if group == 1:
        return min(most, 1 << (tokens - 1).bit_length())
    return min(most, group & -group)


def _as_words(x: Tensor) -> Tensor:
    """View the memory range of x as int64."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    begin, words = x.storage_offset() * x.itemsize // _WORD_BYTES, -(-span * x.itemsize // _WORD_BYTES)
    return torch.empty(0, dtype=torch.int64, device=x.device).set_(x.untyped_storage(), begin, (words,), (1,))


def _launch(
    launch: Any, grid: tuple[int, int], tensors: tuple, numbers: tuple, special: tuple, **constants: Any
) -> None:
    out = tensors[-1]
    wide = max(numbers) >= 1 << 31
    launch(out.device.index or 0, grid, tensors, numbers, warps=4, specialized=(*special, wide), **constants)


@functools.cache
def _launchers() -> Launchers:
    from vbrt.kernels.cuda import kv_pages_triton as device

    return Launchers(Launcher(device.copy_kernel), Launcher(device.decode_kernel), Launcher(device.gather_kernel))
