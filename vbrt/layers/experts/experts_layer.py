"""VBExperts: a module of routed experts whose matrices live as planes in a tier stack, one page per expert.

The class is a mixin in front of the module's own, so isinstance checks hold. The module's own forward runs on decoded
temporaries if pages cannot be used (under a tracer, or with given weights).
"""

import contextlib
import functools
import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.compiler import is_compiling

from vbrt.host.logger import warn
from vbrt.kernels.observers import is_bare, unwatched
from vbrt.kernels.operator_trace import StepRefused, recorder
from vbrt.layers.experts.adapted_experts import adapters_of, adapting
from vbrt.layers.experts.expert_gradients import forward_experts
from vbrt.layers.experts.experts_handle import ExpertsHandle
from vbrt.layers.experts.run_experts import plain_forward
from vbrt.layers.modules.held import HeldLayer
from vbrt.layers.modules.training_warnings import warn_of_training
from vbrt.layers.rebind_forward import rebind_
from vbrt.layers.weights.weight_shards import take_local_
from vbrt.libraries.peft_api import Factors, asks_for_parameters, serve_parameters
from vbrt.residency.plan import format_bytes

__all__ = ["VBExperts", "encoded_forward", "experts_class"]


def encoded_forward(layer: "VBExperts", *args: Any) -> torch.Tensor:
    """Output of an encoded layer; in a step that is being captured the call is one opaque operator."""
    if is_bare(args[0]):
        return forward_experts(layer, *args)
    step = recorder()
    if step is not None and adapters_of(layer):
        raise StepRefused(f"{layer.handle.spec.name}: adapters add to its experts for the time of a call")
    return plain_forward(layer, *args) if step is None else step.leaf(encoded_forward, layer, *args)


