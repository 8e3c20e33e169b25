"""Gradient clipping by the global norm, including gradients in the tiers.

A gradient's norm is one chain of sums, in torch's order, so that its bits are torch's: threads share weights, not one
weight. It is measured once, however it is asked for: by `clip_grad_norm_`, or by torch's own, one weight after another.
"""

import weakref
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from vbrt.training.full.host_gradients import Complete, Gradient
from vbrt.training.full.optimizer_update import Updater
from vbrt.training.full.streamed_parameter import StreamedParameter, StreamedWeight

__all__ = ["Norms", "clip_grad_norm_"]


class Norms:
    """Norms of one optimizer's gradients in the tiers: the first one that is asked for has all measured, by the threads
    of its updates.

    Attributes:
        expected: True if the last step asked for norms: then they are worth measuring as gradients arrive.
    """

    def __init__(self, updater: Updater, weights: Iterable[StreamedWeight]) -> None:
        self._updater = updater
        self._weights = [weakref.ref(weight) for weight in weights]
        self.expected = self._asked = False
        for weight in self._found():
            weight.gradient.on_norm = self._on_norm

    def _found(self) -> list[StreamedWeight]:
        return [weight for weight in (held() for held in self._weights) if weight is not None]

    def _on_norm(self, is_known: bool) -> None:
        self._asked = True
        if not is_known:
            gradients = [weight.gradient for weight in self._found()]
            self._updater.helpers.each([g.measured for g in gradients if not (g.empty or g.exposed)])

    def begin(self, gradient: Gradient, complete: Complete) -> None:
        """Begin to measure a gradient that has arrived."""
        self._updater.helpers.begin(gradient.measure, complete)

    def end_step(self) -> None:
        """End a step."""
        self.expected, self._asked = self._asked, False


def clip_grad_norm_(parameters: Iterable[nn.Parameter], max_norm: float) -> Tensor:
    """Scale all gradients so that their Euclidean norm is at most `max_norm`; return the norm before.

    Bitwise equal to torch.nn.utils.clip_grad_norm_ on fp32 gradients. Waits for all gradients; those in the tiers are
    read once here, and scaled when the update reads them.
    """
    held = [parameter for parameter in parameters if _has_gradient(parameter)]
    if not held:
        return torch.tensor(0.0, dtype=torch.float32, device="cpu")
    norms = [_norm(parameter) for parameter in held]
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


def _norm(parameter: nn.Parameter) -> Tensor:
    if not isinstance(parameter, StreamedParameter):
        return torch.linalg.vector_norm(parameter.grad.float())
    return torch.tensor(parameter.weight.gradient.norm(), dtype=torch.float32, device="cpu")


def _scale(held: Iterable[nn.Parameter], factor: Tensor) -> None:
    known = factor.item()
    for parameter in held:
        if isinstance(parameter, StreamedParameter):
            parameter.weight.gradient.scale_(known)
        else:
            parameter.grad.mul_(factor.to(parameter.grad.device))
