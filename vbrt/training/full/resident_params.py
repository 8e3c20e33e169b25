"""Resident bf16 parameters with fp32 masters in the optimizer's state.

A bf16 step would lose every change below 1/256 of a weight. So the optimizer's state of a bf16 parameter holds its fp32
master, as "master": the step updates the master, and the parameter is its rounding, to nearest even. An element that no
longer matches was written by the user (copy_, mul_, nn.init, a state dict) and becomes the master.

Large parameters, such as output heads, are stepped in chunks, each by a temporary optimizer on a slice of the state, so
that no full fp32 gradient is needed: the rules supported in mode "full" are elementwise.
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

_MASTER = "master"  # key of the optimizer's state: the master after the last step
_LOW, _HIGH = "low", "high"  # keys in older checkpoints: halves of a master rounded half up
_CHUNK = 1 << 24  # elements per chunk, for larger parameters


def check_kept(optimizer: torch.optim.Optimizer) -> None:
    """Raise WrapError for resident parameters that are neither fp32, fp64 nor bf16."""
    for parameter in _kept(optimizer):
        if parameter.dtype not in (torch.float32, torch.bfloat16, torch.float64):
            raise WrapError(
                f'a parameter of shape {tuple(parameter.shape)} is {parameter.dtype}; mode = "full" trains models in '
                "float32 or bfloat16: wrap model.to(torch.bfloat16), or model.float() under autocast"
            )


def step_kept(optimizer: torch.optim.Optimizer, plain: type[torch.optim.Optimizer]) -> None:
    """Do an optimizer's own step on all resident gradients, with fp32 masters of bf16 parameters.

    Args:
        plain: the optimizer class; elementwise.
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
    """Return a class's step without torch's hook wrapper: hooks run once, around the whole step."""
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
    """Step one bf16 parameter in chunks."""
    parameter, gradient = held
    state, high = dict(optimizer.state.get(parameter, {})), parameter.data.view(-1)
    held = {name: state.pop(name).view(-1) for name in (_MASTER, _LOW, _HIGH) if name in state}
    whole = {name: value for name, value in state.items() if _is_of(value, parameter)}
    master = held.get(_MASTER)
    master = torch.empty(high.shape, dtype=torch.float32, device=high.device) if master is None else master

    def step(part: slice) -> dict[str, Any]:
        """Step a chunk; return its per-parameter (not per-element) state."""
        chunk = nn.Parameter(_master_in(high[part], {name: value[part] for name, value in held.items()}))
        chunk.grad = gradient.view(-1)[part].float()
        one = plain([{**group, "params": [chunk]}])
        one.__dict__.update({name: optimizer.__dict__[name] for name in _SCALING if name in optimizer.__dict__})
        for name, value in state.items():
            own = value.view(-1)[part] if name in whole else value
            one.state[chunk][name] = own.clone() if isinstance(value, Tensor) and name not in whole else own
        step_of(plain)(one)
        for name, value in one.state[chunk].items():
            if _is_of(value, chunk) and name not in state:  # existing state was changed in place
                if name not in whole:
                    whole[name] = value.new_empty(parameter.shape)
                whole[name].view(-1)[part] = value
        master[part] = high[part] = chunk.detach()
        return {name: value for name, value in one.state[chunk].items() if name not in whole}

    for begin in range(0, high.numel(), _CHUNK):
        rest = step(slice(begin, min(begin + _CHUNK, high.numel())))
    optimizer.state[parameter] = {**rest, **whole, _MASTER: master.view(parameter.shape)}


_SCALING = ("grad_scale", "found_inf")  # set by torch's GradScaler on an optimizer


def _is_of(value: Any, parameter: Tensor) -> bool:
    """True for per-element state."""
    return isinstance(value, Tensor) and value.shape == parameter.shape


@contextlib.contextmanager
def _masters(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Context in which bf16 parameters with gradients are their fp32 masters."""
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
        if stepped or optimizer.state.get(parameter):  # torch takes a non-empty state for an initialized one
            _drop_masters(optimizer.state[parameter])
            optimizer.state[parameter][_MASTER] = master


def master_of(optimizer: torch.optim.Optimizer | None, parameter: nn.Parameter) -> Tensor:
    """Return an fp32 copy of a bf16 parameter's master; parameters of other dtypes as they are."""
    if parameter.dtype is not torch.bfloat16:
        return parameter.detach()
    return _master_in(parameter.detach(), {} if optimizer is None else optimizer.state.get(parameter, {}))


def take_master(value: Tensor, state: dict[str, Any]) -> Tensor:
    """Return a parameter's fp32 master if its state has one, else its value; remove the master, leaving a plain
    optimizer's state."""
    master = _master_in(value, state) if _MASTER in state or _LOW in state else value
    _drop_masters(state)
    return master


def _drop_masters(state: dict[str, Any]) -> None:
    for name in (_MASTER, _LOW, _HIGH):
        state.pop(name, None)


def _master_in(high: Tensor, state: Mapping[str, Any]) -> Tensor:
    """Return a copy of the fp32 masters of bf16 values: the last step's where it rounds to the value, elsewhere the
    value written since."""
    master, low, last = (state.get(name) for name in (_MASTER, _LOW, _HIGH))
    if master is not None:
        return master.where(master.to(torch.bfloat16).view(torch.int16) == high.view(torch.int16), high)
    if low is None:
        return high.float()
    if last is not None:  # the oldest checkpoints have none
        low = low.where(high.view(torch.int16) == last.view(torch.int16), -0x8000)
    return join_master(without_ties(high, low))


def widen_kept(optimizer: torch.optim.Optimizer) -> None:
    """Turn resident bf16 parameters into their fp32 masters for good."""
    for parameter in _kept(optimizer):
        if parameter.dtype is torch.bfloat16:
            gradient, parameter.grad = parameter.grad, None
            parameter.data = take_master(parameter.detach(), optimizer.state.get(parameter, {})).float()
            parameter.grad = None if gradient is None else gradient.float()


def load_kept(optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any]) -> None:
    """Load the state of resident parameters and the groups through torch, in fp32, where torch would cast moments to
    bf16."""
    with contextlib.ExitStack() as narrowing:
        for parameter in _kept(optimizer):
            if parameter.dtype is torch.bfloat16:
                narrowing.enter_context(_as_fp32(parameter))
        torch.optim.Optimizer.load_state_dict(optimizer, state_dict)
    for own in optimizer.state.values():
        for half, dtype in ((_LOW, torch.int16), (_HIGH, torch.bfloat16)):
            if half in own:
                own[half] = own[half].to(dtype)  # torch casts it, too; fp32 holds its values


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
