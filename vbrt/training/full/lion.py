"""Lion optimizer: for parameters that stay on the device, and reference for the update in the tiers."""

import math
from collections.abc import Callable, Iterable, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from vbrt.config.argument_checks import check_instance
from vbrt.errors import ArgumentError

__all__ = ["Lion"]


class Lion(torch.optim.Optimizer):
    """Lion: steps by the sign of a gradient average, with one moment instead of AdamW's two.

    Chen et al., 2023, "Symbolic Discovery of Optimization Algorithms", arXiv 2302.06675, algorithm 2. Its authors take
    a learning rate 3 to 10 times lower than AdamW's, and a weight decay as many times higher.

    Args:
        params: parameters or param groups.
        lr: step size per element.
        betas: decay of the average, in the step's direction and in the stored moment.
        weight_decay: decoupled: weights are multiplied by 1 - lr * weight_decay.
        maximize: ascend.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
    ) -> None:
        check_instance(betas, Sequence, "Lion: betas", "two numbers")
        for name, value in (("lr", lr), ("weight_decay", weight_decay), *(("betas", beta) for beta in betas)):
            check_instance(value, (Real, Tensor), f"Lion: {name}", "a number")
        is_finite = 0 <= lr < math.inf and 0 <= weight_decay < math.inf
        if not is_finite or len(betas) != 2 or not all(0 <= beta < 1 for beta in betas):
            raise ArgumentError(
                f"Lion(lr={lr}, betas={betas}, weight_decay={weight_decay}): expected none negative, two betas below 1"
            )
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Do one step; return the closure's loss, if given."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    self._step(parameter, -parameter.grad if group["maximize"] else parameter.grad, group)
        return loss

    def _step(self, parameter: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        state = self.state[parameter]
        if not state:
            state["step"] = torch.tensor(0.0, dtype=torch.float32, device="cpu")
            state["exp_avg"] = torch.zeros_like(parameter)
        state["step"] += 1
        mean, (beta1, beta2) = state["exp_avg"], group["betas"]
        if group["weight_decay"]:
            parameter.mul_(1 - group["lr"] * group["weight_decay"])
        direction = mean * beta1 + gradient * (1 - beta1)
        sign = direction.sign().where(direction == direction, direction)  # propagates NaN
        parameter.add_(sign.mul_(-group["lr"]))
        mean.mul_(beta2).add_(gradient * (1 - beta2))
