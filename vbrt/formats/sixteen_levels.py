"""Sixteen levels with 16- or 32-bit block scales, as published: `levels16-float16` to `levels128-float32`, and
`symmetric16-float16` to `symmetric128-float32`.

    levels       weight = level[code] * scale of its block     the product rounded to fp32, then to the weight's dtype
    symmetric    weight = (code - 8) * scale of its block      the same

Holds other libraries' weights bit for bit, without decoding: bitsandbytes' NF4 and FP4 and GGUF's IQ4_NL as levels;
symmetric int4 of GPTQ, AutoRound and compressed-tensors and GGUF's Q4_0, which need no table, as `symmetric` (repacked
by `vbrt.formats.published`). A format's name contains block and scale dtype, so a page's layout depends on the weight's
shape alone: 4 bits per weight plus 0.125 (128, 16 bits) to 2 (16, 32 bits) for scales.

Encoding is for weights assigned to such a layer later; no config selects these formats.
"""

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
    quad_table,
    whole_blocks,
)
from vbrt.formats.format import Format, check_weight, padded, tiles
from vbrt.formats.nf4 import NF4_LEVELS
from vbrt.formats.page import DTYPES, PageLayout, build_layout
from vbrt.formats.rounding import TableRounding, least_error, of_tile

__all__ = ["FP4_LEVELS", "INT4_LEVELS", "IQ4_NL_LEVELS", "Levels", "Symmetric"]

#: two's complement with an offset of 8: GPTQ, AutoRound, compressed-tensors, GGUF's Q4_0
INT4_LEVELS = tuple(float(code - 8) for code in range(16))
#: bitsandbytes' `get_4bit_type("fp4")`: E2M1 with a subnormal of 1/16, divided by 12; bit 3 is the sign
_FP4 = tuple(magnitude / 12 for magnitude in (0.0, 0.0625, 8.0, 12.0, 4.0, 6.0, 2.0, 3.0))
FP4_LEVELS = _FP4 + tuple(-magnitude for magnitude in _FP4)
#: ggml's `kvalues_iq4nl`
IQ4_NL_LEVELS = tuple(map(float, (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)))

_TABLES = (INT4_LEVELS, NF4_LEVELS, FP4_LEVELS, IQ4_NL_LEVELS)
_SAMPLE = 1 << 14  # weights that the choice of a table looks at
_LEAST = 2.0**-100  # smallest divisor: smaller weights round to zero


