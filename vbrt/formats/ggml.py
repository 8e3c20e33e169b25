"""GGUF blocks, repacked into coarse planes without decoding: pure tensor functions.

A tensor of these types is a sequence of equal blocks along K with scales, perhaps minima, and codes. `GGML_PLANES`
lists the types that have a format here; the others must be decoded by the reader. Codes of 5 and 6 bits take a byte
each. Layouts: ggml-common.h and ggml-quants.c of ggml, and `gguf.quants` of its package.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from vbrt.errors import FormatError
from vbrt.formats.published import Repacked, levels_plane, matrix_shape, refuse_nonfinite_fields, repack_mxfp4
from vbrt.formats.sixteen_levels import INT4_LEVELS, IQ4_NL_LEVELS

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


def _of_levels(levels: tuple[float, ...]) -> Callable[[Tensor, tuple[int, int]], Repacked]:
    """Q4_0 and IQ4_NL: an fp16 scale and 16 bytes of codes per 32 weights."""

    def repack(blocks: Tensor, shape: tuple[int, int]) -> Repacked:
        n = shape[0]
        codes, scales = _sequential(blocks[:, 2:]).reshape(n, -1), _half(blocks[:, :2]).view(n, -1)
        return levels_plane("levels32-float16", shape, codes, scales, _table(levels, blocks))

    return repack


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
    device = blocks.device
    shifts = torch.arange(8, dtype=torch.uint8, device=device).view(1, 8, 1)
    third = (blocks[:, None, :32] >> shifts & 1).flatten(1)
    pairs = blocks[:, 32:96].unflatten(1, (2, 1, 32)) >> 2 * shifts[:, :4].unsqueeze(1) & 3
    codes = (pairs.flatten(1) | third << 2) + 4  # -4 to 3 are codes 4 to 11 of int4
    packed = (codes[:, 0::2] | codes[:, 1::2] << 4).reshape(shape[0], -1)
    low = torch.cat((blocks[:, 96:104] & 15, blocks[:, 96:104] >> 4), dim=1)
    high = (blocks[:, None, 104:108] >> 2 * shifts[:, :4] & 3).flatten(1)
    scales = _half(blocks[:, 108:]).float() * ((low | high << 4).int() - 32)
    return levels_plane("levels16-float32", shape, packed, scales.view(shape[0], -1), _table(INT4_LEVELS, blocks))


def _mxfp4(blocks: Tensor, shape: tuple[int, int]) -> Repacked:
    """MXFP4, 32 weights: an E8M0 scale and 16 bytes of codes."""
    codes = _sequential(blocks[:, 1:]).view(shape[0], -1, 16)
    return Repacked("mxfp4", shape, repack_mxfp4(codes, blocks[:, 0].reshape(shape[0], -1)))


def _table(levels: tuple[float, ...], like: Tensor) -> Tensor:
    return torch.tensor(levels, dtype=torch.float32, device=like.device)


GGML_PLANES = {
    "Q4_0": GGMLPlane("levels32-float16", 32, 18, _of_levels(INT4_LEVELS)),
    "Q4_1": GGMLPlane("affine32-float16", 32, 20, _q4_1, since="0.2.0"),
    "Q4_K": GGMLPlane("superblock32", 256, 144, _q4_k, since="0.2.0"),
    "IQ4_NL": GGMLPlane("levels32-float16", 32, 18, _of_levels(IQ4_NL_LEVELS)),
    "IQ4_XS": GGMLPlane("levels32-float32", 256, 136, _iq4_xs),
    "Q3_K": GGMLPlane("levels16-float32", 256, 110, _q3_k),
    "MXFP4": GGMLPlane("mxfp4", 32, 17, _mxfp4),
    "Q8_0": GGMLPlane("bytes32-float16", 32, 34, _q8_0, since="0.2.0"),
    "Q6_K": GGMLPlane("superbytes16", 256, 210, _q6_k, since="0.2.0"),
    "Q5_0": GGMLPlane("bytes32-float16", 32, 22, _q5_0, since="0.2.0"),
    "Q5_1": GGMLPlane("offsetbytes32-float16", 32, 24, _q5_1, since="0.2.0"),
    "Q5_K": GGMLPlane("superbytes32", 256, 176, _q5_k, since="0.2.0"),
}
