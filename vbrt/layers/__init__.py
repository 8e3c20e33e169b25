"""The layers that take the place of nn.Linear, of the subclasses that compute the same, and of Conv1D."""

from vbrt.layers.kinds import KINDS, Kind, kind_of, layer_class, site_of
from vbrt.layers.linear import SwappedLayer, VBLayer, VBLinear, shed
from vbrt.layers.ops import handle_of
from vbrt.layers.spec import HandleSpec
from vbrt.layers.train import TrainedLayer, TrainedLinear, TrainedWeight
from vbrt.layers.weight import WeightHandle, handles_in

__all__ = [
    "KINDS",
    "HandleSpec",
    "Kind",
    "SwappedLayer",
    "TrainedLayer",
    "TrainedLinear",
    "TrainedWeight",
    "VBLayer",
    "VBLinear",
    "WeightHandle",
    "handle_of",
    "handles_in",
    "kind_of",
    "layer_class",
    "shed",
    "site_of",
]
