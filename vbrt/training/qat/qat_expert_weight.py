"""TrainedExpertsWeight: weights of a module of routed experts in quantization-aware training.

A parameter's stacked matrices are rounded as one weight [E N, K], whose blocks never cross experts: one engine per
parameter, however many experts there are. Per-weight fields (nvfp4's tensor scale, a fitted codebook) are then shared
by all experts of a layer; a save repeats them in each expert's planes.

Legend: E experts, N rows of a matrix, K its columns.
"""

import copy
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from vbrt.formats import SeparationCounters, get_format
from vbrt.formats.page import PageLayout
from vbrt.layers.experts import ExpertsSpec
from vbrt.layers.weights.pickling import from_pickle, to_pickle
from vbrt.layers.weights.weight_encoding import Planes
from vbrt.training.qat.qat_weight import TrainedWeight

__all__ = ["TrainedExpertsWeight", "TrainedStack"]


class TrainedStack(TrainedWeight):
    """Stacked matrices of one part; its parameter is [E, N, K], or [E, K, N] in modules that transpose."""

    @classmethod
    def of(cls, spec: ExpertsSpec, part: str) -> "TrainedStack":
        """Return the stack of one part of a module's experts."""
        site = spec.sites[tuple(spec.parts).index(part)]
        rows, columns = site.shape
        return cls(replace(spec.parts[part], site=replace(site, shape=(rows * site.matrices, columns), matrices=1)))

    @property
    def weight(self) -> nn.Parameter:
        """The parameter, in the module's layout."""
        return next(iter(self.layers))._parameters[self.spec.site.parameter]

    def stacked(self, weight: Tensor, dtype: torch.dtype, *, training: bool) -> Tensor:
        """Return the rounded parameter in its own shape. Raises FormatError with its name."""
        return self._as_kept(self.rounded(weight, dtype, training=training), weight)

    def stacked_as_before(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the parameter as the last forward rounded it, in its own shape."""
        return self._as_kept(self.rounded_as_before(weight, dtype), weight)

    def _as_NK(self, weight: Tensor) -> Tensor:
        weight = weight.detach()
        return (weight.mT if self.spec.transposed else weight).flatten(0, 1)

    def _as_kept(self, w_NK: Tensor, weight: Tensor) -> Tensor:
        w_ENK = w_NK.view(len(weight), -1, w_NK.shape[1])
        return w_ENK.mT if self.spec.transposed else w_ENK

    def encoded_expert(self, expert: int) -> dict[str, Tensor]:
        """Return one expert's plane under the current scales, or new ones before the first forward."""
        weight = self.weight.detach()
        w_NK = self._as_NK(weight[expert : expert + 1]).contiguous()
        return self.separation.encode_rows(w_NK, expert * len(w_NK))


class TrainedExpertsWeight:
    """Weights of one module of routed experts in training.

    Attributes:
        parts: stack of each part.
        layers: the live module: one, or also copies in the making.
        forwards: including recomputed ones.
    """

    def __init__(self, spec: ExpertsSpec) -> None:
        self.spec, self.dtype, self.forwards = spec, spec.dtype, 0
        self.layers: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self.parts = {part: TrainedStack.of(spec, part) for part in spec.parts}
        self._share_layers()

    def _share_layers(self) -> None:
        for stack in self.parts.values():
            stack.layers = self.layers

    @property
    def stacks(self) -> dict[str, TrainedStack]:
        """Stacks by parameter name."""
        return dict(zip(self.spec.parameters, self.parts.values(), strict=True))

    @property
    def token(self) -> Tensor:
        """Token of the module's weights in compiled graphs."""
        return next(iter(self.parts.values())).token

    @property
    def separation(self) -> "_Engines | None":
        """Engines of all parts together; None for format "dense"."""
        return None if self.spec.dense else _Engines(self)

    @property
    def trainable(self) -> bool:
        """True if the parameters require grad."""
        return all(stack.trainable for stack in self.parts.values())

    def retype(self, dtype: torch.dtype) -> None:
        """Follow a cast of the module."""
        self.dtype, self.spec = dtype, self.spec.retyped(dtype)
        for stack in self.parts.values():
            stack.retype(dtype)

    def retire(self) -> None:
        """End training: no module holds the weights any more. Idempotent."""
        for stack in self.parts.values():
            stack.retire()

    # -- for saves ----------------------------------------------------------------------------------------------------

    def encoded_layouts(self, part: str, expert: int) -> list[PageLayout]:
        """Layouts of `encoded_matrix`."""
        one = self.spec.parts[part]
        shape = one.site.matrix_shape if one.dense else one.shape
        return [get_format(one.format).layout(shape, self.dtype)]

    @contextmanager
    def encoded_matrix(self, part: str, expert: int) -> Iterator[Planes]:
        """Yield one matrix's planes for inference, as the forward rounds it now."""
        stack, (layout,) = self.parts[part], self.encoded_layouts(part, expert)
        if self.spec.dense:
            yield [(layout, get_format(self.spec.format).encode(stack.weight.detach()[expert]))]
        else:
            yield [(layout, stack.encoded_expert(expert))]

    # -- copies -------------------------------------------------------------------------------------------------------

    def __deepcopy__(self, memo: dict) -> "TrainedExpertsWeight":
        clone = memo[id(self)] = TrainedExpertsWeight(self.spec)
        clone.dtype, clone.forwards = self.dtype, self.forwards
        clone.parts = {part: copy.deepcopy(stack, memo) for part, stack in self.parts.items()}
        clone._share_layers()
        return clone

    def __reduce__(self):
        states = {}
        for part, stack in self.parts.items():
            state = None if stack.separation is None else stack.separation.state(stack.weight)
            states[part] = None if state is None else to_pickle(state)
        return _restore, (self.spec, self.dtype, self.forwards, states)


class _Engines:
    """Statistics over the engines of a module's parts."""

    def __init__(self, handle: TrainedExpertsWeight) -> None:
        self._engines = [stack.separation for stack in handle.parts.values()]

    @property
    def counters(self) -> SeparationCounters:
        """Hits and refreshes of the part with the most, and the larger share of clipped weights."""
        counters = [engine.counters for engine in self._engines]
        return SeparationCounters(
            max(c.hits for c in counters), max(c.refreshes for c in counters), max(c.clipped_share for c in counters)
        )

    @property
    def nbytes(self) -> int:
        """Bytes kept between forwards."""
        return sum(engine.nbytes for engine in self._engines)


def _restore(spec: ExpertsSpec, dtype: torch.dtype, forwards: int, states: dict[str, Any]) -> TrainedExpertsWeight:
    handle = TrainedExpertsWeight(spec)
    handle.dtype, handle.forwards = dtype, forwards
    for part, state in states.items():
        if state is not None:
            stack = handle.parts[part]
            stack.separation.load(from_pickle(state), stack.spec.shape)
    return handle
