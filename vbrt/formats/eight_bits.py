"""8-bit codes under scales of published checkpoints: `bytes16-float16` to `bytes128-float32`, `floatbytes...` with
the same blocks and scales, `unitbytes128` and `superbytes16`.

    bytes           weight = int8 code * scale                  GGUF's Q8_0 and Q5_0; W8A16, torchao
    floatbytes      weight = E4M3 code * scale                  FP8 of compressed-tensors, DeepSeek, Qwen
    unitbytes128    weight = int8 code * scale * unit           bitsandbytes' LLM.int8, its unit 1 / 127
    superbytes16    weight = int8 code * (d * scale)            GGUF's Q6_K

Every product is rounded to fp32, the result to the weight's dtype. `vbrt.formats.affine` has the 8-bit formats with
offsets. A scale of a row, or of a block of rows and columns, is repeated for its blocks of 128: 0.125 or 0.25 bits per
weight. Codes of 5 and 6 bits take a byte each.

Encoding is for weights assigned to such a layer later; no config selects these formats.
"""

import torch
from torch import Tensor

from vbrt.errors import FormatError
from vbrt.formats.affine import CODES, SUPERBLOCK
from vbrt.formats.block_formats import E4M3_MAX, constant_levels, decode_blocks, encode_tile, ones, whole_blocks
from vbrt.formats.format import Format, check_weight, padded
from vbrt.formats.page import DTYPES, PageLayout, build_layout

__all__ = ["FloatBytes", "ScaledBytes", "SuperBytes", "UnitBytes"]

_SCALE = 255.0  # largest integer scale of a superblock


