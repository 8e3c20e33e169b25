"""Layers whose weights train while their forwards see them as 4 bits hold them."""

from vbrt.training import expert_ops as _expert_ops  # registers the operators of compiled graphs
from vbrt.training import ops as _ops
from vbrt.training.expert_layers import TrainedExperts
from vbrt.training.experts import TrainedExpertsWeight
from vbrt.training.kinds import trained_class
from vbrt.training.layers import TrainedLayer, TrainedLinear
from vbrt.training.weight import TrainedWeight

__all__ = ["TrainedExperts", "TrainedExpertsWeight", "TrainedLayer", "TrainedLinear", "TrainedWeight", "trained_class"]

del _expert_ops, _ops
