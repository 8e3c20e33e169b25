"""GGUF blocks, repacked into coarse planes without decoding: pure tensor functions.

A tensor of these types is a sequence of equal blocks along K with scales, perhaps minima, and codes. `GGML_PLANES`
lists the types that have a format here; the others must be decoded by the reader. Codes of fewer than 4 bits take 4,
those of 5 and 6 a byte. The IQ types of up to 3 bits name points of a lattice, whose coordinates are a few magnitudes:
with their signs no more than 16 levels. Layouts: ggml-common.h and ggml-quants.c of ggml, and `gguf.quants` of its
package, which has the lattices.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from vbrt.errors import FormatError
from vbrt.formats.block_formats import pack_codes
from vbrt.formats.published import (
    Repacked,
    levels_plane,
    matrix_shape,
    refuse_nonfinite_fields,
    repack_mxfp4,
    repack_nvfp4,
)
from vbrt.formats.sixteen_levels import IQ4_NL_LEVELS
from vbrt.libraries.gguf_api import lattice

__all__ = ["GGML_PLANES", "GGMLPlane", "repack_gguf"]


@dataclass(frozen=True, slots=True)
class GGMLPlane:
    """Repacking of one block type into a plane.

    Attributes:
        format: of the plane.
        weights: per block.
        nbytes: per block.
        repack: converts all blocks [B, nbytes] of a weight of shape (N, K) into a plane.
        since: version of vbrt that holds it as it is.
    """

    format: str
    weights: int
    nbytes: int
    repack: Callable[[Tensor, tuple[int, int]], Repacked]
    since: str = "0.1.0"


def repack_gguf(blocks: Tensor, shape: tuple[int, int], type: str) -> Repacked:
    """Repack a GGUF tensor of one of the types of `GGML_PLANES`, such as "Q4_0", into a plane.

    blocks: the tensor's bytes, uint8 in any shape; shape (N, K), GGUF's dimensions reversed. Decoded, it equals
    `gguf.dequantize` bit for bit, rounded once to the weight's dtype.

    Raises FormatError for another type, a number of bytes that does not match the shape, or non-finite scales.
    """
    if type not in GGML_PLANES:
        raise FormatError(f"gguf: type {type!r}; expected one of {', '.join(GGML_PLANES)}")
    plane, (n, k) = GGML_PLANES[type], matrix_shape("gguf", shape)
    wanted = n * k // plane.weights * plane.nbytes
    if blocks.dtype != torch.uint8 or k % plane.weights or blocks.numel() != wanted:
        raise FormatError(
            f"gguf: {blocks.numel()} of {blocks.dtype} for a weight {(n, k)} of type {type}; expected {plane.nbytes} "
            f"bytes for each {plane.weights} weights of a row"
        )
    return plane.repack(blocks.detach().reshape(-1, plane.nbytes), (n, k))


def _sequential(packed: Tensor) -> Tensor:
    """Reorder bytes [.., h] of 2h codes to sequential: low nibbles held the first h codes, high ones the rest."""
    half = packed.shape[-1] // 2
    pairs = packed.clone(memory_format=torch.contiguous_format).view(torch.int16)  # two adjacent codes of either half
    out = torch.empty(packed.shape, dtype=torch.uint8, device=packed.device)
    out[..., :half] = pairs & 0x0F | pairs >> 4 & 0xF0
    out[..., half:] = pairs >> 4 & 0x0F | pairs >> 8 & 0xF0
    return out


def _half(two_bytes: Tensor) -> Tensor:
    return two_bytes.contiguous().view(torch.float16)


def _q4_0(blocks: Tensor, shape: tuple[int, int]) -> Repacked:
    """Q4_0, 32 weights: an fp16 scale, 16 bytes of codes. weight = scale * (code - 8)."""
    n = shape[0]
    codes, scales = _sequential(blocks[:, 2:]).reshape(n, -1), _half(blocks[:, :2]).view(n, -1)
    return _plane("symmetric32-float16", shape, {"codes": codes, "scales": scales})


def _iq4_nl(blocks: Tensor, shape: tuple[int, int]) -> Repacked:
    """IQ4_NL, as Q4_0 with levels from a table."""
    plane = _q4_0(blocks, shape).coarse
    return levels_plane("levels32-float16", shape, **plane, levels=_table(IQ4_NL_LEVELS, blocks))


def _q4_1(blocks: Tensor, shape: tuple[int, int]) -> Repacked:
    """Q4_1, 32 weights: an fp16 scale, an fp16 minimum, 16 bytes of codes. weight = scale * code + minimum."""
    n = shape[0]
    scales, offsets = (_half(blocks[:, at : at + 2]).view(n, -1) for at in (0, 2))
    fields = {"codes": _sequential(blocks[:, 4:]).reshape(n, -1), "scales": scales, "offsets": offsets}
    return _plane("affine32-float16", shape, fields)


def _q4_k(blocks: Tensor, shape: tuple[int, int]) -> Repacked:
    """Q4_K, 256 weights: fp16 d and dmin, 8 scales and 8 minima of 6 bits, 128 bytes of codes.

    The 6-bit numbers, 12 bytes: bytes 0-3 have the first four scales, 4-7 the first four minima, each below two high
    bits of the last four; 8-11 the low four bits of the last four scales and, above them, of the last four minima.
    """
    codes = _sequential(blocks[:, 16:].unflatten(1, (4, 32)))
    return _plane("superblock32", shape, {"codes": codes.reshape(shape[0], -1), **_six_bits(blocks, shape[0])})


def _six_bits(blocks: Tensor, n: int) -> dict[str, Tensor]:
    """d, dmin, scales and minima of Q4_K's and Q5_K's first 16 bytes."""
    first_scales, first_mins, low = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat((first_scales & 63, low & 15 | first_scales >> 2 & 0x30), dim=1)
    mins = torch.cat((first_mins & 63, low >> 4 | first_mins >> 2 & 0x30), dim=1)
    d, dmin = (_half(blocks[:, at : at + 2]).view(n, -1) for at in (0, 2))
    return {"scales": scales.view(n, -1), "mins": mins.view(n, -1), "d": d, "dmin": dmin}


def _plane(format: str, shape: tuple[int, int], fields: dict[str, Tensor]) -> Repacked:
    refuse_nonfinite_fields(format, fields)
    return Repacked(format, shape, fields)


def _fields_of_bits(packed: Tensor, group: int, bits: int) -> Tensor:
    """Numbers [B, ...] of `bits` of bytes [B, h]: the first `group` are the lowest bits of as many bytes, and so on."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device=packed.device).view(1, 1, -1, 1)
    return (packed.unflatten(1, (-1, 1, group)) >> shifts & (1 << bits) - 1).flatten(1)


