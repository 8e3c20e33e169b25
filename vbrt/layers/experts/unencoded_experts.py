"""Experts as shells: modules whose handle holds dense parameters, from there to planes and back."""

import warnings
from collections.abc import Mapping

import torch
from torch import nn

from vbrt.host.mapped_weights import page_out
from vbrt.kernels.decoded_weight import DecodedWeight
from vbrt.kernels.observers import unwatched
from vbrt.layers.experts.expert_views import follow_encoding, notice_writes, temporary_of
from vbrt.layers.experts.experts_handle import ExpertsHandle
from vbrt.layers.modules.unencoded_layers import warn_of_training
from vbrt.layers.swapped_layer import SwappedLayer
from vbrt.layers.weights.weight_view import plain_dense
from vbrt.residency.plan import format_bytes

__all__ = ["ExpertsShell"]


class ExpertsShell(SwappedLayer):
    """A module of routed experts whose weights may be dense: until its first forward, and after a write to them.

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
        return not self._vb_handle.dense

    def _given(self) -> bool:
        """True if somebody has put a weight of their own in a parameter's place, as functional_call does."""
        return any(self._parameters[name] is not None for name in self._vb_handle.spec.parameters)

    def keep_given_(self) -> None:
        """Take parameters that somebody has put in the place of the layer's own for its own."""
        held = {name: self._parameters[name] for name in self._vb_handle.spec.parameters}
        given = {name: weight for name, weight in held.items() if isinstance(weight, nn.Parameter)}
        if given:
            self.become_shell_(given)

    def forget_dense_(self) -> None:
        """Hold no dense parameters: the pages have their values by now."""
        self._vb_handle.drop_dense()

    def freeze_(self) -> None:
        """Give the weights back as ones that do not train: nobody asks for their gradients."""
        handle = self._vb_handle
        if handle.trainable:
            handle.trainable = False
            for weight in handle.dense.values():
                weight.requires_grad_(False)

    def become_shell_(self, weights: Mapping[str, torch.Tensor], *, alone: bool = False) -> ExpertsHandle:
        """Hold new dense weights until the next forward, with all layers that are tied, or `alone`; those that are
        not given are the decoded ones. Return their handle."""
        handle = self._vb_handle
        for name, weight in weights.items():
            handle.spec.check(name, weight)
        with handle.stack.encoding:
            dense = {name: self._dense_of(name, weights.get(name)) for name in handle.spec.parameters}
            heir = handle.empty_copy()
            heir.forwards, heir.weight_reads, heir.routing = handle.forwards, handle.weight_reads, handle.routing
            heir.trainable = handle.trainable
            heir.retype(next(iter(dense.values())).dtype)
            heir.hold_dense(dense)
            for layer in [self] if alone else list(handle.layers):
                layer._parameters.update(dict.fromkeys(dense))
                layer.__dict__["_vb_handle"] = heir
                handle.layers.discard(layer)
                heir.layers.add(layer)
            return heir

    def _dense_of(self, name: str, given: torch.Tensor | None) -> torch.Tensor:
        if given is not None:
            return given
        held = self._vb_handle.dense.get(name)
        if held is not None:
            return held
        lent = temporary_of(self._vb_handle, name)
        weight = lent.become_parameter() if lent is not None else nn.Parameter(self._vb_handle.weight(name))
        return weight.requires_grad_(self._vb_handle.trainable)

    def materialize_(self) -> nn.Module:
        """Encode the experts now, one after the other, unless that is done, and drop the dense parameters.

        Raises:
            FormatError, TierError: the weights cannot be held; the layer stays as it was.
        """
        self.notice_writes()
        handle = self._vb_handle
        with unwatched(), handle.stack.encoding:
            if self.materialized:
                return self
            dense = handle.dense
            weights = {name: plain_dense(weight).detach() for name, weight in dense.items()}
            versions = {name: 0 if weight.is_inference() else weight._version for name, weight in weights.items()}
            handle.store(handle.split({handle.spec.part_of(name): weight for name, weight in weights.items()}))
            handle.drop_dense()
            follow_encoding(handle, dense, versions)
            for weight in weights.values():
                page_out(weight)
        if self.training and handle.trainable and torch.is_grad_enabled():
            warn_of_training(stacklevel=4)
        return self

    def release_(self, weight: nn.Parameter | None = None) -> nn.Module:
        """Turn the layer back, in place, into the module it was, holding its weights, dense or decoded. `weight` counts
        where the call before was interrupted: it is the first parameter."""
        self.notice_writes()
        names, handle = self._vb_handle.spec.parameters, self._vb_handle
        made = None if handle.dense else weight
        dense = handle.released or {name: self._dense_of(name, made if name == names[0] else None) for name in names}
        handle.released = dense if len(handle.layers) > 1 else {}  # for the layers that are tied
        self._parameters.update((name, self._released(each)) for name, each in dense.items())
        self._become_plain()
        return self

    def _released(self, weight: torch.Tensor) -> nn.Parameter:
        """A weight as a parameter: a temporary that was written to becomes one."""
        if type(weight) is DecodedWeight:
            return weight.become_parameter().requires_grad_(self._vb_handle.trainable)
        return weight

    def thaw_(self, weights: Mapping[str, nn.Parameter] | None = None) -> nn.Module:
        """Leave the tiers: the plain module again, whose dense weights can train."""
        self.notice_writes()
        handle = self._vb_handle
        dense = {name: self._dense_of(name, (weights or {}).get(name)) for name in handle.spec.parameters}
        released = {name: self._released(weight) for name, weight in dense.items()}
        for layer in list(handle.layers):
            layer._parameters.update(released)
            layer._become_plain()
        for parameter in released.values():
            parameter.requires_grad_()
        handle.retire()
        return self

    def train_(self, weights: Mapping[str, nn.Parameter]) -> None:
        """Leave the tiers, holding `weights`, because somebody wants them to train."""
        spec = self._vb_handle.spec
        warnings.warn(
            f"requires_grad_(True): {spec.name} left the tiers to train: plain experts with "
            f"{format_bytes(spec.weight_bytes)} of dense weights, outside of all budgets",
            stacklevel=5,
        )
        self.thaw_(weights)

    def notice_writes(self) -> None:
        """Take over writes to the temporaries of the weights that nothing has reported."""
        handle = self._vb_handle
        if handle.lent or handle.written:
            notice_writes(handle)
