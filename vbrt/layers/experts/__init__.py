"""Routed experts: modules that keep the matrices of many experts as a few parameters, in the tiers."""

from vbrt.layers.experts import ops as ops
from vbrt.layers.experts.deciding import why_waits
from vbrt.layers.experts.gates import gate_of
from vbrt.layers.experts.handle import ExpertsHandle
from vbrt.layers.experts.layer import VBExperts
from vbrt.layers.experts.spec import ExpertsSpec
from vbrt.layers.experts.special import (
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