def _fifth_bits(four_bytes: Tensor) -> Tensor:
    """Bits [B, 32] of bytes [B, 4], each 16 in its place above a nibble."""
    shifts = torch.arange(8, dtype=torch.uint8, device=four_bytes.device)
    return (four_bytes.unsqueeze(-1) >> shifts & 1).flatten(1) << 4


def _q8_0(blocks: Tensor, shape: tuple[int, int]) -> Repacked:
    """Q8_0, 32 weights: an fp16 scale and 32 bytes of codes."""
    n = shape[0]
    codes = blocks[:, 2:].contiguous().view(torch.int8).view(n, -1)
    return _plane("bytes32-float16", shape, {"codes": codes, "scales": _half(blocks[:, :2]).view(n, -1)})


def _q5_0(blocks: Tensor, shape: tuple[int, int]) -> Repacked:
    """Q5_0, 32 weights: an fp16 scale, the codes' fifth bits (4 bytes), 16 bytes of nibbles; codes less 16."""
    n = shape[0]
    codes = (_fields_of_bits(blocks[:, 6:], 16, 4) | _fifth_bits(blocks[:, 2:6])).view(torch.int8) - 16
    return _plane("bytes32-float16", shape, {"codes": codes.view(n, -1), "scales": _half(blocks[:, :2]).view(n, -1)})


def _q5_1(blocks: Tensor, shape: tuple[int, int]) -> Repacked:
    """Q5_1, 32 weights: an fp16 scale, an fp16 minimum, the codes' fifth bits, 16 bytes of nibbles."""
    n = shape[0]
    codes = _fields_of_bits(blocks[:, 8:], 16, 4) | _fifth_bits(blocks[:, 4:8])
    scales, offsets = (_half(blocks[:, at : at + 2]).view(n, -1) for at in (0, 2))
    return _plane("offsetbytes32-float16", shape, {"codes": codes.view(n, -1), "scales": scales, "offsets": offsets})


