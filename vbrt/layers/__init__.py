"""The layers that take the place of nn.Linear, of the subclasses that compute the same, and of Conv1D."""

from vbrt.layers.base import VBLayer
from vbrt.layers.kinds import KINDS, Kind, kind_of, site_of
from vbrt.layers.linear import VBLinear
from vbrt.layers.ops import handle_of
from vbrt.layers.spec import HandleSpec
from vbrt.layers.swapped import SwappedLayer, strip
from vbrt.layers.thawing import thaw
from vbrt.layers.weight import WeightHandle, handles_in

__all__ = [
    "KINDS",
    "HandleSpec",
    "Kind",
    "SwappedLayer",
    "VBLayer",
    "VBLinear",
    "WeightHandle",
    "handle_of",
    "handles_in",
    "kind_of",
    "site_of",
    "strip",
    "thaw",
]
