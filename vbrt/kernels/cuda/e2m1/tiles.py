"""Tile order: E2M1 weights in the operand order of a warp's mma instruction: pure tensor transforms, any device.

A tile is 16 rows by 128 columns, which one warp multiplies with eight `m16n8k16` instructions. It has 256 words of
codes, then the tile's block scales, so that one contiguous read loads both (1152 bytes for nvfp4, 1088 for mxfp4). Lane
l = 4 g + t of the warp owns rows g and g + 8 and the 32 columns 32 t .. 32 t + 31: whole scale blocks. As the sum over
K may be in any order, instruction j of lane t takes columns 8 (p ^ (t // 2)) + 4 (j % 2) .. + 3 of those, with p = j //
2: the xor spreads a warp's reads of activations over the memory banks.

A word has the 8 codes of one lane and instruction, as four bf16 pairs without their low bits: bit 15 is the sign and
bits 8..6 the magnitude of E2M1, so that the pair read as bf16 is level * 2^-126. Rotations place the 4 * 8 bits:

    pair 0 = (w << 2) & M      pair 1 = (w << 6) & M      pair 2 = rotl(w, 12) & M      pair 3 = (w ^ (w >> 8)) & M

with M = 0x81C081C0: eight instructions for eight weights. No four shifts alone can do it (x^9 + x^2 + x + 1 does not
tile 16 bits), hence the xor in the last.

Legend: N rows, K columns, I row tiles, U column tiles, B scale blocks per row.
"""

import functools
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from vbrt.config import format_records
from vbrt.config.format_records import FormatRecord
from vbrt.errors import KernelError
from vbrt.formats import WeightPlanes
from vbrt.formats.block_formats import pack_codes, powers_of_two
from vbrt.formats.page import PageLayout, build_layout
from vbrt.kernels.cuda.e2m1.encode import launch_pack

__all__ = [
    "CODE_WORDS",
    "COLUMNS",
    "FORMATS",
    "ROWS",
    "TILES",
    "TOP_FIELD",
    "TileFormat",
    "TiledWeight",
    "decode_words",
    "fits",
    "is_tiled",
    "pack_tiles",
    "page_of",
    "parts_of",
    "relative_values",
    "tile_layout",
    "tile_shape",
    "tiled_weight",
    "unpack_tiles",
    "weight_of",
]

#: page field with tiles; another bit order would get another name
TILES = "mma_tiles_v1"
ROWS, COLUMNS = 16, 128
#: words of a tile's codes, before its block scales
CODE_WORDS = 256
_SIGN_AND_MAGNITUDE = {15: 3, 8: 2, 7: 1, 6: 0}  # bit of a bf16 half -> bit of the code
#: an E8M0 scale byte is stored relative to the largest one, which becomes 2^112: its product with a code's
#: level * 2^-126 then stays within bf16's range
TOP_FIELD = 239


class TileFormat(NamedTuple):
    """Properties of an E2M1 format that kernels depend on.

    block: columns per scale. words: int32 words per tile. e8m0_scales: True if block scales are powers of two (E8M0),
    stored relative to the largest; otherwise E4M3.
    """

    block: int
    words: int
    e8m0_scales: bool


def _tile_format(record: FormatRecord) -> TileFormat:
    scale_words = ROWS * COLUMNS // record.block // 4
    return TileFormat(record.block, CODE_WORDS + scale_words, e8m0_scales=record.scales == "e8m0")


FORMATS = {name: _tile_format(format_records.FORMATS[name]) for name in format_records.formats_of("e2m1")}


class TiledWeight(NamedTuple):
    """A weight (n, k) in tile order: tiles int32 [I, U, words] and the tensor scale, fp32 [1]."""

    tiles: Tensor
    scale: Tensor
    format: str
    n: int
    k: int

    @property
    def e8m0_scales(self) -> bool:
        """See `TileFormat`."""
        return FORMATS[self.format].e8m0_scales