def _q5_k(blocks: Tensor, shape: tuple[int, int]) -> Repacked:
    """Q5_K, 256 weights: as Q4_K, the codes' fifth bits (32 bytes) before the nibbles."""
    codes = _fields_of_bits(blocks[:, 48:], 32, 4) | _fields_of_bits(blocks[:, 16:48], 32, 1) << 4
    return _plane("superbytes32", shape, {"codes": codes.view(shape[0], -1), **_six_bits(blocks, shape[0])})


def _q6_k(blocks: Tensor, shape: tuple[int, int]) -> Repacked:
    """Q6_K, 256 weights: the codes' low nibbles (128 bytes), high two bits (64), 16 int8 scales, an fp16 d; codes less
    32. The sign of a scale goes to its codes."""
    n = shape[0]
    codes = _fields_of_bits(blocks[:, :128], 64, 4) | _fields_of_bits(blocks[:, 128:192], 32, 2) << 4
    codes = (codes.view(torch.int8) - 32).unflatten(1, (16, 16))
    scales = blocks[:, 192:208].contiguous().view(torch.int8)
    fields = {
        "codes": torch.where(scales.unsqueeze(-1) < 0, -codes, codes).view(n, -1),
        "scales": scales.to(torch.int16).abs().to(torch.uint8).view(n, -1),
        "d": _half(blocks[:, 208:]).view(n, -1),
    }
    return _plane("superbytes16", shape, fields)


def _iq4_xs(blocks: Tensor, shape: tuple[int, int]) -> Repacked:
    """IQ4_XS, 256 weights: an fp16 scale d; 6-bit scales minus 32 per 32 weights, as high bits (2 bytes) and low bits
    (4); codes. d times such a scale has 17 bits, so it is exact in fp32."""
    n = shape[0]
    high = blocks[:, 2:4].contiguous().view(torch.int16).int()
    high = high >> torch.arange(0, 16, 2, dtype=torch.int32, device=blocks.device) & 3
    low = torch.stack((blocks[:, 4:8] & 15, blocks[:, 4:8] >> 4), dim=-1).flatten(1)
    scales = _half(blocks[:, :2]).float() * ((low | high << 4) - 32)
    codes = _sequential(blocks[:, 8:].unflatten(1, (8, 16))).reshape(n, -1)
    return levels_plane("levels32-float32", shape, codes, scales.view(n, -1), _table(IQ4_NL_LEVELS, blocks))


def _q3_k(blocks: Tensor, shape: tuple[int, int]) -> Repacked:
    """Q3_K, 256 weights: the high bits of all codes (32 bytes), the low two (64), 6-bit scales minus 32 per 16 weights
    (12), an fp16 scale d. weight = d * scale * (code - 4); int4 has the levels -4 to 3."""
    codes = _fields_of_bits(blocks[:, 32:96], 32, 2) | _fields_of_bits(blocks[:, :32], 32, 1) << 2
    packed = _nibbles(codes + 4, shape[0])  # -4 to 3 are codes 4 to 11 of int4
    low, high = _fields_of_bits(blocks[:, 96:104], 8, 4), _fields_of_bits(blocks[:, 104:108], 4, 2)
    scales = _half(blocks[:, 108:]).float() * ((low | high << 4).int() - 32)
    return _plane("symmetric16-float32", shape, {"codes": packed, "scales": scales.view(shape[0], -1)})


def _q2_k(blocks: Tensor, shape: tuple[int, int]) -> Repacked:
    """Q2_K, 256 weights: 16 scales and, above them, minima of 4 bits, 64 bytes of codes, fp16 d and dmin. weight =
    d * scale * code - dmin * minimum; both products have 15 bits, so that they are exact in fp32."""
    n = shape[0]
    d, dmin = (_half(blocks[:, at : at + 2]).float() for at in (80, 82))
    fields = {
        "codes": _nibbles(_fields_of_bits(blocks[:, 16:80], 32, 2), n),
        "scales": (d * (blocks[:, :16] & 15)).view(n, -1),
        "offsets": (-(dmin * (blocks[:, :16] >> 4))).view(n, -1),
    }
    return _plane("affine16-float32", shape, fields)


