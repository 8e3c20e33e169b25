"""VBExperts: a module of routed experts whose matrices live as planes in a tier stack, a page for each expert.

The class is a mixin in front of the module's own, which stays what it is for everybody who asks: its forward runs
wherever pages cannot (a tracer is at work, somebody has put other weights in their place), on decoded temporaries.
"""

import functools
import inspect
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.compiler import is_compiling

from vbrt.errors import WrapError
from vbrt.kernels.recorded import recorder
from vbrt.kernels.watched import is_bare
from vbrt.layers.bound import rebind_
from vbrt.layers.experts.compute import plain_forward
from vbrt.layers.experts.gradients import forward_experts
from vbrt.layers.experts.handle import ExpertsHandle
from vbrt.layers.experts.lending import lend, temporary_of
from vbrt.layers.experts.shells import ExpertsShell
from vbrt.layers.shards import as_whole, local_of, take_local_

__all__ = ["VBExperts", "encoded_forward", "experts_class"]


def encoded_forward(layer: "VBExperts", *args: Any) -> torch.Tensor:
    """The output of a layer whose weights are pages; for a step that is being recorded the call is one piece."""
    if is_bare(args[0]):
        return forward_experts(layer, *args)
    step = recorder()
    return plain_forward(layer, *args) if step is None else step.leaf(encoded_forward, layer, *args)


