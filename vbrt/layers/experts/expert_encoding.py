"""Encodes the experts of a layer, several at a time: small matrices take more steps than work.

On a GPU the weights of the next experts are on their way while those before are encoded, and while their pages are
written nothing else waits.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from vbrt.formats.joint_planes import join_planes
from vbrt.layers.experts.protocols import ExpertsWeights
from vbrt.layers.weights.weight_encoding import Planes

__all__ = ["EncodedExperts", "ExpertsOnDemand", "MatricesOnDemand"]

#: bytes of dense weights that are encoded together, by the type of the device; scratch is about three times that
_STEP_BYTES = {"cpu": 16 << 20, "cuda": 128 << 20}


class MatricesOnDemand:
    """The matrices of a part [E, ...], each read when it is asked for: a slice of it stacks only those in the slice.

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
    """The joint planes of all experts of a layer, in their order, made as they are asked for; may be iterated again, as
    it is where pages turn out to need another order.

    Args:
        make: returns the joint planes of an expert.
    """

    def __init__(self, make: Callable[[int], Planes], experts: int) -> None:
        self._make, self._experts = make, experts

    def __iter__(self) -> Iterator[Planes]:
        """Yield planes."""
        return map(self._make, range(self._experts))


class EncodedExperts:
    """The joint planes of all experts of a layer, in their order, encoded as they are asked for; may be iterated again.

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
    """Return some matrices of a part, and zeros for experts beyond those that it has any of."""
    some = weight[step]
    missing = step.stop - step.start - len(some)
    return torch.cat([some, some.new_zeros(missing, *weight.shape[1:])]) if missing else some


class _Given(NamedTuple):
    """Weights of some experts, there once `arrived` has happened."""

    weights: dict[str, Tensor]
    arrived: torch.cuda.Event | None = None

    def take(self) -> dict[str, Tensor]:
        """Return the weights, for what the current stream does from now on."""
        if self.arrived is not None:
            for weight in self.weights.values():
                current = torch.cuda.current_stream(weight.device)
                current.wait_event(self.arrived)
                weight.record_stream(current)
        return self.weights


def _as_they_are(weights: dict[str, Tensor]) -> _Given:
    return _Given(weights)


def _has_to_move(handle: ExpertsWeights, weights: Mapping[str, Tensor | MatricesOnDemand]) -> bool:
    """True if the weights lie in host memory, in a form that can be copied to the GPU as it is."""
    return handle.device.type == "cuda" and all(
        weight.device.type == "cpu" and weight.is_contiguous() and weight.dtype is handle.spec.dtype
        for weight in weights.values()
    )


class _Uploads:
    """Copies weights to the GPU on the stream of its tier, beside what the GPU computes meanwhile."""

    def __init__(self, handle: ExpertsWeights) -> None:
        level = handle.stack.levels[0]
        self._stream, self._relay = level.stream, level.relay

    def __call__(self, weights: dict[str, Tensor]) -> _Given:
        """Start a copy. Returns when all of it has been given to the link."""
        device = self._stream.device
        with torch.cuda.stream(self._stream):  # their memory comes from this stream's pool: no kernel uses it any more
            there = {part: torch.empty(w.shape, dtype=w.dtype, device=device) for part, w in weights.items()}
        for part, weight in weights.items():
            self._copy(there[part], weight.detach())
        return _Given(there, self._stream.record_event())

    def _copy(self, target: Tensor, origin: Tensor) -> None:
        if origin.is_pinned():
            with torch.cuda.stream(self._stream):
                target.copy_(origin, non_blocking=True)
        else:
            self._relay.copy(target.view(-1).view(torch.uint8), origin.view(-1).view(torch.uint8), self._stream)
