"""Parameters that stay on the computing device, in bf16: their optimizer sees them in fp32.

A step in bf16 would lose every change below a 256th of a weight. So the optimizer's state of a parameter in bf16 has
its fp32 master, as "master": the step is done on it, and the parameter is what it rounds to, to nearest even. A number
that is another one now was written by the user (copy_, mul_, nn.init, a state dict): that is its master from then on.

A parameter that is large, such as an output head, is stepped in chunks, each by an optimizer of its own on a part of
the state, so that a step needs no room for a whole gradient in fp32: the rules that mode "full" takes work number by
number.
"""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from vbrt.errors import WrapError
from vbrt.kernels.update import join_master, without_ties
from vbrt.training.full.streamed_parameter import StreamedParameter

__all__ = ["check_kept", "load_kept", "master_of", "step_kept", "take_master", "widen_kept"]

_MASTER = "master"  # in the optimizer's state of a parameter: as the last step left it
_LOW, _HIGH = "low", "high"  # of older checkpoints: the halves of a master that was rounded half up
_CHUNK = 1 << 24  # numbers that are stepped at a time, of parameters that have more


def check_kept(optimizer: torch.optim.Optimizer) -> None:
    """Raise WrapError for parameters that stay and are neither fp32, fp64 nor bf16."""
    for parameter in _kept(optimizer):
        if parameter.dtype not in (torch.float32, torch.bfloat16, torch.float64):
            raise WrapError(
                f'a parameter of shape {tuple(parameter.shape)} is {parameter.dtype}; mode = "full" trains models in '
                "float32 or bfloat16: wrap model.to(torch.bfloat16), or model.float() under autocast"
            )


def step_kept(optimizer: torch.optim.Optimizer, plain: type[torch.optim.Optimizer]) -> None:
    """Do an optimizer's own step on all that has gradients, with fp32 masters of parameters in bf16.

    Args:
        plain: the class that updates; each number by itself.
    """
    large = [(group, p) for group in optimizer.param_groups for p in group["params"] if _is_large(p)]
    gradients = [parameter.grad for _, parameter in large]
    for _, parameter in large:
        parameter.grad = None
    try:
        with _masters(optimizer):
            step_of(plain)(optimizer)
        for (group, parameter), gradient in zip(large, gradients, strict=True):
            _step_in_chunks(optimizer, plain, group, (parameter, gradient))
    finally:
        for (_, parameter), gradient in zip(large, gradients, strict=True):
            parameter.grad = gradient


def step_of(plain: type[torch.optim.Optimizer]) -> Callable[[torch.optim.Optimizer], Any]:
    """Return a class's step without the hooks that torch puts around it: they are run once, around the whole step."""
    step = plain.step
    return step.__wrapped__ if getattr(step, "hooked", False) else step


def _is_large(parameter: nn.Parameter) -> bool:
    if isinstance(parameter, StreamedParameter) or parameter.dtype is not torch.bfloat16:
        return False
    gradient = parameter.grad
    flat = parameter.is_contiguous() and gradient is not None and gradient.is_contiguous()
    return flat and parameter.numel() > _CHUNK


def _step_in_chunks(
    optimizer: torch.optim.Optimizer,
    plain: type[torch.optim.Optimizer],
    group: dict[str, Any],
    held: tuple[nn.Parameter, Tensor],
) -> None:
    """Do the step of one parameter in bf16 with its gradient, a chunk at a time."""
    parameter, gradient = held
    state, high = dict(optimizer.state.get(parameter, {})), parameter.data.view(-1)
    held = {name: state.pop(name).view(-1) for name in (_MASTER, _LOW, _HIGH) if name in state}
    whole = {name: value for name, value in state.items() if _is_of(value, parameter)}
    master = held.get(_MASTER)
    master = torch.empty(high.shape, dtype=torch.float32, device=high.device) if master is None else master

    def step(part: slice) -> dict[str, Any]:
        """Step a chunk; return what its state has beside numbers for each of the chunk's."""
        chunk = nn.Parameter(_master_in(high[part], {name: value[part] for name, value in held.items()}))
        chunk.grad = gradient.view(-1)[part].float()
        one = plain([{**group, "params": [chunk]}])
        one.__dict__.update({name: optimizer.__dict__[name] for name in _SCALING if name in optimizer.__dict__})
        for name, value in state.items():
            own = value.view(-1)[part] if name in whole else value
            one.state[chunk][name] = own.clone() if isinstance(value, Tensor) and name not in whole else own
        step_of(plain)(one)
        for name, value in one.state[chunk].items():
            if _is_of(value, chunk) and name not in state:  # else it was changed in place
                if name not in whole:
                    whole[name] = value.new_empty(parameter.shape)
                whole[name].view(-1)[part] = value
        master[part] = high[part] = chunk.detach()
        return {name: value for name, value in one.state[chunk].items() if name not in whole}

    for begin in range(0, high.numel(), _CHUNK):
        rest = step(slice(begin, min(begin + _CHUNK, high.numel())))
    optimizer.state[parameter] = {**rest, **whole, _MASTER: master.view(parameter.shape)}


