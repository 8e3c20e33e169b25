"""Planes that compiled graphs hold, because they never move."""

from typing import TYPE_CHECKING, NamedTuple

import torch

from vbrt.formats.format import WeightPlanes

if TYPE_CHECKING:
    from vbrt.layers.weights.weight_handle import WeightHandle

__all__ = ["GraphForm", "GraphTiles", "graph_planes", "mark_static", "show_to_graphs"]


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


def graph_planes(handle: "WeightHandle") -> WeightPlanes | None:
    """The planes that a compiled graph may hold: they never move, and kernels compute with them. Else None.

    Graphs that hold them count no forwards and no hits.
    """
    return handle.ready if handle.shows_planes else None


def show_to_graphs(handle: "WeightHandle", tiles: GraphTiles | None) -> None:
    """Have compiled graphs compute with planes that never move, or with a lease again (None).

    Layers hold this themselves, as a tensor and a string: dynamo checks in one step that these have not changed in a
    module's dict; behind another object it would go through them one by one at each call.
    """
    handle.graph_tiles = tiles
    while True:  # again where another thread has shown something else meanwhile
        shown = handle.graph_tiles
        page, form = shown or (None, None)
        for layer in list(handle.layers):
            layer.__dict__.update(_vb_page=page, _vb_form=form)
        if handle.graph_tiles is shown:
            return


def mark_static(tensor: torch.Tensor) -> torch.Tensor:
    """Mark a tensor as a static input: compiled graphs neither copy it nor guard its address."""
    tensor._dynamo_static_input_type = "unguarded"  # what torch._dynamo.mark_static_address does
    return tensor
