"""Block formats, common part: the tile loop of encode, the search for block scales, nibble packing, table decode.

A weight is split into blocks of b along K. A block has b codes of 4 bits (or 8: `mxint8`) and one scale byte:

    weight = level[code] * (scale * tensor_scale)        both products rounded to fp32, the result to the dtype

Encoding works on tiles that fit in cache, transposed to [b, B] so that reductions over a block and products with its
scale are vectorized across blocks. Two codes share a byte, the even column in the low nibble.
"""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from math import frexp
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vbrt.formats.format import EncodedGroup, Format, check_weight, check_weights, padded, tiles
from vbrt.formats.page import PageLayout, build_layout
from vbrt.formats.rounding import Grid, Rounding, divided, least_error, of_tile

__all__ = [
    "BlockFormat",
    "E4M3Format",
    "Frame",
    "Range",
    "decode_blocks",
    "near_ue4m4",
    "power_of_two_scale",
    "quad_table",
    "ue4m4_values",
    "unpack_codes",
    "whole_blocks",
]

E4M3_MAX = 448.0
_OUTGROWN = 7 / 6  # times the largest level: where E2M1's cell ends, and slightly less than what searches clip


class Range(NamedTuple):
    """Range of a weight, known before its first tile: `limit`, the largest finite magnitude of its dtype, which decoded
    weights may not exceed, and `unit`, the power of two that tiles are divided by (exactly)."""

    limit: float
    unit: float


Step = Callable[["BlockFormat", Tensor, Range, Tensor | None], dict[str, Tensor]]
"""Encoder of a weight (N, K) of a known range; optional squares (G, K) apply to N / G rows each."""


