"""Which modules can become VB layers: an allow-list of exact classes, and what takes the place of each.

A subclass of nn.Linear may compute anything (routers return tuples, grouped layers read slices of their weight), so
one that is not named here is left alone. Those named compute `x Wᵀ + bias`; classes of other packages are named as
text, and the file that imports them is loaded once a model holds one.
"""

import importlib

from torch import nn

from vbrt.layers.linear import SwappedLayer

__all__ = ["KINDS", "kind_of", "layer_class"]

_KINDS = {
    ("torch.nn.modules.linear", "Linear"): "vbrt.layers",
    ("transformers.pytorch_utils", "Conv1D"): "vbrt.layers.conv1d",
    ("transformers.models.esm.modeling_esmfold", "EsmFoldLinear"): "vbrt.layers.esmfold",
    ("transformers.models.falcon.modeling_falcon", "FalconLinear"): "vbrt.layers.falcon",
}
_FILES = {kind: file for (_, kind), file in _KINDS.items()}
#: the names that `kind_of` gives
KINDS = tuple(_FILES)
_PREFIXES = {"infer": "VB", "train": "Trained"}


def kind_of(module: nn.Module) -> str | None:
    """The name of the module's class if it can become a VB layer, else None."""
    cls = type(module)
    return cls.__name__ if (cls.__module__, cls.__qualname__) in _KINDS else None


def layer_class(kind: str, mode: str = "infer") -> type[SwappedLayer]:
    """What takes the place of a module of `kind`; mode: "infer" or "train"."""
    return getattr(importlib.import_module(_FILES[kind]), f"{_PREFIXES[mode]}{kind}")
