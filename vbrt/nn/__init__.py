"""The layers that take the place of nn.Linear and transformers' Conv1D."""

from vbrt.nn.handle import HandleSpec, WeightHandle
from vbrt.nn.linear import VBLayer, VBLinear

__all__ = ["HandleSpec", "VBLayer", "VBLinear", "WeightHandle"]
