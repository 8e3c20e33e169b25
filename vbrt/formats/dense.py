"""`dense`: the original bytes, so that an unquantized layer moves through the same pages as any other."""

import torch
from torch import Tensor

from vbrt.formats.format import Format
from vbrt.formats.page import PageLayout, build_layout

__all__ = ["Dense"]


class Dense(Format):
    """The weight itself, in its own dtype; nothing is checked or changed, NaN included."""

    def encode(self, w_NK: Tensor, squares: Tensor | None = None) -> dict[str, Tensor]:
        """The detached weight, not copied."""
        return {"weight": w_NK.detach()}

    def decode(self, tensors: dict[str, Tensor], shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        """The very tensor when its dtype is already `dtype`."""
        return tensors["weight"].to(dtype)

    def layout(self, shape: tuple[int, int], dtype: torch.dtype) -> PageLayout:
        """One field, "weight" [N, K]."""
        return build_layout(self.name, "dense", [("weight", str(dtype).removeprefix("torch."), tuple(shape))])