class VBExperts(ExpertsShell):
    """Common part of swapped modules of routed experts."""

    @classmethod
    def adopt_(cls, module: nn.Module, handle: ExpertsHandle) -> "VBExperts":
        """Turn `module` into a VB layer in place; nothing is encoded yet."""
        parameters = handle.spec.parameters
        take_local_(module, parameters)
        module.__class__ = experts_class(cls, type(module), parameters)
        rebind_(module, type(module))
        module.__dict__["_vb_handle"] = handle
        handle.trainable = module._parameters[parameters[0]].requires_grad
        handle.layers.add(module)
        module._own_held()
        return module

    # -- forward ------------------------------------------------------------------------------------------------------

    def _vb_forward(self, *args: Any) -> torch.Tensor:
        """The module's output, by its pages unless somebody has put other weights in their place."""
        if is_compiling():
            return torch.ops.vbrt.experts(*args, self._vb_handle.token)
        self.notice_writes()
        if not self.materialized:
            if self._given():
                return plain_forward(self, *args)
            self.materialize_()
            if not isinstance(self, VBExperts):  # somebody has asked the shell to train
                return self(*args)
        return encoded_forward(self, *args)

    # -- the weights, as everybody else sees them ---------------------------------------------------------------------

    def _weight(self, name: str) -> torch.Tensor:
        """A dense parameter of a shell; after that a decoded temporary in the original shape and dtype."""
        self.notice_writes()
        dense = self._parameters[name]
        if dense is not None:
            return dense
        if is_compiling():
            handle = self._vb_handle
            site = handle.spec.site_of(name)
            return torch.ops.vbrt.expert_weight(
                handle.token, name, list(site.kept_shape), handle.dtype, handle.device_name
            )
        return lend(self._vb_handle, name)

    def __setattr__(self, name: str, value: Any) -> None:
        handle = self.__dict__.get("_vb_handle")
        if handle is None or name not in handle.spec.parameters:
            super().__setattr__(name, value)
        elif not isinstance(value, torch.Tensor):
            raise TypeError(f"{handle.spec.name}.{name}: expected a tensor, got {type(value).__name__}")
        elif value is not temporary_of(handle, name):
            is_parameter = isinstance(value, nn.Parameter)
            weight = value if is_parameter else nn.Parameter(value.detach(), requires_grad=False)
            self.become_shell_({name: weight}, alone=True)

    def __delattr__(self, name: str) -> None:
        spec = self._vb_handle.spec
        if name not in spec.parameters:
            super().__delattr__(name)
            return
        if self.materialized:
            spec.refuse(name, "removing it")
        warnings.warn(f"{spec.name}: left the tiers: its {name} was removed", stacklevel=2)
        self._become_plain()
        nn.Module.__delattr__(self, name)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """As in nn.Module; for a weight the same as assigning it.

        Raises WrapError for what would compute a weight of another parameter: the layer is as it was.
        """
        handle = self.__dict__.get("_vb_handle")
        if handle is not None and param is not None and name in handle.spec.parameters:
            self.become_shell_({name: param}, alone=True)
            return
        if (
            handle is not None
            and name.endswith(("_orig", "_g", "_v"))
            and name.rpartition("_")[0] in handle.spec.parameters
        ):
            raise WrapError(
                f"{handle.spec.name}: {name} cannot take the place of its weights (pruning and weight_norm do that): "
                "apply them before wrapping, or unwrap() first"
            )
        super().register_parameter(name, param)

    # -- nn.Module's walks --------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict:
        self.notice_writes()
        return {name: value for name, value in super().__getstate__().items() if name != "_vb_gate"}

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        self._vb_handle.layers.add(self)
        self._own_held()

    def __reduce_ex__(self, protocol: int):
        return (
            _new_layer,
            (type(self).__base__, type(self).plain_class(), self._vb_handle.spec.parameters),
            self.__getstate__(),
        )

    def _apply(self, fn, recurse: bool = True):
        """Casts show in what the layer computes and decodes; pages stay where the tiers have put them."""
        handle = self._vb_handle
        dense = {name: self._parameters[name] for name in handle.spec.parameters}
        held = [p for p in dense.values() if p is not None]
        if held and held[0].is_meta:  # to_empty() gives it memory
            super()._apply(fn, recurse)
            self._own_held()
            handle.retype(self._parameters[handle.spec.parameters[0]].dtype)
            return self
        self._parameters.update(dict.fromkeys(dense))
        try:
            super()._apply(fn, recurse)
            dtype = fn(torch.empty(0, dtype=held[0].dtype if held else handle.dtype, device="cpu")).dtype
        finally:
            self._parameters.update(dense)
        for parameter in held:
            if dtype != parameter.dtype:
                parameter.data = parameter.data.to(dtype)
        handle.retype(dtype)
        return self

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """As of the plain module, with the temporaries in the place of its weights; models that the layer is in list
        what is a parameter only, and so does `recurse=False`."""
        head, listed = f"{prefix}." if prefix else "", set()
        for name in self._vb_handle.spec.parameters if self.materialized and recurse else ():
            listed.add(head + name)
            yield head + name, getattr(self, name)  # of a plain module, if the first was asked to train
        for name, parameter in nn.Module.named_parameters(self, prefix, recurse, remove_duplicate):
            if name not in listed:
                yield name, parameter

    def _save_to_state_dict(self, destination, prefix: str, keep_vars: bool) -> None:
        self.notice_writes()
        if self.materialized:
            for name in self._vb_handle.spec.parameters:
                weight = self._weight(name) if keep_vars else self._vb_handle.weight(name)
                destination[prefix + name] = as_whole(self, name, weight)
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(
        self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
    ) -> None:
        materialized = self.materialized
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )
        if not materialized:
            return
        found, assign = {}, local_metadata.get("assign_to_params_buffers", False)
        for site in self._vb_handle.spec.sites:
            key = prefix + site.parameter
            if key in unexpected_keys:  # for want of a parameter to take it
                unexpected_keys.remove(key)
            weight = local_of(state_dict.get(key))
            if weight is None:
                if strict:
                    missing_keys.append(key)
            elif weight.shape != torch.Size(site.kept_shape):
                error_msgs.append(
                    f"size mismatch for {key}: copying a param with shape {weight.shape} from checkpoint, "
                    f"the shape in current model is {torch.Size(site.kept_shape)}."
                )  # nn.Module's words
            else:
                dtype = weight.dtype if assign else self._vb_handle.dtype
                found[site.parameter] = nn.Parameter(weight.detach().to(dtype), requires_grad=False)
        if found:
            self._store_loaded(found)

    def _store_loaded(self, weights: Mapping[str, nn.Parameter]) -> None:
        """Encode loaded weights; the planes before them are retired first, to make room."""
        trainable = self._vb_handle.trainable
        self.become_shell_(weights)
        for weight in weights.values():
            weight.requires_grad_(trainable)
        with torch.no_grad():
            self.materialize_()


@functools.cache
def experts_class(base: type[VBExperts], plain: type[nn.Module], parameters: tuple[str, ...]) -> type[VBExperts]:
    """The class that takes the place of `plain`, whose weights have these names, made from `base`."""
    members: dict[str, Any] = {name: property(functools.partial(_read, name=name)) for name in parameters}

    @functools.wraps(plain.forward)
    def forward(self: VBExperts, *args: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs:
            args = _bound(plain, self, args, kwargs)
        return self._vb_forward(*args)

    members |= {
        "__module__": plain.__module__,
        "__doc__": f"{plain.__name__} with its experts in a tier stack. Made by `vbrt.wrap`, not by hand.",
        "forward": forward,
    }
    return type(f"VB{plain.__name__}", (base, plain), members)


def _read(self: VBExperts, name: str) -> torch.Tensor:
    return self._weight(name)


def _bound(plain: type, module: nn.Module, args: tuple, kwargs: Mapping[str, Any]) -> tuple:
    """The arguments in the order of the plain class's forward."""
    return inspect.signature(plain.forward).bind(module, *args, **kwargs).args[1:]


def _new_layer(base: type[VBExperts], plain: type[nn.Module], parameters: tuple[str, ...]) -> VBExperts:
    made = experts_class(base, plain, parameters)
    return made.__new__(made)
