"""CUDA device properties that kernels depend on."""

import functools
import importlib.util

import torch

from vbrt.kernels.cuda.launch_table import WIDE, Gpu, rates_of

__all__ = [
    "MIN_MAJOR",
    "available",
    "capability",
    "gpu",
    "launches_dependents",
    "major",
    "taken_for",
    "why_unavailable",
]

MIN_MAJOR = 8  # mma.m16n8k16 on bf16, fma.rn.bf16x2
_REACHED = 0.9  # of a device's memory bandwidth and highest clock
_CAPABILITIES: dict[int, tuple[int, int]] = {}


@functools.cache
def available() -> bool:
    """True if Triton with Gluon is installed and torch is built for CUDA. Imports no kernels."""
    return why_unavailable() is None


def why_unavailable() -> str | None:
    """Return why kernels can run on no device of this process, or None."""
    if torch.version.hip is not None:
        return "they are for NVIDIA GPUs, and this torch is built for ROCm"
    if torch.version.cuda is None:
        return "this torch is built without CUDA"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed"
    if importlib.util.find_spec("triton.experimental.gluon") is None:
        return "the installed Triton has no Gluon; expected 3.6 or newer"
    return None


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
    """The device in the form of `launch_table.choose`; its rates are its own, whatever it is `taken_for`."""
    own = torch.cuda.get_device_properties(index)
    if major(index) in WIDE:
        return Gpu(major(index), own.multi_processor_count)
    mma, matmul = rates_of((own.major, own.minor), own.name)
    return Gpu(
        major(index),
        own.multi_processor_count,
        own.shared_memory_per_multiprocessor,
        own.shared_memory_per_block_optin,
        _REACHED * 2e3 * own.memory_clock_rate * own.memory_bus_width / 8 / 1e6,  # kHz, two transfers per clock
        _REACHED * own.clock_rate / 1e3,
        mma,
        matmul,
    )


def launches_dependents(index: int) -> bool:
    """True if a CUDA device supports programmatic dependent launch (sm_90)."""
    return major(index) >= 9
