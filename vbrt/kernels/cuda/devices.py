"""CUDA device properties that kernels depend on."""

import functools
import importlib.util

import torch

from vbrt.kernels.cuda.launch_table import Gpu

__all__ = ["MIN_MAJOR", "available", "gpu", "launches_dependents", "major"]

MIN_MAJOR = 8  # mma.m16n8k16 on bf16, fma.rn.bf16x2
_MAJORS: dict[int, int] = {}


@functools.cache
def available() -> bool:
    """True if Triton with Gluon is installed and torch is built for CUDA. Imports no kernels."""
    if torch.version.cuda is None or importlib.util.find_spec("triton") is None:
        return False
    return importlib.util.find_spec("triton.experimental.gluon") is not None


def major(index: int) -> int:
    """Compute capability major version of a CUDA device."""
    known = _MAJORS.get(index)  # not functools.cache: torch.compile warns when it traces one
    if known is None:
        known = _MAJORS[index] = torch.cuda.get_device_capability(index)[0]
    return known


@functools.cache
def gpu(index: int) -> Gpu:
    """The device in the form of `launch_table.choose`."""
    return Gpu(major(index), torch.cuda.get_device_properties(index).multi_processor_count)


def launches_dependents(index: int) -> bool:
    """True if a CUDA device supports programmatic dependent launch (sm_90)."""
    return major(index) >= 9
