"""VBLayer: a module whose weight lives as planes in a tier stack.

Until its first forward it is a shell, whose handle still holds the dense parameter; then the weight is encoded and the
parameter is gone (`unencoded_layers.py`). The module has no such parameter from `wrap` on, so no optimizer takes it.
Reading `.weight` gives a temporary (`weight_view.py`), assigning it makes the layer a shell of the new weight.

In `_parameters` the weight's place is None. A tensor that somebody puts there, as functional_call does for a call, is
*given*: the layer computes with it as the plain layer would.
"""

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.compiler import is_compiling
from torch.fx import Proxy

from vbrt.errors import WrapError
from vbrt.kernels.decoded_weight import DecodedWeight
from vbrt.kernels.observers import traced_call
from vbrt.kernels.operator_trace import recorder
from vbrt.layers.modules.unencoded_layers import (
    become_shell,
    dense_shown,
    given_weight,
    join,
    load_weight,
    materialize,
    restore_entry,
    warn_of_thawing,
)
from vbrt.layers.rebind_forward import rebind_
from vbrt.layers.swapped_layer import SwappedLayer
from vbrt.layers.weights.linear_product import linear, linear_on_weight, short_linear
from vbrt.layers.weights.tying import can_tie, drop_dense, hold_dense, tie, twin_of
from vbrt.layers.weights.weight_handle import WeightHandle
from vbrt.layers.weights.weight_shards import as_whole, is_sharded, local_of, take_local_
from vbrt.layers.weights.weight_view import follow_retyping, handle_with, lend, notice_writes, released_parameter
from vbrt.libraries.torch_api import is_fake

__all__ = ["VBLayer"]