def _tq1_0(blocks: Tensor, shape: tuple[int, int]) -> Repacked:
    """TQ1_0, 256 weights: digits of base 3, five to a byte (32 bytes, 16 bytes) or four (4 bytes), the first one in
    byte * 3 >> 8; an fp16 scale."""
    parts = zip(blocks[:, :52].split((32, 16, 4), dim=1), (5, 5, 4), strict=True)
    digits = torch.cat([(part * 3**turn).to(torch.int16) * 3 >> 8 for part, n in parts for turn in range(n)], dim=1)
    return _ternary(digits.to(torch.uint8), blocks[:, 52:], shape)


def _tq2_0(blocks: Tensor, shape: tuple[int, int]) -> Repacked:
    """TQ2_0, 256 weights: 64 bytes of codes, an fp16 scale."""
    return _ternary(_fields_of_bits(blocks[:, :64], 32, 2), blocks[:, 64:], shape)


def _ternary(codes: Tensor, scales: Tensor, shape: tuple[int, int]) -> Repacked:
    """weight = scale * (code - 1)."""
    halves = _half(scales).expand(-1, 2).reshape(shape[0], -1)  # two blocks of 128
    table = _table((-1.0, 0.0, 1.0, 2.0, *[0.0] * 12), codes)
    return levels_plane("levels128-float16", shape, _nibbles(codes, shape[0]), halves, table)


def _iq2_xxs(blocks: Tensor, shape: tuple[int, int]) -> Repacked:
    """IQ2_XXS, 256 weights: an fp16 d; per 32, four bytes that name points of 8, four groups of 7 signs and a 4-bit
    scale (4 bytes). weight = d * (scale + 1/2) / 4 * point."""
    named, words = blocks[:, 2:].unflatten(1, (8, 2, 4)).unbind(2)
    return _signed("IQ2_XXS", named.flatten(1), *_signs_and_scales(words), _half(blocks[:, :2]).float() / 4, shape)


def _iq2_xs(blocks: Tensor, shape: tuple[int, int]) -> Repacked:
    """IQ2_XS, 256 weights: an fp16 d; 32 numbers of 16 bits: 9 name a point of 8, 7 its signs; a 4-bit scale per 16."""
    words = _words(blocks[:, 2:66])
    scales = _fields_of_bits(blocks[:, 66:], 1, 4).float() + 0.5
    return _signed("IQ2_XS", words & 511, _even(words >> 9), scales, _half(blocks[:, :2]).float() / 4, shape)


def _iq2_s(blocks: Tensor, shape: tuple[int, int]) -> Repacked:
    """IQ2_S, 256 weights: an fp16 d; 32 bytes and, with their high two bits, 8 bytes that name points of 8; 32 bytes of
    signs between them; a 4-bit scale per 16."""
    named = blocks[:, 2:34].int() | _fields_of_bits(blocks[:, 66:74], 1, 2).int() << 8
    scales = _fields_of_bits(blocks[:, 74:], 1, 4).float() + 0.5
    return _signed("IQ2_S", named, blocks[:, 34:66], scales, _half(blocks[:, :2]).float() / 4, shape)


def _iq3_xxs(blocks: Tensor, shape: tuple[int, int]) -> Repacked:
    """IQ3_XXS, 256 weights: an fp16 d; 64 bytes that name points of 4; signs and scales as in IQ2_XXS.
    weight = d * (scale + 1/2) / 2 * point."""
    d, words = _half(blocks[:, :2]).float() / 2, blocks[:, 66:].unflatten(1, (8, 4))
    return _signed("IQ3_XXS", blocks[:, 2:66], *_signs_and_scales(words), d, shape)


def _iq3_s(blocks: Tensor, shape: tuple[int, int]) -> Repacked:
    """IQ3_S, 256 weights: an fp16 d; 64 bytes and, with their ninth bits, 8 bytes that name points of 4; 32 bytes of
    signs; a 4-bit scale per 32. weight = d * (2 * scale + 1) * point."""
    named = blocks[:, 2:66].int() | _fields_of_bits(blocks[:, 66:74], 1, 1).int() << 8
    scales = _fields_of_bits(blocks[:, 106:], 1, 4).float() * 2 + 1
    return _signed("IQ3_S", named, blocks[:, 74:106], scales, _half(blocks[:, :2]).float(), shape)


