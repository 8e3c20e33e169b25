"""A 4-bit format as somebody might add one: this file, and its record in `vbrt.config.FORMATS`."""

import torch
import torch.nn.functional as F

from vbrt.formats import Format, PageLayout, build_layout
from vbrt.formats.format import check_weight, padded


class Int4(Format):
    """Whole numbers from -7 to 7 and an fp32 scale for each block."""

    def encode(self, w_NK):
        check_weight(w_NK, self.name)
        x_NK = F.pad(w_NK.float(), (0, -w_NK.shape[1] % self.block))
        x_NBb = x_NK.view(len(x_NK), -1, self.block)
        scale_NB = x_NBb.abs().amax(-1) / 7
        code_NK = (x_NBb / scale_NB.clamp(min=1e-30).unsqueeze(-1)).round().add(8).flatten(1).to(torch.uint8)
        return {"codes": code_NK[:, 0::2] | code_NK[:, 1::2] << 4, "scales": scale_NB}

    def decode(self, tensors, shape, dtype):
        codes, scale_NB = tensors["codes"], tensors["scales"]
        code_NK = torch.stack((codes & 15, codes >> 4), dim=-1).flatten(1).float() - 8
        w_NBb = code_NK.view(*scale_NB.shape, self.block) * scale_NB.unsqueeze(-1)
        return w_NBb.flatten(1)[:, : shape[1]].to(dtype)

    def layout(self, shape: tuple[int, int], dtype: torch.dtype) -> PageLayout:
        n, kp = shape[0], padded(shape[1], self.block)
        fields = [("codes", "uint8", (n, kp // 2)), ("scales", "float32", (n, kp // self.block))]
        return build_layout(self.name, "coarse", fields)
