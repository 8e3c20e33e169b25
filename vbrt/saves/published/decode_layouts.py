"""Decoders for published layouts without a matching vbrt format: pure functions in plain torch.

Every function returns [N, K] as the layout's own library decodes it.
"""

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from torch import Tensor

from vbrt.errors import FormatError
from vbrt.formats.published import unpack_hqq

__all__ = ["decode_compressed_ints", "decode_gptq", "decode_hqq", "decode_torchao_int4", "scaled_blocks", "unswizzled"]

Fields = Mapping[str, Tensor]


class _Outline(Protocol):
    shape: tuple[int, int]
    dtype: torch.dtype
    more: Mapping[str, Any]


def _codes(words: Tensor, bits: int, dim: int) -> Tensor:
    """Unpack int32 words along a dimension, the first code in the lowest bits."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device="cpu")
    codes = words.movedim(dim, -1).unsqueeze(-1) >> shifts & ((1 << bits) - 1)
    return codes.flatten(-2).movedim(-1, dim)


def _places(count: int) -> Tensor:
    return torch.arange(count, dtype=torch.int64, device="cpu")


def _check(name: str, tensor: Tensor, shape: tuple[int, ...]) -> None:
    if tuple(tensor.shape) != shape:
        raise FormatError(f"{name} has shape {tuple(tensor.shape)}; expected {shape}")


def decode_gptq(t: Fields, outline: _Outline) -> Tensor:
    """GPTQ: qweight int32 [K bits/32, N], scales [G, N], qzeros int32 [G, N bits/32] (stored minus one in "gptq"
    files), g_idx [K]: the group of each column. weight = (code - zero) * scale. Raises FormatError."""
    n, k = outline.shape
    bits, group = outline.more["bits"], outline.more["group"]
    groups = len(t["scales"])
    _check("scales", t["scales"], (groups, n))
    index = _groups_of(t.get("g_idx"), k, group, groups)
    if "qzeros" in t:
        _check("qzeros", t["qzeros"], (groups, -(-n * bits // 32)))
        stored_less = 1 if outline.more["checkpoint_format"] == "gptq" else 0
        zeros = (_codes(t["qzeros"], bits, 1)[:, :n] + stored_less) & ((1 << bits) - 1)
    else:
        zeros = torch.full((groups, n), 1 << (bits - 1), dtype=torch.int32, device="cpu")
    codes_KN = _codes(t["weight"], bits, 0)
    return ((codes_KN - zeros[index]) * t["scales"][index]).t().contiguous()


def _groups_of(g_idx: Tensor | None, k: int, group: int, groups: int) -> Tensor:
    """Return each column's group. Raises FormatError: a group without scales."""
    index = _places(k) // (k if group < 1 else group) if g_idx is None else g_idx.long()
    if tuple(index.shape) != (k,) or int(index.min()) < 0 or int(index.max()) >= groups:
        raise FormatError(f"columns are of groups up to {int(index.max())}, and there are scales of {groups}")
    return index


def decode_compressed_ints(t: Fields, outline: _Outline) -> Tensor:
    """compressed-tensors' `pack-quantized`: weight_packed int32 [N, ceil(K bits/32)] of codes with an offset of half
    the range, weight_scale [N, G], weight_zero_point int32 [ceil(N bits/32), G] or int8 [N, G], weight_g_idx [K].
    weight = (code - zero) * scale. Raises FormatError."""
    n, k = outline.shape
    bits, group = outline.more["bits"], outline.more["group"]
    middle = 1 << (bits - 1)
    scale = t["scale"].reshape(1, 1).expand(n, 1) if t["scale"].numel() == 1 else t["scale"].reshape(n, -1)
    index = _groups_of(t.get("g_idx"), k, group, scale.shape[1])
    codes = _codes(t["weight"], bits, 1)[:, :k] - middle
    zero = t.get("zero_point")
    if zero is None:
        return codes * scale[:, index]
    zero = _codes(zero, bits, 0)[:n] - middle if zero.dtype == torch.int32 else zero.to(torch.int32)
    zero = zero.reshape(-1, 1) if zero.ndim == 1 else zero
    if zero.shape[1] != scale.shape[1] or zero.shape[0] not in (1, n):
        raise FormatError(f"weight_zero_point {tuple(zero.shape)} with scales of {tuple(scale.shape)}")
    return (codes - zero.expand(n, -1)[:, index]).to(scale.dtype) * scale[:, index]