class VBExperts(HeldLayer):
    """Mixin of swapped modules of routed experts.

    Attributes:
        handle: the weights of the experts.
    """

    _vb_handle: ExpertsHandle
    _vb_adapted = 0  # adapters of calls that are under way

    @classmethod
    def adopt_(cls, module: nn.Module, handle: ExpertsHandle) -> "VBExperts":
        """Turn `module` into a VB layer in place; nothing is encoded yet."""
        parameters = handle.spec.parameters
        take_local_(module, parameters)
        module.__class__ = experts_class(cls, type(module), parameters)
        rebind_(module, type(module))
        module.__dict__["_vb_handle"] = handle
        serve_parameters()  # adapters may be there already
        handle.adopt(module, {name: module._parameters[name] for name in parameters})
        module._parameters.update(dict.fromkeys(parameters))
        return module

    def release_(self, weight: nn.Parameter | None = None) -> nn.Module:
        """Turn the layer back, in place, into the module it was, holding its weights, dense or decoded. `weight` counts
        where the call before was interrupted: it is the first parameter."""
        self.notice_writes()
        self._parameters.update(self._vb_handle.released_parameters(weight))
        self._become_plain()
        return self

    def thaw_(self, weights: Mapping[str, nn.Parameter] | None = None) -> nn.Module:
        """Leave the tiers: the plain module again, whose dense weights can train."""
        self.notice_writes()
        handle = self._vb_handle
        dense = {name: handle.dense_or_decoded(name, (weights or {}).get(name)) for name in handle.spec.parameters}
        released = {name: handle.plain_parameter(weight) for name, weight in dense.items()}
        for layer in list(handle.layers):
            layer._parameters.update(released)
            layer._become_plain()
        for parameter in released.values():
            parameter.requires_grad_()
        handle.retire()
        return self

    def train_(self, weights: Mapping[str, nn.Parameter]) -> None:
        """Leave the tiers with `weights` as trainable parameters."""
        spec = self._vb_handle.spec
        warn(
            f"requires_grad_(True): {spec.name} left the tiers to train: plain experts with "
            f"{format_bytes(spec.weight_bytes)} of dense weights, outside of all budgets",
            stacklevel=5,
        )
        self.thaw_(weights)

    def become_shell_(self, weights: Mapping[str, torch.Tensor], *, alone: bool = False) -> ExpertsHandle:
        """Hold new dense weights until the next forward, with all layers that are tied, or `alone`; those that are
        not given are the decoded ones. Return their handle."""
        handle = self._vb_handle
        return handle.pass_on([self] if alone else list(handle.layers), weights)

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
            handle.encode()
        if self.training and handle.trainable and torch.is_grad_enabled():
            warn_of_training(stacklevel=4)
        return self

    # -- forward ------------------------------------------------------------------------------------------------------

    def _vb_forward(self, *args: Any) -> torch.Tensor:
        """Output of the module, from pages unless weights are given."""
        if is_compiling() and self._vb_adapted:
            return torch.compiler.disable(self._vb_forward)(*args)
        if is_compiling():
            return torch.ops.vbrt.experts(*args, self._vb_handle.token)
        self.notice_writes()
        if self._is_given():
            return plain_forward(self, *args)
        if not self.materialized:
            self.materialize_()
        return encoded_forward(self, *args)

    # -- adapters -----------------------------------------------------------------------------------------------------

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Yield the parameters that are not in the tiers; for PEFT's `target_parameters`, which are found by name, also
        stand-ins of those that are."""
        asked = not recurse and asks_for_parameters()
        yield from super().named_parameters(prefix, recurse, remove_duplicate)
        for name in self._vb_handle.spec.parameters if asked else ():
            if self._parameters[name] is None:
                yield f"{prefix}.{name}".lstrip("."), nn.Parameter(self.stand_in(name), requires_grad=False)

    def stand_in(self, name: str) -> torch.Tensor:
        """Return a tensor of a parameter's shape, dtype and device, without its memory."""
        handle = self._vb_handle
        one = torch.zeros(1, dtype=handle.dtype, device=handle.device)
        return one.expand(handle.spec.site_of(name).kept_shape)

    @contextlib.contextmanager
    def adapting(self, name: str, factors: Sequence[Factors]) -> Iterator[None]:
        """Context in which this thread's forwards add low-rank terms to a parameter; compiled graphs break there."""
        self.__dict__["_vb_adapted"] = self._vb_adapted + 1
        try:
            with adapting(self, name, factors):
                yield
        finally:
            left = self.__dict__.pop("_vb_adapted", 1) - 1
            if left:  # between calls the module is as before, so that recordings of it hold
                self.__dict__["_vb_adapted"] = left

    # -- the weights --------------------------------------------------------------------------------------------------

    def _held(self) -> Mapping[str, str]:
        return {name: name for name in self._vb_handle.spec.parameters}

    def _by_operator(self, name: str) -> torch.Tensor:
        handle = self._vb_handle
        shape = list(handle.spec.site_of(name).kept_shape)
        return torch.ops.vbrt.expert_weight(handle.token, name, shape, handle.dtype, handle.device_name)

    def _assign(self, name: str, value: torch.Tensor) -> None:
        if value is not self._vb_handle.temporary(name):
            weight = value if isinstance(value, nn.Parameter) else nn.Parameter(value.detach(), requires_grad=False)
            self.become_shell_({name: weight}, alone=True)

    def keep_given_(self) -> None:
        """Adopt given parameters as the layers' own."""
        given = {name: self._parameters[name] for name in self._held()}
        given = {name: weight for name, weight in given.items() if isinstance(weight, nn.Parameter)}
        if given:
            self.become_shell_(given)

    def _take_loaded(self, values: Mapping[str, torch.Tensor], *, assign: bool) -> None:
        """Encode loaded weights; the planes before them are retired first, to make room."""
        kept, trainable, dense = self._vb_handle.dtype, self._vb_handle.trainable, {}  # no name holds the old pages
        for name, value in values.items():
            dense[name] = nn.Parameter(value.detach().to(value.dtype if assign else kept), requires_grad=False)
        self.become_shell_(dense)
        for weight in dense.values():
            weight.requires_grad_(trainable)
        with torch.no_grad():
            self.materialize_()

    # -- copies -------------------------------------------------------------------------------------------------------

    def __getstate__(self) -> dict:
        return {name: value for name, value in super().__getstate__().items() if name != "_vb_gate"}

    def __reduce_ex__(self, protocol: int):
        return (
            _new_layer,
            (type(self).__base__, type(self).plain_class(), self._vb_handle.spec.parameters),
            self.__getstate__(),
        )


@functools.cache
def experts_class(base: type[VBExperts], plain: type[nn.Module], parameters: tuple[str, ...]) -> type[VBExperts]:
    """Return the replacement class of `plain`, whose weights have these names, derived from `base`."""
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
    return self._read(name)


def _bound(plain: type, module: nn.Module, args: tuple, kwargs: Mapping[str, Any]) -> tuple:
    """The arguments in the order of the plain class's forward."""
    return inspect.signature(plain.forward).bind(module, *args, **kwargs).args[1:]


def _new_layer(base: type[VBExperts], plain: type[nn.Module], parameters: tuple[str, ...]) -> VBExperts:
    made = experts_class(base, plain, parameters)
    return made.__new__(made)
