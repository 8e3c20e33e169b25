"""The layers that take the place of nn.Linear, of the subclasses that compute the same, and of Conv1D."""

from vbrt.layers.modules.layer_kinds import KINDS, Kind, kind_of, site_of
from vbrt.layers.modules.linear import VBLinear
from vbrt.layers.modules.unfreeze import thaw
from vbrt.layers.modules.vb_layer import VBLayer
from vbrt.layers.swapped_layer import SwappedLayer, strip
from vbrt.layers.weights.state import Weight, weights_in
from vbrt.layers.weights.weight_operators import handle_of
from vbrt.layers.weights.weight_spec import HandleSpec

__all__ = [
    "KINDS",
    "HandleSpec",
    "Kind",
    "SwappedLayer",
    "VBLayer",
    "VBLinear",
    "Weight",
    "handle_of",
    "kind_of",
    "site_of",
    "strip",
    "thaw",
    "weights_in",
]
