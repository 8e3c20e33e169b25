"""Batched encoding of a layer's experts: for small matrices, launch overhead exceeds the work.

On a GPU the H2D copy of the next experts' weights overlaps with the encoding of the current ones, and writing pages
blocks neither.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from vbrt.formats.joint_planes import join_planes
from vbrt.host import accelerator
from vbrt.layers.experts.protocols import ExpertsWeights
from vbrt.layers.weights.weight_encoding import Planes

__all__ = ["EncodedExperts", "ExpertsOnDemand", "MatricesOnDemand"]

#: bytes of dense weights that are encoded together, by the type of the device; scratch is about three times that
_STEP_BYTES = {"cpu": 16 << 20, accelerator.TYPE: 128 << 20}


class MatricesOnDemand:
    """Lazy stack of a part's matrices [E, ...]: a slice reads and stacks only its own matrices.

    Args:
        read: returns the matrix of an expert on the CPU, as the module keeps it, of `shape[1:]` and `dtype`; may be
            called again.
        shape: of all matrices, stacked.
    """

    device = torch.device("cpu")

    def __init__(self, read: Callable[[int], Tensor], shape: tuple[int, ...], dtype: torch.dtype) -> None:
        self._read, self.shape, self.dtype = read, shape, dtype
        self.nbytes = math.prod(shape) * dtype.itemsize

    def is_contiguous(self) -> bool:
        """True: so are its slices."""
        return True

    def __getitem__(self, some: slice) -> Tensor:
        made = torch.empty((len(range(self.shape[0])[some]), *self.shape[1:]), dtype=self.dtype, device=self.device)
        for place, expert in enumerate(range(self.shape[0])[some]):
            made[place].copy_(self._read(expert))
        return made


class ExpertsOnDemand:
    """Lazy iterable of the joint planes of a layer's experts, in order. It may be iterated again, which happens if
    pages need another order.

    Args:
        make: returns the joint planes of an expert.
    """

    def __init__(self, make: Callable[[int], Planes], experts: int) -> None:
        self._make, self._experts = make, experts

    def __iter__(self) -> Iterator[Planes]:
        """Yield planes."""
        return map(self._make, range(self._experts))


class EncodedExperts:
    """Lazily encoded joint planes of a layer's experts, in order; may be iterated again.

    Args:
        weights: by part, [E, ...] as the module keeps them.
    """

    def __init__(self, handle: ExpertsWeights, weights: Mapping[str, Tensor | MatricesOnDemand]) -> None:
        self._handle, self._weights = handle, weights

    def __iter__(self) -> Iterator[Planes]:
        """Yield planes. Raises FormatError with the name of the expert that cannot be encoded."""
        handle, steps = self._handle, self._steps()
        upload = _Uploads(handle) if _has_to_move(handle, self._weights) else _as_they_are
        given = upload(self._part_of(steps[0]))
        for step, following in zip(steps, [*steps[1:], None], strict=True):
            weights = given.take()
            made = {part: handle.coder.encoders[part].split_many(w, step.start) for part, w in weights.items()}
            del weights
            if following is not None:
                given = upload(self._part_of(following))
            for planes in zip(*made.values(), strict=True):
                yield join_planes(dict(zip(made, planes, strict=True)))

    def _steps(self) -> list[slice]:
        experts = self._handle.spec.experts
        each = max(1, sum(weight.nbytes for weight in self._weights.values()) // experts)
        count = max(1, _STEP_BYTES.get(self._handle.device.type, _STEP_BYTES["cpu"]) // each)
        return [slice(first, min(first + count, experts)) for first in range(0, experts, count)]

    def _part_of(self, step: slice) -> dict[str, Tensor]:
        return {part: _some(weight, step) for part, weight in self._weights.items()}


def _some(weight: Tensor | MatricesOnDemand, step: slice) -> Tensor:
    """Return some matrices of a part, with zeros for experts beyond its end."""
    some = weight[step]
    missing = step.stop - step.start - len(some)
    return torch.cat([some, some.new_zeros(missing, *weight.shape[1:])]) if missing else some


class _Given(NamedTuple):
    """Weights of some experts, valid after the event `arrived`."""

    weights: dict[str, Tensor]
    arrived: torch.Event | None = None

    def take(self) -> dict[str, Tensor]:
        """Make the current stream wait for the weights, and return them."""
        if self.arrived is not None:
            for weight in self.weights.values():
                current = accelerator.current_stream(weight.device)
                current.wait_event(self.arrived)
                weight.record_stream(current)
        return self.weights


def _as_they_are(weights: dict[str, Tensor]) -> _Given:
    return _Given(weights)


def _has_to_move(handle: ExpertsWeights, weights: Mapping[str, Tensor | MatricesOnDemand]) -> bool:
    """True if the weights lie in host memory, in a form that can be copied to the GPU as it is."""
    return accelerator.has_streams(handle.device) and all(
        weight.device.type == "cpu" and weight.is_contiguous() and weight.dtype is handle.spec.dtype
        for weight in weights.values()
    )


class _Uploads:
    """H2D copies of weights on the tier's stream, overlapping with compute."""

    def __init__(self, handle: ExpertsWeights) -> None:
        level = handle.stack.levels[0]
        self._stream, self._relay = level.stream, level.relay

    def __call__(self, weights: dict[str, Tensor]) -> _Given:
        """Start a copy. Returns when all of it has been given to the link."""
        device = self._stream.device
        with accelerator.stream(self._stream):  # their memory comes from this stream's pool: no kernel uses it any more
            there = {part: torch.empty(w.shape, dtype=w.dtype, device=device) for part, w in weights.items()}
        for part, weight in weights.items():
            self._copy(there[part], weight.detach())
        return _Given(there, self._stream.record_event())

    def _copy(self, target: Tensor, origin: Tensor) -> None:
        if origin.is_pinned():
            with accelerator.stream(self._stream):
                target.copy_(origin, non_blocking=True)
        else:
            self._relay.copy(target.view(-1).view(torch.uint8), origin.view(-1).view(torch.uint8), self._stream)
