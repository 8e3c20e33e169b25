"""Page encodings of the KV cache: unchanged, or asymmetric quantization to 8 or 4 bits.

A page holds keys, then values, of `page` consecutive tokens of one attention layer:

    16 bits        the bytes of keys [B, H, P, K] and values [B, H, P, V]
    8 and 4 bits   codes uint8, the even column in the low nibble; then per-group lows and steps, bfloat16

Dequantization: x = low + code * step in fp32, rounded to the cache's dtype. Key groups are 64 tokens of one channel,
value groups 64 channels of one token: key channels have offsets and outliers common to all tokens (Liu et al., KIVI,
2024). low is the group's minimum rounded down, step is rounded up to reach its maximum, so the error is at most half a
step: (maximum - low) / 30 or / 510, plus bf16 rounding of the bounds.

Legend: n pages, B sequences, H heads, P tokens per page, K and V channels of a key and a value.
"""

from dataclasses import dataclass
from math import prod
from typing import Protocol

import torch
from torch import Tensor

from vbrt.errors import ArgumentError
from vbrt.formats.rounding import divided
from vbrt.host.host_memory import storage_of
from vbrt.kernels.cuda import kv_pages

__all__ = ["BITS", "AffineCode", "KVShape", "PageCode", "decode_groups", "encode_groups", "page_code"]

BITS = (16, 8, 4)
_ALIGN_BYTES = 256
_GROUP = 64


@dataclass(frozen=True, slots=True)
class KVShape:
    """Shape of a page: sequences, heads, tokens per page, channels of a key and of a value; and dtype."""

    batch: int
    heads: int
    page: int
    key_dim: int
    value_dim: int
    dtype: torch.dtype

    @property
    def dims(self) -> tuple[int, int]:
        """Channels of a key and of a value."""
        return self.key_dim, self.value_dim

    @property
    def plain_bytes(self) -> int:
        """Bytes of a page's tokens unencoded."""
        return self.batch * self.heads * self.page * sum(self.dims) * self.dtype.itemsize


class PageCode(Protocol):
    """Encoder and decoder of pages.

    Attributes:
        shape: of a page.
        page_bytes: of one page, a multiple of 256.
    """

    shape: KVShape
    page_bytes: int

    def encode(self, keys: Tensor, values: Tensor) -> Tensor:
        """Return pages uint8 [n, page_bytes] of keys [B, H, n P, K] and values [B, H, n P, V]."""

    def decode(self, pages: Tensor, out: tuple[Tensor, Tensor], rows: Tensor | None = None) -> None:
        """Decode pages [n, page_bytes] into keys [R, H, n P, K] and values [R, H, n P, V], which may be strided.
        `rows`, int64 [R], gives the sequence for each row; default: identity."""


def page_code(shape: KVShape, bits: int) -> PageCode:
    """Return the page encoding for a shape.

    Raises:
        ArgumentError: 4 bits with an odd number of channels, or 8 or 4 bits of a non-floating dtype.
    """
    if bits == 16:
        return _Plain(shape)
    if not shape.dtype.is_floating_point or (bits == 4 and any(dim % 2 for dim in shape.dims)):
        raise ArgumentError(
            f"bits = {bits}: keys and values of {shape.dims} channels in {shape.dtype}; expected floating-point numbers"
            f"{' and even numbers of channels' if bits == 4 else ''}; use bits = 16"
        )
    return AffineCode(shape, bits)


