"""GGUF blocks, repacked into coarse planes without decoding: pure tensor functions.

A tensor of these types is a sequence of equal blocks along K with scales, perhaps minima, and codes. `GGML_PLANES`
lists the types of up to 4-bit codes that have a format here; the others must be decoded by the reader. Layouts:
ggml-common.h and ggml-quants.c of ggml, and `gguf.quants` of its package.
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
    """

    format: str
    weights: int
    nbytes: int
    repack: Callable[[Tensor, tuple[int, int]], Repacked]


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
    refuse_nonfinite_fields("affine32-float16", fields)
    return Repacked("affine32-float16", shape, fields)


def _q4_k(blocks: Tensor, shape: tuple[int, int]) -> Repacked:
    """Q4_K, 256 weights: fp16 d and dmin, 8 scales and 8 minima of 6 bits, 128 bytes of codes.

    The 6-bit numbers, 12 bytes: bytes 0-3 have the first four scales, 4-7 the first four minima, each below two high
    bits of the last four; 8-11 the low four bits of the last four scales and, above them, of the last four minima.
    """
    n = shape[0]
    d, dmin = (_half(blocks[:, at : at + 2]).view(n, -1) for at in (0, 2))
    first_scales, first_mins, low = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    scales = torch.cat((first_scales & 63, low & 15 | first_scales >> 2 & 0x30), dim=1)
    mins = torch.cat((first_mins & 63, low >> 4 | first_mins >> 2 & 0x30), dim=1)
    codes = _sequential(blocks[:, 16:].unflatten(1, (4, 32)))
    fields = {
        "codes": codes.reshape(n, -1),
        "scales": scales.view(n, -1),
        "mins": mins.view(n, -1),
        "d": d,
        "dmin": dmin,
    }
    refuse_nonfinite_fields("superblock32", fields)
    return Repacked("superblock32", shape, fields)


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
    "Q4_1": GGMLPlane("affine32-float16", 32, 20, _q4_1),
    "Q4_K": GGMLPlane("superblock32", 256, 144, _q4_k),
    "IQ4_NL": GGMLPlane("levels32-float16", 32, 18, _of_levels(IQ4_NL_LEVELS)),
    "IQ4_XS": GGMLPlane("levels32-float32", 256, 136, _iq4_xs),
    "Q3_K": GGMLPlane("levels16-float32", 256, 110, _q3_k),
    "MXFP4": GGMLPlane("mxfp4", 32, 17, _mxfp4),
}