def decode_hqq(t: Fields, outline: _Outline) -> Tensor:
    """HQQ: W_q, packed rows of a matrix with the groups as its rows (axis 1) or columns (axis 0); scale and zero: a
    number a group, or one of all. weight = (code - zero) * scale, in the model's dtype. Raises FormatError."""
    (n, k), group, axis = outline.shape, outline.more["group"], outline.more["axis"]
    shape = (n * k // group, group) if axis == 1 else (group, n * k // group)
    numbers = (shape[0], 1) if axis == 1 else (1, shape[1])
    codes = unpack_hqq(t["weight"], outline.more["packing"])[: shape[0]]
    _check("W_q, unpacked,", codes, shape)
    scale, zero = (t[name].reshape((1, 1) if t[name].numel() == 1 else numbers) for name in ("scale", "zero"))
    return ((codes.to(outline.dtype) - zero.to(outline.dtype)) * scale.to(outline.dtype)).view(n, k)


def decode_torchao_int4(t: Fields, outline: _Outline) -> Tensor:
    """torchao's `Int4Tensor`: qdata [N, K/2], signed nibbles, the even column in the low one; scale and zero_point
    [G, N]. weight = code * scale + zero_point, each operation rounded to fp32, as by MSLK's Triton kernel and torchao's
    `Int4WeightFakeQuantizer`. Raises FormatError.

    Counted from 0, codes would have the offset zero_point - 8 * scale, which fp32 does not hold where zero_point is
    small: the weight of code 0 is zero_point itself.
    """
    (n, k), groups = outline.shape, len(t["scale"])
    for name in ("scale", "zero_point"):
        _check(name, t[name], (groups, n))
        if not torch.isfinite(t[name]).all():
            raise FormatError(f"{name} holds NaN or Inf; expected finite numbers")
    if not groups or k % groups:
        raise FormatError(f"scales of {groups} groups in rows of {k}; expected whole groups")
    packed = t["weight"].view(torch.uint8)
    nibbles = torch.stack((packed & 15, packed >> 4), dim=-1)
    codes_NGg = ((nibbles ^ 8).to(torch.int8) - 8).view(n, groups, -1)
    scale_NG1, zero_NG1 = (t[name].float().t().unsqueeze(-1) for name in ("scale", "zero_point"))
    return (codes_NGg.float() * scale_NG1 + zero_NG1).view(n, k)


def scaled_blocks(t: Fields, outline: _Outline) -> Tensor:
    """FP8 weight [N, K] times a per-tensor, per-row or per-block scale, in fp32. Raises FormatError."""
    scale, blocks = t["scale"].float(), outline.more["block"]
    grid = scale.reshape(1, 1) if scale.numel() == 1 else scale.unsqueeze(1) if scale.ndim == 1 else scale
    if grid.ndim != 2:
        raise FormatError(f"a scale of shape {tuple(scale.shape)}; expected one, one for each row or for each block")
    rows, columns = map(_blocks_of, outline.shape, grid.shape, blocks)
    return t["weight"].float() * grid[rows][:, columns]


def _blocks_of(size: int, count: int, block: int) -> Tensor:
    """Return the block index of each of `size` positions, for `count` blocks."""
    each = size if count == 1 else 1 if count == size else block
    if each < 1 or -(-size // each) != count:
        raise FormatError(f"{count} scales for {size} rows or columns in blocks of {block}")
    return _places(size) // each


def unswizzled(scale: Tensor, n: int, groups: int) -> Tensor:
    """Return block scales [N, G] from cuBLAS's swizzled order: tiles of 128 rows and 4 groups, each [32, 4, 4] bytes:
    row modulo 32, row quarter, group. Raises FormatError.

    Source: cuBLAS documentation, "1D block scaling factors layout".
    """
    down, across = -(-n // 128), -(-groups // 4)
    if scale.numel() != down * across * 512:
        raise FormatError(f"{scale.numel()} swizzled scales; expected {down * across * 512} for {n} rows of {groups}")
    tiles = scale.reshape(down, across, 32, 4, 4).permute(0, 3, 2, 1, 4)
    return tiles.reshape(down * 128, across * 4)[:n, :groups].contiguous()
