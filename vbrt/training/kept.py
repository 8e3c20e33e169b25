"""Parameters that stay on the computing device, in bf16: their optimizer sees them in fp32.

A step in bf16 would lose every change below a 256th of a weight. So a parameter in bf16 is its high half, as a weight
in the tiers is: the low half is in the optimizer's state, as "low", and the step is done on the fp32 master that both
make.
"""

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from vbrt.errors import WrapError
from vbrt.training.streamed import StreamedParameter
from vbrt.training.update import join_master, split_master

__all__ = ["LOW", "check_kept", "load_kept", "master_of", "masters", "widen_kept"]

LOW = "low"  #: in the optimizer's state of a parameter


def check_kept(optimizer: torch.optim.Optimizer) -> None:
    """Raise WrapError for parameters that stay and are neither fp32, fp64 nor bf16."""
    for parameter in _kept(optimizer):
        if parameter.dtype not in (torch.float32, torch.bfloat16, torch.float64):
            raise WrapError(
                f'a parameter of shape {tuple(parameter.shape)} is {parameter.dtype}; mode = "full" trains models in '
                "float32 or bfloat16: wrap model.to(torch.bfloat16), or model.float() under autocast"
            )


@contextlib.contextmanager
def masters(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Have the bf16 parameters that stayed and have gradients be their fp32 masters within a `with` block, and bf16
    again at its end, rounded half up."""
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
    try:
        parameter.grad = gradient.float()
        yield
    finally:
        parameter.grad = None
        new_high, low = split_master(master)
        parameter.data = high.copy_(new_high)
        parameter.grad = gradient
        if optimizer.state.get(parameter):  # a step was made: torch begins a state where there is none
            optimizer.state[parameter][LOW] = low


def master_of(optimizer: torch.optim.Optimizer | None, parameter: nn.Parameter) -> Tensor:
    """Return a copy of a parameter that stayed, in fp32, with the bits that bf16 does not hold; others as they are."""
    if parameter.dtype is not torch.bfloat16:
        return parameter.detach()
    low = None if optimizer is None else optimizer.state.get(parameter, {}).get(LOW)
    return parameter.detach().float() if low is None else join_master(parameter.detach(), low)


def widen_kept(optimizer: torch.optim.Optimizer) -> None:
    """Turn the bf16 parameters that stayed into their fp32 masters for good."""
    for parameter in _kept(optimizer):
        if parameter.dtype is torch.bfloat16:
            gradient, parameter.grad = parameter.grad, None
            parameter.data = master_of(optimizer, parameter)
            parameter.grad = None if gradient is None else gradient.float()
            optimizer.state.get(parameter, {}).pop(LOW, None)


def load_kept(optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any]) -> None:
    """Have torch take the state of parameters that stayed, and the groups: in fp32, where torch would cast moments to
    the parameter's dtype."""
    with contextlib.ExitStack() as narrowing:
        for parameter in _kept(optimizer):
            if parameter.dtype is torch.bfloat16:
                narrowing.enter_context(_as_fp32(parameter))
        torch.optim.Optimizer.load_state_dict(optimizer, state_dict)
    for own in optimizer.state.values():
        if LOW in own:
            own[LOW] = own[LOW].to(torch.int16)  # torch casts it, too: fp32 holds its values


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