class Levels(Format):
    """Fields: codes uint8 [N, Kp/2], low nibble first; scales [N, Kp/block] in the record's dtype, of either sign;
    levels float32 [16] by code."""

    #: fields besides codes and scales
    extra = (("levels", "float32", (16,)),)

    def __init__(self, record: FormatRecord) -> None:
        super().__init__(record)
        self.scale_dtype = DTYPES[record.scales]

    def layout(self, shape: tuple[int, int], dtype: torch.dtype) -> PageLayout:
        """See `Format.layout`."""
        n, kp = shape[0], padded(shape[1], self.block)
        scales = ("scales", self.record.scales, (n, kp // self.block))
        return build_layout(self.name, "coarse", [("codes", "uint8", (n, kp // 2)), scales, *self.extra])

    def decode(self, tensors: dict[str, Tensor], shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        """See `Format.decode`."""
        return decode_blocks(tensors["codes"], tensors["scales"].float(), self._quads(tensors), shape, dtype)

    def _quads(self, tensors: dict[str, Tensor]) -> Tensor:
        return quad_table(tensors["levels"])

    def tables(self, tensors: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """See `BlockFormat.tables`: the levels, an empty table of scale bytes, and 1."""
        device = tensors["levels"].device
        return tensors["levels"], torch.empty(0, dtype=torch.float32, device=device), ones(device)

    @torch.no_grad()
    def encode(self, w_NK: Tensor, squares: Tensor | None = None, levels: Tensor | None = None) -> dict[str, Tensor]:
        """See `Format.encode`. Candidate scales map a block's largest weight to one of the levels; the one with the
        least squared error is taken. levels fp32 [16]; default: the published table with the least error.

        Also raises FormatError if the scales' dtype cannot reach the largest weight.
        """
        amax = check_weight(w_NK, self.name)
        if levels is None:
            levels = self._best_table(w_NK)
        reach = float(levels.abs().max()) * torch.finfo(self.scale_dtype).max
        if amax > reach:
            raise FormatError(
                f"{self.name}: the largest weight is {amax:g}; {self.record.scales} scales reach {reach:g}"
            )
        codes, scales = self._encode_weight(w_NK, levels, squares)
        return {"codes": codes, "scales": scales, "levels": levels}

    def _encode_weight(self, w_NK: Tensor, levels: Tensor, squares: Tensor | None) -> tuple[Tensor, Tensor]:
        """(codes uint8 [N, Kp/2], scales [N, Kp/block]) of a weight within the scales' range."""
        n, kp, block = len(w_NK), padded(w_NK.shape[1], self.block), self.block
        codes = torch.empty(n, kp // 2, dtype=torch.uint8, device=w_NK.device)
        scales = torch.empty(n, kp // block, dtype=self.scale_dtype, device=w_NK.device)
        for rows, columns in tiles((n, w_NK.shape[1]), block, encode_tile(w_NK.device)):
            x_RK = whole_blocks(w_NK[rows, columns].float(), block)
            first, last = columns.start, columns.start + x_RK.shape[1]
            m_bB = None if squares is None else of_tile(squares[None], rows, columns, n, block)
            code_bB, scale_B = self._encode_blocks(
                x_RK.reshape(-1, block).t().contiguous(), levels, self.reach(levels, w_NK.dtype), m_bB
            )
            codes[rows, first // 2 : last // 2] = pack_nibbles(code_bB).view(len(x_RK), -1)
            scales[rows, first // block : last // block] = scale_B.view(len(x_RK), -1)
        return codes, scales

    def reach(self, levels: Tensor, dtype: torch.dtype) -> float:
        """Return the largest scale that its dtype can represent and for which decoded weights are finite."""
        return min(torch.finfo(self.scale_dtype).max, torch.finfo(dtype).max / float(levels.abs().max()))

    def rounding(self, x_bB: Tensor, levels: Tensor, m_bB: Tensor | None = None) -> TableRounding:
        """Return the rounding of a tile, levels in units of the largest; see `BlockFormat._rounding`."""
        unit = levels / float(levels.abs().max())
        return TableRounding(x_bB, unit, TableRounding.cells(unit), m_bB)

    def _encode_blocks(self, x_bB: Tensor, levels: Tensor, reach: float, m_bB: Tensor | None) -> tuple[Tensor, Tensor]:
        """(codes fp32 [b, B], scales [B]) of blocks."""
        top = float(levels.abs().max())
        largest_1B = x_bB.gather(0, x_bB.abs().argmax(0, keepdim=True))
        scale_CB = largest_1B / levels[levels != 0].unsqueeze(1)
        scale_CB = scale_CB.clamp_(-reach, reach).to(self.scale_dtype)
        divisor_CB = scale_CB.float() * top
        divisor_CB.masked_fill_(divisor_CB.abs() < _LEAST, _LEAST)
        rounding = self.rounding(x_bB, levels, m_bB)
        pick_1B = least_error(rounding, divisor_CB).unsqueeze(0).long()
        return rounding.codes(divisor_CB.gather(0, pick_1B).squeeze(0)), scale_CB.gather(0, pick_1B).squeeze(0)

    def _best_table(self, w_NK: Tensor) -> Tensor:
        """Return the published levels with the least error on some rows of a weight."""
        sample = w_NK[:: -(-w_NK.numel() // _SAMPLE), : max(self.block, _SAMPLE)].contiguous()
        errors = []
        for table in _TABLES:
            plane = self.encode(sample, levels=constant_levels(table, w_NK.device))
            errors.append(
                (self.decode(plane, tuple(sample.shape), torch.float32) - sample.float()).double().square().sum()
            )
        return constant_levels(_TABLES[int(torch.stack(errors).argmin())], w_NK.device).clone()


class Symmetric(Levels):
    """Fields: codes uint8 [N, Kp/2], low nibble first; scales [N, Kp/block] in the record's dtype, of either sign."""

    extra = ()

    def _quads(self, tensors: dict[str, Tensor]) -> Tensor:
        return constant_quads(INT4_LEVELS, tensors["codes"].device)

    def tables(self, tensors: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """See `Levels.tables`."""
        return super().tables({"levels": constant_levels(INT4_LEVELS, tensors["codes"].device)})

    def encode(self, w_NK: Tensor, squares: Tensor | None = None, levels: Tensor | None = None) -> dict[str, Tensor]:
        """See `Levels.encode`; levels are int4's."""
        fields = super().encode(w_NK, squares, constant_levels(INT4_LEVELS, w_NK.device))
        return {name: fields[name] for name in ("codes", "scales")}
