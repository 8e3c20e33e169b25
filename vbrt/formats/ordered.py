"""Published weights with columns in another order, as GPTQ's with act-order: `levels128-float16-ordered` and others.

    weight[:, order] = the weight of the format without "-ordered"

Groups of columns share scales; with act-order a group's columns lie anywhere in the weight. The plane has them side by
side, and `order` says where each belongs. Kernels put x in this order and multiply by the plane of the other format.
"""

import torch
from torch import Tensor

from vbrt.config.format_records import FormatRecord
from vbrt.formats import get_format
from vbrt.formats.format import Format
from vbrt.formats.page import PageLayout, build_layout

__all__ = ["Ordered"]


class Ordered(Format):
    """Fields: those of the format of the record's `base`; order int32 [K]: the column of each stored one."""

    def __init__(self, record: FormatRecord) -> None:
        super().__init__(record)
        self.base = get_format(record.base)
        self.code_dtype = self.base.code_dtype

    def layout(self, shape: tuple[int, int], dtype: torch.dtype) -> PageLayout:
        """See `Format.layout`."""
        fields = [(field.name, field.dtype, field.shape) for field in self.base.layout(shape, dtype).fields]
        return build_layout(self.name, "coarse", [*fields, ("order", "int32", (shape[1],))])

    def encode(self, w_NK: Tensor, squares: Tensor | None = None) -> dict[str, Tensor]:
        """See `Format.encode`. Columns stay where they are."""
        order = torch.arange(w_NK.shape[1], dtype=torch.int32, device=w_NK.device)
        return {**self.base.encode(w_NK, squares), "order": order}

    def decode(self, tensors: dict[str, Tensor], shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
        """See `Format.decode`."""
        return self.base.decode(tensors, shape, dtype).index_select(1, torch.argsort(tensors["order"]))
