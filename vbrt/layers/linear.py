"""VBLinear: an nn.Linear whose weight lives as planes in a tier stack.

A module is turned into a VB layer in place, by changing its class: hooks, attributes and every reference to it stay
valid. Until its first forward it is a shell that still holds the dense parameter; then the weight is encoded and the
parameter is gone. Reading `.weight` decodes a temporary, assigning it makes the layer a shell of the new weight.

The road not taken: replacing modules in their parents. It loses hooks, breaks lists and closures that hold the old
module, and must rebuild each subclass's attributes.
"""

import functools
import math
import types
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import is_fake
from torch.compiler import is_compiling, is_dynamo_compiling
from torch.fx import Proxy

from vbrt.errors import WrapError
from vbrt.formats.separation import identity
from vbrt.host.mapped import page_out
from vbrt.kernels.reference import wants_grad
from vbrt.kernels.watched import dispatch_modes, is_tracing, unwatched
from vbrt.layers.compute import linear, linear_on_weight
from vbrt.layers.graphs import GraphForm, graph_planes
from vbrt.layers.lending import handle_with, is_lent, lend, lend_again, look, released_parameter, show_stored
from vbrt.layers.product import as_autocast
from vbrt.layers.ties import (
    adopt,
    can_tie,
    detach_moved,
    holds,
    holds_values,
    own_weight,
    owns,
    pass_on,
    tie,
    twin_of,
    untie,
)
from vbrt.layers.weight import WeightHandle

__all__ = ["SwappedLayer", "VBLayer", "VBLinear", "shed"]

_FEW_TOKENS = 16  # on every GPU and for every dtype this many go to the fused kernel


class SwappedLayer(nn.Module):
    """A module that was turned into another class in place, and can be turned back; a mixin in front of its class."""

    _vb_handle: Any

    @classmethod
    def plain_class(cls) -> type[nn.Module]:
        """The class of the module before it was swapped: the first one behind this mixin."""
        return next(c for c in cls.__mro__ if not issubclass(c, SwappedLayer))

    def _become_plain(self) -> None:
        plain = type(self).plain_class()
        for name, value in list(self.__dict__.items()):
            if isinstance(value, types.MethodType) and value.__self__ is self:  # accelerate's hooks keep `forward` so
                self.__dict__[name] = types.MethodType(getattr(plain, value.__name__), self)
        self.__class__ = plain
        shed(self)

    def _not_to_be_replaced(self, name: str) -> WrapError:
        return WrapError(
            f"{self._vb_handle.spec.name}.{name} cannot be removed or computed from something else (as by "
            "prune, weight_norm, spectral_norm and parametrizations): apply them before wrapping, or "
            "unwrap() first"
        )

    def __prepare_scriptable__(self) -> None:  # torch.jit.script asks here for what it is to compile instead
        name = self._vb_handle.spec.name
        raise WrapError(
            f"{name}: torch.jit.script cannot compile a {type(self).__name__}; use torch.jit.trace or "
            "torch.compile, or script the model after unwrap()"
        )


def shed(module: nn.Module) -> None:
    """Take from a module that is plain again what it had as a swapped one. Twice is fine."""
    handle = module.__dict__.get("_vb_handle")
    if handle is not None:
        handle.layers.discard(module)
    for name in [name for name in module.__dict__ if name.startswith("_vb_")]:
        module.__dict__.pop(name, None)


