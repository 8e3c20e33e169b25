"""Layers with trainable weights: dense parameters rounded to 4 bits in the forward (`qat`), or in the tiers (`full`).

`trained_kinds.py` makes the training classes of each kind of layer from its record. `activations` is for every mode
whose forward has gradients.
"""

from vbrt.training.full.full_layers import FullLayer, FullLinear
from vbrt.training.full.full_weight import FullWeight
from vbrt.training.full.optimizer_takeover import take_optimizer
from vbrt.training.full.streamed_parameter import StreamedParameter
from vbrt.training.qat import compiled_experts, compiled_layers
from vbrt.training.qat.qat_expert_weight import TrainedExpertsWeight
from vbrt.training.qat.qat_experts import TrainedExperts
from vbrt.training.qat.qat_layers import TrainedLayer, TrainedLinear
from vbrt.training.qat.qat_weight import TrainedWeight
from vbrt.training.trained_kinds import full_class, trained_class

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

del compiled_experts, compiled_layers
