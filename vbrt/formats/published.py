"""Published 4-bit and 8-bit checkpoints, repacked into coarse planes without decoding: pure tensor functions.

`nvfp4` and `mxfp4` are the published formats themselves. The others have 16 levels with a scale per group of weights
along K (`vbrt.formats.sixteen_levels`), or also an offset or a zero point (`vbrt.formats.affine`), or 8-bit codes
(`vbrt.formats.eight_bits`): nibbles are reordered, groups are split into blocks of up to 128, and a group's numbers are
repeated for its blocks. `levels_format` gives the resulting format from shapes alone.
"""

from collections.abc import Mapping, Sequence
from math import gcd
from typing import NamedTuple

import torch
from torch import Tensor

from vbrt.config.format_records import BYTE_KINDS, FORMATS, GROUP_KINDS, LEVEL_BLOCKS, LEVEL_SCALES, ORDERED
from vbrt.errors import FormatError
from vbrt.formats.block_formats import pack_codes, unpack_codes
from vbrt.formats.format import padded

__all__ = [
    "Nested",
    "Repacked",
    "column_order",
    "cut_blocks",
    "join_rows",
    "levels_format",
    "levels_plane",
    "matrix_shape",
    "refuse_nonfinite_fields",
    "repack_awq",
    "repack_bitsandbytes",
    "repack_compressed_int4",
    "repack_compressed_int8",
    "repack_fp8",
    "repack_gptq",
    "repack_hqq",
    "repack_int8",
    "repack_llm_int8",
    "repack_mlx",
    "repack_mxfp4",
    "repack_nvfp4",
    "repack_tinygemm",
    "repack_torchao_int4",
    "unpack_hqq",
    "unpack_tinygemm",
]

#: subtracted from zero points in files of a `checkpoint_format`
_STORED_LESS = {"gptq": 1, "gptq_v2": 0}
#: the zero point of symmetric weights, by bits
_MIDDLE = {4: 8, 8: 128}
#: bitsandbytes' 1 / 127
_LLM_INT8_UNIT = 7.874015718698502e-3
_KINDS = (*GROUP_KINDS, *BYTE_KINDS)
#: column of each nibble in an AWQ word, from the lowest
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
#: HQQ's packings: dtype, and shift of each part of the rows
_HQQ_PACKINGS = {
    "8bit_u8": (torch.uint8, (0,)),
    "4bit_u8": (torch.uint8, (4, 0)),
    "2bit_u8": (torch.uint8, (6, 4, 2, 0)),
    "1bit_u8": (torch.uint8, (7, 6, 5, 4, 3, 2, 1, 0)),
    "3bit_32": (torch.int32, (27, 24, 21, 18, 15, 12, 9, 6, 3, 0)),
}
#: rows, and columns per inner tile, of tinygemm's `m16n8k16` tiles of a weight
_TINYGEMM_ROWS, _TINYGEMM_COLUMNS = 8, 16
#: fields of a plane that are not numbers per block
_NOT_PER_BLOCK = ("codes", "levels", "d", "dmin", "unit")


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


