"""Layers whose weights train while their forwards see them as 4 bits hold them."""

from vbrt.training import ops as _ops  # registers the operators of compiled graphs
from vbrt.training.kinds import trained_class
from vbrt.training.layers import TrainedLayer, TrainedLinear
from vbrt.training.weight import TrainedWeight

__all__ = ["TrainedLayer", "TrainedLinear", "TrainedWeight", "trained_class"]

del _ops