def _iq1_s(blocks: Tensor, shape: tuple[int, int]) -> Repacked:
    """IQ1_S, 256 weights: an fp16 d; 32 bytes that name points of 8; per 32, three more bits of each name, a 3-bit
    scale and the sign of a shift by 1/8 (2 bytes). weight = d * (2 * scale + 1) * (point +- 1/8)."""
    words = _words(blocks[:, 34:])
    named = blocks[:, 2:34].int() | _four_of(words, 3) << 8
    scales, below = (words >> 12 & 7).float() * 2 + 1, words >> 15 & 1
    return _shifted(named, below.repeat_interleave(4, dim=1), scales, _half(blocks[:, :2]).float(), shape)


def _iq1_m(blocks: Tensor, shape: tuple[int, int]) -> Repacked:
    """IQ1_M, 256 weights: 32 bytes that name points of 8; a nibble for each (16 bytes): three more bits of the name and
    the sign of its shift; four 3-bit scales per 64, below a quarter of the fp16 d (8 bytes)."""
    more, words = _fields_of_bits(blocks[:, 32:48], 1, 4).int(), _words(blocks[:, 48:])
    quarters = words >> torch.tensor((12, 8, 4, 0), dtype=torch.int32, device=blocks.device)
    d = (quarters & torch.tensor((0xF, 0xF0, 0xF00, 0xF000), dtype=torch.int32, device=blocks.device)).sum(1)
    scales = _four_of(words, 3).float() * 2 + 1
    named = blocks[:, :32].int() | (more & 7) << 8
    return _shifted(named, more >> 3, scales, d.to(torch.int16).view(torch.float16).float().unsqueeze(1), shape)


def _words(packed: Tensor) -> Tensor:
    """Numbers [B, h / 2] int32 of 16 bits, low byte first."""
    return packed[:, 0::2].int() | packed[:, 1::2].int() << 8


def _four_of(words: Tensor, bits: int) -> Tensor:
    """The lowest four numbers [B, 4 W] of so many bits of each of the words int32 [B, W]."""
    shifts = torch.arange(0, 4 * bits, bits, dtype=torch.int32, device=words.device)
    return (words.unsqueeze(-1) >> shifts & (1 << bits) - 1).flatten(1)


def _even(seven_bits: Tensor) -> Tensor:
    """Bytes of signs of which the last one makes their number even."""
    parity = seven_bits
    for shift in (4, 2, 1):
        parity = parity ^ parity >> shift
    return (seven_bits | (parity & 1) << 7).to(torch.uint8)


def _signs_and_scales(words: Tensor) -> tuple[Tensor, Tensor]:
    """Bytes of signs [B, 32] and scales plus 1/2 [B, 8] of words [B, 8, 4]: four groups of 7 bits below a scale."""
    bytes_of = words.int()
    word = bytes_of[..., 0] | bytes_of[..., 1] << 8 | bytes_of[..., 2] << 16 | bytes_of[..., 3] << 24
    return _even(_four_of(word, 7)), (words[..., 3] >> 4).float() + 0.5


def _signed(type: str, named: Tensor, signs: Tensor, scales: Tensor, d: Tensor, shape: tuple[int, int]) -> Repacked:
    """weight = d * scale * point, with a bit of `signs` [B, 32] for each coordinate. named [B, points], scales [B, ..],
    d [B, 1]: their product has at most 17 bits."""
    points, levels = lattice(type)
    magnitudes = points.to(named.device)[named.long()].flatten(1)
    codes = magnitudes | _fields_of_bits(signs, 1, 1) << 3
    table = (*levels, *[0.0] * (8 - len(levels)))
    return _of_lattice(codes, (*table, *(-level for level in table)), d * scales, shape)


def _shifted(named: Tensor, below: Tensor, scales: Tensor, d: Tensor, shape: tuple[int, int]) -> Repacked:
    """weight = d * scale * (point + 1/8), or - 1/8 where `below` [B, points] is 1."""
    points, levels = lattice("IQ1_S")
    codes = points.to(named.device)[named.long()] | below.to(torch.uint8).unsqueeze(-1) << 3
    table = [*(level + 0.125 for level in levels), *[0.0] * 5, *(level - 0.125 for level in levels), *[0.0] * 5]
    return _of_lattice(codes.flatten(1), tuple(table), d * scales, shape)


