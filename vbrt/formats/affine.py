"""Codes with a scale and an offset per block, as published: `affine16-float16` to `affine128-float32`, `signed...`,
`zeros16-float16` to `zeros128-float32`, `floatzeros...` and `superblock32` of 4 bits; `offsetbytes...`, `zerobytes...`,
`floatzerobytes...` and `superbytes32` of 8.

    4 bits        8 bits            weight
    affine        offsetbytes       code * scale + offset              GGUF's Q4_1, MLX    Q5_1
    signed                          (code - 8) * scale + middle        torchao
    zeros         zerobytes         (code - zero) * scale              AWQ, asymmetric GPTQ, AutoRound, int4 of others
    floatzeros    floatzerobytes    (code - zero) * scale              HQQ
    superblock    superbytes32      code * (d * scale) - dmin * min    GGUF's Q4_K         Q5_K

Every operation is rounded to fp32, the result to the weight's dtype. All products are exact in fp32 but those of fp32
scales, so a kernel may compute any of them as one FMA of level, scale and offset (`Affine.block_terms`) with the same
bits; of fp32 scales it may not. Nor may it of `floatzeros`, whose zero points lie between codes: the difference is
rounded to the scales' dtype, as HQQ does in its compute dtype, before the product.

`signed` differs from `affine` in what stays exact: the weight of code 8 is `middle` itself. As an offset of codes from
0, middle - 8 * scale, it would be rounded: fp32 loses a middle below 2^-24 of 8 * scale. A decoder therefore subtracts
8 from the code. A product of sums, scale * (q x) + (middle - 8 * scale) * (sum of x), may round that offset to fp32,
by 2^-24 of its size: its sums are rounded by as much.

Bits per weight: those of a code, plus 32 / block (16-bit offsets or float zero points), 24 / block (zero points of
16-bit scales) or 0.625 (superblocks, whose 6-bit numbers take a byte each).

Encoding is for weights assigned to such a layer later; no config selects these formats.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from vbrt.config.format_records import FormatRecord
from vbrt.errors import FormatError
from vbrt.formats.block_formats import (
    constant_levels,
    constant_quads,
    decode_blocks,
    encode_tile,
    ones,
    pack_nibbles,
    whole_blocks,
)
from vbrt.formats.format import Format, check_weight, padded
from vbrt.formats.page import DTYPES, PageLayout, build_layout
from vbrt.formats.sixteen_levels import INT4_LEVELS

__all__ = ["CODES", "SUPERBLOCK", "Affine", "BlockTerms", "FloatZeroPoint", "Signed", "Superblock", "ZeroPoint"]

#: weights that share `d` and `dmin`
SUPERBLOCK = 256
#: levels of 4-bit codes
CODES = tuple(map(float, range(16)))
#: largest code of an encoder, by bits
_LAST = {4: 15, 8: 255}
#: the same in superblocks, whose products of code, 6-bit scale and d have to be exact in fp32
_LAST_IN_SUPERBLOCKS = {4: 15, 8: 127}
_SIX_BITS = 63
_INSIDE = 7 / 8  # part of a dtype's range from which rounding of scales, offsets and codes does not lead to Inf


class BlockTerms(NamedTuple):
    """Scale and offset of each block, fp32 [N, Kp/block]: weight = level * scale + offset."""

    scale_NB: Tensor
    offset_NB: Tensor


class Affine(Format):
    """Fields: codes uint8 [N, Kp/2], low nibble first, or [N, Kp] of 8 bits; scales and offsets [N, Kp/block] in the
    record's dtype, of either sign.

    Attributes:
        levels: of 4-bit codes, ascending whole numbers.
    """

    levels = CODES

    def __init__(self, record: FormatRecord) -> None:
        super().__init__(record)
        self.last = _LAST[record.bits]

    def layout(self, shape: tuple[int, int], dtype: torch.dtype) -> PageLayout:
        """See `Format.layout`."""
        n, kp = shape[0], padded(shape[1], self.block)
        codes = ("codes", "uint8", (n, kp * self.record.bits // 8))
        return build_layout(self.name, "coarse", [codes, *self._fields(n, kp // self.block)])

    def _fields(self, n: int, blocks: int) -> list[tuple[str, str, tuple[int, int]]]:
        return [(name, self.record.scales, (n, blocks)) for name in ("scales", "offsets")]

    def block_terms(self, tensors: dict[str, Tensor]) -> BlockTerms:
        """Return scale and offset of each block."""
        return BlockTerms(tensors["scales"].float(), tensors["offsets"].float())

    def tables(self, tensors: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """See `BlockFormat.tables`: the levels, an empty table of scale bytes, and 1."""
        device = tensors["codes"].device
        return constant_levels(self.levels, device), torch.empty(0, dtype=torch.float32, device=device), ones(device)

    def decode(self, tensors: dict[str, Tensor], shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        """See `Format.decode`."""
        scale_NB, offset_NB = self.block_terms(tensors)
        return decode_blocks(tensors["codes"], scale_NB, self._quads(tensors), shape, dtype, offset_NB=offset_NB)

    def _quads(self, tensors: dict[str, Tensor]) -> Tensor | None:
        return constant_quads(self.levels, tensors["codes"].device) if self.record.bits == 4 else None

    @torch.no_grad()
    def encode(self, w_NK: Tensor, squares: Tensor | None = None) -> dict[str, Tensor]:
        """See `Format.encode`. A block's least and largest weight become the first and last code, without
        a search; where offsets are no values, the range includes 0.

        Also raises FormatError if scales or offsets cannot reach the largest weight.
        """
        amax, reach = check_weight(w_NK, self.name), self._reach()
        if amax > reach:
            raise FormatError(f"{self.name}: the largest weight is {amax:g}; its scales and offsets reach {reach:g}")
        parts = [self._encode_rows(rows) for rows in w_NK.split(max(1, encode_tile(w_NK.device) // w_NK.shape[1]))]
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    def _reach(self) -> float:
        """Return the largest magnitude that encodes; a block's range is finite in fp32."""
        return min(torch.finfo(DTYPES[self.record.scales]).max, torch.finfo(torch.float32).max / 4)

    def _encode_rows(self, w_RK: Tensor) -> dict[str, Tensor]:
        limit = torch.finfo(w_RK.dtype).max * _INSIDE
        x_RK = whole_blocks(w_RK.float().clamp(-limit, limit), self.block)
        x_RBb = x_RK.view(len(x_RK), -1, self.block)
        terms = self._terms(x_RBb.amin(-1), x_RBb.amax(-1))
        scale_RB, offset_RB = self.block_terms(terms)
        level_RBb = (x_RBb - offset_RB.unsqueeze(-1)).div_(_divisor(scale_RB).unsqueeze(-1)).round_()
        code_RBb = level_RBb.sub_(self.levels[0]).clamp_(0, self.last)
        codes = pack_nibbles(code_RBb.view(-1, self.block).t()) if self.record.bits == 4 else code_RBb.to(torch.uint8)
        return {"codes": codes.view(len(x_RK), -1), **terms}

    def _terms(self, low_RB: Tensor, high_RB: Tensor) -> dict[str, Tensor]:
        """Return the fields besides codes of blocks with these ranges."""
        dtype = DTYPES[self.record.scales]
        return {"scales": ((high_RB - low_RB) / self.last).to(dtype), "offsets": low_RB.to(dtype)}


