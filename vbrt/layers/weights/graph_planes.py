"""Planes that compiled graphs hold, because they never move."""

from typing import NamedTuple

import torch

from vbrt.formats.format import WeightPlanes
from vbrt.kernels import TILES, page_of

__all__ = ["GraphForm", "GraphTiles", "graph_tiles", "mark_static"]


class GraphForm(NamedTuple):
    """Describes the tiles that a compiled graph holds, for `vbrt::fp4_linear`.

    A layer keeps it as text: dynamo guards one string in one step, and would go through a tuple item by item. For the
    same reason `compiled_forward.py` reads the text in place: a method to parse it made a graph's guards 8 % slower.
    """

    format: str
    n: int
    k: int
    dtype: torch.dtype
    device: str

    def encode(self) -> str:
        """The text that a layer keeps: "format n k dtype device"."""
        return f"{self.format} {self.n} {self.k} {str(self.dtype).removeprefix('torch.')} {self.device}"


class GraphTiles(NamedTuple):
    """The tiles up to the scale behind them, as `vbrt::fp4_linear` takes them; `form`: a `GraphForm` as text."""

    page: torch.Tensor
    form: str


def graph_tiles(planes: WeightPlanes, shown: GraphTiles | None) -> GraphTiles | None:
    """Return the tiles of planes that never move, marked as static, or None for planes in another order.

    `shown` is returned where it holds these tiles already: a layer's dict then stays as it is, or dynamo would check it
    again.
    """
    for tensor in planes.coarse.values():
        mark_static(tensor)
    tiles = planes.coarse.get(TILES)
    if tiles is None or (shown and shown.page.data_ptr() == tiles.data_ptr()):
        return shown
    page = page_of(tiles, planes.coarse["tensor_scale"])
    form = GraphForm(planes.format, *planes.shape, planes.dtype, str(page.device))
    return GraphTiles(mark_static(page), form.encode())


def mark_static(tensor: torch.Tensor) -> torch.Tensor:
    """Mark a tensor as a static input: compiled graphs neither copy it nor guard its address."""
    tensor._dynamo_static_input_type = "unguarded"  # what torch._dynamo.mark_static_address does
    return tensor
