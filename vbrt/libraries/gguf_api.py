"""gguf: lattices that the codes of GGUF's IQ types name.

| feature | without it |
| --- | --- |
| `LATTICES` | weights of IQ types are not read |
"""

import functools
from typing import Any

import torch

from vbrt.errors import LibraryError
from vbrt.libraries.probe import Feature, find

__all__ = ["FEATURES", "LATTICES", "lattice"]

LATTICES = Feature(
    "gguf",
    ("quants:IQ2_XXS.init_grid", "quants:IQ2_XXS.grid_map"),
    without="GGUF weights of IQ types are not read; pip install -U gguf",
)
FEATURES = (LATTICES,)


@functools.cache
def lattice(type: str) -> tuple[torch.Tensor, tuple[float, ...]]:
    """Return the points uint8 [P, d] of an IQ type, as indices of its levels, and the levels.

    Raises LibraryError if the installed gguf does not have it.
    """
    quant: Any = find("gguf", f"quants:{type}")
    try:
        quant.init_grid()
        points = torch.from_numpy(quant.grid).reshape(quant.grid_shape)
        levels = tuple(map(float, quant.grid_map))
    except (AttributeError, TypeError, RuntimeError) as error:
        raise LibraryError(f"gguf has no lattice of {type} ({error}): {LATTICES.without}") from error
    table = torch.tensor(levels, dtype=torch.float32, device=points.device)
    return (points.unsqueeze(-1) == table).to(torch.uint8).argmax(-1).to(torch.uint8), levels
