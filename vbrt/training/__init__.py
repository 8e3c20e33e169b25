"""Layers whose weights train: as parameters whose forwards see them in 4 bits, or from the tiers."""

from vbrt.training import expert_ops as _expert_ops  # registers the operators of compiled graphs
from vbrt.training import ops as _ops
from vbrt.training.expert_layers import TrainedExperts
from vbrt.training.experts import TrainedExpertsWeight
from vbrt.training.full import FullWeight
from vbrt.training.full_layers import FullLayer, FullLinear
from vbrt.training.kinds import full_class, trained_class
from vbrt.training.layers import TrainedLayer, TrainedLinear
from vbrt.training.optimizers import take_optimizer
from vbrt.training.streamed import StreamedParameter
from vbrt.training.weight import TrainedWeight

__all__ = [
    "FullLayer",
    "FullLinear",
    "FullWeight",
    "StreamedParameter",
    "TrainedExperts",
    "TrainedExpertsWeight",
    "TrainedLayer",
    "TrainedLinear",
    "TrainedWeight",
    "full_class",
    "take_optimizer",
    "trained_class",
]

del _expert_ops, _ops
