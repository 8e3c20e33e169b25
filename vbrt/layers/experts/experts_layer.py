"""VBExperts: a module of routed experts whose matrices live as planes in a tier stack, a page for each expert.

The class is a mixin in front of the module's own, which stays what it is for everybody who asks: its forward runs
wherever pages cannot (a tracer is at work, somebody has put other weights in their place), on decoded temporaries.
"""

import contextlib
import functools
import inspect
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.compiler import is_compiling

from vbrt.errors import WrapError
from vbrt.kernels.decoded_weight import DecodedWeight
from vbrt.kernels.observers import is_bare
from vbrt.kernels.operator_trace import recorder
from vbrt.layers.experts.expert_gradients import forward_experts
from vbrt.layers.experts.expert_views import dense_parameters, follow_retyping, lend, temporary_of
from vbrt.layers.experts.experts_handle import ExpertsHandle
from vbrt.layers.experts.run_experts import plain_forward
from vbrt.layers.experts.unencoded_experts import ExpertsShell
from vbrt.layers.rebind_forward import rebind_
from vbrt.layers.weights.weight_shards import as_whole, local_of, take_local_
from vbrt.libraries.torch_api import is_fake

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
        weights = {name: module._parameters[name] for name in parameters}
        handle.trainable = weights[parameters[0]].requires_grad
        handle.layers.add(module)
        handle.hold_dense(handle.dense or weights)
        module._parameters.update(dict.fromkeys(parameters))
        return module

    # -- forward ------------------------------------------------------------------------------------------------------

    def _vb_forward(self, *args: Any) -> torch.Tensor:
        """The module's output, by its pages unless somebody has put other weights in their place."""
        if is_compiling():
            return torch.ops.vbrt.experts(*args, self._vb_handle.token)
        self.notice_writes()
        if self._given():
            return plain_forward(self, *args)
        if not self.materialized:
            self.materialize_()
        return encoded_forward(self, *args)

    # -- the weights, as everybody else sees them ---------------------------------------------------------------------

    def _weight(self, name: str) -> torch.Tensor:
        """A temporary in the original shape and dtype: decoded, or in the memory of a shell's dense weight."""
        given = self._parameters[name]
        if given is not None:
            return given
        if is_compiling():
            handle = self._vb_handle
            site = handle.spec.site_of(name)
            return torch.ops.vbrt.expert_weight(
                handle.token, name, list(site.kept_shape), handle.dtype, handle.device_name
            )
        self.notice_writes()
        self._note_read()
        return lend(self._vb_handle, name)

    def _note_read(self) -> None:
        """Encode a shell that a forward of the model reads; else note that it was read."""
        handle = self._vb_handle
        shells, dense = handle.stack.shells, handle.dense.values()
        if not dense or any(map(is_fake, dense)):
            return
        if shells.in_pass:
            self.materialize_()
        elif not any(weight.is_meta for weight in dense):  # of which there is nothing to encode
            shells.note(handle)

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
        spec.refuse(name, "removing it")

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

    def __reduce_ex__(self, protocol: int):
        return (
            _new_layer,
            (type(self).__base__, type(self).plain_class(), self._vb_handle.spec.parameters),
            self.__getstate__(),
        )

    def _apply(self, fn, recurse: bool = True):
        """Casts show in what the layer computes and decodes; pages stay where the tiers have put them."""
        handle = self._vb_handle
        first = next(iter(handle.dense.values()), None)
        if first is not None and first.is_meta:  # to_empty() gives it memory
            with self._dense_shown():
                super()._apply(fn, recurse)
            handle.retype(next(iter(handle.dense.values())).dtype)
            return self
        super()._apply(fn, recurse)
        dtype = fn(torch.empty(0, dtype=handle.dtype if first is None else first.dtype, device="cpu")).dtype
        follow_retyping(handle, dtype)
        handle.retype(dtype)
        return self

    @contextlib.contextmanager
    def _dense_shown(self) -> Iterator[None]:
        """Have a shell's dense parameters stand among the module's for a block, for walks of nn.Module that fill or
        replace them; what then stands there is the layer's."""
        handle = self._vb_handle
        shown = dense_parameters(handle)
        self._parameters.update(shown)
        try:
            yield
        finally:
            held = {name: self._parameters[name] for name in shown}
            self._parameters.update(dict.fromkeys(shown))
            if self._vb_handle is handle:
                handle.dense |= {name: weight for name, weight in held.items() if weight is not shown[name]}

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """As of the plain module, with the temporaries in the place of its weights; models that the layer is in list
        what is a parameter only, and so does `recurse=False`."""
        head, listed = f"{prefix}." if prefix else "", set()
        for name in self._vb_handle.spec.parameters if recurse and not self._given() else ():
            listed.add(head + name)
            yield head + name, getattr(self, name)  # of a plain module, if the first was asked to train
        for name, parameter in nn.Module.named_parameters(self, prefix, recurse, remove_duplicate):
            if name not in listed:
                yield name, parameter

    def _save_to_state_dict(self, destination, prefix: str, keep_vars: bool) -> None:
        self.notice_writes()
        if not self._given():
            for name in self._vb_handle.spec.parameters:
                weight = VBExperts._weight(self, name) if keep_vars else self._stored(name)
                destination[prefix + name] = as_whole(self, name, weight)
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _stored(self, name: str) -> torch.Tensor:
        """A parameter for a state dict: as the pages hold it, or a shell's dense one in its own memory."""
        dense = self._vb_handle.dense.get(name)
        if dense is None:
            return self._vb_handle.weight(name)
        return dense.clone() if type(dense) is DecodedWeight else dense.detach()  # the first is rounded in its place

    def _load_from_state_dict(
        self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
    ) -> None:
        arguments = (state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        if not self.materialized:
            with self._dense_shown():
                super()._load_from_state_dict(*arguments)
            return
        super()._load_from_state_dict(*arguments)
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
