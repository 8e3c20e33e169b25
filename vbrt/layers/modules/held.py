"""HeldLayer: nn.Module's protocol for a frozen layer whose parameters live in the tiers.

Casts, copies, state dicts, assignment, pruning and `named_parameters` are written here once, over the names of the
parameters and the state that holds them (`layers/weights/state.py`, `layers/experts/experts_handle.py`). Such a
parameter's entry is None. A tensor that is assigned there for a call, as by functional_call, is *given*: the layer
computes with it as the plain layer would, and never stores it.
"""

import contextlib
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.compiler import is_compiling

from vbrt.errors import WrapError
from vbrt.kernels.decoded_weight import DecodedWeight
from vbrt.kernels.operator_trace import recorder
from vbrt.layers.modules.weight_facts import WeightFacts, asks_for_facts
from vbrt.layers.swapped_layer import SwappedLayer
from vbrt.layers.weights.weight_shards import as_whole, local_of
from vbrt.libraries.torch_api import is_fake

__all__ = ["HeldLayer"]

_REPLACED = ("_orig", "_g", "_v")  # what pruning, spectral_norm and weight_norm keep the replaced parameter as


class HeldLayer(SwappedLayer):
    """Frozen layer. Subclasses define the parameters in the tiers, and how to assign new values.

    Attributes:
        handle: the state of the weights.
    """

    _vb_handle: Any

    # -- for subclasses -----------------------------------------------------------------------------------------------

    def _held(self) -> Mapping[str, Any]:
        """Parameters in the tiers: name -> key in the handle."""
        raise NotImplementedError

    def _by_operator(self, name: str) -> torch.Tensor:
        """Decoded parameter as the result of a graph operator: the graph holds no copy."""
        raise NotImplementedError

    def _assign(self, name: str, value: torch.Tensor) -> None:
        """Assign new values to a parameter: the layer is dense until its next forward."""
        raise NotImplementedError

    def _take_loaded(self, values: Mapping[str, torch.Tensor], *, assign: bool) -> None:
        """Load values from a state dict; with `assign` keep these tensors and their dtype."""
        raise NotImplementedError

    def _takes_the_place(self, name: str) -> bool:
        """True if a parameter of this name is what another tool computes one in the tiers from."""
        return name.endswith(_REPLACED) and name.rpartition("_")[0] in self._held()

    def materialize_(self) -> nn.Module:
        """Encode the weights now, unless that is done, and drop the dense parameters.

        Raises:
            FormatError, TierError: the weights cannot be held; the layer stays as it was.
        """
        raise NotImplementedError

    # -- state --------------------------------------------------------------------------------------------------------

    @property
    def handle(self) -> Any:
        """The state of the weights, shared with layers that are tied to them."""
        return self._vb_handle

    @property
    def materialized(self) -> bool:
        """True if the weights have been encoded and the dense parameters are gone."""
        return not self._vb_handle.dense

    def _is_given(self) -> bool:
        """True if a parameter is given: another tensor has its entry."""
        return any(self._parameters[name] is not None for name in self._held())

    def forget_given_(self) -> None:
        """Remove given tensors."""
        self._parameters.update(dict.fromkeys(self._held()))

    def keep_given_(self) -> None:
        """Adopt given parameters as the layer's own."""
        given = {name: self._parameters[name] for name in self._held()}
        for name, weight in given.items():
            if isinstance(weight, nn.Parameter):
                self._assign(name, weight)

    def forget_dense_(self) -> None:
        """Drop dense parameters: the pages have their values."""
        self._vb_handle.drop_dense()

    def freeze_(self) -> None:
        """Make `unwrap` return the weights frozen (requires_grad False)."""
        self._vb_handle.freeze()

    def notice_writes(self) -> None:
        """Take over unreported writes to the weights' temporaries."""
        self._vb_handle.notice_writes()

    # -- reading and assigning ----------------------------------------------------------------------------------------

    def _read(self, name: str) -> torch.Tensor | WeightFacts:
        """A temporary in the original shape and dtype: decoded, or in the memory of the dense parameter.

        While a reference to the temporary exists, all layers on this weight return the same one, and a write to it
        makes these layers dense until their next forward. If a forward of the model reads a weight that is not
        encoded yet, it is encoded first, so that this forward computes with the same values as later ones.

        Called by the parameter's property, whose reader gets only facts if it asks for no more: nothing is decoded.
        """
        given = self._parameters[name]
        if given is not None:
            return given
        if is_compiling():
            return self._by_operator(name)
        self.notice_writes()
        if asks_for_facts(sys._getframe(2), name):
            return self._facts(name)
        self._note_read()
        handle = self._vb_handle
        if handle.device.type == "cpu" and recorder() is not None and not handle.dense:
            return self._by_operator(name)  # each replay decodes it: a temporary would be the tape's for good
        return handle.lend(self._held()[name])

    def _facts(self, name: str) -> WeightFacts:
        handle = self._vb_handle
        holder = next(iter(handle.dense_parameters()), handle)
        return WeightFacts(holder.device, holder.dtype, handle.shape_of(self._held()[name]))

    def _note_read(self) -> None:
        """Encode dense parameters that a forward of the model reads; else note that they were read."""
        handle = self._vb_handle
        shells, dense = handle.stack.shells, handle.dense_parameters()
        if not dense or any(map(is_fake, dense)):
            return
        if shells.in_pass:
            self.materialize_()
        elif not any(weight.is_meta for weight in dense):  # of which there is nothing to encode
            shells.note(handle)

    def __setattr__(self, name: str, value: Any) -> None:
        if "_vb_handle" not in self.__dict__ or name not in self._held():
            super().__setattr__(name, value)
        elif isinstance(value, torch.Tensor):
            self._assign(name, value)
        else:
            raise TypeError(f"{self._vb_handle.name}.{name}: expected a tensor, got {type(value).__name__}")

    def __delattr__(self, name: str) -> None:
        held = self._held()
        if name in held:
            self._vb_handle.refuse_lent(held[name], "removing it")
        super().__delattr__(name)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """As in nn.Module; a parameter in the tiers is assigned.

        Raises WrapError for a parametrization by another parameter; the layer is unchanged then.
        """
        held = self._held() if "_vb_handle" in self.__dict__ else {}
        if param is not None and name in held:
            self._assign(name, param)
            return
        if held and self._takes_the_place(name):
            self._restore_entries(held)
            raise WrapError(
                f"{self._vb_handle.name}: {name} cannot take the place of its weight (pruning, weight_norm and "
                "spectral_norm do that): apply them before wrapping, or unwrap() first"
            )
        super().register_parameter(name, param)

    def _restore_entries(self, held: Mapping[str, Any]) -> None:
        """Undo `del layer._parameters[name]`."""
        missing = [name for name in held if name not in self._parameters]
        if missing:
            rest = dict(self._parameters)
            self._parameters.clear()
            self._parameters.update(dict.fromkeys(missing), **rest)

    # -- nn.Module's walks --------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict:
        self.notice_writes()
        return super().__getstate__()

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        self._vb_handle.tie(self)

    def _apply(self, fn, recurse: bool = True):
        """Apply casts to results and decoded weights; pages stay in their tiers."""
        handle = self._vb_handle
        first = next(iter(handle.dense_parameters()), None)
        if first is not None and first.is_meta:  # to_empty() gives it memory
            with self._dense_shown():
                super()._apply(fn, recurse)
            handle.retype(handle.dense_parameters()[0].dtype)
            return self
        super()._apply(fn, recurse)
        handle.cast(fn(torch.empty(0, dtype=handle.dtype if first is None else first.dtype, device="cpu")).dtype)
        return self

    @contextlib.contextmanager
    def _dense_shown(self) -> Iterator[None]:
        """Register the dense parameters on the module within a block, for nn.Module methods that fill or replace
        parameters; the layer adopts the result."""
        handle, held = self._vb_handle, self._held()
        shown = {name: handle.dense_parameter(key) for name, key in held.items()}
        self._parameters.update(shown)
        try:
            yield
        finally:
            found = {name: self._parameters[name] for name in held}
            self._parameters.update(dict.fromkeys(held))
            for name, weight in found.items():
                if weight is not None and weight is not shown[name] and self._vb_handle is handle:
                    handle.put_dense(held[name], weight)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """As of the plain layer, with temporaries for its weights. A model that contains the layer lists real
        parameters only, and so does `recurse=False`, which placement tools use."""
        head, listed = f"{prefix}." if prefix else "", set()
        for name in self._held() if recurse and not self._is_given() else ():
            listed.add(head + name)
            yield head + name, getattr(self, name)  # of a plain module, if the first was asked to train
        for name, parameter in nn.Module.named_parameters(self, prefix, recurse, remove_duplicate):
            if name not in listed:
                yield name, parameter

    def _save_to_state_dict(self, destination, prefix: str, keep_vars: bool) -> None:
        self.notice_writes()
        if not self._is_given():
            for name, key in self._held().items():
                weight = self._read(name) if keep_vars else self._stored(key)
                destination[prefix + name] = as_whole(self, name, weight)
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _stored(self, key: Any) -> torch.Tensor:
        """Parameter for a state dict: decoded from pages, or the dense one without a copy."""
        handle = self._vb_handle
        if not handle.dense:
            return handle.decoded(key)
        dense = handle.dense[key]
        return dense.clone() if type(dense) is DecodedWeight else dense.detach()  # the first is rounded in its place

    def _load_from_state_dict(
        self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
    ) -> None:
        arguments = (state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        if not self.materialized:
            with self._dense_shown():
                super()._load_from_state_dict(*arguments)
            return
        super()._load_from_state_dict(*arguments)  # its hooks see the weights, and may change them
        found: dict[str, torch.Tensor] = {}
        for name, held in self._held().items():
            key, expected = prefix + name, self._vb_handle.shape_of(held)
            if key in unexpected_keys:  # for want of a parameter to take it
                unexpected_keys.remove(key)
            weight = local_of(state_dict.get(key))
            if weight is None:
                if strict:
                    missing_keys.append(key)
            elif weight.shape != expected:
                error_msgs.append(
                    f"size mismatch for {key}: copying a param with shape {weight.shape} from checkpoint, "
                    f"the shape in current model is {expected}."
                )  # nn.Module's message
            else:
                found[name] = weight
        if found:
            self._take_loaded(found, assign=local_metadata.get("assign_to_params_buffers", False))
