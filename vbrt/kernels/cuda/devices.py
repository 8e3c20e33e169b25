"""CUDA device properties that kernels depend on, and the requirements that kernels have in common."""

import functools
import importlib.util

import torch

from vbrt.kernels.cuda.launch_table import WIDE, Gpu, rates_of
from vbrt.kernels.registry import Needs

__all__ = [
    "BF16",
    "E4M3",
    "PTX",
    "TRITON",
    "capability",
    "gpu",
    "launches_dependents",
    "major",
    "refusal",
    "serves",
    "taken_for",
    "takes_bf16",
]

#: plain Triton: bf16 is stored and converted, never computed with, except in products, which become fp32 there
TRITON = Needs((7, 5), "support in Triton", nvidia=False)
#: the same with Gluon's layouts or PTX assembly that sm_75 has
PTX = Needs((7, 5), "support in Triton")
#: mma.m16n8k16 on bf16, fma.rn.bf16x2, cp.async
BF16 = Needs((8, 0), "bf16 arithmetic")
#: conversions to E4M3, and the vendor's matmul
E4M3 = Needs((8, 9), "FP8 matmul")
_REACHED = 0.9  # of a device's memory bandwidth and highest clock
_CAPABILITIES: dict[int, tuple[int, int]] = {}


@functools.cache
def refusal(device: torch.device, needs: Needs) -> str | None:
    """Return why device code with these requirements cannot run on a device, or None. Imports no kernels."""
    if why := _why_unavailable(needs):
        return why
    index = device.index or 0
    if index >= torch.cuda.device_count():
        return f"{device} is not there"
    if serves(index, needs):
        return None
    (major, minor), (least, least_minor) = capability(index), needs.capability
    return f"sm_{major}{minor} has no {needs.lacking}, it takes sm_{least}{least_minor}"


def _why_unavailable(needs: Needs) -> str | None:
    """Return why device code can run on no device of this process, or None."""
    if torch.version.hip is not None and needs.nvidia:
        return "they are for NVIDIA GPUs, and this torch is built for ROCm"
    if torch.version.hip is None and torch.version.cuda is None:
        return "this torch is built without CUDA"
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed; pip install triton, or triton-windows"
    if needs.nvidia and importlib.util.find_spec("triton.experimental.gluon") is None:
        return "the installed Triton has no Gluon; expected 3.6 or newer"
    return None


def serves(index: int, needs: Needs) -> bool:
    """True if a CUDA device has what device code needs, given that Triton is there (`refusal`)."""
    if torch.version.hip is not None:
        return not needs.nvidia
    return capability(index) >= needs.capability


def takes_bf16(x: torch.Tensor, needs: Needs) -> bool:
    """True if kernels on bf16 inputs, for some number of tokens, take x on its device."""
    return x.dtype is torch.bfloat16 and x.numel() > 0 and serves(x.device.index, needs)


def capability(index: int) -> tuple[int, int]:
    """Compute capability (major, minor) of a CUDA device; (0, 0) of AMD's, whose numbers mean something else."""
    if torch.version.hip is not None:
        return 0, 0
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
    refusal.cache_clear()


@functools.cache
def gpu(index: int) -> Gpu:
    """The device in the form of `launch_table.choose`; its rates are its own, whatever it is `taken_for`."""
    own = torch.cuda.get_device_properties(index)
    if major(index) in WIDE:
        return Gpu(major(index), own.multi_processor_count, minor=capability(index)[1])
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
        capability(index)[1],
    )


def launches_dependents(index: int) -> bool:
    """True if a CUDA device supports programmatic dependent launch (sm_90)."""
    return major(index) >= 9
