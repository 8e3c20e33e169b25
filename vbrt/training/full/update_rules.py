"""Which optimizers update weights in the tiers, and what they read from a parameter group."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from vbrt.errors import WrapError
from vbrt.kernels.update import Step
from vbrt.training.full.lion import Lion

__all__ = ["Rule", "Scaling", "rule_for", "rule_names"]

Group = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Scaling:
    """What is done to gradients as they are read: divided (of a loss that was scaled up), then multiplied (clipped)."""

    divisor: float = 1.0
    factor: float = 1.0


@dataclass(frozen=True, slots=True)
class Rule:
    """How an optimizer's class updates a weight.

    Attributes:
        optimizer: the class; its own step, with `fused=True` if it is torch's, is the reference.
        moments: of a parameter group, the names of its state and what kernels call them.
        settings: of a parameter group, what `Step` takes of it.
        resumes: True if only state that is there tells a first step (SGD counts none).
    """

    optimizer: type[torch.optim.Optimizer]
    moments: Callable[[Group], dict[str, str]]
    settings: Callable[[Group], dict[str, Any]]
    resumes: bool = False

    def check(self, name: str, group: Group, kinds: Mapping[str, str] | None = None) -> None:
        """Raise WrapError for a group whose settings cannot be followed.

        Args:
            name: of a weight.
            kinds: the moments that the weight has in the tiers.
        """
        if group.get("differentiable"):
            raise WrapError(f"{self.optimizer.__name__}: differentiable=True; updates in the tiers have no gradients")
        asked = self.moments(group)
        if kinds is not None and asked != kinds:
            raise WrapError(
                f"{name}: its param group asks for moments {sorted(asked)}, and the weight has {sorted(kinds)} in the "
                "tiers: amsgrad, and whether there is momentum, stay as they were when the optimizer was taken over; "
                "give weights that come later to optimizer.add_param_group(), or unwrap() and wrap again"
            )

    def step(self, group: Group, number: int, scaling: Scaling) -> Step:
        """Return what the `number`th update of a weight does, from 1, with a group's settings as they are now."""
        return Step(
            number=number, lr=float(group["lr"]), weight_decay=float(group["weight_decay"]),
            maximize=bool(group.get("maximize")), divisor=scaling.divisor, factor=scaling.factor,
            **self.settings(group),
        )  # fmt: skip


def _adam_moments(group: Group) -> dict[str, str]:
    names = {"exp_avg": "first", "exp_avg_sq": "second"}
    return names | ({"max_exp_avg_sq": "peak"} if group["amsgrad"] else {})


def _adam(group: Group, decoupled: bool) -> dict[str, Any]:
    beta1, beta2 = map(float, group["betas"])
    decoupled = bool(group.get("decoupled_weight_decay", decoupled))
    return {"rule": "adam", "beta1": beta1, "beta2": beta2, "epsilon": float(group["eps"]), "decoupled": decoupled}


def _sgd_moments(group: Group) -> dict[str, str]:
    return {"momentum_buffer": "first"} if group["momentum"] else {}


def _sgd(group: Group) -> dict[str, Any]:
    own = {"beta1": float(group["momentum"]), "dampening": float(group["dampening"])}
    return {"rule": "sgd", "nesterov": bool(group["nesterov"]), **own}


def _lion(group: Group) -> dict[str, Any]:
    beta1, beta2 = map(float, group["betas"])
    return {"rule": "lion", "beta1": beta1, "beta2": beta2, "decoupled": True}


RULES = (
    Rule(torch.optim.AdamW, _adam_moments, lambda group: _adam(group, True)),
    Rule(torch.optim.Adam, _adam_moments, lambda group: _adam(group, False)),
    Rule(torch.optim.SGD, _sgd_moments, _sgd, resumes=True),
    Rule(Lion, lambda group: {"exp_avg": "first"}, _lion),
)


def rule_for(optimizer: torch.optim.Optimizer) -> Rule:
    """Return the rule of an optimizer's class. Raises WrapError for a class that has none."""
    for rule in RULES:
        if type(optimizer) is rule.optimizer:
            return rule
    raise WrapError(
        f'{type(optimizer).__name__}: mode = "full" updates weights where they live, in chunks, which it can do for '
        f"{rule_names()}; take one of these, or train resident"
    )


def rule_names() -> str:
    """Return the classes that have a rule, as errors name them."""
    return ", ".join(rule.optimizer.__name__ for rule in RULES)
