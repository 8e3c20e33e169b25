"""`dense`: the original bytes, so that unquantized layers use the same pages as others."""

import torch
from torch import Tensor

from vbrt.formats.format import Format
from vbrt.formats.page import PageLayout, build_layout

__all__ = ["Dense"]


class Dense(Format):
    """The weight in its own dtype, unchecked and unchanged, NaN included."""

    def encode(self, w_NK: Tensor, squares: Tensor | None = None) -> dict[str, Tensor]:
        """The detached weight, without a copy."""
        return {"weight": w_NK.detach()}

    def decode(self, tensors: dict[str, Tensor], shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        """The stored tensor itself if its dtype is `dtype`."""
        return tensors["weight"].to(dtype)

    def layout(self, shape: tuple[int, int], dtype: torch.dtype) -> PageLayout:
        """One field, "weight" [N, K]."""
        return build_layout(self.name, "dense", [("weight", str(dtype).removeprefix("torch."), tuple(shape))])
