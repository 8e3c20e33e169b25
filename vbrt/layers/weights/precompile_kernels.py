"""Ahead-of-time, parallel compilation of 4-bit kernels before the pass that launches them.

Triton compiles a kernel when it is first launched: a multiplication takes one to two seconds, and a pass that meets one
after the other waits for their sum. So the products of the next pass are run before it on placeholder memory: they
launch nothing, and threads compile their kernels (`vbrt.kernels.cuda.compiling`). A kernel that is cached on disk or
in the process takes milliseconds.
"""

from collections.abc import Hashable, Iterable, Iterator
from typing import Any, NamedTuple

import torch

from vbrt.formats.format import WeightPlanes
from vbrt.formats.page import PageLayout, unpack
from vbrt.kernels.cuda.compiling import Compilation, begin, noting
from vbrt.kernels.observers import unwatched
from vbrt.layers.weights.kernel_selection import Kernels
from vbrt.layers.weights.state import Weight

__all__ = ["compile_ahead"]

_MOST_BYTES = 128 << 20  # of memory that stands in for a weight and an input
_ALIGNED = 256
_asked: set[Hashable] = set()  # kinds of products, in this process


class _Job(NamedTuple):
    """Representative product of its kind; `decodes`: the weight is decoded, and multiplied by torch."""

    kernels: Kernels
    dtype: torch.dtype
    tokens: int
    decodes: bool

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


def compile_ahead(
    handles: Iterable[Any], tokens: Iterable[int], device: torch.device, *, soon: bool = True
) -> list[Compilation]:
    """Start compiling the kernels of 4-bit weights on a GPU for these token counts; return the compilations.

    Args:
        handles: of layers; those without kernels that say what they compile are left out.
        soon: see `compiling.begin`.
    """
    weights = {(each.spec.format, each.spec.shape, each.dtype): each for each in handles if _takes(each, device)}
    counts = [count for count in dict.fromkeys(tokens) if count > 0]
    jobs = dict(job for count in counts for handle in weights.values() for job in _jobs_of(handle, count))
    jobs = {kind: job for kind, job in jobs.items() if kind not in _asked}
    with noting() as found, unwatched():
        memory = torch.empty(max((job.nbytes for job in jobs.values()), default=0), dtype=torch.uint8, device=device)
        for kind, job in jobs.items():
            _run(job, memory)
            _asked.add(kind)
    begin(found, soon=soon)
    return found


def _takes(handle: Any, device: torch.device) -> bool:
    """True if the weight's kernels support compilation ahead of time."""
    if not isinstance(handle, Weight) or handle.device != device:
        return False
    kernels = handle.kernels or handle.take_kernels()
    return not kernels.lossless and kernels.packing is not None and kernels.kernel.code_of is not None


def _jobs_of(handle: Weight, tokens: int) -> Iterator[tuple[tuple, _Job]]:
    """The product of a weight, by its kind; none where its operands are large."""
    kernels, (n, k) = handle.kernels, handle.spec.shape
    code = kernels.kernel.code_of((n, k), handle.dtype, tokens, handle.device)
    job = _Job(kernels, handle.dtype, tokens, decodes=code is None)
    if job.nbytes <= _MOST_BYTES:
        yield (handle.device, handle.spec.format, (n, k), handle.dtype, code), job


def _run(job: _Job, memory: torch.Tensor) -> None:
    """Run the product on placeholders, or decode the placeholder weight if torch multiplies."""
    spec, layout = job.kernels.spec, job.layout
    x = memory[job.input_at : job.nbytes].view(job.dtype).view(job.tokens, spec.shape[1])
    planes = WeightPlanes(spec.format, spec.shape, job.dtype, unpack(memory[: layout.nbytes], layout))
    if job.decodes:
        job.kernels.decode(planes)
    else:
        job.kernels.linear(x, planes, None)
