"""Routed experts: modules that keep the matrices of many experts as a few parameters, in the tiers."""

from vbrt.layers.experts import expert_operators as expert_operators  # registers them
from vbrt.layers.experts.experts_handle import ExpertsHandle
from vbrt.layers.experts.experts_layer import VBExperts
from vbrt.layers.experts.experts_spec import ExpertsSpec
from vbrt.layers.experts.gates import gate_of
from vbrt.layers.experts.residency_reasons import why_waits
from vbrt.layers.experts.special_calls import (
    VBGivenExperts,
    VBParallelExperts,
    VBSharedExperts,
    VBSortedExperts,
    VBZeroExperts,
)

__all__ = [
    "ExpertsHandle",
    "ExpertsSpec",
    "VBExperts",
    "VBGivenExperts",
    "VBParallelExperts",
    "VBSharedExperts",
    "VBSortedExperts",
    "VBZeroExperts",
    "gate_of",
    "why_waits",
]
