"""CUDA device properties that kernels depend on."""

import functools
import importlib.util

import torch

from vbrt.kernels.cuda.launch_table import Gpu

__all__ = ["MIN_MAJOR", "available", "capability", "gpu", "launches_dependents", "major", "taken_for"]

MIN_MAJOR = 8  # mma.m16n8k16 on bf16, fma.rn.bf16x2
_CAPABILITIES: dict[int, tuple[int, int]] = {}


@functools.cache
def available() -> bool:
    """True if Triton with Gluon is installed and torch is built for CUDA. Imports no kernels."""
    if torch.version.cuda is None or importlib.util.find_spec("triton") is None:
        return False
    return importlib.util.find_spec("triton.experimental.gluon") is not None


def capability(index: int) -> tuple[int, int]:
    """Compute capability (major, minor) of a CUDA device."""
    known = _CAPABILITIES.get(index)  # not functools.cache: torch.compile warns when it traces one
    if known is None:
        known = _CAPABILITIES[index] = torch.cuda.get_device_capability(index)
    return known


def major(index: int) -> int:
    """Major version of a CUDA device's compute capability."""
    return capability(index)[0]


def taken_for(given: tuple[int, int] | None) -> None:
    """Choose kernels on all CUDA devices as for another compute capability, or for their own again (None).

    For tests and measurements of other GPUs' paths; the devices must be able to run their kernels.
    """
    _CAPABILITIES.clear()
    if given is not None:
        _CAPABILITIES.update(dict.fromkeys(range(torch.cuda.device_count()), given))
    gpu.cache_clear()


@functools.cache
def gpu(index: int) -> Gpu:
    """The device in the form of `launch_table.choose`."""
    return Gpu(major(index), torch.cuda.get_device_properties(index).multi_processor_count)


def launches_dependents(index: int) -> bool:
    """True if a CUDA device supports programmatic dependent launch (sm_90)."""
    return major(index) >= 9