class _Parts:
    """Field layout of a page, each field 256-byte aligned: dtype and shape."""

    def __init__(self, *fields: tuple[torch.dtype, tuple[int, ...]]) -> None:
        self._fields, self._ends, end = fields, [], 0
        for dtype, shape in fields:
            end += dtype.itemsize * prod(shape)
            self._ends.append(end)
            end = -(-end // _ALIGN_BYTES) * _ALIGN_BYTES
        self.nbytes = end

    def views(self, pages: Tensor) -> list[Tensor]:
        """Return the fields [n, *shape] of pages uint8 [n, nbytes]."""
        found = []
        for (dtype, shape), end in zip(self._fields, self._ends, strict=True):
            part = pages[:, end - dtype.itemsize * prod(shape) : end]
            found.append(part.view(dtype).unflatten(1, shape))
        return found


class _Plain:
    """Unencoded keys and values."""

    def __init__(self, shape: KVShape) -> None:
        self.shape = shape
        self._parts = _Parts(*((shape.dtype, (shape.batch, shape.heads, shape.page, dim)) for dim in shape.dims))
        self.page_bytes = self._parts.nbytes
        both = _Parts((shape.dtype, (2 * shape.batch, shape.heads, shape.page, shape.key_dim)))
        alike = shape.key_dim == shape.value_dim and both.nbytes == self.page_bytes  # no padding between the two
        self._both = both if alike else None

    def encode(self, keys: Tensor, values: Tensor) -> Tensor:
        """See `PageCode.encode`."""
        pages = _new_pages(keys, self)
        for x, part in zip((keys, values), self._parts.views(pages), strict=True):
            _wide(part).copy_(_wide(_by_page(x, self.shape.page)))
        return pages

    def decode(self, pages: Tensor, out: tuple[Tensor, Tensor], rows: Tensor | None = None) -> None:
        """See `PageCode.decode`."""
        both = _joined(*out) if self._both is not None and rows is None else None
        parts, out = (self._parts, out) if both is None else (self._both, (both,))
        fast = kv_pages.serves(pages, out)
        for x, part in zip(out, parts.views(pages), strict=True):
            if fast and kv_pages.copy(part, x, rows):
                continue
            part = part if rows is None else part.index_select(1, rows)
            _wide(_by_page(x, self.shape.page)).copy_(_wide(part))


class AffineCode:
    """8- or 4-bit codes with a low and a step per group: a `PageCode`.

    Attributes:
        token_group: tokens per group of keys, a divisor of the page.
        channel_group: channels per group of values.
    """

    def __init__(self, shape: KVShape, bits: int) -> None:
        self.shape, self.bits = shape, bits
        self.token_group, self.channel_group = _divisor(shape.page), _divisor(shape.value_dim)
        head, pack = (shape.batch, shape.heads), 8 // bits
        bounds_K = (torch.bfloat16, (2, *head, shape.page // self.token_group, shape.key_dim))
        bounds_V = (torch.bfloat16, (2, *head, shape.page, shape.value_dim // self.channel_group))
        codes = ((torch.uint8, (*head, shape.page, dim // pack)) for dim in shape.dims)
        self._parts = _Parts(next(codes), bounds_K, next(codes), bounds_V)
        self.page_bytes = self._parts.nbytes

    def fields(self, pages: Tensor) -> list[Tensor]:
        """Return views of pages uint8 [n, page_bytes]: codes uint8 [n, B, H, P, K * bits / 8] and bounds bfloat16
        [n, 2, B, H, P / token_group, K] of keys; codes and bounds [n, 2, B, H, P, V / channel_group] of values."""
        return self._parts.views(pages)

    def encode(self, keys: Tensor, values: Tensor) -> Tensor:
        """See `PageCode.encode`."""
        pages = _new_pages(keys, self)
        codes_K, bounds_K, codes_V, bounds_V = self.fields(pages)
        self._encode(self._key_groups(_by_page(keys, self.shape.page).float()), 4, codes_K, bounds_K)
        self._encode(self._value_groups(_by_page(values, self.shape.page).float()), 5, codes_V, bounds_V)
        return pages

    def decode(self, pages: Tensor, out: tuple[Tensor, Tensor], rows: Tensor | None = None) -> None:
        """See `PageCode.decode`."""
        codes_K, bounds_K, codes_V, bounds_V = self.fields(pages)
        if kv_pages.serves(pages, out):
            kv_pages.decode(codes_K, bounds_K, kv_pages.Groups(self.token_group, 1, self.bits), out[0], rows)
            kv_pages.decode(codes_V, bounds_V, kv_pages.Groups(1, self.channel_group, self.bits), out[1], rows)
            return
        keys, values = (_by_page(x, self.shape.page) for x in out)
        self._decode(codes_K, bounds_K, 4, keys, rows)
        self._decode(codes_V, bounds_V, 5, values, rows)

    def _key_groups(self, x: Tensor) -> Tensor:
        return x.unflatten(3, (-1, self.token_group))

    def _value_groups(self, x: Tensor) -> Tensor:
        return x.unflatten(4, (-1, self.channel_group))

    def _encode(self, x: Tensor, along: int, codes: Tensor, bounds: Tensor) -> None:
        """Quantize x fp32, grouped along a dimension, into codes and bounds."""
        code, bounds[:, 0], bounds[:, 1] = encode_groups(x, along, self.bits)
        codes.copy_(code)

    def _decode(self, codes: Tensor, bounds: Tensor, along: int, out: Tensor, rows: Tensor | None) -> None:
        if rows is not None:
            codes, bounds = codes.index_select(1, rows), bounds.index_select(2, rows)
        out.copy_(decode_groups(codes, bounds[:, 0], bounds[:, 1], along, self.bits))


def encode_groups(x: Tensor, along: int, bits: int) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize groups to 8 or 4 bits.

    Args:
        x: fp32 [..., groups, members, ...]; dimension `along` is that of the members.

    Returns:
        Codes uint8 with the two dimensions as one, the last one halved in 4 bits; low and step, fp32 with values of
        bfloat16, without the dimension of the members.
    """
    top = (1 << bits) - 1
    low = _rounded_down(x.amin(along))
    step = _rounded_up(divided(x.amax(along) - low, top))
    divisor = torch.where(step > 0, step, 1).unsqueeze(along)
    code = ((x - low.unsqueeze(along)) / divisor).round_().clamp_(0, top).to(torch.uint8)
    code = code.flatten(along - 1, along)
    return (code if bits == 8 else code[..., ::2] | (code[..., 1::2] << 4)), low, step


def decode_groups(codes: Tensor, low: Tensor, step: Tensor, along: int, bits: int) -> Tensor:
    """Return fp32 values of codes, grouped as for `encode_groups`; low and step are bfloat16."""
    if bits == 4:
        codes = torch.stack((codes & 15, codes >> 4), -1).flatten(-2)
    code = codes.unflatten(along - 1, (low.shape[along - 1], -1)).float()
    return torch.addcmul(low.float().unsqueeze(along), code, step.float().unsqueeze(along)).flatten(along - 1, along)


def _new_pages(like: Tensor, code: PageCode) -> Tensor:
    """Return zeroed pages for all tokens of a tensor: zero padding, so that equal tokens give equal bytes."""
    pages = like.shape[2] // code.shape.page
    return torch.zeros(pages, code.page_bytes, dtype=torch.uint8, device=like.device)


def _joined(keys: Tensor, values: Tensor) -> Tensor | None:
    """Return keys and values [B, H, T, D] as one view [2 B, H, T, D]; None unless values directly follow keys in the
    same storage."""
    batch, step = keys.shape[0], keys.stride(0)
    if keys.shape != values.shape or keys.stride() != values.stride():
        return None
    if storage_of(keys) != storage_of(values):
        return None
    if values.storage_offset() - keys.storage_offset() != batch * step:
        return None
    return keys.as_strided((2 * batch, *keys.shape[1:]), keys.stride())


def _by_page(x: Tensor, page: int) -> Tensor:
    """Return [n, B, H, P, D], a view of x [B, H, n P, D]."""
    return x.unflatten(2, (-1, page)).permute(2, 0, 1, 3, 4)


def _wide(x: Tensor) -> Tensor:
    """Return a view in 8-byte words if rows are aligned: strided copies of words are faster."""
    whole = x.stride(-1) == 1 and x.shape[-1] * x.itemsize % 8 == 0 and x.data_ptr() % 8 == 0
    strides = x.stride()[:-1]
    return x.view(torch.int64) if whole and all(stride * x.itemsize % 8 == 0 for stride in strides) else x


def _divisor(n: int) -> int:
    """Return the largest divisor up to the group size."""
    return next(group for group in range(min(n, _GROUP), 0, -1) if n % group == 0)


def _rounded_down(x: Tensor) -> Tensor:
    """Round fp32 x down to bfloat16, toward -inf."""
    bits = x.contiguous().view(torch.int32)
    return torch.where(x < 0, bits + 0xFFFF, bits).bitwise_and_(-65536).view(torch.float32)


def _rounded_up(x: Tensor) -> Tensor:
    """Round non-negative fp32 x up to bfloat16."""
    return (x.contiguous().view(torch.int32) + 0xFFFF).bitwise_and_(-65536).view(torch.float32)
