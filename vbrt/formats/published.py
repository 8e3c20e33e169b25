"""Published 4-bit checkpoints, repacked into coarse planes without decoding: pure tensor functions.

`nvfp4` and `mxfp4` are the published formats themselves. The others have 16 levels with a scale per group of weights
along K (`vbrt.formats.sixteen_levels`): nibbles are reordered, groups are split into blocks of up to 128, and a group's
scale is repeated for its blocks. `levels_format` gives the resulting format from shapes alone.
"""

from collections.abc import Sequence
from math import gcd
from typing import NamedTuple

import torch
from torch import Tensor

from vbrt.config.format_records import FORMATS, LEVEL_BLOCKS, LEVEL_SCALES
from vbrt.errors import FormatError
from vbrt.formats.block_formats import unpack_codes
from vbrt.formats.format import padded
from vbrt.formats.sixteen_levels import INT4_LEVELS

__all__ = [
    "Nested",
    "Repacked",
    "cut_blocks",
    "join_rows",
    "levels_format",
    "levels_plane",
    "matrix_shape",
    "repack_bitsandbytes",
    "repack_compressed_int4",
    "repack_gptq",
    "repack_mxfp4",
    "repack_nvfp4",
]

_STORED_ZERO = {"gptq": 7, "gptq_v2": 8}


class Repacked(NamedTuple):
    """Coarse plane made from a published weight.

    Attributes:
        format: name of its format, one of `vbrt.config.FORMATS`.
        shape: (N, K).
        coarse: tensors of the plane, as in `get_format(format).layout(shape, dtype)`.
    """

    format: str
    shape: tuple[int, int]
    coarse: dict[str, Tensor]


class Nested(NamedTuple):
    """bitsandbytes' double quantization of absmax to a byte each: `nested_absmax` fp32, `nested_quant_map` fp32 [256],
    and the quant state's `nested_blocksize` and `nested_offset`."""

    absmax: Tensor
    quant_map: Tensor
    blocksize: int
    offset: float