class VBLayer(SwappedLayer):
    """Common part of VB layers; a mixin in front of the class of the module that was swapped.

    Attributes:
        handle: the planes of the weight, shared with layers that are tied to it.
    """

    _vb_handle: WeightHandle
    _vb_page: torch.Tensor | None  # of planes that never move, see `show_to_graphs`
    _vb_form: str | None
    _vb_twin: int  # which of the parameters on one storage the layer had

    def __init__(self, *_args: Any, **_kwargs: Any) -> None:
        name = type(self).__name__
        raise WrapError(f"{name}(): made of a module that has weights, by vbrt.wrap; expected no call of {name} itself")

    @classmethod
    def adopt_(cls, module: nn.Module, handle: WeightHandle) -> "VBLayer":
        """Turn `module` into a VB layer in place; nothing is encoded yet."""
        take_local_(module, ("weight",))
        module.__class__ = cls
        rebind_(module, type(module))
        weight = module._parameters["weight"]
        handle.trainable = weight.requires_grad
        module.__dict__.update(_vb_handle=handle, _vb_twin=twin_of(handle, weight))
        tie(handle, module)
        module._parameters["weight"] = None
        return module

    def release_(self, weight: nn.Parameter | None = None) -> nn.Module:
        """Turn the layer back, in place, into the module it was, holding its dense weight, or `weight`, or its own
        decoded one."""
        self.notice_writes()
        self._parameters["weight"] = released_parameter(self._vb_handle, self._vb_twin, weight)
        self._become_plain()
        return self

    def thaw_(self, weight: nn.Parameter | None = None) -> nn.Module:
        """Leave the tiers, with all layers that are tied: plain modules again, whose dense weight can train."""
        self.notice_writes()
        handle = self._vb_handle
        if handle.dense and weight is not None:
            hold_dense(handle, *[weight] * len(handle.dense))
        for layer in list(handle.layers):
            weight = layer.release_(weight)._parameters["weight"]
            weight.requires_grad_()
        return self

    def train_(self, weight: nn.Parameter) -> None:
        """Leave the tiers, holding `weight`, because somebody wants it to train."""
        warn_of_thawing([self])
        self.thaw_(weight)

    @property
    def handle(self) -> WeightHandle:
        """The planes of the weight."""
        return self._vb_handle

    @property
    def materialized(self) -> bool:
        """True if the weight has been encoded and the dense parameter is gone."""
        return not self._vb_handle.dense

    @property
    def dense(self) -> torch.Tensor | None:
        """The dense weight of a shell; None once it is encoded."""
        dense = self._vb_handle.dense
        return dense[self._vb_twin] if dense else None

    def forget_dense_(self) -> None:
        """Hold no dense parameter: the pages have its values by now."""
        drop_dense(self._vb_handle)

    def forget_given_(self) -> None:
        """Take out what somebody has put in the weight's place."""
        self._parameters["weight"] = None

    def freeze_(self) -> None:
        """Give the weight back as one that does not train: nobody asks for its gradient."""
        handle = self._vb_handle
        if handle.trainable:
            handle.trainable = False
            for weight in handle.dense:
                weight.requires_grad_(False)
            if handle.spec.lossless:  # whose planes require grad where the weight does
                handle.forget_ready()

    def keep_given_(self) -> None:
        """Take a parameter that somebody has put in the weight's place for the layer's own."""
        weight = self._parameters["weight"]
        if isinstance(weight, nn.Parameter):
            self.weight = weight

    def materialize_(self) -> nn.Module:
        """Encode the weight now; see `shells.materialize`. Raises FormatError, TierError: the layer stays as it was."""
        return materialize(self)

    # -- forward ------------------------------------------------------------------------------------------------------

    def _product(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x Wᵀ + bias, by the planes unless somebody has put another weight in their place."""
        if type(x) is not torch.Tensor and isinstance(x, Proxy):
            return traced_call(self, x)
        handle = self._vb_handle
        if handle.short is not None and self._parameters["weight"] is None:
            y = short_linear(handle, x, bias)
            if y is not None:
                return y
        if handle.lent is not None:
            self.notice_writes()
            handle = self._vb_handle
        if handle.tied or handle.dense or self._parameters["weight"] is not None:
            given = given_weight(self)
            if given is not None:
                return linear_on_weight(handle.spec, x, given, bias)
            self.materialize_()
            handle = self._vb_handle
        return linear(handle, x, bias)

    # -- the weight, as everybody else sees it ------------------------------------------------------------------------

    @property
    def weight(self) -> torch.Tensor:
        """A temporary in the original shape and dtype: decoded, or in the memory of a shell's dense weight.

        While somebody holds the temporary, all layers on this weight give the same one, and writes to it count: the
        layers are shells of it then, until their next forward. A forward of the model that reads the weight of a shell
        has it encoded first, so that it computes with what later forwards do.
        """
        given = self._parameters["weight"]
        if given is not None:
            return given
        if is_compiling():
            return self._decoded_by_operator()
        self.notice_writes()
        self._note_read()
        if self._vb_handle.device.type == "cpu" and recorder() is not None and not self._vb_handle.dense:
            return self._decoded_by_operator()  # each replay decodes it: a temporary would be the tape's for good
        return lend(self._vb_handle, self._vb_twin)

    def _decoded_by_operator(self) -> torch.Tensor:
        """The weight as an operation of a graph, which holds none of it."""
        handle = self._vb_handle
        rows, columns = handle.spec.weight_shape
        return torch.ops.vbrt.weight(handle.token, rows, columns, handle.dtype, handle.device_name)

    def _note_read(self) -> None:
        """Encode a shell that a forward of the model reads; else note that it was read."""
        handle = self._vb_handle
        shells, dense = handle.stack.shells, self.dense
        if dense is None or is_fake(dense):
            return
        if shells.in_pass:
            self.materialize_()
        elif not dense.is_meta:  # of which there is nothing to encode
            shells.note(handle)

    def notice_writes(self) -> None:
        """Take over writes to the temporary of the weight that nothing has reported."""
        if self._vb_handle.lent is not None:
            notice_writes(self._vb_handle)

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "weight":
            super().__setattr__(name, value)
            return
        _check_whole(self, value)
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"{self._vb_handle.spec.name}.weight: expected a tensor, got {type(value).__name__}")
        shared = handle_with(value)
        if shared is not None and can_tie(shared, self._vb_handle):
            join(self, shared)
        elif isinstance(value, nn.Parameter):
            become_shell(self, value)
        else:
            become_shell(self, nn.Parameter(value.detach(), requires_grad=False))

    def __delattr__(self, name: str) -> None:
        if name == "bias":
            raise self._not_to_be_replaced(name)
        if name == "weight":
            self._vb_handle.spec.refuse("removing it")
        nn.Module.__delattr__(self, name)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """As in nn.Module; for `weight` the same as assigning it.

        Raises WrapError for what would compute the weight of another parameter: the layer is as it was.
        """
        if name == "bias_orig":
            raise self._not_to_be_replaced("bias")
        if name.startswith("weight_"):
            restore_entry(self)
            raise WrapError(
                f"{self._vb_handle.spec.name}: {name} cannot take the place of its weight (pruning, "
                "weight_norm and spectral_norm do that): apply them before wrapping, or unwrap() first"
            )
        if name == "weight" and param is not None and "_vb_handle" in self.__dict__:
            _check_whole(self, param)
            become_shell(self, param)
        else:
            super().register_parameter(name, param)

    # -- nn.Module's walks --------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict:
        """Without a view into a page of this process; the handle of a copy gives it its own."""
        self.notice_writes()
        return {**super().__getstate__(), "_vb_page": None, "_vb_form": None}

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        tie(self._vb_handle, self)

    def _apply(self, fn, recurse: bool = True):
        """Casts show in what the layer computes and decodes; pages stay where the tiers have put them."""
        handle = self._vb_handle
        if handle.dense and handle.dense[0].is_meta:  # to_empty() gives it memory
            with dense_shown(self):
                super()._apply(fn, recurse)
            handle.retype(handle.dense[0].dtype)
            return self
        super()._apply(fn, recurse)
        dtype = handle.dense[0].dtype if handle.dense else handle.dtype
        dtype = fn(torch.empty(0, dtype=dtype, device="cpu")).dtype
        follow_retyping(handle, dtype)
        handle.retype(dtype)
        return self

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """As of the plain layer, with the temporary in the place of its weight; models that the layer is in list what
        is a parameter only, and so does `recurse=False`, by which tools ask for what to place."""
        name = f"{prefix}.weight" if prefix else "weight"
        if self._parameters["weight"] is None and recurse:
            yield name, self.weight
        for other, parameter in nn.Module.named_parameters(self, prefix, recurse, remove_duplicate):
            if other != name or isinstance(self, VBLayer):
                yield other, parameter

    def _save_to_state_dict(self, destination, prefix: str, keep_vars: bool) -> None:
        self.notice_writes()
        if self._parameters["weight"] is None:
            weight = self.weight if keep_vars else self._stored()
            destination[prefix + "weight"] = as_whole(self, "weight", weight)
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _stored(self) -> torch.Tensor:
        """The weight for a state dict: as the pages hold it, or a shell's dense one in its own memory."""
        dense = self.dense
        if dense is None:
            return self._vb_handle.weight()
        return dense.clone() if type(dense) is DecodedWeight else dense.detach()  # the first is rounded in its place

    def _load_from_state_dict(
        self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
    ) -> None:
        key = prefix + "weight"
        if not self.materialized:
            with dense_shown(self):
                super()._load_from_state_dict(
                    state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
                )
            return
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )  # its hooks see the weight, and may change it
        if key in unexpected_keys:  # for want of a parameter to take it
            unexpected_keys.remove(key)
        weight = local_of(state_dict.get(key))
        if weight is None:
            if strict:
                missing_keys.append(key)
            return
        expected = torch.Size(self._vb_handle.spec.weight_shape)
        if weight.shape != expected:
            error_msgs.append(
                f"size mismatch for {key}: copying a param with shape {weight.shape} from checkpoint, "
                f"the shape in current model is {expected}."
            )  # nn.Module's words
            return
        if local_metadata.get("assign_to_params_buffers", False):
            trainable = self._vb_handle.trainable
            is_parameter = isinstance(weight, nn.Parameter)
            self.weight = weight.requires_grad_(trainable) if is_parameter else nn.Parameter(weight, trainable)
        else:
            load_weight(self, weight)


def _check_whole(layer: VBLayer, value: object) -> None:
    """Raise WrapError if a weight that ranks hold in parts takes the place of a whole one."""
    if is_sharded(value) and "_vb_shardings" not in layer.__dict__:
        raise WrapError(
            f"{layer._vb_handle.spec.name}: its weight would be spread over ranks; a parallel plan comes before "
            "vbrt.wrap, and fully_shard (FSDP2), which comes after it, spreads what is not in the tiers"
        )