def levels_format(k: int, group: int, scales: torch.dtype, *, flat: bool = False, kind: str = "levels") -> str:
    """Return the format for rows of K weights with a scale per `group` of them (-1: one per row).

    flat: groups are counted through the flattened weight instead of from the start of each row, as in bitsandbytes.
    kind: one of `GROUP_KINDS` or `BYTE_KINDS`, such as "levels", "affine" (with offsets) or "zeros" (with zero points).
    Raises FormatError if groups are not multiples of 16 weights within rows, or scales have another dtype.
    """
    if kind not in _KINDS:
        raise FormatError(f"kind = {kind!r}; expected one of {', '.join(_KINDS)}")
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
    return f"{kind}{blocks[-1]}-{known}"


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
    symmetric: bool = True,
    bits: int = 4,
) -> Repacked:
    """Repack a weight of GPTQ or AutoRound (packing `auto_gptq`) in 4 or 8 bits.

    qweight int32 [K bits/32, N], eight or four codes of a column per word, the first in the lowest bits; scales [G, N],
    G = K / group rounded up (group -1: one per row); qzeros int32 [G, N bits/32], zero points, less one if the file's
    `checkpoint_format` is "gptq", as they are if it is "gptq_v2". weight = (code - zero) * scale. Of AutoRound's
    packings "auto_round:auto_gptq" is the former, "auto_round" and "auto_round:gptqmodel" are the latter. Decoded in
    the scales' dtype it equals both libraries' weights bit for bit; in another dtype they round twice, this once.

    symmetric: all zero points are 8 (128 of 8 bits), and the plane is one of 16 levels (of integers); else it has zero
    points.

    g_idx [K]: the group of each column; with act-order (desc_act) the plane has columns in the order of their groups.

    Raises FormatError for groups of unequal sizes, other zero points than said, or mismatched tensors.
    """
    if bits not in _MIDDLE:
        raise FormatError(f"gptq: {bits} bits; expected 4 or 8")
    k, n = (32 // bits * qweight.shape[0], qweight.shape[-1]) if qweight.ndim else (0, 0)
    if qweight.dtype != torch.int32 or qweight.ndim != 2 or scales.ndim != 2:
        raise FormatError(
            f"gptq: qweight {qweight.dtype} {tuple(qweight.shape)}, scales {tuple(scales.shape)}; "
            f"expected int32 [K/{32 // bits}, N] of {bits} bits and [G, N]"
        )
    order = column_order(g_idx, k, group)
    zeros_NG, middle = _zeros_of_gptq(qzeros, scales, checkpoint_format, bits), _MIDDLE[bits]
    if symmetric and zeros_NG is not None and bool((zeros_NG != middle).any()):
        raise FormatError(
            f"gptq: zero points are not all {middle}, as those of symmetric weights are in {checkpoint_format!r} "
            "files; repack with symmetric=False"
        )
    codes = _in_order(qweight.detach().t().contiguous().view(torch.uint8), order, bits)
    if not symmetric and zeros_NG is None:
        zeros_NG = torch.full(scales.shape[::-1], middle, dtype=torch.uint8, device=scales.device)
    zeros = None if symmetric else {"zeros": zeros_NG}
    build = _grouped_bytes if bits == 8 else _grouped
    return _ordered(build("gptq", (n, k), codes, scales.detach().t(), group, zeros), order)


def _zeros_of_gptq(qzeros: Tensor | None, scales: Tensor, checkpoint_format: str, bits: int) -> Tensor | None:
    """Zero points uint8 [N, G] of GPTQ. Raises FormatError."""
    if checkpoint_format not in _STORED_LESS:
        raise FormatError(f"gptq: checkpoint_format {checkpoint_format!r}; expected one of {', '.join(_STORED_LESS)}")
    if qzeros is None:
        return None
    groups, n = scales.shape
    words = -(-n * bits // 32)
    if qzeros.dtype != torch.int32 or tuple(qzeros.shape) != (groups, words):
        raise FormatError(
            f"gptq: qzeros {qzeros.dtype} {tuple(qzeros.shape)}; expected int32 {(groups, words)} beside "
            f"scales of {tuple(scales.shape)}"
        )
    packed = qzeros.detach().contiguous().view(torch.uint8)
    codes = unpack_codes(packed, n) if bits == 4 else packed[:, :n]
    return (codes + _STORED_LESS[checkpoint_format] & (1 << bits) - 1).t()


def repack_awq(qweight: Tensor, scales: Tensor, qzeros: Tensor) -> Repacked:
    """Repack a 4-bit weight of AWQ ("gemm"): weight = (code - zero) * scale.

    qweight int32 [K, N/8], eight rows' codes of a column per word in the order 0 2 4 6 1 3 5 7; scales [G, N]; qzeros
    int32 [G, N/8]. Decoded in the scales' dtype it equals AutoAWQ's weights bit for bit; in another dtype it rounds
    twice, this once.

    Raises FormatError for mismatched tensors, or groups that are not made of blocks of 16 weights.
    """
    k, words = qweight.shape if qweight.ndim == 2 else (0, 0)
    n, groups = 8 * words, scales.shape[0] if scales.ndim == 2 else 0
    fits = qweight.dtype == qzeros.dtype == torch.int32 and groups > 0 and k % groups == 0
    if not fits or tuple(scales.shape) != (groups, n) or tuple(qzeros.shape) != (groups, words):
        raise FormatError(
            f"awq: qweight {qweight.dtype} {tuple(qweight.shape)}, scales {tuple(scales.shape)}, qzeros {qzeros.dtype} "
            f"{tuple(qzeros.shape)}; expected int32 [K, N/8], [G, N] and int32 [G, N/8]"
        )
    codes_NK, zeros_NG = (_awq_nibbles(words).t() for words in (qweight, qzeros))
    packed = pack_codes(codes_NK) if k % 2 == 0 else codes_NK
    return _grouped("awq", (n, k), packed, scales.detach().t(), k // groups, {"zeros": zeros_NG})


def repack_mlx(weight: Tensor, scales: Tensor, biases: Tensor, *, bits: int = 4) -> Repacked:
    """Repack a weight of MLX's affine quantization in 4 or 8 bits: weight = code * scale + bias.

    weight uint32 [N, K bits/32], the first code in the lowest bits; scales and biases [N, G] of one dtype. MLX computes
    in that dtype; here product and sum are rounded to fp32 each, then to the weight's dtype.

    Raises FormatError for mismatched tensors, or groups that are not made of blocks of 16 weights.
    """
    if bits not in _MIDDLE:
        raise FormatError(f"mlx: {bits} bits; expected 4 or 8")
    n, words = weight.shape if weight.ndim == 2 else (0, 0)
    k, groups = 32 // bits * words, scales.shape[-1] if scales.ndim else 0
    fits = weight.dtype == torch.uint32 and biases.dtype == scales.dtype and groups > 0 and k % groups == 0
    if not fits or tuple(scales.shape) != (n, groups) or biases.shape != scales.shape:
        raise FormatError(
            f"mlx: weight {weight.dtype} {tuple(weight.shape)}, scales {scales.dtype} {tuple(scales.shape)}, biases "
            f"{biases.dtype} {tuple(biases.shape)}; expected uint32 [N, K/{32 // bits}], and [N, G] twice in one dtype"
        )
    codes, offsets = weight.detach().contiguous().view(torch.uint8), {"offsets": biases.detach()}
    make = _grouped if bits == 4 else _grouped_bytes
    return make("mlx", (n, k), codes, scales.detach(), k // groups, offsets)


def unpack_hqq(w_q: Tensor, packing: str) -> Tensor:
    """Codes of an HQQ weight, uint8 [rows, columns]: a word has codes of rows that are a part of all rows apart, the
    first in the highest bits; 3-bit codes may end with rows of padding. Raises FormatError."""
    if packing not in _HQQ_PACKINGS:
        raise FormatError(f"hqq: packing {packing!r}; expected one of {', '.join(_HQQ_PACKINGS)}")
    dtype, shifts = _HQQ_PACKINGS[packing]
    if w_q.ndim != 2 or not (w_q.dtype == dtype or w_q.is_floating_point()):
        raise FormatError(f"hqq: W_q {w_q.dtype} {tuple(w_q.shape)} packed as {packing}; expected {dtype}, a matrix")
    words, bits = w_q.detach().contiguous().view(dtype), int(packing[0])
    return torch.cat([(words >> shift & (1 << bits) - 1).to(torch.uint8) for shift in shifts])


def repack_hqq(
    w_q: Tensor, scale: Tensor, zero: Tensor, shape: tuple[int, int], *, group: int, packing: str = "4bit_u8"
) -> Repacked:
    """Repack a weight of HQQ with axis = 1 in 4 to 8 bits: weight = (code - zero) * scale, each operation rounded to
    the dtype of scales and zero points, which HQQ casts to its compute dtype.

    w_q: codes [N K / group, group] of the flattened weight, packed as 4bit_u8 (the first half of the rows in high
    nibbles) or 8bit_u8, or those bytes under a float dtype; scale and zero: a number per group, of one dtype. Decoded
    in that dtype it equals HQQ's `dequantize` bit for bit.

    Raises FormatError for mismatched tensors, numbers that are not finite, or groups not made of blocks of 16 weights
    of a row.
    """
    n, k = matrix_shape("hqq", shape)
    codes, groups = unpack_hqq(w_q, packing), n * k // max(1, group)
    fits = codes.shape == (groups, group) and groups * group == n * k
    if not fits or scale.numel() != groups or zero.numel() != groups or scale.dtype != zero.dtype:
        raise FormatError(
            f"hqq: W_q {tuple(w_q.shape)} packed as {packing}, scale {scale.dtype} {tuple(scale.shape)}, "
            f"zero {zero.dtype} {tuple(zero.shape)}; expected those of {(n, k)} weights in groups of {group}"
        )
    four = packing == "4bit_u8"
    format = levels_format(k, group, scale.dtype, flat=True, kind="floatzeros" if four else "floatzerobytes")
    codes, each = codes.view(n, k), group // _block(format)
    terms = {"scales": scale, "zeros": zero}
    terms = {name: term.detach().reshape(-1).repeat_interleave(each).view(n, -1) for name, term in terms.items()}
    refuse_nonfinite_fields(format, terms)
    return Repacked(format, (n, k), {"codes": pack_codes(codes) if four else codes, **terms})


def repack_torchao_int4(qdata: Tensor, scale: Tensor, zero_point: Tensor) -> Repacked:
    """Repack a weight of torchao's `Int4Tensor`, plain packing: weight = code * scale + zero_point, codes -8 to 7.

    qdata int8 or uint8 [N, K/2], signed nibbles, the even column in the low one; scale and zero_point fp16, bf16 or
    fp32 [G, N], numbers of weights. Each operation is rounded to fp32, then to the weight's dtype, as by MSLK's Triton
    kernel and torchao's `Int4WeightFakeQuantizer`. Of two dtypes, both become the one that has all their numbers.

    Raises FormatError for mismatched tensors, numbers that are not finite, or groups that are not made of blocks of 16
    weights.
    """
    n, half = qdata.shape if qdata.ndim == 2 else (0, 0)
    k, groups = 2 * half, len(scale) if scale.ndim else 0
    if qdata.dtype not in (torch.int8, torch.uint8) or not groups or k % groups or not k:
        raise FormatError(
            f"torchao int4: qdata {qdata.dtype} {tuple(qdata.shape)} with scale {tuple(scale.shape)}; expected int8 "
            "[N, K/2] with [G, N] of whole groups"
        )
    terms = _scales_and_middles("torchao int4", scale, zero_point, (groups, n))
    codes = qdata.detach().contiguous().view(torch.uint8) ^ 0x88
    return _grouped_plane("torchao int4", "signed", (n, k), codes, terms, k // groups)


def unpack_tinygemm(qdata: Tensor) -> Tensor:
    """Codes uint8 [8 T, 16 I O] of tinygemm's tiles, int32 [T, O, 32, I/2], of I = 2, 4 or 8 inner tiles.

    A warp's lane t owns row t // 4 of a tile's eight rows, and in each word columns of two inner tiles, four each, in
    the order of `mma.m16n8k16`'s B operand. Nibble 4 b + j (from the lowest bits) of word i of lane 4 r + l in outer
    tile o is the code of row r, column 16 I o + 32 i + 8 j + 2 l + b. Source: `matrix_to_m16n8k16_Bint4_layout` of
    PyTorch's aten/src/ATen/native/cuda/int4mm.cu; on AMD GPUs tiles have 16 rows instead.

    Raises FormatError.
    """
    sizes = tuple(qdata.shape)
    if qdata.dtype != torch.int32 or len(sizes) != 4 or sizes[2] != 32 or sizes[3] not in (1, 2, 4) or not all(sizes):
        raise FormatError(
            f"tinygemm: qdata {qdata.dtype} {sizes}; expected int32 [N/8, K/(16 I), 32, I/2] of I 2, 4 or 8"
        )
    tiles, outer, _lanes, words = sizes
    packed = qdata.detach().contiguous().view(torch.uint8).view(-1, 4 * words)
    nibbles_TOrlibj = unpack_codes(packed, 8 * words).view(tiles, outer, _TINYGEMM_ROWS, 4, words, 2, 4)
    codes_TrOijlb = nibbles_TOrlibj.permute(0, 2, 1, 4, 6, 3, 5)
    return codes_TrOijlb.reshape(tiles * _TINYGEMM_ROWS, outer * 2 * words * _TINYGEMM_COLUMNS)


def repack_tinygemm(qdata: Tensor, scale_and_zero: Tensor, shape: tuple[int, int], *, group: int) -> Repacked:
    """Repack a weight in tiles of PyTorch's `_weight_int4pack_mm` (tinygemm) on NVIDIA GPUs, as in torchao's
    `Int4TilePackedTo4dTensor`: weight = (code - 8) * scale + zero, codes 0 to 15.

    qdata: see `unpack_tinygemm`, of rows and columns padded to whole tiles; scale_and_zero bf16 [G, padded N, 2], G =
    padded K / group; shape (N, K) without padding. tinygemm rounds product and sum once, to bf16; here the sum is
    rounded to fp32 before (the product is exact). In bf16 the two differ, in the last bit, only where the product lies
    in the middle between two numbers of bf16 and zero is less than 2^-24 of it.

    Raises FormatError for mismatched tensors, numbers that are not finite, or groups that are not made of blocks of 16
    weights.
    """
    n, k = matrix_shape("tinygemm", shape)
    codes = unpack_tinygemm(qdata)
    rows, columns = codes.shape
    groups = columns // group if group > 0 and columns % group == 0 else -1
    if rows < n or columns < k or tuple(scale_and_zero.shape) != (groups, rows, 2):
        raise FormatError(
            f"tinygemm: qdata of {(rows, columns)} codes with scale_and_zero {tuple(scale_and_zero.shape)}; expected "
            f"those of a weight {(n, k)} in groups of {group}, with padding"
        )
    used = scale_and_zero[: -(-k // group), :n]
    terms = _scales_and_middles("tinygemm", used[..., 0], used[..., 1], tuple(used.shape[:2]))
    return _grouped_plane("tinygemm", "signed", (n, k), pack_codes(codes[:n, :k]), terms, group)


def _scales_and_middles(source: str, scale: Tensor, zero: Tensor, shape: tuple[int, int]) -> dict[str, Tensor]:
    """Scales and middles [N, G] of one dtype, of tensors of this shape [G, N]. Raises FormatError."""
    floats = scale.is_floating_point() and zero.is_floating_point()
    if tuple(scale.shape) != shape or tuple(zero.shape) != shape or not floats:
        raise FormatError(
            f"{source}: scale {scale.dtype} {tuple(scale.shape)} with zero point {zero.dtype} {tuple(zero.shape)}; "
            f"expected floats {shape}"
        )
    dtype = torch.promote_types(scale.dtype, zero.dtype)
    return {"scales": scale.detach().to(dtype).t(), "middles": zero.detach().to(dtype).t()}


def _awq_nibbles(words: Tensor) -> Tensor:
    """uint8 [R, N] of AWQ's words [R, N/8]."""
    nibbles = unpack_codes(words.detach().contiguous().view(torch.uint8), 8 * words.shape[1])
    place = torch.tensor(_AWQ_ORDER, dtype=torch.int64, device=words.device).argsort()
    return nibbles.view(len(words), -1, 8)[..., place].flatten(1)


def repack_compressed_int4(
    weight_packed: Tensor,
    weight_scale: Tensor,
    shape: tuple[int, int],
    *,
    group: int,
    weight_g_idx: Tensor | None = None,
    weight_zero_point: Tensor | None = None,
) -> Repacked:
    """Repack a 4-bit weight of compressed-tensors' `pack-quantized`: weight = (code - 8 - zero point) * scale.

    weight_packed int32 [N, ceil(K/8)], the first code in the lowest bits; weight_scale [N, G] for groups, [N, 1] or [N]
    for channels, one number for a tensor (group -1 for both); shape (N, K) is `weight_shape`; weight_zero_point of
    asymmetric weights int32 [ceil(N/8), G] of codes with an offset of 8, or integers from -8 to 7 shaped like the
    scales; weight_g_idx as GPTQ's g_idx. Decoded in the scales' dtype it equals compressed-tensors' decompression bit
    for bit.

    Raises FormatError for mismatched tensors, or groups of unequal sizes.
    """
    n, k = matrix_shape("pack-quantized", shape)
    order = column_order(weight_g_idx, k, group)
    codes = _in_order(_words_of_compressed(weight_packed, n, k, 4), order, 4)
    scale_NG, zeros = _by_row(weight_scale, n), None
    if weight_zero_point is not None:
        zeros = {"zeros": _zeros_of_compressed(weight_zero_point.detach(), scale_NG)}
    return _ordered(_grouped("pack-quantized", (n, k), codes, scale_NG, group, zeros), order)


def repack_compressed_int8(
    weight_packed: Tensor,
    weight_scale: Tensor,
    shape: tuple[int, int],
    *,
    group: int,
    weight_g_idx: Tensor | None = None,
    weight_zero_point: Tensor | None = None,
) -> Repacked:
    """Repack an 8-bit weight of compressed-tensors' `pack-quantized`: weight = (code - 128 - zero point) * scale.

    weight_packed int32 [N, ceil(K/4)], the first code in the lowest bits; weight_zero_point int32 [ceil(N/4), G] of
    codes with an offset of 128, or int8 shaped like the scales; the others as in `repack_compressed_int4`.

    Raises FormatError for mismatched tensors, or groups of unequal sizes.
    """
    n, k = matrix_shape("pack-quantized", shape)
    order = column_order(weight_g_idx, k, group)
    codes, scale_NG = _words_of_compressed(weight_packed, n, k, 8)[:, :k], _by_row(weight_scale, n)
    zeros = weight_zero_point
    if zeros is not None and zeros.dtype == torch.int32:
        if tuple(zeros.shape) != (-(-n // 4), scale_NG.shape[1]):
            raise FormatError(
                f"pack-quantized: weight_zero_point {tuple(zeros.shape)}; "
                f"expected {(-(-n // 4), scale_NG.shape[1])} of 8 bits beside scales of {tuple(scale_NG.shape)}"
            )
        zeros = zeros.detach().t().contiguous().view(torch.uint8)[:, :n].t() ^ 0x80
        zeros = zeros.contiguous().view(torch.int8)
    codes = (_in_order(codes, order, 8) ^ 0x80).contiguous().view(torch.int8)
    return _ordered(repack_int8(codes, scale_NG, zeros, group=group), order)


def _words_of_compressed(weight_packed: Tensor, n: int, k: int, bits: int) -> Tensor:
    """Bytes of `pack-quantized`'s words. Raises FormatError."""
    words = -(-k * bits // 32)
    if weight_packed.dtype != torch.int32 or tuple(weight_packed.shape) != (n, words):
        raise FormatError(
            f"pack-quantized: weight_packed {weight_packed.dtype} {tuple(weight_packed.shape)}; "
            f"expected int32 {(n, words)} of a weight {(n, k)} in {bits} bits"
        )
    return weight_packed.detach().contiguous().view(torch.uint8)


def _by_row(scale: Tensor, n: int) -> Tensor:
    """Scales [N, G] of groups, of rows, or of a tensor."""
    scale = scale.detach()
    return scale.reshape(1, 1).expand(n, 1) if scale.numel() == 1 else scale.reshape(len(scale), -1)


def repack_int8(weight: Tensor, scale: Tensor, zero_point: Tensor | None = None, *, group: int = -1) -> Repacked:
    """Repack an int8 weight with scales: weight = (code - zero point) * scale (compressed-tensors, torchao).

    weight int8 [N, K]; scale [N, G] of groups, [N, 1] or [N] of rows, one number of a tensor (group -1 for both);
    zero_point int8, shaped like the scales. Decoded in the scales' dtype it equals these libraries' dequantization bit
    for bit.

    Raises FormatError for mismatched tensors, or groups that are not made of blocks of 16 weights.
    """
    if weight.dtype != torch.int8 or weight.ndim != 2 or not weight.numel():
        raise FormatError(f"int8: weight {weight.dtype} {tuple(weight.shape)}; expected int8 [N, K]")
    n, k = weight.shape
    scale_NG, codes = _by_row(scale, n), weight.detach().contiguous()
    if zero_point is None:
        return _grouped_plane("int8", "bytes", (n, k), codes, {"scales": scale_NG}, group)
    if zero_point.dtype != torch.int8 or zero_point.numel() not in (1, scale_NG.numel()):
        raise FormatError(
            f"int8: zero points {zero_point.dtype} {tuple(zero_point.shape)} with scales of {tuple(scale_NG.shape)}; "
            "expected int8, shaped like the scales"
        )
    zeros = zero_point.detach().reshape(-1, 1 if zero_point.numel() == 1 else scale_NG.shape[1])
    zeros_NG = (zeros.contiguous().view(torch.uint8) ^ 0x80).expand(scale_NG.shape)
    return _grouped_bytes("int8", (n, k), codes.view(torch.uint8) ^ 0x80, scale_NG, group, {"zeros": zeros_NG})


def repack_llm_int8(weight: Tensor, row_stats: Tensor) -> Repacked:
    """Repack an int8 weight of bitsandbytes' LLM.int8: weight = code * row's largest magnitude * (1 / 127).

    weight int8 [N, K]; row_stats ("SCB") fp32 [N]. Decoded, it equals `int8_vectorwise_dequant` bit for bit.
    bitsandbytes itself multiplies inputs rounded to int8.

    Raises FormatError for mismatched tensors.
    """
    if weight.dtype != torch.int8 or weight.ndim != 2 or row_stats.numel() != len(weight) or not weight.numel():
        raise FormatError(
            f"LLM.int8: weight {weight.dtype} {tuple(weight.shape)} with SCB {tuple(row_stats.shape)}; "
            "expected int8 [N, K] and [N]"
        )
    made = repack_int8(weight, row_stats.float().reshape(-1, 1))
    unit = torch.full((1,), _LLM_INT8_UNIT, dtype=torch.float32, device=weight.device)
    return Repacked("unitbytes128", made.shape, {**made.coarse, "unit": unit})


def repack_fp8(weight: Tensor, scale: Tensor, *, block: tuple[int, int] = (128, 128)) -> Repacked:
    """Repack an FP8 weight with scales of blocks, of rows or of the tensor: weight = code * scale.

    weight float8_e4m3fn [N, K]; scale fp16, bf16 or fp32: [ceil(N/rows), ceil(K/columns)] of blocks of (rows, columns),
    [N, 1] or [N] of rows, one number of a tensor. The product is rounded to fp32, then to the weight's dtype.

    Raises FormatError for mismatched tensors, NaN codes, or blocks that are not made of 16 columns.
    """
    if weight.dtype != torch.float8_e4m3fn or weight.ndim != 2 or not weight.numel():
        raise FormatError(f"FP8: weight {weight.dtype} {tuple(weight.shape)}; expected float8_e4m3fn [N, K]")
    n, k = weight.shape
    grid = scale.detach().reshape(1, 1) if scale.numel() == 1 else scale.detach().reshape(len(scale), -1)
    down = n if len(grid) == 1 else 1 if len(grid) == n else block[0]
    group = -1 if grid.shape[1] == 1 else block[1]
    if scale.ndim > 2 or down < 1 or len(grid) != -(-n // down):
        raise FormatError(f"FP8: scales of {tuple(scale.shape)} for a weight {(n, k)} in blocks of {tuple(block)}")
    scale_NG = grid.repeat_interleave(down, dim=0)[:n]
    return _grouped_plane("FP8", "floatbytes", (n, k), weight.detach(), {"scales": scale_NG}, group)


def _zeros_of_compressed(zeros: Tensor, scale_NG: Tensor) -> Tensor:
    """Zero points uint8 [N, G] of 4-bit `pack-quantized`. Raises FormatError."""
    n, groups = scale_NG.shape
    if zeros.dtype == torch.int32 and tuple(zeros.shape) == (-(-n // 8), groups):
        return unpack_codes(zeros.t().contiguous().view(torch.uint8), n).t()
    if zeros.dtype == torch.int8 and zeros.numel() in (1, n * groups) and bool(((zeros >= -8) & (zeros < 8)).all()):
        return (
            (zeros + _MIDDLE[4]).to(torch.uint8).reshape(1, 1).expand(n, groups)
            if zeros.numel() == 1
            else ((zeros + _MIDDLE[4]).to(torch.uint8).reshape(n, groups))
        )
    raise FormatError(
        f"pack-quantized: weight_zero_point {zeros.dtype} {tuple(zeros.shape)} with scales of {(n, groups)}; expected "
        f"int32 {(-(-n // 8), groups)} of 4 bits, or int8 from -8 to 7 shaped like the scales"
    )


def cut_blocks(made: Repacked, block: int) -> Repacked:
    """Split blocks into smaller ones of `block`, a divisor, so that several parts can share a format.

    Raises FormatError for another block.
    """
    own = _block(made.format)
    if block == own:
        return made
    kind = next((kind for kind in _KINDS if made.format.startswith(kind)), None)
    if block not in LEVEL_BLOCKS or block > own or kind is None:
        raise FormatError(f"{made.format}: cut into blocks of {block}; expected one of {LEVEL_BLOCKS}, at most {own}")
    k = made.shape[1]
    columns = padded(k, block)
    fields = {
        name: field.repeat_interleave(own // block, dim=1)[:, : columns // block].contiguous()
        for name, field in made.coarse.items()
        if name not in _NOT_PER_BLOCK
    }
    format = levels_format(k, block, fields["scales"].dtype, kind=kind)
    codes = made.coarse["codes"][:, : columns * FORMATS[format].bits // 8].contiguous()
    return Repacked(format, made.shape, {**made.coarse, **fields, "codes": codes})


def join_rows(parts: Sequence[Repacked]) -> Repacked:
    """Concatenate the rows of weights of one K, such as an expert's gate and up projections.

    Blocks are split to the smallest. Raises FormatError if K, kind, levels or the scales' dtype differ.
    """
    block = min(_block(part.format) for part in parts)
    cut = [cut_blocks(part, block) for part in parts]
    first = cut[0].coarse
    whole = {name: field for name, field in first.items() if field.ndim == 1}
    alike = {(part.format, part.shape[1]) for part in cut}
    if len(alike) > 1 or not all(torch.equal(part.coarse[name], whole[name]) for part in cut for name in whole):
        found = ", ".join(f"{part.format} {part.shape}" for part in cut)
        raise FormatError(f"join: {found}; expected one K, one dtype of scales and the same sixteen levels")
    fields = {name: torch.cat([part.coarse[name] for part in cut]) for name in first if name not in whole}
    shape = (sum(part.shape[0] for part in cut), cut[0].shape[1])
    return Repacked(cut[0].format, shape, {**fields, **whole})


def column_order(g_idx: Tensor | None, k: int, group: int) -> Tensor | None:
    """Return the columns int64 [K] by their groups (group -1: one for all); None where they are in that order.

    Raises FormatError if `g_idx` [K] does not name a group for each, or groups of other sizes.
    """
    if g_idx is None:
        return None
    own = torch.arange(k, dtype=torch.int64, device=g_idx.device) // (k if group == -1 else max(1, group))
    given = g_idx.detach().long()
    if given.shape == own.shape and torch.equal(given, own):
        return None
    order = torch.argsort(given, stable=True)
    if given.shape != own.shape or not torch.equal(given[order], own):
        raise FormatError(
            f"g_idx {tuple(g_idx.shape)} with groups of other sizes than {group}; expected one of {k} columns with "
            "act-order (desc_act), or decode this weight to a dense one"
        )
    return order


def _in_order(codes: Tensor, order: Tensor | None, bits: int) -> Tensor:
    """Codes of a weight, bytes [N, .. of 4 or 8 bits], with the columns in this order."""
    if order is None:
        return codes
    if bits == 8:
        return codes.index_select(1, order)
    taken = unpack_codes(codes, 2 * codes.shape[1]).index_select(1, order)
    return pack_codes(taken)


def _ordered(made: Repacked, order: Tensor | None) -> Repacked:
    if order is None:
        return made
    return Repacked(ORDERED[made.format], made.shape, {**made.coarse, "order": order.int()})


def _grouped(
    source: str,
    shape: tuple[int, int],
    codes: Tensor,
    scale_NG: Tensor,
    group: int,
    more: Mapping[str, Tensor] | None = None,
) -> Repacked:
    """Build the plane of a 4-bit weight with per-row groups; codes uint8 [N, >= K/2].

    more: "zeros" or "offsets" [N, G]; None: all zero points are 8, and the plane is `symmetric`.
    """
    codes = codes[:, : (shape[1] + 1) // 2]
    kind = "symmetric" if more is None else "zeros" if "zeros" in more else "affine"
    return _grouped_plane(source, kind, shape, codes, {"scales": scale_NG, **(more or {})}, group)


def _grouped_bytes(
    source: str,
    shape: tuple[int, int],
    codes: Tensor,
    scale_NG: Tensor,
    group: int,
    more: Mapping[str, Tensor] | None = None,
) -> Repacked:
    """Build the plane of an 8-bit weight with per-row groups; codes uint8 [N, >= K].

    more: as in `_grouped`; None: all zero points are 128, and the plane is one of int8.
    """
    codes = codes[:, : shape[1]]
    if more is None:
        return _grouped_plane(
            source, "bytes", shape, (codes ^ 0x80).contiguous().view(torch.int8), {"scales": scale_NG}, group
        )
    kind = "zerobytes" if "zeros" in more else "offsetbytes"
    return _grouped_plane(source, kind, shape, codes, {"scales": scale_NG, **more}, group)


def _grouped_plane(
    source: str, kind: str, shape: tuple[int, int], codes: Tensor, terms: Mapping[str, Tensor], group: int
) -> Repacked:
    """Build the plane of a weight with per-row groups of `terms` [N, G], its scales among them; codes cover K columns,
    and are padded to whole blocks."""
    (n, k), scale_NG = shape, terms["scales"]
    width = k if group == -1 else group
    groups = -(-k // width) if width > 0 else -1
    if tuple(scale_NG.shape) != (n, groups):
        raise FormatError(
            f"{source}: scales of {tuple(scale_NG.shape)} rows and groups; expected {(n, groups)} of a weight {(n, k)} "
            f"in groups of {group}"
        )
    format = levels_format(k, group, scale_NG.dtype, kind=kind)
    block, bits = _block(format), FORMATS[format].bits
    blocks, columns = padded(k, block) // block, padded(k, block) * bits // 8
    each = blocks if groups == 1 else width // block
    if codes.shape[1] < columns:
        wide = torch.zeros(n, columns, dtype=torch.uint8, device=codes.device)
        wide += _MIDDLE[4] * 0x11 * (bits == 4)
        wide[:, : codes.shape[1]] = codes.view(torch.uint8)
        codes = wide.view(codes.dtype)
    fields = {name: term.repeat_interleave(each, dim=1)[:, :blocks].contiguous() for name, term in terms.items()}
    refuse_nonfinite_fields(format, {"codes": codes, **fields})
    return Repacked(format, shape, {"codes": codes.contiguous(), **fields})


def refuse_nonfinite_fields(format: str, fields: Mapping[str, Tensor]) -> None:
    """Raise a FormatError if numbers of a published plane are NaN or Inf."""
    for name, field in fields.items():
        if not field.is_floating_point():
            continue
        e4m3 = field.dtype == torch.float8_e4m3fn  # torch has no isfinite for it; it has NaN, and no Inf
        bad = (field.view(torch.uint8) & 0x7F) == 0x7F if e4m3 else ~torch.isfinite(field)
        if bad.any():
            raise FormatError(f"{format}: block {name} hold NaN or Inf; expected finite numbers")


def levels_plane(format: str, shape: tuple[int, int], codes: Tensor, scales: Tensor, levels: Tensor) -> Repacked:
    """Build a plane of codes, block scales and sixteen levels. Raises FormatError for non-finite numbers."""
    levels = levels.detach().float().reshape(-1).contiguous()
    if levels.numel() != 16 or not torch.isfinite(levels).all():
        raise FormatError(f"{format}: {levels.numel()} levels; expected 16 finite numbers")
    refuse_nonfinite_fields(format, {"scales": scales})
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