class VBLayer(SwappedLayer):
    """What VB layers share; a mixin in front of the class of the module that was swapped.

    Attributes:
        handle: the planes of the weight, shared with layers that are tied to it.
    """

    _vb_handle: WeightHandle
    _vb_page: torch.Tensor | None  # of planes that never move, see `show_to_graphs`
    _vb_form: str | None
    _vb_twin: int  # which of the parameters on one storage the layer had

    @classmethod
    def adopt_(cls, module: nn.Module, handle: WeightHandle) -> "VBLayer":
        """Turn `module` into a VB layer in place; nothing is encoded yet."""
        module.__class__ = cls
        module.__dict__["_vb_handle"] = handle
        handle.trainable = module._parameters["weight"].requires_grad
        tie(handle, module)
        module.__dict__["_vb_twin"] = twin_of(handle, module._parameters["weight"])
        return module

    def release_(self, weight: nn.Parameter | None = None) -> nn.Module:
        """Turn the layer back, in place, into the module it was, holding `weight`, or its own decoded one."""
        self.look()
        handle = self._vb_handle
        if self.materialized:
            self._parameters["weight"] = released_parameter(handle, self._vb_twin, weight)
        elif is_lent(handle, self._parameters["weight"]):
            self._parameters["weight"].requires_grad_(handle.trainable)
        self._become_plain()
        return self

    def thaw_(self, weight: nn.Parameter | None = None) -> nn.Module:
        """Leave the tiers, with all layers that are tied: plain modules again, whose dense weight can train."""
        self.look()
        layers = list(self._vb_handle.layers)
        for layer in layers:
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
        """Whether the weight has been encoded and the dense parameter is gone."""
        return self._parameters["weight"] is None

    def keep_given_(self) -> None:
        """Take a parameter that somebody has put in the place of the layer's own, as accelerate does, for its own."""
        weight = self._parameters["weight"]
        if isinstance(weight, nn.Parameter) and not owns(self._vb_handle, weight):
            self.weight = weight

    def materialize_(self) -> "VBLayer":
        """Encode the weight now, unless that is done, and drop the dense parameter of all layers that are tied to it.

        Nothing is encoded of a weight that is not the layer's own, as functional_call puts in its place.

        Raises:
            FormatError, TierError: the weight cannot be held; the layer stays as it was.
        """
        self.look()
        with unwatched(), self._vb_handle.stack.encoding:
            handle, weight = self._vb_handle, self._parameters["weight"]
            if weight is None or not owns(handle, weight):
                return self
            if weight.requires_grad and (is_lent(handle, weight) or not handle.trainable):  # since it was put there
                return self.thaw_()
            detach_moved(handle, weight)
            version = 0 if weight.is_inference() else weight._version
            if not holds(handle, weight):
                handle.store(handle.split(weight))
                handle.source = identity(weight)
            self._hold(None)
            page_out(weight)
            trained = weight.requires_grad
            del weight  # unless somebody else holds it, it goes now
            lend_again(handle, version)
        if self.training and trained and torch.is_grad_enabled():
            warn_of_training(stacklevel=4)
        return self

    def _hold(self, dense: nn.Parameter | None) -> None:
        """A dense parameter for all layers that are tied to the handle, or none."""
        handle = self._vb_handle
        for layer in list(handle.layers):
            old = layer._parameters["weight"]
            if dense is None and old is not None and not is_lent(handle, old):
                handle.trainable = old.requires_grad
            layer._parameters["weight"] = dense
        if dense is not None:
            adopt(self._vb_handle, dense)

    # -- forward ------------------------------------------------------------------------------------------------------

    def _product(self, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """x Wᵀ + bias, by the planes unless somebody has put another weight in their place."""
        if type(x) is not torch.Tensor and isinstance(x, Proxy):
            return leaf(self, x)
        if self._vb_handle.lent is not None:
            self.look()
        handle = self._vb_handle
        if handle.tied or self._parameters["weight"] is not None:
            given = self._given()
            if given is not None:
                return linear_on_weight(handle.spec, x, given, bias)
            self.materialize_()
            if not isinstance(self, VBLayer):  # somebody has asked the shell to train
                return linear_on_weight(handle.spec, x, self._parameters["weight"], bias)
            handle = self._vb_handle
        return linear(handle, x, bias)

    def _given(self) -> torch.Tensor | None:
        """A weight that is not the layer's own and stands where the parameter would: functional_call puts it there.

        It is computed with as by the plain layer, and never stored. To one of several tied layers it is given to all,
        as functional_call does where it can see the tie.
        """
        handle = self._vb_handle
        for layer in (self, *handle.layers) if handle.tied else (self,):
            weight = layer._parameters["weight"]
            if weight is not None and (not owns(handle, weight) or is_fake(weight)):
                return weight
        return None

    # -- the weight, as everybody else sees it ------------------------------------------------------------------------

    @property
    def weight(self) -> torch.Tensor:
        """The dense parameter of a shell; after that a decoded temporary in the original shape and dtype.

        While somebody holds the temporary, all layers on this weight give the same one, and writes to it count: the
        layers are shells of it then, until their next forward.
        """
        self.look()
        handle, dense = self._vb_handle, self._parameters["weight"]
        if dense is not None:
            return dense
        if is_compiling():
            rows, columns = handle.spec.weight_shape
            return torch.ops.vbrt.weight(handle.token, rows, columns, handle.dtype, handle.device_name)
        return lend(handle)

    def look(self) -> None:
        """See whether the temporary of the weight was written to in a way that nothing has told of."""
        if self._vb_handle.lent is not None:
            look(self._vb_handle)

    def __setattr__(self, name: str, value: Any) -> None:
        if name != "weight":
            super().__setattr__(name, value)
            return
        if not isinstance(value, torch.Tensor):
            raise TypeError(f"{self._vb_handle.spec.name}.weight: expected a tensor, got {type(value).__name__}")
        shared = handle_with(value)
        if shared is not None and can_tie(shared, self._vb_handle):
            self._join(shared)
        elif isinstance(value, nn.Parameter):
            self._become_shell(value)
        else:
            self._become_shell(nn.Parameter(value.detach(), requires_grad=False))

    def _join(self, handle: WeightHandle) -> None:
        """Be tied to the layers of another handle."""
        if handle is self._vb_handle:
            return
        with handle.stack.encoding:
            self._parameters["weight"] = next(iter(handle.layers))._parameters["weight"]
            untie(self._vb_handle, self)
            self.__dict__.update(_vb_handle=handle, _vb_twin=next(iter(handle.layers))._vb_twin)
            tie(handle, self)

    def __delattr__(self, name: str) -> None:
        if name == "bias":
            raise self._not_to_be_replaced(name)
        if name == "weight" and self.materialized:
            self._vb_handle.spec.refuse("removing it")
        if name == "weight":  # nothing is encoded yet: a parametrization takes the parameter over
            warn_of_thawing([self])
            self._become_plain()
        nn.Module.__delattr__(self, name)

    def _empty_weight(self) -> nn.Parameter:
        """A dense parameter to draw a new weight into."""
        handle = self._vb_handle
        return nn.Parameter(torch.empty(handle.spec.weight_shape, dtype=handle.dtype, device=handle.stack.device))

    def _become_shell(self, weight: nn.Parameter) -> None:
        """Hold a new dense weight until the next forward; layers that were tied to the old one keep theirs."""
        self._vb_handle.spec.check(weight)
        pass_on(self._vb_handle, [self], weight)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """As in nn.Module; for `weight` the same as assigning it.

        Raises WrapError for what would compute the weight of another parameter: the layer is as it was.
        """
        if name == "bias_orig":
            raise self._not_to_be_replaced("bias")
        if name.startswith("weight_"):
            self._take_back_weight()
            raise WrapError(
                f"{self._vb_handle.spec.name}: {name} cannot take the place of its weight (pruning, "
                "weight_norm and spectral_norm do that): apply them before wrapping, or unwrap() first"
            )
        if name == "weight" and param is not None and "_vb_handle" in self.__dict__:
            self._become_shell(param)
        else:
            super().register_parameter(name, param)

    def _take_back_weight(self) -> None:
        """Undo `del module._parameters["weight"]`."""
        if "weight" not in self._parameters:
            weight = None if self._vb_handle.keys else own_weight(self._vb_handle)
            rest = dict(self._parameters)
            self._parameters.clear()
            self._parameters.update(weight=weight, **rest)

    # -- nn.Module's walks --------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict:
        """Without a view into a page of this process; the handle of a copy gives it its own."""
        self.look()
        return {**super().__getstate__(), "_vb_page": None, "_vb_form": None}

    def __setstate__(self, state: dict) -> None:
        super().__setstate__(state)
        tie(self._vb_handle, self)

    def _apply(self, fn, recurse: bool = True):
        """Casts show in what the layer computes and decodes; pages stay where the tiers have put them."""
        dense, handle = self._parameters["weight"], self._vb_handle
        if dense is not None and dense.is_meta:  # to_empty() gives it memory
            super()._apply(fn, recurse)
            adopt(handle, self._parameters["weight"])
            handle.retype(self._parameters["weight"].dtype)
            return self
        self._parameters["weight"] = None
        try:
            super()._apply(fn, recurse)
            dtype = fn(torch.empty(0, dtype=handle.dtype if dense is None else dense.dtype, device="cpu")).dtype
        finally:
            self._parameters["weight"] = dense
        if dense is not None and dtype != dense.dtype:
            dense.data = dense.data.to(dtype)  # the same Parameter, so that tied layers see it
        handle.retype(dtype)
        return self

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """As of the plain layer, with the temporary in the place of its weight; models that the layer is in list what
        is a parameter only, and so does `recurse=False`, by which tools ask for what to place."""
        name = f"{prefix}.weight" if prefix else "weight"
        if self.materialized and recurse:
            yield name, self.weight
        for other, parameter in nn.Module.named_parameters(self, prefix, recurse, remove_duplicate):
            if other != name or isinstance(self, VBLayer):
                yield other, parameter

    def _save_to_state_dict(self, destination, prefix: str, keep_vars: bool) -> None:
        self.look()
        if self.materialized:
            destination[prefix + "weight"] = self.weight if keep_vars else self._vb_handle.weight()
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(
        self, state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
    ) -> None:
        key = prefix + "weight"
        if not self.materialized:
            super()._load_from_state_dict(
                state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
            )
            return
        super()._load_from_state_dict(
            state_dict, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )  # its hooks see the weight, and may change it
        if key in unexpected_keys:  # for want of a parameter to take it
            unexpected_keys.remove(key)
        weight = state_dict.get(key)
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
            self._load(weight)

    def _load(self, weight: torch.Tensor) -> None:
        """Take over a new weight, for all tied layers; the planes before it are dropped first, to make room.

        Raises:
            FormatError: the weight cannot be encoded; the old one is still in place.
            TierError: the pages cannot be stored; the layer is a shell of the new weight.
        """
        self.look()
        handle = self._vb_handle
        with torch.no_grad(), handle.stack.encoding:
            if holds_values(handle, weight):
                return
            shell = nn.Parameter(weight.detach().to(handle.dtype), requires_grad=handle.trainable)
            strides = handle.strides
            planes = handle.split(shell)
            handle.strides = strides  # those of the weight whose place it takes
            self._hold(shell)
            handle.store(planes)
            self._hold(None)
        show_stored(handle)


class VBLinear(VBLayer, nn.Linear):
    """nn.Linear with its weight in a tier stack. Made by `vbrt.wrap`, not by hand."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """input [..., in_features] -> [..., out_features]; gradients flow to input and bias.

        Raises:
            TierError: a page cannot be read or verified, or does not fit beside what is in use.
            FormatError: (first forward) the weight cannot be encoded.
        """
        if is_compiling():
            return compiled_linear(self, input, self._parameters["bias"])
        handle, parameters = self._vb_handle, self._parameters
        weight = handle.resident
        if (
            weight is not None
            and parameters["weight"] is None
            and handle.stack.at_rest
            and not torch.is_grad_enabled()
            and input.is_cuda is weight.is_cuda
            and not (dispatch_modes() or is_tracing())
        ):  # these would keep the very tensor, which is a page's
            handle.forwards += 1  # the short way: no more Python than nn.Linear's own
            handle.page.hits += 1  # no call in between: one step for threads that share an interpreter lock
            return F.linear(input, weight, parameters["bias"])
        return self._product(input, parameters["bias"])

    def reset_parameters(self) -> None:
        """A new random weight, as nn.Linear draws it."""
        if self.materialized:
            self._become_shell(self._empty_weight())
        super().reset_parameters()

    def extra_repr(self) -> str:
        """nn.Linear's, and how the weight is held."""
        return f"{super().extra_repr()}, format={self._vb_handle.spec.label}"


def leaf(module: nn.Module, x: Proxy) -> Proxy:
    """A call of the module, in a graph of torch.fx."""
    return x.tracer.create_proxy("call_module", x.tracer.path_of_module(module), (x,), {})


def compiled_linear(layer: VBLayer, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """A VB layer's forward as torch.compile sees it, with the cast of x that autocast would do.

    Where the planes never move and no gradient is wanted, it is the kernel's own op on them, which CUDA graphs can
    record. Otherwise it is one opaque op that leases when it runs, and that CUDA graphs leave out. The kernel's op for
    few tokens, where the host's part of a call counts, is found without a look at the handle.
    """
    refuse_given_in_graph(layer)
    cast, x, bias = torch.is_autocast_enabled(x.device.type), as_autocast(x), as_autocast(bias)
    frozen = not wants_grad(x, bias) and (bias is None or bias.dtype == x.dtype)
    form = layer._vb_form
    if frozen and form is not None and x.numel() <= _FEW_TOKENS * x.shape[-1]:
        page, tiles = layer._vb_page, GraphForm.parse(form)
        if x.dtype == tiles.dtype and x.device == page.device:
            return torch.ops.vbrt.fp4_linear(x, page, None, bias, tiles.format, tiles.n, "none")
    handle = layer._vb_handle
    if frozen:
        planes = graph_planes(handle)
        if planes is not None and x.dtype == handle.dtype and x.device == handle.stack.device:
            return handle.kernels.linear(x, planes, bias)
    return torch.ops.vbrt.linear(x, bias, handle.token, handle.spec.shape[0], cast, wants_grad(x, bias))


def refuse_given_in_graph(layer: VBLayer) -> None:
    """Raise WrapError where functional_call has given a layer another weight within a function that dynamo traces."""
    if is_dynamo_compiling():
        from torch._dynamo.comptime import comptime  # two seconds, which whoever compiles nothing need not wait

        comptime(_refuse_given)


def _refuse_given(context: Any) -> None:
    """Raises WrapError where functional_call, called within what dynamo traces, has given `layer` another weight.

    Looked up in dynamo's own table: reading the parameter would guard it, and compile again when it is encoded.
    """
    trace = context._i_will_not_complain_if_bc_breaks_InstructionTranslator()
    layer = trace.symbolic_locals["layer"].value
    table = trace.output.side_effects.id_to_variable.get(id(layer._parameters))
    items = {} if table is None else {key.vt.as_python_constant(): value for key, value in table.items.items()}
    weight = items.get("weight")
    if weight is None or not weight.is_realized() or weight.is_python_constant():  # the last: None, of an encoded layer
        return
    given = weight.as_proxy().node.meta.get("grapharg")
    if given is None or not owns(layer._vb_handle, given.example):
        raise WrapError(
            f"{layer._vb_handle.spec.name}: functional_call gives it another weight within a function that "
            "torch.compile traces, where a VB layer's weight is fixed; call it outside of the function, or "
            "unwrap() first"
        )


def thaw(layers: Sequence[VBLayer]) -> None:
    """Have VB layers leave the tiers because somebody wants their weights to train; says so."""
    if layers:
        warn_of_thawing(layers)
    for layer in layers:
        if isinstance(layer, VBLayer):  # not yet, with one that is tied to it
            layer.thaw_()


def warn_of_thawing(layers: Sequence[VBLayer]) -> None:
    """Name the first of the layers, and what they take from now on."""
    nbytes = sum(math.prod(handle.spec.shape) * handle.dtype.itemsize for handle in {x.handle for x in layers})
    named = f"{layers[0].handle.spec.name} and {len(layers) - 1} more" if layers[1:] else layers[0].handle.spec.name
    warnings.warn(
        f"requires_grad_(True) or a parametrization: {named} left the tiers to train: plain layers with "
        f"{nbytes} bytes of dense weights, outside of all budgets. To train through 4 bits, wrap with "
        'mode="train"',
        stacklevel=4,
    )


def _see_requires_grad() -> None:
    """Have nn.Module.requires_grad_, which walks through parameters, find the weights that are none in the tiers."""
    plain = nn.Module.requires_grad_

    @functools.wraps(plain)
    def requires_grad_(self: nn.Module, requires_grad: bool = True) -> nn.Module:
        if requires_grad:
            thaw([module for module in self.modules() if isinstance(module, VBLayer)])
        return plain(self, requires_grad)

    nn.Module.requires_grad_ = requires_grad_


_see_requires_grad()


def warn_of_training(stacklevel: int) -> None:
    """One text for all layers, so that Python's filter shows it once."""
    warnings.warn(
        "this model is in training mode and its VB layers hold frozen planes: their weights no longer train "
        '(gradients still flow through them). Call model.eval(), wrap with mode="train", or exclude what '
        "should train in weights.exclude",
        stacklevel=stacklevel + 1,
    )