def is_tiled(tensors: dict[str, Tensor]) -> bool:
    """True if a coarse plane is in tile order."""
    return TILES in tensors


def tile_shape(format: str, shape: tuple[int, int]) -> tuple[int, int, int]:
    """(I, U, words) of the tiles of a weight (N, K)."""
    n, k = shape
    return -(-n // ROWS), -(-k // COLUMNS), FORMATS[format].words


def tile_layout(format: str, shape: tuple[int, int]) -> PageLayout:
    """Page layout of a coarse plane in tile order."""
    fields = [(TILES, "int32", tile_shape(format, shape)), ("tensor_scale", "float32", (1,))]
    return build_layout(format, "coarse", fields)


@functools.cache
def relative_values(device: torch.device) -> Tensor:
    """Values of E8M0 scale bytes as stored in tiles, relative to the tensor scale: fp32 [256]."""
    exponents = torch.arange(256, dtype=torch.float64, device="cpu") - TOP_FIELD
    return (2.0**exponents).float().to(device)


def page_of(tiles: Tensor, scale: Tensor) -> Tensor:
    """View of int32 words from the first tile up to the scale behind them in a page: one tensor for both.

    It keeps the two as `_vb_parts`, for `tiled_weight`.
    """
    words = (scale.data_ptr() - tiles.data_ptr()) // 4 + 1
    page = tiles.as_strided((words,), (1,))
    page._vb_parts = tiles, scale
    return page


def tiled_weight(tiles: Tensor, scale: Tensor | None, format: str, n: int, k: int) -> TiledWeight:
    """The weight (n, k) from tiles and their scale or, without a scale, from a `page_of` both, or a copy of one."""
    if scale is None:
        tiles, scale = parts_of(tiles, format, (n, k))
    return TiledWeight(tiles, scale, format, n, k)


def weight_of(planes: WeightPlanes) -> TiledWeight:
    """The weight in planes in tile order."""
    n, k = planes.shape
    return TiledWeight(planes.coarse[TILES], planes.coarse["tensor_scale"], planes.format, n, k)


def parts_of(page: Tensor, format: str, shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Tiles and scale of a `page_of` both for a weight (N, K), or of a copy of one."""
    parts = getattr(page, "_vb_parts", None)
    if parts is None:
        tiles = tile_shape(format, shape)
        parts = page[: prod(tiles)].view(tiles), page[-1:].view(torch.float32)
    return parts


def fits(format: str, coarse: dict[str, Tensor]) -> bool:
    """True if `pack_tiles` is exact: always with E4M3 scales; with E8M0 ones if they span fewer than 127 octaves."""
    if format not in FORMATS:
        return False
    if not FORMATS[format].e8m0_scales:
        return True
    low, high = torch.aminmax(coarse["scales"])
    return int(high) - int(low) < 127 and int(high) < 255


def pack_tiles(format: str, coarse: dict[str, Tensor], shape: tuple[int, int]) -> dict[str, Tensor]:
    """Reorder a coarse plane of one of `FORMATS` into tiles: {TILES: int32 [I, U, words], "tensor_scale": fp32 [1]}.

    Raises KernelError for another format, or scales that do not fit (`fits`).
    """
    if not fits(format, coarse):
        raise KernelError(f"{format} weight {shape}: cannot be put in tile order; keep the plain coarse plane")
    rows, columns, words = tile_shape(format, shape)
    device = coarse["codes"].device
    tiles = torch.empty(rows, columns, words, dtype=torch.int32, device=device)
    top = coarse["scales"].amax().view(1) if FORMATS[format].e8m0_scales else None
    if device.type == "cuda":
        with torch.cuda.device(device):
            launch_pack(coarse["codes"], coarse["scales"].view(torch.uint8), tiles, top, TOP_FIELD)
    else:
        _fill_tiles(tiles, coarse["codes"], _stored_scales(coarse["scales"], top), COLUMNS // FORMATS[format].block)
    scale = coarse["tensor_scale"].to(torch.float32).reshape(1) if top is None else _power_of_two(top)
    return {TILES: tiles, "tensor_scale": scale}


def _fill_tiles(tiles: Tensor, codes: Tensor, scales: Tensor, per_tile: int) -> None:
    rows, columns, _ = tiles.shape
    step = max(1, (1 << 22) // (columns * COLUMNS * ROWS))  # bounds the int32 temporaries
    for first in range(0, rows, step):
        part = slice(first * ROWS, min((first + step) * ROWS, len(codes)))
        out = tiles[first : first + step]
        out[..., :CODE_WORDS] = _pack_codes(_padded(_nibbles(codes[part]), len(out), columns, COLUMNS))
        out[..., CODE_WORDS:] = _pack_scales(_padded(scales[part], len(out), columns, per_tile), per_tile)


def unpack_tiles(format: str, tensors: dict[str, Tensor], shape: tuple[int, int]) -> dict[str, Tensor]:
    """Exact inverse of `pack_tiles`: the coarse plane in the format's order."""
    n, k = shape
    block = FORMATS[format].block
    tiles = tensors[TILES]
    blocks = -(-k // block)
    code_NK = _unpack_codes(tiles[..., :CODE_WORDS])[:n, : blocks * block]
    byte_NB = _unpack_scales(tiles[..., CODE_WORDS:], COLUMNS // block)[:n, :blocks].contiguous()
    codes = pack_codes(code_NK)
    if not FORMATS[format].e8m0_scales:
        scale = tensors["tensor_scale"].clone()
        return {"codes": codes, "scales": byte_NB.view(torch.float8_e4m3fn), "tensor_scale": scale}
    top = int(torch.frexp(tensors["tensor_scale"].cpu().double()).exponent) - 1 + 127
    return {"codes": codes, "scales": (byte_NB.to(torch.int32) - TOP_FIELD + top).to(torch.uint8)}


def _stored_scales(scales: Tensor, top: Tensor | None) -> Tensor:
    """Scale bytes uint8 [N, B] as stored in tiles; top: the largest E8M0 byte [1]."""
    if top is None:
        return scales.view(torch.uint8)
    return (scales.to(torch.int32) - top.to(torch.int32) + TOP_FIELD).to(torch.uint8)


def _power_of_two(byte_1: Tensor) -> Tensor:
    """Value fp32 [1] of an E8M0 byte [1]."""
    return powers_of_two(byte_1.device).index_select(0, byte_1.to(torch.int32))


def _nibbles(codes: Tensor) -> Tensor:
    return torch.stack((codes & 15, codes >> 4), dim=-1).flatten(1)


def _padded(byte_NX: Tensor, rows: int, columns: int, per_tile: int) -> Tensor:
    """uint8 [rows * 16, columns * per_tile], zero-padded."""
    out = byte_NX.new_zeros(rows * ROWS, columns * per_tile)
    out[: byte_NX.shape[0], : byte_NX.shape[1]] = byte_NX
    return out


def _pack_codes(code_NK: Tensor) -> Tensor:
    """int32 [I, U, 256] from codes uint8 [16 I, 128 U]."""
    rows, columns = code_NK.shape[0] // ROWS, code_NK.shape[1] // COLUMNS
    # row = 16 i + 8 h + g, column = 128 u + 32 t + 8 q + 4 jj + 2 c + e
    byte = code_NK.view(rows, 2, 8, columns, 2, 2, 2, 2, 2, 2, 2)  # i h g u t1 t0 q1 q0 jj c e
    byte = torch.stack((byte[:, :, :, :, 0], byte[:, :, :, :, 1].flip(6)), dim=4)  # q0 becomes p0 = q0 ^ t1
    byte = byte.permute(0, 3, 6, 2, 4, 5, 7, 8, 9, 1, 10)  # i u p1 g t1 t0 p0 jj c h e
    pair = byte.reshape(rows, columns, CODE_WORDS, 4, 2).to(torch.int32)
    word = torch.zeros(rows, columns, CODE_WORDS, dtype=torch.int32, device=code_NK.device)
    bits: dict[int, Tensor] = {}
    for half in range(2):
        for place, bit in _SIGN_AND_MAGNITUDE.items():
            want = (pair[..., half] >> bit) & 1  # [..., pair]
            for index, shift in ((0, 2), (1, 6), (2, 12)):
                bits[(16 * half + place - shift) % 32] = want[..., index]
    last = {}
    for half in range(2):
        for place, bit in _SIGN_AND_MAGNITUDE.items():
            last[16 * half + place] = (pair[..., 3, half] >> bit) & 1
    # pair 3 is w ^ (w >> 8): from the top, where the shift yields zeros, each free bit follows from one above it
    bits[31], bits[24] = last[31], last[24]
    bits[23], bits[30] = last[23] ^ bits[31], last[22] ^ bits[22]
    bits[15], bits[8] = last[15] ^ bits[23], last[8] ^ bits[16]
    bits[7], bits[14] = last[7] ^ bits[15], last[6] ^ bits[6]
    for place, value in bits.items():
        word |= value << place
    return word


def decode_words(word: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The four masked pairs of int32 words, computed like in the kernels: bf16 bits of level * 2^-126, two per word."""
    mask = 0x81C081C0 - (1 << 32)  # as int32
    low = word.to(torch.int64) & 0xFFFFFFFF
    rotated = ((low << 12) | (low >> 20)) & 0xFFFFFFFF
    shifted = (low << 2, low << 6, rotated, low ^ (low >> 8))
    return tuple(((s & (mask & 0xFFFFFFFF)) + (1 << 31)) % (1 << 32) - (1 << 31) for s in shifted)


def _unpack_codes(words: Tensor) -> Tensor:
    """Codes uint8 [16 I, 128 U] from int32 [I, U, 256]."""
    rows, columns, _ = words.shape
    pair = torch.stack(decode_words(words), dim=-1)  # [..., 256, 4]
    half = torch.stack((pair, pair >> 16), dim=-1)
    code = (((half >> 12) & 8) | ((half >> 6) & 7)).to(torch.uint8)
    byte = code.view(rows, columns, 2, 8, 2, 2, 2, 2, 2, 2, 2)  # i u p1 g t1 t0 p0 jj c h e
    byte = byte.permute(0, 9, 3, 1, 4, 5, 2, 6, 7, 8, 10)  # i h g u t1 t0 p1 p0 jj c e
    byte = torch.stack((byte[:, :, :, :, 0], byte[:, :, :, :, 1].flip(6)), dim=4)
    return byte.reshape(rows * ROWS, columns * COLUMNS)


def _pack_scales(byte_NB: Tensor, per_tile: int) -> Tensor:
    """int32 words [I, U, 4 * per_tile]: bytes grouped by lane, row g before row g + 8."""
    rows, columns = byte_NB.shape[0] // ROWS, byte_NB.shape[1] // per_tile
    byte = byte_NB.view(rows, 2, 8, columns, 4, per_tile // 4).permute(0, 3, 2, 4, 1, 5)  # i u g t h b
    return byte.reshape(rows, columns, ROWS * per_tile).view(torch.int32)


def _unpack_scales(words: Tensor, per_tile: int) -> Tensor:
    """Scale bytes uint8 [16 I, per_tile * U]."""
    rows, columns, _ = words.shape
    byte = words.contiguous().view(torch.uint8).view(rows, columns, 8, 4, 2, per_tile // 4)  # i u g t h b
    return byte.permute(0, 4, 2, 1, 3, 5).reshape(rows * ROWS, columns * per_tile)
