"""Experts as shells: modules that hold dense parameters, from there to planes and back."""

import warnings
import weakref
from collections.abc import Mapping

import torch
from torch import nn

from vbrt.host.mapped import page_out
from vbrt.kernels.watched import unwatched
from vbrt.layers.experts.handle import ExpertsHandle
from vbrt.layers.experts.lending import notice_writes, temporary_of
from vbrt.layers.shells import warn_of_training
from vbrt.layers.swapped import SwappedLayer
from vbrt.residency.plan import format_bytes

__all__ = ["ExpertsShell"]


class ExpertsShell(SwappedLayer):
    """A module of routed experts that may hold dense parameters: until its first forward, and after a write to them.

    Attributes:
        handle: the planes of the experts.
    """

    _vb_handle: ExpertsHandle

    @property
    def handle(self) -> ExpertsHandle:
        """The planes of the experts."""
        return self._vb_handle

    @property
    def materialized(self) -> bool:
        """True if the weights have been encoded and the dense parameters are gone."""
        return all(self._parameters[name] is None for name in self._vb_handle.spec.parameters)

    def _own_held(self) -> None:
        """Count the dense parameters that the module holds as the weights'."""
        held = {name: self._parameters[name] for name in self._vb_handle.spec.parameters}
        self._vb_handle.own = {name: weakref.ref(p) for name, p in held.items() if p is not None}

    def _given(self) -> bool:
        """True if somebody has put a weight of their own in a parameter's place, as functional_call does."""
        own = self._vb_handle.own
        held = ((name, self._parameters[name]) for name in self._vb_handle.spec.parameters)
        return any(p is not None and (name not in own or own[name]() is not p) for name, p in held)

    def keep_given_(self) -> None:
        """Take parameters that somebody has put in the place of the layer's own, as accelerate does, for its own."""
        if self._given():
            self.become_shell_(
                {
                    name: self._parameters[name]
                    for name in self._vb_handle.spec.parameters
                    if isinstance(self._parameters[name], nn.Parameter)
                }
            )

    def forget_dense_(self) -> None:
        """Hold no dense parameters: the pages have their values by now."""
        self._parameters.update(dict.fromkeys(self._vb_handle.spec.parameters))
        self._vb_handle.own = {}

    def become_shell_(self, weights: Mapping[str, nn.Parameter], *, alone: bool = False) -> None:
        """Hold new dense parameters until the next forward, with all layers that are tied, or `alone`; those that are
        not given are the decoded ones."""
        handle = self._vb_handle
        for name, weight in weights.items():
            handle.spec.check(name, weight)
        with handle.stack.encoding:
            dense = {name: self._dense_of(name, weights.get(name)) for name in handle.spec.parameters}
            heir = handle.empty_copy()
            heir.forwards, heir.weight_reads, heir.routing = handle.forwards, handle.weight_reads, handle.routing
            heir.trainable = handle.trainable
            heir.retype(next(iter(dense.values())).dtype)
            for layer in [self] if alone else list(handle.layers):
                layer._parameters.update(dense)
                layer.__dict__["_vb_handle"] = heir
                handle.layers.discard(layer)
                heir.layers.add(layer)
                layer._own_held()

    def _dense_of(self, name: str, given: nn.Parameter | None) -> nn.Parameter:
        if given is not None:
            return given
        held = self._parameters[name]
        if held is not None:
            return held
        lent = temporary_of(self._vb_handle, name)
        weight = lent.become_parameter() if lent is not None else nn.Parameter(self._vb_handle.weight(name))
        return weight.requires_grad_(self._vb_handle.trainable)

    def materialize_(self) -> nn.Module:
        """Encode the experts now, one after the other, unless that is done, and remove the dense parameters.

        Raises:
            FormatError, TierError: the weights cannot be held; the layer stays as it was.
        """
        self.notice_writes()
        handle = self._vb_handle
        with unwatched(), handle.stack.encoding:
            if self.materialized or self._given():
                return self
            weights = {name: self._dense_of(name, None) for name in handle.spec.parameters}
            if any(weight.requires_grad for weight in weights.values()) and not handle.trainable:  # asked for since
                return self.thaw_()
            trained = handle.trainable
            by_part = dict(zip(handle.spec.parts, weights.values(), strict=True))
            handle.store(handle.split({part: weight.detach() for part, weight in by_part.items()}))
            for layer in list(handle.layers):
                layer.forget_dense_()
            for weight in weights.values():
                page_out(weight)
        if self.training and trained and torch.is_grad_enabled():
            warn_of_training(stacklevel=4)
        return self

    def release_(self, weight: nn.Parameter | None = None) -> nn.Module:
        """Turn the layer back, in place, into the module it was, holding its weights, decoded. `weight` counts where
        the call before was interrupted: it is the first parameter."""
        self.notice_writes()
        names, handle = self._vb_handle.spec.parameters, self._vb_handle
        dense = handle.released or {name: self._dense_of(name, weight if name == names[0] else None) for name in names}
        handle.released = dense if len(handle.layers) > 1 else {}  # for the layers that are tied
        for parameter in dense.values():
            parameter.requires_grad_(handle.trainable)
        self._parameters.update(dense)
        self._become_plain()
        return self

    def thaw_(self, weights: Mapping[str, nn.Parameter] | None = None) -> nn.Module:
        """Leave the tiers: the plain module again, whose dense weights can train."""
        self.notice_writes()
        handle = self._vb_handle
        dense = {name: self._dense_of(name, (weights or {}).get(name)) for name in handle.spec.parameters}
        for layer in list(handle.layers):
            layer._parameters.update(dense)
            layer._become_plain()
        for parameter in dense.values():
            parameter.requires_grad_()
        handle.retire()
        return self

    def train_(self, weights: Mapping[str, nn.Parameter]) -> None:
        """Leave the tiers, holding `weights`, because somebody wants them to train."""
        spec = self._vb_handle.spec
        warnings.warn(
            f"requires_grad_(True) or a parametrization: {spec.name} left the tiers to train: plain experts with "
            f"{format_bytes(spec.weight_bytes)} of dense weights, outside of all budgets",
            stacklevel=5,
        )
        self.thaw_(weights)

    def notice_writes(self) -> None:
        """Take over writes to the temporaries of the weights that nothing has reported."""
        handle = self._vb_handle
        if handle.lent or handle.written:
            notice_writes(handle)
