"""TrainedWeight: one weight in quantization-aware training, with its engine and layers.

The weight stays the optimizer's parameter and does not move. Each forward rounds it under scales kept by
`TrainedSeparation`, and the backward pass rounds it again under the same scales.
"""

import itertools
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from vbrt.errors import FormatError, WrapError
from vbrt.formats import get_format
from vbrt.formats.fitted_codebook import identity
from vbrt.formats.page import PageLayout
from vbrt.layers.weights.pickling import from_pickle, to_pickle
from vbrt.layers.weights.weight_encoding import Planes
from vbrt.layers.weights.weight_spec import HandleSpec
from vbrt.training.qat.incremental_encoding import TrainedSeparation

__all__ = ["TrainedWeight", "live_weight"]

_ids = itertools.count()
_live: "weakref.WeakValueDictionary[int, TrainedWeight]" = weakref.WeakValueDictionary()


class TrainedWeight:
    """One weight in training; shared by all layers tied to it.

    Attributes:
        separation: the engine; None for format "dense".
        layers: live layers that hold the weight.
        forwards: of all layers, including recomputed ones.
    """

    def __init__(self, spec: HandleSpec) -> None:
        self.spec, self.dtype = spec, spec.dtype
        self.layers: weakref.WeakSet[nn.Module] = weakref.WeakSet()
        self.forwards = 0
        self.separation: TrainedSeparation | None = None
        if not spec.dense:
            self.separation = TrainedSeparation(get_format(spec.format), spec.levels, spec.refresh_every)
        self._name()

    def _name(self) -> None:
        """Set the name for compiled graphs; a tensor, not a constant, so that layers share one graph."""
        _notes.begin()
        self.id = next(_ids)
        self.token = torch.tensor(self.id, dtype=torch.int64, device="cpu")
        _live[self.id] = self

    @property
    def weight(self) -> nn.Parameter:
        """The parameter, in the module's orientation."""
        return next(iter(self.layers)).dense

    @property
    def trainable(self) -> bool:
        """True if the parameter requires grad."""
        return self.weight.requires_grad

    def retype(self, dtype: torch.dtype) -> None:
        """Follow a cast of the layers."""
        self.dtype, self.spec = dtype, self.spec.retyped(dtype)

    def empty_copy(self) -> "TrainedWeight":
        """Return a handle for another weight of the same layer, without engine state."""
        return type(self)(self.spec)

    def retire(self) -> None:
        """End training: no layer holds the weight any more. Idempotent."""
        _live.pop(self.id, None)
        if not _live:
            _notes.end()

    # -- rounding -----------------------------------------------------------------------------------------------------

    def rounded(self, weight: Tensor, dtype: torch.dtype, *, training: bool) -> Tensor:
        """Return the rounded weight [N, K] in `dtype`. Raises FormatError with the layer's name."""
        self.forwards += 1
        _notes.seen[id(weight)] = weight
        if weight.is_meta:
            raise FormatError(f"{self.spec.name}: its weight is on the meta device, without data; load it first")
        try:
            return self.separation.forward(weight, self._as_NK(weight), dtype, training=training)
        except FormatError as error:
            raise FormatError(
                f"{self.spec.name}: {error}; exclude the layer (weights.exclude), or go back to a state "
                "dict from before and a lower learning rate"
            ) from error

    def rounded_as_before(self, weight: Tensor, dtype: torch.dtype) -> Tensor:
        """Return the weight [N, K] in `dtype` as the last forward rounded it."""
        return self.separation.repeat(self._as_NK(weight), dtype)

    def _as_NK(self, weight: Tensor) -> Tensor:
        weight = weight.detach()
        return weight.t() if self.spec.transposed else weight

    def snapshot(self, weight: Tensor) -> tuple[Any, ...]:
        """Return a value that changes with the weight and with its scales."""
        return (*identity(weight), self.separation.generation)

    def check(self, weight: Tensor, snapshot: tuple[Any, ...]) -> None:
        """Raise WrapError if weight or scales have changed since a snapshot."""
        if self.snapshot(weight) != snapshot:
            raise WrapError(
                f"{self.spec.name}: its weight was changed or loaded anew between forward and backward (an "
                "optimizer step, load_state_dict, .to()); run the forward again"
            )

    # -- for saves ----------------------------------------------------------------------------------------------------

    def encoded_layouts(self) -> list[PageLayout]:
        """Layouts of `encoded`."""
        shape = tuple(self.weight.shape) if self.spec.dense else self.spec.shape
        return [get_format(self.spec.format).layout(shape, self.weight.dtype)]

    @contextmanager
    def encoded(self) -> Iterator[Planes]:
        """Yield the planes for inference, as the forward rounds now, without a refit."""
        weight = self.weight.detach()
        if self.separation is None:
            yield [(self.encoded_layouts()[0], get_format(self.spec.format).encode(weight))]
        else:
            yield [(self.encoded_layouts()[0], self.separation.encode(self._as_NK(weight).contiguous()))]

    # -- copies -------------------------------------------------------------------------------------------------------

    def __deepcopy__(self, memo: dict) -> "TrainedWeight":
        clone = memo[id(self)] = type(self)(self.spec)
        clone.dtype, clone.forwards = self.dtype, self.forwards
        if self.separation is not None:
            clone.separation = self.separation.copied(self.weight)
        return clone

    def __reduce__(self):
        state = None if self.separation is None else self.separation.state(self.weight)
        return _restore, (self.spec, self.dtype, self.forwards, None if state is None else to_pickle(state))


def live_weight(id: int) -> TrainedWeight | None:
    """Return the weight of a compiled graph's token, if a layer still trains it."""
    return _live.get(id)


class _StepNotes:
    """Bumps the version of trained parameters at each optimizer step.

    Fused optimizers, and those that write through `.data`, do not bump it. While weights are in training, a global hook
    does so for the parameters of any stepping optimizer that a forward has seen.
    """

    def __init__(self) -> None:
        self.seen: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()
        self._hook: Any = None

    def begin(self) -> None:
        """Register the hook, once."""
        if self._hook is None:
            self._hook = register_optimizer_step_post_hook(self._note)

    def end(self) -> None:
        """Remove the hook."""
        hook, self._hook = self._hook, None
        self.seen.clear()
        if hook is not None:
            hook.remove()

    def _note(self, optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
        for group in optimizer.param_groups if self.seen else ():
            for parameter in group["params"]:
                if self.seen.get(id(parameter)) is parameter:
                    torch.autograd.graph.increment_version(parameter)


_notes = _StepNotes()


def _restore(spec: HandleSpec, dtype: torch.dtype, forwards: int, state: Tensor | bytes | None) -> TrainedWeight:
    handle = TrainedWeight(spec)
    handle.dtype, handle.forwards = dtype, forwards
    if state is not None:
        handle.separation.load(from_pickle(state), spec.shape)
    return handle