def _of_lattice(codes: Tensor, levels: tuple[float, ...], scales: Tensor, shape: tuple[int, int]) -> Repacked:
    n, block = shape[0], 256 // scales.shape[1]
    table = _table(levels, codes)
    return levels_plane(f"levels{block}-float32", shape, _nibbles(codes, n), scales.reshape(n, -1), table)


def _nibbles(codes: Tensor, n: int) -> Tensor:
    """Codes of 4 bits, two a byte, in n rows."""
    return pack_codes(codes).reshape(n, -1)


def _nvfp4(blocks: Tensor, shape: tuple[int, int]) -> Repacked:
    """NVFP4, 64 weights: four E4M3 scales without signs, of which 0x7F is 0, and 32 bytes of codes."""
    scales, codes = blocks[:, :4] & 0x7F, _sequential(blocks[:, 4:].unflatten(1, (4, 8)))
    scales = torch.where(scales == 0x7F, 0, scales).reshape(shape[0], -1)
    return Repacked("nvfp4", shape, repack_nvfp4(codes.reshape(shape[0], -1), scales, 1.0, divide=False))


def _mxfp4(blocks: Tensor, shape: tuple[int, int]) -> Repacked:
    """MXFP4, 32 weights: an E8M0 scale and 16 bytes of codes."""
    codes = _sequential(blocks[:, 1:]).view(shape[0], -1, 16)
    return Repacked("mxfp4", shape, repack_mxfp4(codes, blocks[:, 0].reshape(shape[0], -1)))


def _table(levels: tuple[float, ...], like: Tensor) -> Tensor:
    return torch.tensor(levels, dtype=torch.float32, device=like.device)


GGML_PLANES = {
    "Q4_0": GGMLPlane("symmetric32-float16", 32, 18, _q4_0),
    "Q4_1": GGMLPlane("affine32-float16", 32, 20, _q4_1, since="0.2.0"),
    "Q4_K": GGMLPlane("superblock32", 256, 144, _q4_k, since="0.2.0"),
    "IQ4_NL": GGMLPlane("levels32-float16", 32, 18, _iq4_nl),
    "IQ4_XS": GGMLPlane("levels32-float32", 256, 136, _iq4_xs),
    "Q3_K": GGMLPlane("symmetric16-float32", 256, 110, _q3_k),
    "MXFP4": GGMLPlane("mxfp4", 32, 17, _mxfp4),
    "Q8_0": GGMLPlane("bytes32-float16", 32, 34, _q8_0, since="0.2.0"),
    "Q6_K": GGMLPlane("superbytes16", 256, 210, _q6_k, since="0.2.0"),
    "Q5_0": GGMLPlane("bytes32-float16", 32, 22, _q5_0, since="0.2.0"),
    "Q5_1": GGMLPlane("offsetbytes32-float16", 32, 24, _q5_1, since="0.2.0"),
    "Q5_K": GGMLPlane("superbytes32", 256, 176, _q5_k, since="0.2.0"),
    "Q2_K": GGMLPlane("affine16-float32", 256, 84, _q2_k, since="0.2.0"),
    "IQ2_XXS": GGMLPlane("levels32-float32", 256, 66, _iq2_xxs, since="0.2.0"),
    "IQ2_XS": GGMLPlane("levels16-float32", 256, 74, _iq2_xs, since="0.2.0"),
    "IQ2_S": GGMLPlane("levels16-float32", 256, 82, _iq2_s, since="0.2.0"),
    "IQ3_XXS": GGMLPlane("levels32-float32", 256, 98, _iq3_xxs, since="0.2.0"),
    "IQ3_S": GGMLPlane("levels32-float32", 256, 110, _iq3_s, since="0.2.0"),
    "IQ1_S": GGMLPlane("levels32-float32", 256, 50, _iq1_s, since="0.2.0"),
    "IQ1_M": GGMLPlane("levels16-float32", 256, 56, _iq1_m, since="0.2.0"),
    "TQ1_0": GGMLPlane("levels128-float16", 256, 54, _tq1_0, since="0.2.0"),
    "TQ2_0": GGMLPlane("levels128-float16", 256, 66, _tq2_0, since="0.2.0"),
    "NVFP4": GGMLPlane("nvfp4", 64, 36, _nvfp4, since="0.2.0"),
}
