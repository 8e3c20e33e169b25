"""Resident planes as static inputs of compiled graphs."""

from typing import NamedTuple

import torch

from vbrt.formats.format import WeightPlanes
from vbrt.kernels import TILES, page_of

__all__ = ["GraphForm", "GraphTiles", "graph_tiles", "mark_static"]


class GraphForm(NamedTuple):
    """Layout of the tiles that a compiled graph holds, for `vbrt::fp4_linear`.

    A layer keeps it as text: dynamo guards one string in one step, and would go through a tuple item by item. For the
    same reason `compiled_forward.py` reads the text in place: a method to parse it made a graph's guards 8 % slower.
    """

    format: str
    n: int
    k: int
    dtype: torch.dtype
    device: str

    def encode(self) -> str:
        """Return the text stored on a layer: "format n k dtype device"."""
        return f"{self.format} {self.n} {self.k} {str(self.dtype).removeprefix('torch.')} {self.device}"


class GraphTiles(NamedTuple):
    """The tiles up to the scale behind them, as `vbrt::fp4_linear` takes them; `form`: a `GraphForm` as text."""

    page: torch.Tensor
    form: str


def graph_tiles(planes: WeightPlanes, shown: GraphTiles | None) -> GraphTiles | None:
    """Return the tiles of resident planes, marked as static, or None for planes in another order.

    `shown` is returned if it already holds these tiles: an unchanged layer dict spares dynamo's guards a check.
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
    tensor._dynamo_static_input_type = "unguarded"  # as torch._dynamo.mark_static_address does
    return tensor
