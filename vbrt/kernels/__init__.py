"""Ops on planes: a reference in plain torch, which is the specification, and faster kernels for CPUs and GPUs.

Planes, activations and numbers enter, tensors leave; nothing here knows of tiers or modules. Every implementation of an
op is one record, `Kernel` (`registry.py`), and `entries.py` lists all on one screen: backend, devices, formats, why it
refuses a device, and what its callers must know (the page order it is fast on, whether it computes from planes as
encoded, whether it restores exact weights itself, what to prepare before a CUDA graph captures it). `resolve(op,
backend, device, format)` returns the record; "auto" takes the highest rank that serves. No caller asks for a kernel by
name, and hot paths keep `kernel.run`, the bare function. Products with operands rounded to FP8 or int8 are functions of
the same record, used only where the caller allows it. Where the reference steps in for want of a kernel, or FP8 was
asked for and cannot be had, a warning says so once, and `stats().fallbacks` lists it.

Other files specify what fused kernels compute: `experts.py` (routed experts), `step.py` (a decode step's norms, rotary
embeddings, attention), `update.py` (an optimizer's step on split weights). `operator_trace.py` records a step's
operators as a torch.fx graph; a collective that sums in place is a new value to that graph and is replayed in its place
on devices where that was seen to work (`SUMS_ON`); other collectives, DTensor operators and other devices keep a step
eager. `observers.py` finds out who watches a tensor. Kernels read memory by its address, which tracers, dispatcher
modes and torch.func transforms do not see; layers that are watched compute by operators instead. `frozen_product.py`:
the product is linear in input and bias, so its derivative is such a product again, any number of times, forward and
backward, without keeping the weight. `uncompiled.py` is `torch.compiler.disable` without dynamo's import.

**The temporary of `.weight`** (`decoded_weight.py`). It is the layer's weight for as long as a reference to it lives.
Writes are seen by the version counter: after each method of the temporary, before each use of the layer, and as the
temporary dies; once its memory was handed out (numpy, DLPack, an address), by a digest. Not seen: a write that torch
does not count and that went by no method of the temporary, such as a collective into it or C++ that takes its address;
assign there.

**Deterministic attention** (`attended(..., steady=True)` in `step.py`) gives each query programs of its own, over spans
of keys that follow from their number alone, so its bits depend neither on the batch, nor on other tokens of the pass,
nor on whether heads share keys.

**Encoding.** The op `encode_many` has the format's own encoder as its specification. It finds the ranges of all
matrices with one wait for the device and encodes matrices of one range as one: blocks know nothing of each other but
the range of their matrix, a power of two.
"""

from vbrt.kernels.cpu.build import libraries
from vbrt.kernels.cpu.int8 import int8_refusal
from vbrt.kernels.cuda.e2m1.linear import Packing
from vbrt.kernels.cuda.e2m1.tiles import TILES, page_of
from vbrt.kernels.cuda.rounded.fp8 import fp8_refusal, noted_refusal
from vbrt.kernels.entries import KERNELS, fused_on
from vbrt.kernels.registry import (
    BACKENDS,
    EXACT,
    Kernel,
    Needs,
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
    "Needs",
    "Packing",
    "PageOrder",
    "fp8_refusal",
    "fused_on",
    "int8_refusal",
    "kernel_refusal",
    "libraries",
    "noted_refusal",
    "page_of",
    "register_kernel",
    "resolve",
    "resolves_late",
]
