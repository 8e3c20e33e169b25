"""Gradient clipping by the global norm, including gradients in the tiers."""

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from vbrt.kernels import resolve
from vbrt.training.full.streamed_parameter import StreamedParameter
from vbrt.training.full.update_threads import Helpers

__all__ = ["clip_grad_norm_"]


def clip_grad_norm_(parameters: Iterable[nn.Parameter], max_norm: float, helpers: Helpers) -> Tensor:
    """Scale all gradients so that their Euclidean norm is at most `max_norm`; return the norm before.

    Bitwise equal to torch.nn.utils.clip_grad_norm_ on fp32 gradients. Waits for all gradients; those in the tiers are
    read once here, and scaled when the update reads them.

    Args:
        helpers: threads that share the weights.
    """
    held = [parameter for parameter in parameters if _has_gradient(parameter)]
    norm_of = resolve("gradient_norm", "auto", torch.device("cpu")).run
    norms: list[Tensor] = [torch.tensor(0.0, dtype=torch.float32, device="cpu")] * len(held)

    def measure(at: int) -> None:
        norms[at] = _norm(held[at], norm_of)

    helpers.each([lambda at=at: measure(at) for at in range(len(held))])
    if not held:
        return torch.tensor(0.0, dtype=torch.float32, device="cpu")
    first = norms[0].device
    total = torch.linalg.vector_norm(torch.stack([norm.to(first) for norm in norms]))
    factor = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    _scale(held, factor)
    return total


def _has_gradient(parameter: nn.Parameter) -> bool:
    if isinstance(parameter, StreamedParameter):
        parameter.weight.gradient.check_here()
        return not parameter.weight.gradient.empty
    return parameter.grad is not None


def _norm(parameter: nn.Parameter, norm_of) -> Tensor:
    if not isinstance(parameter, StreamedParameter):
        return torch.linalg.vector_norm(parameter.grad.float())
    gradient = parameter.weight.gradient.held()
    found = norm_of(gradient.read().reshape(-1), gradient.factor)
    return torch.tensor(found, dtype=torch.float32, device="cpu")


def _scale(held: Iterable[nn.Parameter], factor: Tensor) -> None:
    known = factor.item()
    for parameter in held:
        if isinstance(parameter, StreamedParameter):
            parameter.weight.gradient.scale_(known)
        else:
            parameter.grad.mul_(factor.to(parameter.grad.device))