_SCALING = ("grad_scale", "found_inf")  # what torch's GradScaler puts on an optimizer


def _is_of(value: Any, parameter: Tensor) -> bool:
    """True if something of an optimizer's state has a number for each of a parameter."""
    return isinstance(value, Tensor) and value.shape == parameter.shape


@contextlib.contextmanager
def _masters(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Have the bf16 parameters that stayed and have gradients be their fp32 masters within a `with` block, and bf16
    again at its end."""
    with contextlib.ExitStack() as narrowing:
        for parameter in _kept(optimizer):
            if parameter.dtype is torch.bfloat16 and parameter.grad is not None:
                narrowing.enter_context(_master(optimizer, parameter))
        yield


@contextlib.contextmanager
def _master(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> Iterator[None]:
    high, gradient = parameter.data, parameter.grad
    parameter.grad = None
    parameter.data = master = master_of(optimizer, parameter)
    stepped = False
    try:
        parameter.grad = gradient.float()
        yield
        stepped = True
    finally:
        parameter.grad = None
        parameter.data = high.copy_(master)
        parameter.grad = gradient
        if stepped or optimizer.state.get(parameter):  # else torch would take it for a state that was begun
            _drop_masters(optimizer.state[parameter])
            optimizer.state[parameter][_MASTER] = master


def master_of(optimizer: torch.optim.Optimizer | None, parameter: nn.Parameter) -> Tensor:
    """Return a copy of a parameter that stayed, in fp32, with the bits that bf16 does not hold; others as they are."""
    if parameter.dtype is not torch.bfloat16:
        return parameter.detach()
    return _master_in(parameter.detach(), {} if optimizer is None else optimizer.state.get(parameter, {}))


def take_master(value: Tensor, state: dict[str, Any]) -> Tensor:
    """Return the fp32 master of a parameter's value, where its state has one, else the value; and leave in the state
    what a plain optimizer has."""
    master = _master_in(value, state) if _MASTER in state or _LOW in state else value
    _drop_masters(state)
    return master


def _drop_masters(state: dict[str, Any]) -> None:
    for name in (_MASTER, _LOW, _HIGH):
        state.pop(name, None)


def _master_in(high: Tensor, state: Mapping[str, Any]) -> Tensor:
    """Return the fp32 masters of numbers in bf16, a copy: that of the last step where they are what it rounds to, and
    elsewhere the number that was written."""
    master, low, last = (state.get(name) for name in (_MASTER, _LOW, _HIGH))
    if master is not None:
        return master.where(master.to(torch.bfloat16).view(torch.int16) == high.view(torch.int16), high)
    if low is None:
        return high.float()
    if last is not None:  # the oldest checkpoints have none
        low = low.where(high.view(torch.int16) == last.view(torch.int16), -0x8000)
    return join_master(without_ties(high, low))


def widen_kept(optimizer: torch.optim.Optimizer) -> None:
    """Turn the bf16 parameters that stayed into their fp32 masters for good."""
    for parameter in _kept(optimizer):
        if parameter.dtype is torch.bfloat16:
            gradient, parameter.grad = parameter.grad, None
            parameter.data = take_master(parameter.detach(), optimizer.state.get(parameter, {})).float()
            parameter.grad = None if gradient is None else gradient.float()


def load_kept(optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any]) -> None:
    """Have torch take the state of parameters that stayed, and the groups: in fp32, where torch would cast moments to
    the parameter's dtype."""
    with contextlib.ExitStack() as narrowing:
        for parameter in _kept(optimizer):
            if parameter.dtype is torch.bfloat16:
                narrowing.enter_context(_as_fp32(parameter))
        torch.optim.Optimizer.load_state_dict(optimizer, state_dict)
    for own in optimizer.state.values():
        for half, dtype in ((_LOW, torch.int16), (_HIGH, torch.bfloat16)):
            if half in own:
                own[half] = own[half].to(dtype)  # torch casts it, too: fp32 holds its values


@contextlib.contextmanager
def _as_fp32(parameter: nn.Parameter) -> Iterator[None]:
    high, gradient = parameter.data, parameter.grad
    parameter.grad = None
    parameter.data = torch.empty((), dtype=torch.float32, device=high.device).expand(high.shape)
    try:
        yield
    finally:
        parameter.data = high
        parameter.grad = gradient


def _kept(optimizer: torch.optim.Optimizer) -> Iterator[nn.Parameter]:
    every = (parameter for group in optimizer.param_groups for parameter in group["params"])
    return (parameter for parameter in every if not isinstance(parameter, StreamedParameter))