def repack_nvfp4(
    weight_packed: Tensor, weight_scale: Tensor, global_scale: Tensor | float, *, divide: bool
) -> dict[str, Tensor]:
    """Build the `nvfp4` coarse plane from an NVFP4 checkpoint's tensors; codes and block scales are used as they are.

    weight_packed uint8 [N, K/2]; weight_scale float8_e4m3fn (or its bytes) [N, K/16], not swizzled; global_scale one
    positive number. divide=False: ModelOpt's `weight_scale_2`, weight = code * scale * global. divide=True:
    compressed-tensors' `weight_global_scale`, weight = code * scale / global; its reciprocal is rounded to fp32.

    Raises FormatError for mismatched shapes or dtypes, NaN scales, or a scale that is not positive.
    """
    scales = weight_scale.view(torch.uint8) if weight_scale.dtype == torch.float8_e4m3fn else weight_scale
    _check_bytes("nvfp4", weight_packed, scales, (weight_packed.ndim == 2, scales.ndim == 2))
    n, half = weight_packed.shape
    if half % 8 or scales.shape != (n, half // 8):
        raise FormatError(
            f"nvfp4: packed weight {tuple(weight_packed.shape)} with scales {tuple(scales.shape)}; "
            f"expected [N, K/2] with [N, K/16]"
        )
    if ((scales & 0x7F) == 0x7F).any():
        raise FormatError("nvfp4: block scales hold NaN (byte 0x7F or 0xFF); expected finite E4M3 values")
    own = global_scale.device if isinstance(global_scale, Tensor) else "cpu"  # read there without a sync
    scale = torch.as_tensor(global_scale, dtype=torch.float32, device=own).reshape(-1)
    if scale.numel() != 1 or not (torch.isfinite(scale) & (scale > 0)).all():
        raise FormatError(f"nvfp4: global scale {scale.tolist()}; expected one positive finite number")
    tensor_scale = scale.reciprocal() if divide else scale.clone()
    return {
        "codes": weight_packed.detach().contiguous(),
        "scales": scales.detach().contiguous().view(torch.float8_e4m3fn),
        "tensor_scale": tensor_scale.to(weight_packed.device),
    }


def repack_mxfp4(blocks: Tensor, scales: Tensor) -> dict[str, Tensor]:
    """Build the `mxfp4` coarse plane from an MXFP4 checkpoint's tensors (gpt-oss: `*_blocks`, `*_scales`), bit-exact.

    blocks uint8 [..., K/32, 16]; scales uint8 (or float8_e8m0fnu) [..., K/32]. Leading dimensions become rows.

    Raises FormatError for mismatched shapes or dtypes, or NaN scales (byte 255).
    """
    scales = scales.view(torch.uint8) if scales.dtype == torch.float8_e8m0fnu else scales
    _check_bytes("mxfp4", blocks, scales, (blocks.ndim >= 2, scales.ndim >= 1))
    if blocks.shape[-1] != 16 or scales.shape != blocks.shape[:-1]:
        raise FormatError(
            f"mxfp4: blocks {tuple(blocks.shape)} with scales {tuple(scales.shape)}; "
            f"expected [..., K/32, 16] with [..., K/32]"
        )
    if (scales == 255).any():
        raise FormatError("mxfp4: scales hold NaN (byte 255); expected 0 to 254")
    groups = scales.shape[-1]
    return {
        "codes": blocks.detach().reshape(-1, groups * 16).contiguous(),
        "scales": scales.detach().reshape(-1, groups).contiguous(),
    }


def levels_format(k: int, group: int, scales: torch.dtype, *, flat: bool = False) -> str:
    """Return the format for rows of K weights with a scale per `group` of them (-1: one per row).

    flat: groups are counted through the flattened weight instead of from the start of each row, as in bitsandbytes.
    Raises FormatError if groups are not multiples of 16 weights within rows, or scales have another dtype.
    """
    known = str(scales).removeprefix("torch.")
    if known not in LEVEL_SCALES:
        raise FormatError(f"block scales are {scales}; expected one of {', '.join(LEVEL_SCALES)}")
    if group == -1 or (group >= k and not flat):
        group = LEVEL_BLOCKS[-1]
    within = gcd(group, k) if flat else group
    blocks = [block for block in LEVEL_BLOCKS if within > 0 and within % block == 0]
    if not blocks:
        counted = "counted through the weight" if flat else "of each row"
        raise FormatError(
            f"groups of {group} weights {counted}, rows of {k}; expected groups made of blocks of 16 weights, "
            "each inside a row: decode this weight to a dense one"
        )
    return f"levels{blocks[-1]}-{known}"


def repack_bitsandbytes(
    packed: Tensor,
    absmax: Tensor,
    quant_map: Tensor,
    shape: tuple[int, int],
    *,
    blocksize: int = 64,
    nested: Nested | None = None,
) -> Repacked:
    """Repack a bitsandbytes NF4 or FP4 weight; block scales become fp32, dequantized first if they are nested.

    packed: N K / 2 bytes, high nibble first, in any shape (wider storage dtypes are viewed as bytes); absmax fp32
    (uint8 with `nested`) per `blocksize` weights of the flattened weight; quant_map fp32 [16]; shape (N, K) from the
    quant state. Decoded in the quant state's dtype, it equals `dequantize_4bit` bit for bit.

    Raises FormatError for mismatched tensors, non-finite scales, or blocks across rows.
    """
    n, k = matrix_shape("bitsandbytes", shape)
    codes = packed.detach().contiguous().view(torch.uint8).reshape(-1)
    if codes.numel() * 2 != n * k or k % 2:
        raise FormatError(f"bitsandbytes: {codes.numel()} bytes of codes; expected {n} x {k} / 2 of a weight {shape}")
    scales = (absmax.float() if nested is None else _unnested(absmax, nested)).detach().reshape(-1)
    if blocksize < 1 or scales.numel() != -(-n * k // blocksize):
        raise FormatError(
            f"bitsandbytes: {scales.numel()} scales; expected one for each {blocksize} of {n * k} weights"
        )
    format = levels_format(k, blocksize, torch.float32, flat=True)
    block = _block(format)
    spread = scales.repeat_interleave(blocksize // block)[: n * k // block].view(n, -1)
    return levels_plane(format, shape, ((codes << 4) | (codes >> 4)).view(n, -1), spread, quant_map)


def matrix_shape(source: str, shape: Sequence[int]) -> tuple[int, int]:
    """Return (N, K); raises FormatError for a shape that is not a non-empty matrix."""
    if len(shape) != 2 or min(shape) < 1:
        raise FormatError(f"{source}: a weight of shape {tuple(shape)}; expected (N, K) with at least one weight")
    return shape[0], shape[1]


def _unnested(absmax: Tensor, nested: Nested) -> Tensor:
    """Dequantize absmax to fp32, in the steps of bitsandbytes' `dequantize_4bit`."""
    flat = absmax.detach().reshape(-1)
    groups = -(-flat.numel() // nested.blocksize) if nested.blocksize > 0 else -1
    if absmax.dtype != torch.uint8 or nested.quant_map.numel() != 256 or nested.absmax.numel() != groups:
        raise FormatError(
            f"bitsandbytes: absmax {absmax.dtype} {tuple(absmax.shape)} with {nested.absmax.numel()} nested scales for "
            f"{nested.blocksize} each and a map of {nested.quant_map.numel()}; expected bytes, a scale a group, 256"
        )
    value = nested.quant_map.detach().float().reshape(-1).index_select(0, flat.to(torch.int32))
    scale = nested.absmax.detach().float().reshape(-1).repeat_interleave(nested.blocksize)[: flat.numel()]
    return value.mul_(scale).add_(torch.tensor(float(nested.offset), dtype=torch.float32, device=value.device))


def repack_gptq(
    qweight: Tensor,
    scales: Tensor,
    qzeros: Tensor | None = None,
    g_idx: Tensor | None = None,
    *,
    group: int,
    checkpoint_format: str = "gptq",
) -> Repacked:
    """Repack a symmetric 4-bit weight of GPTQ or AutoRound (packing `auto_gptq`).

    qweight int32 [K/8, N], eight codes of a column per word, the first in the lowest bits; scales [G, N], G = K / group
    rounded up (group -1: one per row); qzeros int32 [G, N/8], which encode the zero point 8: as 7 if the file's
    `checkpoint_format` is "gptq", as 8 if it is "gptq_v2". weight = (code - 8) * scale. Of AutoRound's packings
    "auto_round:auto_gptq" is the former, "auto_round" and "auto_round:gptqmodel" are the latter. Decoded in the scales'
    dtype it equals both libraries' weights bit for bit; in another dtype they round twice, this once.

    g_idx [K]: groups in order only. Raises FormatError for act-order (columns permuted against their groups,
    unsupported by the kernels: decode such weights), zero points other than 8, or mismatched tensors.
    """
    k, n = (8 * qweight.shape[0], qweight.shape[-1]) if qweight.ndim else (0, 0)
    if qweight.dtype != torch.int32 or qweight.ndim != 2 or scales.ndim != 2:
        raise FormatError(
            f"gptq: qweight {qweight.dtype} {tuple(qweight.shape)}, scales {tuple(scales.shape)}; "
            "expected int32 [K/8, N] of 4 bits and [G, N]"
        )
    _check_order("gptq", g_idx, k, group)
    _check_zeros(qzeros, scales, checkpoint_format)
    codes = qweight.detach().t().contiguous().view(torch.uint8)
    return _grouped("gptq", (n, k), codes, scales.detach().t(), group)


def _check_zeros(qzeros: Tensor | None, scales: Tensor, checkpoint_format: str) -> None:
    """Raise FormatError for GPTQ zero points that are not all 8."""
    if checkpoint_format not in _STORED_ZERO:
        raise FormatError(f"gptq: checkpoint_format {checkpoint_format!r}; expected one of {', '.join(_STORED_ZERO)}")
    if qzeros is None:
        return
    groups, n = scales.shape
    if qzeros.dtype != torch.int32 or tuple(qzeros.shape) != (groups, -(-n // 8)):
        raise FormatError(
            f"gptq: qzeros {qzeros.dtype} {tuple(qzeros.shape)}; expected int32 {(groups, -(-n // 8))} beside "
            f"scales of {tuple(scales.shape)}"
        )
    nibbles = unpack_codes(qzeros.detach().contiguous().view(torch.uint8), n)
    if bool((nibbles != _STORED_ZERO[checkpoint_format]).any()):
        raise FormatError(
            f"gptq: zero points are not all 8, as those of symmetric weights are in {checkpoint_format!r} files; "
            "decode this weight to a dense one"
        )


def repack_compressed_int4(
    weight_packed: Tensor,
    weight_scale: Tensor,
    shape: tuple[int, int],
    *,
    group: int,
    weight_g_idx: Tensor | None = None,
) -> Repacked:
    """Repack a symmetric 4-bit weight of compressed-tensors' `pack-quantized`: weight = (code - 8) * scale.

    weight_packed int32 [N, ceil(K/8)], the first code in the lowest bits; weight_scale [N, G] for groups, [N, 1] or [N]
    for channels, one number for a tensor (group -1 for both); shape (N, K) is `weight_shape`. Decoded in the scales'
    dtype it equals compressed-tensors' decompression bit for bit.

    Raises FormatError for mismatched tensors, or a g_idx out of order.
    """
    n, k = matrix_shape("pack-quantized", shape)
    if weight_packed.dtype != torch.int32 or tuple(weight_packed.shape) != (n, -(-k // 8)):
        raise FormatError(
            f"pack-quantized: weight_packed {weight_packed.dtype} {tuple(weight_packed.shape)}; "
            f"expected int32 {(n, -(-k // 8))} of a weight {(n, k)} in 4 bits"
        )
    _check_order("pack-quantized", weight_g_idx, k, group)
    scale = weight_scale.detach()
    scale_NG = scale.reshape(1, 1).expand(n, 1) if scale.numel() == 1 else scale.reshape(len(scale), -1)
    return _grouped("pack-quantized", (n, k), weight_packed.detach().contiguous().view(torch.uint8), scale_NG, group)


def cut_blocks(made: Repacked, block: int) -> Repacked:
    """Split blocks into smaller ones of `block`, a divisor, so that several parts can share a format.

    Raises FormatError for another block.
    """
    own = _block(made.format)
    if block not in LEVEL_BLOCKS or block > own:
        raise FormatError(f"{made.format}: cut into blocks of {block}; expected one of {LEVEL_BLOCKS}, at most {own}")
    k = made.shape[1]
    columns = padded(k, block)
    scales = made.coarse["scales"].repeat_interleave(own // block, dim=1)[:, : columns // block].contiguous()
    codes = made.coarse["codes"][:, : columns // 2].contiguous()
    format = levels_format(k, block, scales.dtype)
    return Repacked(format, made.shape, {"codes": codes, "scales": scales, "levels": made.coarse["levels"]})


def join_rows(parts: Sequence[Repacked]) -> Repacked:
    """Concatenate the rows of weights of one K, such as an expert's gate and up projections.

    Blocks are split to the smallest. Raises FormatError if K, levels or the scales' dtype differ.
    """
    block = min(_block(part.format) for part in parts)
    cut = [cut_blocks(part, block) for part in parts]
    levels = cut[0].coarse["levels"]
    alike = {(part.format, part.shape[1]) for part in cut}
    if len(alike) > 1 or not all(torch.equal(part.coarse["levels"], levels) for part in cut):
        found = ", ".join(f"{part.format} {part.shape}" for part in cut)
        raise FormatError(f"join: {found}; expected one K, one dtype of scales and the same sixteen levels")
    fields = {name: torch.cat([part.coarse[name] for part in cut]) for name in ("codes", "scales")}
    shape = (sum(part.shape[0] for part in cut), cut[0].shape[1])
    return Repacked(cut[0].format, shape, {**fields, "levels": levels})


def _check_order(source: str, g_idx: Tensor | None, k: int, group: int) -> None:
    """Raise FormatError if columns are not in the order of their groups."""
    if g_idx is None:
        return
    own = torch.arange(k, dtype=torch.int64, device=g_idx.device) // (k if group == -1 else max(1, group))
    if g_idx.shape != own.shape or not torch.equal(g_idx.detach().long(), own):
        raise FormatError(
            f"{source}: g_idx has columns in another order than their groups (act-order, desc_act); decode this weight "
            "to a dense one"
        )


def _grouped(source: str, shape: tuple[int, int], codes: Tensor, scale_NG: Tensor, group: int) -> Repacked:
    """Build the plane of an int4 weight with per-row groups; codes uint8 [N, >= K/2]."""
    n, k = shape
    width = k if group == -1 else group
    groups = -(-k // width) if width > 0 else -1
    if tuple(scale_NG.shape) != (n, groups):
        raise FormatError(
            f"{source}: scales of {tuple(scale_NG.shape)} rows and groups; expected {(n, groups)} of a weight {(n, k)} "
            f"in groups of {group}"
        )
    format = levels_format(k, group, scale_NG.dtype)
    block = _block(format)
    each = -(-padded(k, block) // block) if groups == 1 else width // block
    scales = scale_NG.repeat_interleave(each, dim=1)[:, : padded(k, block) // block]
    half = padded(k, block) // 2
    wide = torch.full((n, half), 0x88, dtype=torch.uint8, device=codes.device)  # 0x88: two zero weights
    wide[:, : (k + 1) // 2] = codes[:, : (k + 1) // 2]
    return levels_plane(format, shape, wide, scales, _table(INT4_LEVELS, codes))


def levels_plane(format: str, shape: tuple[int, int], codes: Tensor, scales: Tensor, levels: Tensor) -> Repacked:
    """Build a plane of codes, block scales and sixteen levels. Raises FormatError for non-finite numbers."""
    levels = levels.detach().float().reshape(-1).contiguous()
    if levels.numel() != 16 or not torch.isfinite(levels).all():
        raise FormatError(f"{format}: {levels.numel()} levels; expected 16 finite numbers")
    if not torch.isfinite(scales).all():
        raise FormatError(f"{format}: block scales hold NaN or Inf; expected finite numbers")
    return Repacked(format, shape, {"codes": codes.contiguous(), "scales": scales.contiguous(), "levels": levels})


def _block(format: str) -> int:
    return FORMATS[format].block


def _table(levels: tuple[float, ...], like: Tensor) -> Tensor:
    return torch.tensor(levels, dtype=torch.float32, device=like.device)


def _check_bytes(format: str, codes: Tensor, scales: Tensor, ranks: tuple[bool, bool]) -> None:
    if codes.dtype != torch.uint8 or scales.dtype != torch.uint8 or not all(ranks):
        raise FormatError(
            f"{format}: codes are {codes.dtype} {tuple(codes.shape)}, scales {scales.dtype} {tuple(scales.shape)}; "
            "expected torch.uint8 codes and one scale byte per block"
        )
