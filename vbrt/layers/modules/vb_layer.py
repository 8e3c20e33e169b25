"""VBLayer: a module whose weight lives as planes in a tier stack.

Until its first forward the weight is dense, held by its handle; then it is encoded and the dense parameter is freed.
From `wrap` on the module has no such parameter, so optimizers do not see it. Reading `.weight` gives a temporary,
assigning it makes the layer dense with new values. `held.py` has the rest of nn.Module's protocol.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.fx import Proxy

from vbrt.errors import WrapError
from vbrt.kernels.observers import traced_call, unwatched
from vbrt.layers.modules.held import HeldLayer
from vbrt.layers.modules.training_warnings import warn_of_thawing, warn_of_training
from vbrt.layers.rebind_forward import rebind_
from vbrt.layers.weights.linear_product import linear_on_weight
from vbrt.layers.weights.state import Weight, weight_of
from vbrt.layers.weights.weight_shards import is_sharded, take_local_
from vbrt.libraries.torch_api import is_fake

__all__ = ["VBLayer"]


class VBLayer(HeldLayer):
    """Mixin of VB layers, in front of the swapped module's class.

    Attributes:
        handle: the weight, shared with layers that are tied to it.
    """

    _vb_handle: Weight
    _vb_page: torch.Tensor | None  # of planes that never move, see `Weight.show_to_graphs`
    _vb_form: str | None
    _vb_twin: int  # which of the parameters on one storage the layer had

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        name = type(self).__name__
        raise WrapError(f"{name}(): made of a module that has weights, by vbrt.wrap; expected no call of {name} itself")

    @classmethod
    def adopt_(cls, module: nn.Module, handle: Weight) -> "VBLayer":
        """Turn `module` into a VB layer in place; nothing is encoded yet."""
        take_local_(module, ("weight",))
        module.__class__ = cls
        rebind_(module, type(module))
        module.__dict__.update(_vb_handle=handle, _vb_twin=handle.adopt(module._parameters["weight"]))
        handle.tie(module)
        module._parameters["weight"] = None
        return module

    def release_(self, weight: nn.Parameter | None = None) -> nn.Module:
        """Restore the original module in place, with its dense weight, `weight`, or its decoded one."""
        self.notice_writes()
        self._parameters["weight"] = self._vb_handle.released_parameter(self._vb_twin, weight)
        self._become_plain()
        return self

    def thaw_(self, weight: nn.Parameter | None = None) -> nn.Module:
        """Leave the tiers with all tied layers: plain modules again, whose dense weight can train."""
        self.notice_writes()
        handle = self._vb_handle
        if handle.dense and weight is not None:
            handle.hold_dense(*[weight] * len(handle.dense))
        for layer in list(handle.layers):
            weight = layer.release_(weight)._parameters["weight"]
            weight.requires_grad_()
        return self

    def train_(self, weight: nn.Parameter) -> None:
        """Leave the tiers with `weight` as a trainable parameter."""
        warn_of_thawing([self._vb_handle])
        self.thaw_(weight)

    @property
    def dense(self) -> torch.Tensor | None:
        """The dense weight until it is encoded; None after that."""
        dense = self._vb_handle.dense
        return dense[self._vb_twin] if dense else None

    def materialize_(self) -> nn.Module:
        """Encode the weight, unless that is done, and drop the dense parameters of all layers tied to it.

        A weight given by functional_call stays.

        Raises:
            FormatError, TierError: the weight cannot be held; the layer stays as it was.
        """
        self.notice_writes()
        with unwatched(), self._vb_handle.stack.encoding:
            handle, dense = self._vb_handle, self.dense
            if dense is None:
                return self
            handle.encode(dense)
            del dense  # freed now unless another reference exists
        if self.training and handle.trainable and torch.is_grad_enabled():
            warn_of_training(stacklevel=4)
        return self

    # -- forward ------------------------------------------------------------------------------------------------------

    def _product(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x Wᵀ + bias, by the product of the weight's state. A dense, lent, tied or given weight is settled first."""
        handle = self._vb_handle
        product = handle.product
        if product is not None and type(x) is torch.Tensor and self._parameters["weight"] is None:
            return product(handle, x, bias)
        del handle  # pages of a weight that was written to make room for the new ones
        if isinstance(x, Proxy):
            return traced_call(self, x)
        given = self._settled_or_given()
        handle = self._vb_handle
        if given is not None:
            return linear_on_weight(handle.spec, x, given, bias)
        return handle.held.product(handle, x, bias)

    def _settled_or_given(self) -> torch.Tensor | None:
        """Return the given weight, if there is one; else encode the weight, with writes to its temporary, and return
        None.

        A weight given to one of several tied layers counts for all, as functional_call does if it can see the tie. So
        does a fake tensor.
        """
        if self._vb_handle.lent is not None:
            self.notice_writes()
        handle = self._vb_handle
        for holder in (self, *handle.layers) if handle.tied else (self,):
            weight = holder._parameters["weight"]
            if weight is not None:
                return weight
        if handle.dense:
            if is_fake(handle.dense[0]):
                return handle.dense[0]
            self.materialize_()
        self._vb_handle.choose_product()
        return None

    # -- the weight ---------------------------------------------------------------------------------------------------

    @property
    def weight(self) -> torch.Tensor:
        """Temporary of the weight, in the original shape and dtype; see `HeldLayer._read`."""
        return self._read("weight")

    def _held(self) -> Mapping[str, int]:
        return {"weight": self._vb_twin}

    def _takes_the_place(self, name: str) -> bool:
        return name.startswith("weight_")  # a linear layer has no parameter of its own with such a name

    def _by_operator(self, name: str) -> torch.Tensor:
        handle = self._vb_handle
        rows, columns = handle.spec.weight_shape
        return torch.ops.vbrt.weight(handle.token, rows, columns, handle.dtype, handle.device_name)

    def _assign(self, name: str, value: torch.Tensor) -> None:
        if is_sharded(value) and "_vb_shardings" not in self.__dict__:
            raise WrapError(
                f"{self._vb_handle.name}: its weight would be spread over ranks; a parallel plan comes before "
                "vbrt.wrap, and fully_shard (FSDP2), which comes after it, spreads what is not in the tiers"
            )
        shared = weight_of(value)
        if shared is not None and shared.can_tie(self._vb_handle):
            self._join(shared)
            return
        self._vb_handle.spec.check(value)
        weight = value if isinstance(value, nn.Parameter) else nn.Parameter(value.detach(), requires_grad=False)
        self._vb_handle.pass_on([self], weight)

    def _join(self, handle: Weight) -> None:
        """Tie this layer to the layers of another weight."""
        if handle is self._vb_handle:
            return
        with handle.stack.encoding:
            self.forget_given_()
            self._vb_handle.untie(self)
            self.__dict__.update(_vb_handle=handle, _vb_twin=next(iter(handle.layers))._vb_twin)
            handle.tie(self)

    def _take_loaded(self, values: Mapping[str, torch.Tensor], *, assign: bool) -> None:
        weight, trainable = values["weight"], self._vb_handle.trainable
        if assign:
            is_parameter = isinstance(weight, nn.Parameter)
            self.weight = weight.requires_grad_(trainable) if is_parameter else nn.Parameter(weight, trainable)
        else:
            self.notice_writes()
            self._vb_handle.load(weight)

    def __delattr__(self, name: str) -> None:
        if name == "bias":
            raise self._not_to_be_replaced(name)
        super().__delattr__(name)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """As in nn.Module; see `HeldLayer`. Raises WrapError for a parametrization of the weight or bias."""
        if name == "bias_orig":
            raise self._not_to_be_replaced("bias")
        super().register_parameter(name, param)

    def __getstate__(self) -> dict:
        """State without views into pages of this process; a copy's handle creates its own."""
        return {**super().__getstate__(), "_vb_page": None, "_vb_form": None}
