"""VB layers of transformers' subclasses of nn.Embedding whose forward computes with the rows that nn.Embedding's gives:
scaled (Gemma, BART) or normed (Inkling).

The forward is the subclass's own, of whichever version is installed; VBEmbedding stands between the two classes, so
that `super().forward` reads rows in the tiers. `VB<name>` of a kind with this file is made when it is first asked for,
by name, as pickles do too.
"""

import functools
import importlib
from typing import Any

import torch
from torch.fx import Proxy

from vbrt.kernels.observers import traced_call
from vbrt.layers.modules.embedding import VBEmbedding
from vbrt.layers.modules.layer_kinds import KINDS, Kind

__all__: list[str] = []

_PREFIX = "VB"


@functools.cache
def _layer_class(kind: Kind) -> type[VBEmbedding]:
    plain = getattr(importlib.import_module(kind.package), kind.name)

    @functools.wraps(plain.forward)
    def forward(self: VBEmbedding, input_ids: torch.Tensor) -> torch.Tensor:
        if isinstance(input_ids, Proxy):
            return traced_call(self, input_ids)
        return plain.forward(self, input_ids)

    members: dict[str, Any] = {
        "__module__": __name__,
        "__doc__": f"{kind.name} with its table in a tier stack. Made by `vbrt.wrap`, not by hand.",
        "forward": forward,
    }
    return type(f"{_PREFIX}{kind.name}", (plain, VBEmbedding), members)


def __getattr__(name: str) -> type[VBEmbedding]:
    kind = KINDS.get(name.removeprefix(_PREFIX)) if name.startswith(_PREFIX) else None
    if kind is None or kind.file != __name__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return _layer_class(kind)
