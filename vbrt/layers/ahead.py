"""Compiling kernels ahead of the pass that launches them, several at a time.

Triton compiles a kernel when it is first launched: a multiplication takes one to two seconds, and a pass that meets one
after the other waits for their sum. A product on zeros compiles the same code, so those of the kinds that a pass will
need run in threads, before it. Triton lets other threads run while it compiles. What disk or process have already
takes milliseconds.
"""

import contextlib
import functools
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import torch

from vbrt.formats.base import WeightPlanes
from vbrt.formats.page import PageLayout, unpack
from vbrt.layers.selection import Kernels
from vbrt.layers.weight import WeightHandle

__all__ = ["compile_ahead"]

_MOST_BYTES = 128 << 20  # of zeros in the place of a weight and an input
_ALIGNED = 256
_compiled: set[tuple] = set()  # kinds of products, in this process


class _Job(NamedTuple):
    """A product that compiles what all of its kind need."""

    kernels: Kernels
    dtype: torch.dtype
    tokens: int

    @property
    def layout(self) -> PageLayout:
        """Of the weight's page."""
        return self.kernels.packing.layout(self.kernels.spec.shape)

    @property
    def input_at(self) -> int:
        """Where the input lies behind the page."""
        return -(-self.layout.nbytes // _ALIGNED) * _ALIGNED

    @property
    def nbytes(self) -> int:
        """Of page and input."""
        return self.input_at + self.tokens * self.kernels.spec.shape[1] * self.dtype.itemsize


def compile_ahead(handles: Iterable[Any], tokens: Iterable[int], device: torch.device) -> None:
    """Compile what 4-bit weights on a GPU need for products of so many tokens, all at once; return when that is done.

    Args:
        handles: of layers; those without kernels that say what they compile are left out.
    """
    weights = {(each.spec.format, each.spec.shape, each.dtype): each for each in handles if _takes(each, device)}
    counts = [count for count in dict.fromkeys(tokens) if count > 0]
    jobs = dict(job for handle in weights.values() for count in counts for job in _jobs_of(handle, count))
    jobs = {key: job for key, job in jobs.items() if key not in _compiled}
    _compiled.update(jobs)
    if len(jobs) < 2:  # which the pass compiles as fast
        return
    with contextlib.suppress(torch.OutOfMemoryError):  # without the memory for it the pass compiles what it launches
        zeros = torch.zeros(max(job.nbytes for job in jobs.values()), dtype=torch.uint8, device=device)
        stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        run = functools.partial(_run, zeros=zeros, stream=stream)
        with ThreadPoolExecutor(min(len(jobs), os.cpu_count() or 1), "vbrt-compile") as pool:
            list(pool.map(run, jobs.values()))


def _takes(handle: Any, device: torch.device) -> bool:
    """True for a weight whose kernels say what they compile."""
    if not isinstance(handle, WeightHandle) or handle.device != device:
        return False
    kernels = handle.kernels or handle.take_kernels()
    return not kernels.lossless and kernels.packing is not None and kernels.kernel.code_of is not None


def _jobs_of(handle: WeightHandle, tokens: int) -> Iterator[tuple[tuple, _Job]]:
    """The product of a weight, by its kind; none where what it compiles is small, or its operands are large."""
    kernels, (n, k) = handle.kernels, handle.spec.shape
    code = kernels.kernel.code_of((n, k), handle.dtype, tokens, handle.device)
    job = _Job(kernels, handle.dtype, tokens)
    if code is not None and job.nbytes <= _MOST_BYTES:
        yield (handle.device, handle.spec.format, (n, k), handle.dtype, code), job


@torch.no_grad()
def _run(job: _Job, *, zeros: torch.Tensor, stream: torch.cuda.Stream | None) -> None:
    """Multiply zeros by zeros; `zeros`: memory for both."""
    spec, layout = job.kernels.spec, job.layout
    x = zeros[job.input_at : job.nbytes].view(job.dtype).view(job.tokens, spec.shape[1])
    with torch.cuda.stream(stream):  # of another device than the thread's, too; None: nothing
        planes = WeightPlanes(spec.format, spec.shape, spec.dtype, unpack(zeros[: layout.nbytes], layout))
        job.kernels.linear(x, planes, None)
