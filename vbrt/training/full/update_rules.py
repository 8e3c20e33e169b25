"""Update rules: supported optimizer classes, and the settings that they read from a param group."""

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
    """Scaling of gradients as they are read: divided by the loss scale, then multiplied by the clipping factor."""

    divisor: float = 1.0
    factor: float = 1.0


@dataclass(frozen=True, slots=True)
class Rule:
    """Update rule of an optimizer class.

    Attributes:
        optimizer: the class; its own step, with `fused=True` if it is torch's, is the reference.
        moments: of a param group: torch's state names -> kernel names.
        settings: of a param group: further fields of `Step`.
        resumes: True if a first step is recognised only by missing state (SGD keeps no step count).
    """

    optimizer: type[torch.optim.Optimizer]
    moments: Callable[[Group], dict[str, str]]
    settings: Callable[[Group], dict[str, Any]]
    resumes: bool = False

    def check(self, name: str, group: Group, kinds: Mapping[str, str] | None = None) -> None:
        """Raise WrapError for a group with unsupported settings.

        Args:
            name: of a weight.
            kinds: the weight's moments in the tiers.
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
        """Return the parameters of a weight's `number`th update, from 1, with the group's current settings."""
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
    """Return the rule of an optimizer's class. Raises WrapError: unsupported class."""
    for rule in RULES:
        if type(optimizer) is rule.optimizer:
            return rule
    raise WrapError(
        f'{type(optimizer).__name__}: mode = "full" updates weights where they live, in chunks, which it can do for '
        f"{rule_names()}; take one of these, or train resident"
    )


def rule_names() -> str:
    """Return the supported classes, for errors."""
    return ", ".join(rule.optimizer.__name__ for rule in RULES)
