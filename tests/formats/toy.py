"""A 4-bit format and a kernel for it, as a package outside vbrt might have them: one file, by public names only."""

import torch
import torch.nn.functional as F

from vbrt.formats import Format, FormatRecord, PageLayout, build_layout
from vbrt.formats.format import check_weight, padded
from vbrt.kernels import Kernel
from vbrt.kernels.reference import activate


class Int4(Format):
    """Whole numbers from -7 to 7 and an fp32 scale for each block."""

    def encode(self, w_NK, squares=None):
        check_weight(w_NK, self.name)
        x_NK = F.pad(w_NK.float(), (0, -w_NK.shape[1] % self.block))
        x_NBb = x_NK.view(len(x_NK), -1, self.block)
        scale_NB = x_NBb.abs().amax(-1) / 7
        code_NK = (x_NBb / scale_NB.clamp(min=1e-30).unsqueeze(-1)).round().add(8).flatten(1).to(torch.uint8)
        return {"codes": code_NK[:, 0::2] | code_NK[:, 1::2] << 4, "scales": scale_NB}

    def decode(self, tensors, shape, dtype):
        w_NBb = whole_numbers(tensors) * tensors["scales"].unsqueeze(-1)
        return w_NBb.flatten(1)[:, : shape[1]].to(dtype)

    def layout(self, shape: tuple[int, int], dtype: torch.dtype) -> PageLayout:
        n, kp = shape[0], padded(shape[1], self.block)
        fields = [("codes", "uint8", (n, kp // 2)), ("scales", "float32", (n, kp // self.block))]
        return build_layout(self.name, "coarse", fields)


def whole_numbers(tensors):
    """The codes of a plane as numbers from -7 to 7, [N, B, b]."""
    code_NK = torch.stack((tensors["codes"] & 15, tensors["codes"] >> 4), dim=-1).flatten(1).float() - 8
    return code_NK.view(*tensors["scales"].shape, -1)


def multiply(x, planes, bias=None, activation="none"):
    """The op "linear": sums over each block of codes, then scales; the weight is never decoded."""
    code_NBb, scale_NB = whole_numbers(planes.coarse), planes.coarse["scales"]
    n, blocks, block = code_NBb.shape
    x_MBb = F.pad(x.float(), (0, blocks * block - x.shape[-1])).view(-1, blocks, block)
    y_MN = torch.einsum("mbk,nbk,nb->mn", x_MBb, code_NBb, scale_NB).view(*x.shape[:-1], n).to(x.dtype)
    return activate(y_MN if bias is None else y_MN + bias, activation)


RECORD = FormatRecord("int4", Int4, block=32, noise=0.1)
KERNEL = Kernel("linear", "compiled", multiply, devices=("cpu",), formats=("int4",), rank=1, runs_unpacked=True)