class Signed(Affine):
    """Fields: codes; scales and middles [N, Kp/block] in the record's dtype, of either sign: the weights of code 8."""

    levels = INT4_LEVELS

    def _fields(self, n: int, blocks: int) -> list[tuple[str, str, tuple[int, int]]]:
        return [(name, self.record.scales, (n, blocks)) for name in ("scales", "middles")]

    def block_terms(self, tensors: dict[str, Tensor]) -> BlockTerms:
        """See `Affine.block_terms`."""
        return BlockTerms(tensors["scales"].float(), tensors["middles"].float())

    def _terms(self, low_RB: Tensor, high_RB: Tensor) -> dict[str, Tensor]:
        scales = super()._terms(low_RB, high_RB)["scales"]
        middle_RB = low_RB - self.levels[0] * scales.float()
        return {"scales": scales, "middles": middle_RB.to(scales.dtype)}


class ZeroPoint(Affine):
    """Fields: codes; scales [N, Kp/block] in the record's dtype; zeros uint8 [N, Kp/block], codes too."""

    def _fields(self, n: int, blocks: int) -> list[tuple[str, str, tuple[int, int]]]:
        return [("scales", self.record.scales, (n, blocks)), ("zeros", "uint8", (n, blocks))]

    def block_terms(self, tensors: dict[str, Tensor]) -> BlockTerms:
        """See `Affine.block_terms`; under fp32 scales the offset is rounded, unlike the decoded weight."""
        scale_NB = tensors["scales"].float()
        return BlockTerms(scale_NB, -(tensors["zeros"].float() * scale_NB))

    def decode(self, tensors: dict[str, Tensor], shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        """See `Format.decode`."""
        scale_NB, zero_NB = tensors["scales"].float(), tensors["zeros"].float()
        return decode_blocks(tensors["codes"], scale_NB, self._quads(tensors), shape, dtype, zero_NB=zero_NB)

    def _reach(self) -> float:
        return min(self.last // 2 * torch.finfo(DTYPES[self.record.scales]).max, torch.finfo(torch.float32).max / 4)

    def _terms(self, low_RB: Tensor, high_RB: Tensor) -> dict[str, Tensor]:
        low_RB = low_RB.clamp(max=0)
        scale_RB = ((high_RB.clamp(min=0) - low_RB) / self.last).to(DTYPES[self.record.scales])
        zero_RB = (-low_RB / _divisor(scale_RB.float())).round_().clamp_(0, self.last)
        return {"scales": scale_RB, "zeros": zero_RB.to(torch.uint8)}


class FloatZeroPoint(ZeroPoint):
    """Fields: codes; scales and zeros [N, Kp/block] in the record's dtype. code - zero is rounded to that dtype."""

    def _fields(self, n: int, blocks: int) -> list[tuple[str, str, tuple[int, int]]]:
        return [(name, self.record.scales, (n, blocks)) for name in ("scales", "zeros")]

    def decode(self, tensors: dict[str, Tensor], shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        """See `Format.decode`."""
        scale_NB, zero_NB = tensors["scales"].float(), tensors["zeros"].float()
        quads, difference = self._quads(tensors), DTYPES[self.record.scales]
        return decode_blocks(
            tensors["codes"], scale_NB, quads, shape, dtype, zero_NB=zero_NB, difference_dtype=difference
        )

    def _terms(self, low_RB: Tensor, high_RB: Tensor) -> dict[str, Tensor]:
        terms = super()._terms(low_RB, high_RB)
        return {**terms, "zeros": terms["zeros"].to(DTYPES[self.record.scales])}


class Superblock(Affine):
    """Fields: codes; scales and mins uint8 [N, Kp/block], 0 to 63; d and dmin float16 [N, Kp/256 rounded up], of either
    sign."""

    def __init__(self, record: FormatRecord) -> None:
        super().__init__(record)
        self.last = _LAST_IN_SUPERBLOCKS[record.bits]

    def _fields(self, n: int, blocks: int) -> list[tuple[str, str, tuple[int, int]]]:
        large = -(-blocks * self.block // SUPERBLOCK)
        return [
            ("scales", "uint8", (n, blocks)),
            ("mins", "uint8", (n, blocks)),
            ("d", "float16", (n, large)),
            ("dmin", "float16", (n, large)),
        ]

    def block_terms(self, tensors: dict[str, Tensor]) -> BlockTerms:
        """See `Affine.block_terms`; both are exact in fp32."""
        each, blocks = SUPERBLOCK // self.block, tensors["scales"].shape[1]
        d_NB, dmin_NB = (tensors[name].float().repeat_interleave(each, 1)[:, :blocks] for name in ("d", "dmin"))
        return BlockTerms(d_NB * tensors["scales"].float(), -(dmin_NB * tensors["mins"].float()))

    def _reach(self) -> float:
        return torch.finfo(torch.float16).max * _SIX_BITS

    def _terms(self, low_RB: Tensor, high_RB: Tensor) -> dict[str, Tensor]:
        min_RB = -low_RB.clamp(max=0)
        d, scales = self._six_bits((high_RB.clamp(min=0) + min_RB) / self.last)
        dmin, mins = self._six_bits(min_RB)
        return {"scales": scales, "mins": mins, "d": d, "dmin": dmin}

    def _six_bits(self, number_RB: Tensor) -> tuple[Tensor, Tensor]:
        """(fp16 unit per superblock, uint8 [R, B] multiples of it) of numbers that are not negative."""
        each = SUPERBLOCK // self.block
        number_RSe = whole_blocks(number_RB, each).unflatten(1, (-1, each))
        unit_RS = (number_RSe.amax(-1) / _SIX_BITS).half()
        times_RSe = (number_RSe / _divisor(unit_RS.float()).unsqueeze(-1)).round_().clamp_(0, _SIX_BITS)
        return unit_RS, times_RSe.flatten(1)[:, : number_RB.shape[1]].to(torch.uint8).contiguous()


def _divisor(scale: Tensor) -> Tensor:
    """Scale, or Inf for 0: what it divides becomes 0."""
    return scale.masked_fill(scale == 0, float("inf"))