class BlockFormat(Format):
    """4-bit codes by default, with one scale byte per block of `block` columns. Subclasses define levels and scales."""

    scale_dtype: str
    #: further fields: (name, dtype, shape)
    extra: tuple[tuple[str, str, tuple[int, ...]], ...] = ()
    #: codes whose cell includes zero, so that weights may be many octaves below the level
    wide_codes: tuple[int, ...]
    #: mantissas that scales have: scale byte % this number tells which; 1: powers of two
    scale_mantissas = 1
    #: the largest level, and the level of a block's largest weight under the largest scale searched
    top: float
    low_top: float
    #: byte of the largest scale
    last_byte: int
    #: candidate scale bytes, relative to the one nearest to absmax / top
    offsets: range

    def layout(self, shape: tuple[int, int], dtype: torch.dtype) -> PageLayout:
        """codes [N, Kp/2] (or [N, Kp] of 8 bits), scales [N, Kp/block], then the format's own fields."""
        n, kp = shape[0], padded(shape[1], self.block)
        codes = ("codes", self.code_dtype, (n, kp * self.record.bits // 8))
        fields = [codes, ("scales", self.scale_dtype, (n, kp // self.block)), *self.extra]
        return build_layout(self.name, "coarse", fields)

    def pack_codes(self, code_bB: Tensor) -> Tensor:
        """Pack fp32 codes [b, B] as in the page: [B, b/2], or [B, b] of 8 bits."""
        return pack_nibbles(code_bB)

    @torch.no_grad()
    def encode(self, w_NK: Tensor, squares: Tensor | None = None) -> dict[str, Tensor]:
        """See `Format.encode`. Extra memory on a CPU: a few MiB for any weight size."""
        return self._encode(w_NK, self._range(w_NK), None if squares is None else squares[None])

    def _range(self, w_NK: Tensor) -> Range:
        return self._range_of(check_weight(w_NK, self.name), w_NK.dtype)

    def _range_of(self, amax: float, dtype: torch.dtype) -> Range:
        return Range(torch.finfo(dtype).max, power_of_two_scale(amax / self.low_top))

    @torch.no_grad()
    def encode_many(
        self,
        w_ENK: Tensor,
        amax_E: Sequence[float] | None = None,
        squares: Tensor | None = None,
        step: Step | None = None,
    ) -> Iterator[EncodedGroup]:
        """See `Format.encode_many`. Blocks depend on the rest only through the matrix's range, so matrices of equal
        range are encoded as one. Synchronizes with the device once.

        Args:
            amax_E: see `Format.encode_many`.
            step: replaces this class's encoder for a weight (N, K) of known range, with the same bits.
        """
        if self.record.fitted:  # each matrix has its own levels
            yield from super().encode_many(w_ENK, squares=squares)
            return
        step = step or type(self)._encode
        amax_E = check_weights(w_ENK, self.name) if amax_E is None else amax_E
        ranges = [self._range_of(amax, w_ENK.dtype) for amax in amax_E]
        for known in dict.fromkeys(ranges):
            members = [at for at, own in enumerate(ranges) if own == known]
            every = len(members) == len(ranges)
            chosen = w_ENK if every else w_ENK[members]
            theirs = squares if every or squares is None else squares[members]
            yield EncodedGroup(members, step(self, chosen.reshape(-1, w_ENK.shape[-1]), known, theirs))

    @torch.no_grad()
    def frame(self, w_NK: Tensor, **extra: Tensor) -> "Frame":
        """Return the scales that `encode` would choose; raises like `encode`."""
        return Frame(self, self._encode(w_NK, self._range(w_NK), coded=False, **extra))

    def _encode(
        self, w_NK: Tensor, known: Range, squares: Tensor | None = None, *, coded: bool = True, **extra: Tensor
    ) -> dict[str, Tensor]:
        n, k = w_NK.shape
        kp, block, per_byte = padded(k, self.block), self.block, 8 // self.record.bits
        shape, dtype = (n, kp // per_byte if coded else 0), getattr(torch, self.code_dtype)
        codes = torch.empty(shape, dtype=dtype, device=w_NK.device)
        scales = torch.empty(n, kp // block, dtype=torch.uint8, device=w_NK.device)

        def encode(tile: tuple[slice, slice]) -> None:
            rows, columns = tile
            x_RK = whole_blocks(w_NK[rows, columns].float(), block)
            x_bB = torch.empty(block, x_RK.numel() // block, dtype=torch.float32, device=x_RK.device)
            torch.mul(x_RK.reshape(-1, block).t(), 1 / known.unit, out=x_bB)
            m_bB = None if squares is None else of_tile(squares, rows, columns, n, block)
            rounding, scale_B, byte_B = self._search(x_bB, known, m_bB, **extra)
            first, last = columns.start, columns.start + x_RK.shape[1]
            if coded:
                code_bB = rounding.codes(scale_B)
                codes[rows, first // per_byte : last // per_byte] = self.pack_codes(code_bB).view(x_RK.shape[0], -1)
            scales[rows, first // block : last // block] = byte_B.view(x_RK.shape[0], -1)

        _for_each(encode, list(tiles((n, k), block, encode_tile(w_NK.device))), w_NK.device)
        known_fields = self.range_fields(known, w_NK.device)
        tensors = {"scales": scales.view(getattr(torch, self.scale_dtype)), **extra, **known_fields}
        return {"codes": codes, **tensors} if coded else tensors

    def range_fields(self, known: Range, device: torch.device) -> dict[str, Tensor]:
        """Return the coarse plane's fields that depend on the weight's range alone."""
        return {}

    def _search(
        self, x_bB: Tensor, known: Range, m_bB: Tensor | None = None, **extra: Tensor
    ) -> tuple[Rounding, Tensor, Tensor]:
        """Search block scales for fp32 weights in units of known.unit: (rounding, scales [B], scale bytes [B])."""
        amax_B = torch.maximum(x_bB.amax(0), -x_bB.amin(0))
        near_B = self._near_byte(divided(amax_B, self.top))
        offset_C = torch.arange(self.offsets.start, self.offsets.stop, dtype=torch.int32, device=x_bB.device)
        byte_CB = (near_B + offset_C.unsqueeze(1)).clamp_(*self.byte_bounds(known))
        scale_CB = self.byte_values(x_bB.device).index_select(0, byte_CB.view(-1)).view_as(byte_CB)
        rounding = self._rounding(x_bB, m_bB, **extra)
        pick_1B = least_error(rounding, scale_CB).unsqueeze(0).long()
        shift, least = self.stored(known)
        byte_B = byte_CB.gather(0, pick_1B).squeeze(0).add_(shift).mul_(amax_B > least).to(torch.uint8)
        return rounding, scale_CB.gather(0, pick_1B).squeeze(0), byte_B

    def tables(self, tensors: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """Return a kernel's lookup tables: fp32 levels by code, values [256] by scale byte, the tensor scale [1]."""
        device = tensors["codes"].device
        scale = tensors.get("tensor_scale")
        return self._levels(tensors), self.byte_values(device), ones(device) if scale is None else scale

    @abstractmethod
    def _levels(self, tensors: dict[str, Tensor]) -> Tensor:
        """Level of each code, fp32 [16], or [256] for 8 bits."""

    @abstractmethod
    def _scales(self, tensors: dict[str, Tensor]) -> Tensor:
        """Block scales fp32 [N, Kp/block], tensor scale included."""

    @abstractmethod
    def _grid(self, tensors: dict[str, Tensor]) -> Grid:
        """Return the grid for rounding weights in units of their scale."""

    @abstractmethod
    def _rounding(self, x_bB: Tensor, m_bB: Tensor | None = None, **extra: Tensor) -> Rounding:
        """Return the rounding of a tile, with squared errors weighted by m_bB."""

    @abstractmethod
    def _near_byte(self, scale_B: Tensor) -> Tensor:
        """int32 byte whose value is nearest to each scale."""

    @abstractmethod
    def byte_bounds(self, known: Range) -> tuple[int, int]:
        """Return the lowest and highest allowed byte."""

    @abstractmethod
    def byte_values(self, device: torch.device) -> Tensor:
        """Return fp32 [256]: value of each byte, in units of known.unit."""

    @abstractmethod
    def stored(self, known: Range) -> tuple[int, float]:
        """Return the offset added to scale bytes in the page, and the largest block magnitude, in units of known.unit,
        that is stored as zero."""


class TensorScaled(BlockFormat):
    """Block format with one fp32 tensor scale (a power of two from encode) on top of byte scales.

    Range: the tensor scale follows the largest magnitude, so neither bf16's 3e38 nor fp16's 65504 overflows: a block
    whose scale times the largest level would not be finite takes a smaller scale and clips by up to 1/8. Blocks more
    than 2^15 below the tensor's largest weight fade to zero.
    """

    extra: tuple[tuple[str, str, tuple[int, ...]], ...] = (("tensor_scale", "float32", (1,)),)

    def range_fields(self, known: Range, device: torch.device) -> dict[str, Tensor]:
        """Return the tensor scale, fp32 [1]."""
        return {"tensor_scale": torch.full((1,), known.unit, dtype=torch.float32, device=device)}

    def byte_bounds(self, known: Range) -> tuple[int, int]:
        """See `BlockFormat.byte_bounds`."""
        values = self.byte_values(torch.device("cpu"))[: self.last_byte + 1]
        return 1, max(1, int((values <= known.limit / known.unit / self.top).sum()) - 1)

    def stored(self, known: Range) -> tuple[int, float]:
        """See `BlockFormat.stored`: below a quarter of the smallest scale, weights round to zero in every format or are
        not worth their codes."""
        return 0, float(self.byte_values(torch.device("cpu"))[1]) / 4

    def _scales(self, tensors: dict[str, Tensor]) -> Tensor:
        """fp32 [N, Kp/block]."""
        return tensors["scales"].float().mul_(tensors["tensor_scale"])


class E4M3Format(TensorScaled):
    """Block scales in E4M3 (OCP 8-bit Floating Point v1.0)."""

    scale_dtype = "float8_e4m3fn"
    scale_mantissas = 8
    last_byte = 0x7E  # 0x7F is NaN

    def _near_byte(self, scale_B: Tensor) -> Tensor:
        return scale_B.clamp(max=E4M3_MAX).to(torch.float8_e4m3fn).view(torch.uint8).to(torch.int32)

    def byte_values(self, device: torch.device) -> Tensor:
        """See `BlockFormat.byte_values`."""
        return e4m3_values(device)


class UE4M4Format(TensorScaled):
    """Block scales with E4M3's sign bit used as mantissa: (1 + byte % 16 / 16) * 2^(byte // 16 - 7), byte 0 is 0.

    Steps of 3 to 6 % instead of 6 to 12 % gain 0.15 dB for formats with 64 weights per scale.
    """

    scale_dtype = "uint8"
    scale_mantissas = 16
    last_byte = 0xFF
    _EXPONENT = 127 - 7

    def _near_byte(self, scale_B: Tensor) -> Tensor:
        return near_ue4m4(scale_B)

    def byte_values(self, device: torch.device) -> Tensor:
        """See `BlockFormat.byte_values`."""
        return ue4m4_values(device)

    def _scales(self, tensors: dict[str, Tensor]) -> Tensor:
        byte_NB = tensors["scales"]
        scale_NB = ue4m4_values(byte_NB.device).index_select(0, byte_NB.view(-1).to(torch.int32)).view(byte_NB.shape)
        return scale_NB.mul_(tensors["tensor_scale"])


class Frame:
    """Frozen scales (and levels) of a weight, to round later values of the weight with.

    Attributes:
        tensors: fields of the coarse plane except codes.
    """

    def __init__(self, format: BlockFormat, tensors: dict[str, Tensor], grid: Grid | None = None) -> None:
        """grid: of another frame with the same levels, to reuse."""
        self.format, self.tensors = format, tensors
        self._grid = grid or format._grid(tensors)

    @torch.no_grad()
    def round(self, w_NK: Tensor, dtype: torch.dtype | None = None, *, clipped: Tensor | None = None) -> Tensor:
        """Fake quantization: return `decode(encode(w))` [N, K] in `dtype` (default: the weight's), without codes.

        NaN and Inf become NaN. `clipped` (fp32 []) is incremented by the number of weights beyond the cell of their
        block's largest level; that cell is taken to be symmetric around its level. Does not synchronize.
        """
        n, k = w_NK.shape
        block, out = self.format.block, torch.empty(n, k, dtype=dtype or w_NK.dtype, device=w_NK.device)
        scale_NB = self.format._scales(self.tensors)
        divisor_NB = scale_NB.masked_fill(scale_NB == 0, 2.0**-126)  # under scale zero all but zeros are out of range
        for rows, columns in tiles((n, k), block, round_tile(w_NK.device)):
            x_RK = whole_blocks(w_NK[rows, columns].float(), block)
            blocks = slice(columns.start // block, columns.start // block + x_RK.shape[1] // block)
            y_RBb = x_RK.reshape(len(x_RK), -1, block) / divisor_NB[rows, blocks].unsqueeze(-1)
            if clipped is not None:
                clipped += y_RBb.abs().gt_(self._grid.reach).sum()
            w_RBb = self._grid.nearest(y_RBb).mul_(scale_NB[rows, blocks].unsqueeze(-1))
            w_RK = w_RBb.view_as(x_RK)[:, : columns.stop - columns.start]
            torch.add(w_RK, w_NK[rows, columns], alpha=0, out=out[rows, columns])
        return out

    @torch.no_grad()
    def widened(self, w_NK: Tensor) -> "Frame":
        """Return a frame with larger scales for blocks whose largest weight exceeds the largest level by a sixth or
        more: the scale that maps it to that level, within the format's range. Does not synchronize."""
        fmt, scales = self.format, self.tensors["scales"]
        scale_NB, byte_NB = fmt._scales(self.tensors), scales.view(torch.uint8)
        amax_NB = torch.empty_like(scale_NB)
        for rows, columns in tiles((len(w_NK), w_NK.shape[1]), fmt.block, round_tile(w_NK.device)):
            x_RK = whole_blocks(w_NK[rows, columns].float(), fmt.block)
            first = columns.start // fmt.block
            amax_NB[rows, first : first + x_RK.shape[1] // fmt.block] = _block_amax(x_RK, fmt.block)
        unit = self.tensors.get("tensor_scale", ones(w_NK.device))
        largest = torch.finfo(w_NK.dtype).max / fmt.top / 2  # rounded up or down, weights stay finite
        near_NB = fmt._near_byte(divided(amax_NB, fmt.top).clamp_(max=largest) / unit).clamp_(1, fmt.last_byte)
        wider_NB = torch.maximum(near_NB, byte_NB).to(torch.uint8)
        wider_NB = torch.where(amax_NB > scale_NB * (_OUTGROWN * fmt.top), wider_NB, byte_NB)
        return Frame(fmt, {**self.tensors, "scales": wider_NB.view(scales.dtype)}, self._grid)

    @torch.no_grad()
    def encode(self, w_NK: Tensor) -> dict[str, Tensor]:
        """Encode a weight with these scales: `decode` gives the result of `round`."""
        n, block = len(w_NK), self.format.block
        scale_NB = self.format._scales(self.tensors)
        x_NBb = whole_blocks(w_NK.float(), block).reshape(n, -1, block)
        y_NBb = x_NBb / scale_NB.masked_fill(scale_NB == 0, 2.0**-126).unsqueeze(-1)
        code_bB = self._grid.codes(self._grid.nearest(y_NBb)).flatten(1).view(-1, block).t()
        return {"codes": self.format.pack_codes(code_bB).view(n, -1), **self.tensors}


def _block_amax(x_RK: Tensor, block: int) -> Tensor:
    """Largest magnitude of each block [R, K/block]; NaN if the block has one."""
    if not x_RK.is_cpu:
        return x_RK.abs().view(len(x_RK), -1, block).amax(-1)
    return F.max_pool1d(x_RK.abs(), block, block)  # four times as fast as amax over a short last dimension


def near_ue4m4(scale: Tensor) -> Tensor:
    """int32 byte of `UE4M4Format` whose value is nearest to each positive fp32 scale, not limited to 0..255."""
    # the byte is a bit field of the fp32 pattern, so adding half a step rounds
    return ((scale.view(torch.int32) + (1 << 18)) >> 19) - (UE4M4Format._EXPONENT << 4)


@lru_cache(maxsize=8)
def ue4m4_values(device: torch.device) -> Tensor:
    """Value of each byte of `UE4M4Format`, fp32 [256]."""
    byte = torch.arange(256, dtype=torch.int32, device=device)
    return ((byte + (UE4M4Format._EXPONENT << 4)) << 19).view(torch.float32) * (byte > 0)


@lru_cache(maxsize=8)
def e4m3_values(device: torch.device) -> Tensor:
    """Value of each E4M3 byte, fp32 [256]; ascending up to 0x7E."""
    return torch.arange(256, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn).float()


@lru_cache(maxsize=8)
def ones(device: torch.device) -> Tensor:
    """Tensor scale of a format without one, fp32 [1]."""
    return torch.ones(1, dtype=torch.float32, device=device)


@lru_cache(maxsize=32)
def constant_levels(levels: Sequence[float], device: torch.device) -> Tensor:
    """Fixed levels of a format, fp32 [16], cached per device."""
    return torch.tensor(levels, dtype=torch.float32, device=device)


@lru_cache(maxsize=8)
def powers_of_two(device: torch.device) -> Tensor:
    """Value 2^(byte - 127) of each E8M0 byte, fp32 [256]; 255 is NaN."""
    value = torch.arange(-127, 129, dtype=torch.float64, device="cpu").exp2_()
    value[255] = float("nan")
    return value.float().to(device)


def power_of_two_scale(largest: float) -> float:
    """Power of two S with largest / S in (224, 448], clamped to [2^-126, 2^127] so that 1 / S is finite too.

    A power of two keeps level * scale * S exact: E4M3 has 4 significant bits, E2M1 has 2, bf16 holds 8.
    """
    if not largest:
        return 2.0**-126
    mantissa, exponent = frexp(largest / E4M3_MAX)  # exact where it matters: 448 = 7 * 2^6, and weights have 24 bits
    return 2.0 ** min(127, max(-126, exponent - (mantissa == 0.5)))


def encode_tile(device: torch.device) -> int:
    """Weights per encode tile: on a CPU they and four fp32 temporaries fit in a core's L2 cache."""
    return 1 << 15 if device.type == "cpu" else 1 << 22


def round_tile(device: torch.device) -> int:
    """Weights per tile of `Frame.round`: they and three fp32 temporaries fit in cache, and threading pays off."""
    return torch.get_num_threads() << 16 if device.type == "cpu" else 1 << 24


def decode_tile(device: torch.device) -> int:
    """Weights per decode tile: few operations, each long enough for torch to thread."""
    return torch.get_num_threads() << 18 if device.type == "cpu" else 1 << 24


def _for_each(
    encode: Callable[[tuple[slice, slice]], None], work: list[tuple[slice, slice]], device: torch.device
) -> None:
    """Run encode on every tile, on a CPU from torch's number of threads.

    Tiles are small enough that torch does not thread their hundred operations. Threads over tiles beat threads within
    an operation, with a barrier each: twentyfold on a machine with busy cores.
    """
    threads = min(torch.get_num_threads(), len(work)) if device.type == "cpu" else 1
    inference = torch.is_inference_mode_enabled()  # thread-local, like grad mode

    def in_mode(tile: tuple[slice, slice]) -> None:
        with torch.inference_mode(inference), torch.no_grad():
            encode(tile)

    if threads == 1:
        for tile in work:
            encode(tile)
        return
    with ThreadPoolExecutor(threads, thread_name_prefix="vbrt-encode") as pool:
        for _ in pool.map(in_mode, work):  # re-raises exceptions of tiles
            pass


def whole_blocks(x_RK: Tensor, block: int) -> Tensor:
    """Pad x with zero columns to a whole block; F.pad alone would always copy."""
    return F.pad(x_RK, (0, -x_RK.shape[1] % block)) if x_RK.shape[1] % block else x_RK


def pack_nibbles(code_bB: Tensor) -> Tensor:
    """Pack fp32 codes [b, B] into bytes [B, b/2]; the sum is exact in fp32 and halves the conversions."""
    byte = torch.add(code_bB[0::2], code_bB[1::2], alpha=16)
    return byte.to(torch.int32).to(torch.uint8).t().contiguous()


def pack_codes(code_NK: Tensor) -> Tensor:
    """Pack codes uint8 [N, K] into bytes [N, K/2], a zero behind an odd K: `unpack_codes` in reverse."""
    code_NK = whole_blocks(code_NK, 2)
    return code_NK[:, 0::2] | code_NK[:, 1::2] << 4


def unpack_codes(codes: Tensor, k: int) -> Tensor:
    """Unpack bytes [N, >= K/2] into codes uint8 [N, K]."""
    return torch.stack((codes & 15, codes >> 4), dim=-1).flatten(1)[:, :k]


def pair_table(level_16: Tensor) -> Tensor:
    """complex64 [256], really two fp32 per entry: levels of a byte's two codes, low nibble first."""
    byte = torch.arange(256, dtype=torch.int64, device=level_16.device)
    return torch.stack((level_16[byte & 15], level_16[byte >> 4]), dim=-1).view(torch.complex64).squeeze(-1)


def quad_table(level_16: Tensor) -> Tensor:
    """complex128 [65536], really four fp32 per entry: levels of the four codes in two adjacent bytes.

    One 16-byte gather serves four weights; gathers dominate a table decode.
    """
    pair = pair_table(level_16)
    quad = torch.empty(256, 256, 2, dtype=torch.complex64, device=level_16.device)
    quad[:, :, 0] = pair  # the first byte is the low one
    quad[:, :, 1] = pair.unsqueeze(1)
    return quad.view(torch.complex128).view(-1)


def lookup(quads: Tensor, codes: Tensor) -> Tensor:
    """Gather one entry of a 65,536-entry table per two bytes of `codes`, flat."""
    index = codes.view(torch.int16).to(torch.int32).bitwise_and_(0xFFFF)
    return quads.index_select(0, index.view(-1))


@lru_cache(maxsize=8)
def code_mask_quads(chosen: tuple[int, ...], device: torch.device) -> Tensor:
    """int32 [65536], really four bools per entry: which of two bytes' four codes are in `chosen`."""
    index = torch.arange(65536, dtype=torch.int64, device=device)
    code = torch.stack([(index >> shift) & 15 for shift in (0, 4, 8, 12)], dim=-1)
    return torch.isin(code, torch.tensor(chosen, dtype=torch.int64, device=device)).view(torch.int32).squeeze(-1)


@lru_cache(maxsize=8)
def constant_quads(levels: Sequence[float], device: torch.device) -> Tensor:
    """`quad_table` of fixed levels, 1 MiB, cached per device."""
    return quad_table(torch.tensor(levels, dtype=torch.float32, device=device))


def decode_blocks(
    codes: Tensor,
    scale_NB: Tensor,
    quads: Tensor | None,
    shape: tuple[int, int],
    dtype: torch.dtype,
    *,
    zero_NB: Tensor | None = None,
    difference_dtype: torch.dtype = torch.float32,
    offset_NB: Tensor | None = None,
    unit: Tensor | None = None,
) -> Tensor:
    """Dequantize: (level[code] - zero) * scale * unit + offset [N, K] from codes [N, Kp/2], fp32 numbers [N, Kp/block],
    a unit [1] and a `quad_table`; without one codes are numbers [N, Kp] of 8 bits, their own levels.

    Each operation is rounded to fp32, level - zero then to `difference_dtype`, the result to `dtype`; all devices give
    the same bits.
    """
    n, k = shape
    per_byte = 1 if quads is None else 2
    block = codes.shape[1] * per_byte // scale_NB.shape[1]
    out = torch.empty(n, k, dtype=dtype, device=codes.device)
    for rows, columns in tiles(shape, block, decode_tile(codes.device)):
        first, last = columns.start, columns.start + padded(columns.stop - columns.start, block)
        code_R = codes[rows, first // per_byte : last // per_byte]
        w_R = code_R.float() if quads is None else lookup(quads, code_R).view(torch.float32)
        within = rows, slice(first // block, last // block)
        scale_RB = scale_NB[within]
        w_RBb = w_R.view(*scale_RB.shape, block)
        if zero_NB is not None:
            w_RBb.sub_(zero_NB[within].unsqueeze(-1))
            if difference_dtype is not torch.float32:
                w_RBb.copy_(w_RBb.to(difference_dtype))
        w_RBb.mul_(scale_RB.unsqueeze(-1))
        if unit is not None:
            w_RBb.mul_(unit)
        if offset_NB is not None:
            w_RBb.add_(offset_NB[within].unsqueeze(-1))
        out[rows, columns] = w_RBb.flatten(1)[:, : columns.stop - first]
    return out
