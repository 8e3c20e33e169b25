"""VBLinear: an nn.Linear whose weight lives as planes in a tier stack.

A module is turned into a VB layer in place, by changing its class: hooks, attributes and every reference to it stay
valid. Until its first forward it is a shell that still holds the dense parameter; then the weight is encoded and the
parameter is gone. Reading `.weight` decodes a temporary, assigning it makes the layer a shell of the new weight.

The road not taken: replacing modules in their parents. It loses hooks, breaks lists and closures that hold the old
module, and must rebuild each subclass's attributes.
"""

import warnings
import weakref
from typing import Any

import torch
from torch import nn

from vbrt.nn.handle import WeightHandle

__all__ = ["VBLayer", "VBLinear"]


class VBLayer(nn.Module):
    """What VB layers share; a mixin in front of the class of the module that was swapped.

    Attributes:
        handle: the planes of the weight, shared with layers that are tied to it.
    """

    _vb_handle: WeightHandle
    _vb_trainable: bool

    @classmethod
    def adopt_(cls, module: nn.Module, handle: WeightHandle) -> "VBLayer":
        """Turn `module` into a VB layer in place; nothing is encoded yet."""
        weight = module._parameters["weight"]
        module.__class__ = cls
        module.__dict__["_vb_handle"] = handle
        handle.layer = weakref.ref(module)
        module.__dict__["_vb_trainable"] = weight.requires_grad
        return module

    def release_(self) -> nn.Module:
        """Turn the layer back, in place, into the module it was, holding its decoded weight."""
        if self.materialized:
            self._parameters["weight"] = nn.Parameter(self._dense_copy(), requires_grad=self._vb_trainable)
        for name in ("_vb_handle", "_vb_trainable"):
            del self.__dict__[name]
        self.__class__ = type(self).plain_class()
        return self

    @classmethod
    def plain_class(cls) -> type[nn.Module]:
        """The class of the module before it was swapped: the first one behind this mixin."""
        return next(c for c in cls.__mro__ if c is not VBLayer and not issubclass(c, VBLayer))

    @property
    def handle(self) -> WeightHandle:
        """The planes of the weight."""
        return self._vb_handle

    @property
    def materialized(self) -> bool:
        """Whether the weight has been encoded and the dense parameter is gone."""
        return self._parameters["weight"] is None

    def materialize_(self) -> "VBLayer":
        """Encode the weight now, unless a tied layer has done it, and drop the dense parameter.

        Raises:
            FormatError, TierError: the weight cannot be held; the layer stays as it was.
        """
        with self._vb_handle.stack.encoding:
            weight = self._parameters["weight"]
            if weight is None:
                return self
            if not self._vb_handle.keys:
                self._warn_of_training(weight)
                self._vb_handle.encode(weight)
            self._parameters["weight"] = None
        return self

    def _warn_of_training(self, weight: nn.Parameter) -> None:
        if self.training and weight.requires_grad and torch.is_grad_enabled():
            warnings.warn(f"{self._vb_handle.spec.name}: VB layers hold frozen planes; this weight no longer trains "
                          "(gradients still flow through it). Call model.eval(), or exclude the layer", stacklevel=5)

    def _dense_copy(self) -> torch.Tensor:
        weight = self._vb_handle.weight()
        return weight.clone() if weight._base is not None or self._vb_handle.spec.format == "dense" else weight

    # -- the weight, as everybody else sees it ------------------------------------------------------------------------

    @property
    def weight(self) -> torch.Tensor:
        """The dense parameter of a shell; after that a decoded temporary in the original shape and dtype."""
        dense = self._parameters["weight"]
        return self._vb_handle.weight() if dense is None else dense

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "weight":
            super().__setattr__(name, value)
            return
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"{self._vb_handle.spec.name}.weight: expected a tensor, got {type(value).__name__}")
        self._become_shell(value if isinstance(value, nn.Parameter) else nn.Parameter(value, requires_grad=False))

    def _become_shell(self, weight: nn.Parameter) -> None:
        """Hold a new dense weight until the next forward; layers that were tied to the old one keep theirs."""
        handle = self.__dict__["_vb_handle"] = self._vb_handle.empty_copy()
        handle.retype(weight.dtype)
        handle.layer = weakref.ref(self)
        self._parameters["weight"] = weight

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """As in nn.Module; for `weight` the same as assigning it."""
        if name == "weight" and param is not None and "_vb_handle" in self.__dict__:
            self._become_shell(param)
        else:
            super().register_parameter(name, param)

    # -- nn.Module's walks --------------------------------------------------------------------------------------------

    def _apply(self, fn, recurse: bool = True):
        """Casts show in what the layer computes and decodes; pages stay where the tiers have put them."""
        dense = self._parameters["weight"]
        self._parameters["weight"] = None
        try:
            super()._apply(fn, recurse)
            probe = torch.empty(0, dtype=self._vb_handle.dtype if dense is None else dense.dtype)
            dtype = fn(probe).dtype
        finally:
            self._parameters["weight"] = dense
        if dense is not None and dtype != dense.dtype:
            dense.data = dense.data.to(dtype)  # the same Parameter, so that tied layers see it
        self._vb_handle.retype(dtype)
        return self

    def _save_to_state_dict(self, destination, prefix: str, keep_vars: bool) -> None:
        if self.materialized:
            destination[prefix + "weight"] = self._dense_copy()
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys,
                              error_msgs) -> None:
        weight = state_dict.pop(prefix + "weight", None) if self.materialized else None
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys,
                                      error_msgs)
        if not self.materialized:
            return
        if weight is None:
            if strict:
                missing_keys.append(prefix + "weight")
            return
        expected = self._vb_handle.weight_shape
        if tuple(weight.shape) != expected:
            error_msgs.append(f"size mismatch for {prefix}weight: copying a param with shape {tuple(weight.shape)} from "
                              f"checkpoint, the shape in current model is {expected}.")
            return
        self._vb_handle.encode(weight.to(self._vb_handle.dtype))  # one dense weight at a time, gone after this line

    def reset_parameters(self) -> None:
        """A new random weight, as the original class draws it."""
        if self.materialized:
            handle = self._vb_handle
            self._become_shell(nn.Parameter(torch.empty(handle.weight_shape, dtype=handle.dtype)))
        super().reset_parameters()

    def extra_repr(self) -> str:
        """The original's, and how the weight is held."""
        spec = self._vb_handle.spec
        return f"{super().extra_repr()}, format={spec.format}{'+exact' if spec.fine else ''}"


class VBLinear(VBLayer, nn.Linear):
    """nn.Linear with its weight in a tier stack. Made by `vbrt.wrap`, not by hand."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """input [..., in_features] -> [..., out_features]; gradients flow to input and bias.

        Raises:
            TierError: a page cannot be read or verified, or does not fit beside what is in use.
            FormatError: (first forward) the weight cannot be encoded.
        """
        if torch.compiler.is_compiling():
            return _compiled_linear(self, input)
        if self._parameters["weight"] is not None:
            self.materialize_()
        return self._vb_handle.linear(input, self._parameters["bias"])


def _compiled_linear(layer: VBLayer, x: torch.Tensor) -> torch.Tensor:
    if torch.is_autocast_enabled(x.device.type):
        x = x.to(torch.get_autocast_dtype(x.device.type))
    return torch.ops.vbrt.linear(x, layer.bias, layer._vb_handle.id)
