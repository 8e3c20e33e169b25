"""Kernels: ops on planes, in plain torch as the reference, and faster for CPUs and GPUs; see `resolve`."""

from vbrt.kernels.cpu.build import libraries
from vbrt.kernels.cpu.int8 import int8_refusal
from vbrt.kernels.cuda.e2m1.linear import Packing
from vbrt.kernels.cuda.e2m1.tiles import TILES, page_of
from vbrt.kernels.cuda.rounded.fp8 import fp8_refusal, noted_refusal
from vbrt.kernels.entries import KERNELS
from vbrt.kernels.registry import (
    BACKENDS,
    EXACT,
    Kernel,
    PageOrder,
    kernel_refusal,
    register_kernel,
    resolve,
    resolves_late,
)

__all__ = [
    "BACKENDS",
    "EXACT",
    "KERNELS",
    "TILES",
    "Kernel",
    "Packing",
    "PageOrder",
    "fp8_refusal",
    "int8_refusal",
    "kernel_refusal",
    "libraries",
    "noted_refusal",
    "page_of",
    "register_kernel",
    "resolve",
    "resolves_late",
]
