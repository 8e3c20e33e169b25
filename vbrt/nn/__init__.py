"""The layers that take the place of nn.Linear, of the subclasses that compute the same, and of Conv1D; and building
blocks for models of one's own."""

from vbrt.nn.attention import AttentionChoice, FlashAttention
from vbrt.nn.block import OptimizedTransformerBlock
from vbrt.nn.fused import FusedFP4Linear, quantize
from vbrt.nn.handle import HandleSpec, WeightHandle, handles_in
from vbrt.nn.linear import SwappedLayer, VBLayer, VBLinear, shed
from vbrt.nn.sampling import gumbel_max_sample
from vbrt.nn.swappable import kind_of, layer_class
from vbrt.nn.train import TrainedLayer, TrainedLinear, TrainedWeight

__all__ = [
    "AttentionChoice",
    "FlashAttention",
    "FusedFP4Linear",
    "HandleSpec",
    "OptimizedTransformerBlock",
    "SwappedLayer",
    "TrainedLayer",
    "TrainedLinear",
    "TrainedWeight",
    "VBLayer",
    "VBLinear",
    "WeightHandle",
    "gumbel_max_sample",
    "handles_in",
    "kind_of",
    "layer_class",
    "quantize",
    "shed",
]