class ScaledBytes(Format):
    """Fields: codes int8 [N, Kp]; scales [N, Kp/block] in the record's dtype, of either sign."""

    code_dtype = "int8"
    #: largest code of the encoder
    last = 127.0

    def layout(self, shape: tuple[int, int], dtype: torch.dtype) -> PageLayout:
        """See `Format.layout`."""
        n, kp = shape[0], padded(shape[1], self.block)
        return build_layout(self.name, "coarse", [("codes", self.code_dtype, (n, kp)), *self._fields(n, kp)])

    def _fields(self, n: int, kp: int) -> list[tuple[str, str, tuple[int, int]]]:
        return [("scales", self.record.scales, (n, kp // self.block))]

    def block_scales(self, tensors: dict[str, Tensor]) -> Tensor:
        """Return the scale of each block, fp32 [N, Kp/block]."""
        return tensors["scales"].float()

    def decode(self, tensors: dict[str, Tensor], shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        """See `Format.decode`."""
        return decode_blocks(tensors["codes"], self.block_scales(tensors), None, shape, dtype)

    def tables(self, tensors: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """See `BlockFormat.tables`: 8-bit codes are their own levels, so kernels read none of these."""
        device = tensors["codes"].device
        return constant_levels(CODES, device), torch.empty(0, dtype=torch.float32, device=device), ones(device)

    @torch.no_grad()
    def encode(self, w_NK: Tensor, squares: Tensor | None = None) -> dict[str, Tensor]:
        """See `Format.encode`. A block's largest weight becomes the largest code, without a search.

        Also raises FormatError if the scales cannot reach the largest weight.
        """
        amax, reach = check_weight(w_NK, self.name), self._reach()
        if amax > reach:
            raise FormatError(f"{self.name}: the largest weight is {amax:g}; its scales reach {reach:g}")
        parts = [self._encode_rows(rows) for rows in w_NK.split(max(1, encode_tile(w_NK.device) // w_NK.shape[1]))]
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    def _reach(self) -> float:
        """Return the largest magnitude that encodes."""
        return self.last * torch.finfo(DTYPES[self.record.scales]).max

    def _encode_rows(self, w_RK: Tensor) -> dict[str, Tensor]:
        x_RK = whole_blocks(w_RK.float(), self.block)
        x_RBb = x_RK.view(len(x_RK), -1, self.block)
        # a rounded scale times the largest code must not exceed the weights' dtype
        limit = torch.finfo(w_RK.dtype).max / self.last * (1 - 2.0**-7)
        fields = self._scale_fields((x_RBb.abs().amax(-1) / self.last).clamp_(max=limit))
        scale_RB = self.block_scales(fields)
        code_RBb = x_RBb / scale_RB.masked_fill(scale_RB == 0, float("inf")).unsqueeze(-1)
        return {"codes": self._codes(code_RBb.clamp_(-self.last, self.last)).view_as(x_RK), **fields}

    def _scale_fields(self, scale_RB: Tensor) -> dict[str, Tensor]:
        """Return the fields besides codes of blocks with about these scales."""
        return {"scales": scale_RB.to(DTYPES[self.record.scales])}

    def _codes(self, code: Tensor) -> Tensor:
        return code.round_().to(torch.int8)


class FloatBytes(ScaledBytes):
    """Fields: codes float8_e4m3fn [N, Kp]; scales."""

    code_dtype = "float8_e4m3fn"
    last = E4M3_MAX

    def _codes(self, code: Tensor) -> Tensor:
        return code.to(torch.float8_e4m3fn)


class UnitBytes(ScaledBytes):
    """Fields: codes; scales; unit float32 [1]."""

    def layout(self, shape: tuple[int, int], dtype: torch.dtype) -> PageLayout:
        """See `Format.layout`."""
        fields = [(field.name, field.dtype, field.shape) for field in super().layout(shape, dtype).fields]
        return build_layout(self.name, "coarse", [*fields, ("unit", "float32", (1,))])

    def decode(self, tensors: dict[str, Tensor], shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        """See `Format.decode`."""
        scale_NB = self.block_scales(tensors)
        return decode_blocks(tensors["codes"], scale_NB, None, shape, dtype, unit=tensors["unit"])

    def tables(self, tensors: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
        """See `ScaledBytes.tables`; with the weight's own unit."""
        levels, values, unit = super().tables(tensors)
        return levels, values, tensors.get("unit", unit)

    @torch.no_grad()
    def encode(self, w_NK: Tensor, squares: Tensor | None = None) -> dict[str, Tensor]:
        """See `ScaledBytes.encode`; the unit is 1."""
        return {**super().encode(w_NK, squares), "unit": torch.ones(1, dtype=torch.float32, device=w_NK.device)}


class SuperBytes(ScaledBytes):
    """Fields: codes; scales uint8 [N, Kp/block]; d float16 [N, Kp/256 rounded up], of either sign. The sign of a
    published scale is in its codes."""

    def _fields(self, n: int, kp: int) -> list[tuple[str, str, tuple[int, int]]]:
        return [("scales", "uint8", (n, kp // self.block)), ("d", "float16", (n, -(-kp // SUPERBLOCK)))]

    def block_scales(self, tensors: dict[str, Tensor]) -> Tensor:
        """See `ScaledBytes.block_scales`; exact in fp32."""
        scale_NB = tensors["scales"].float()
        return tensors["d"].float().repeat_interleave(SUPERBLOCK // self.block, 1)[:, : scale_NB.shape[1]] * scale_NB

    def _reach(self) -> float:
        return self.last * _SCALE * torch.finfo(torch.float16).max

    def _scale_fields(self, scale_RB: Tensor) -> dict[str, Tensor]:
        each = SUPERBLOCK // self.block
        scale_RSe = whole_blocks(scale_RB, each).unflatten(1, (-1, each))
        d_RS = (scale_RSe.amax(-1) / _SCALE).half()
        divisor_RS = d_RS.float().masked_fill(d_RS == 0, float("inf"))
        times_RSe = (scale_RSe / divisor_RS.unsqueeze(-1)).round_().clamp_(0, _SCALE)
        return {"scales": times_RSe.flatten(1)[:, : scale_RB.shape[1]].to(torch.uint8).contiguous(), "d": d_RS}
