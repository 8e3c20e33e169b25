"""`vbrt.wrap`: plan, swap in place, put a façade in front.

Nothing moves when a model is wrapped: its layers become shells that share their parameters. The first forward of a
layer, or `materialize()` for all of them, encodes the weight, stores its pages and frees the dense weight.
"""

import warnings
from collections.abc import Mapping
from os import PathLike
from typing import Any

from torch import nn

from vbrt.config import PolicyConfig, VBConfig, load_config
from vbrt.errors import ConfigError, WrapError
from vbrt.model.attach import Attempt, attach, plan_for
from vbrt.model.attachment import Attachment
from vbrt.model.runtime import Runtime
from vbrt.model.sharing import shared_config
from vbrt.model.trained import TrainingAttachment
from vbrt.residency.custom import PolicyFactory, policy_factory, take_policy
from vbrt.residency.plan import Plan
from vbrt.wrapper.training import VBTrainingWrapper
from vbrt.wrapper.wrapper import VBModelWrapper

__all__ = ["facade_of", "user_policy", "warn_of_plan", "wrap"]


def wrap(
    model: nn.Module,
    config: VBConfig | Mapping[str, Any] | str | PathLike | None = None,
    *,
    runtime: Runtime | None = None,
    **overrides: Any,
) -> VBModelWrapper:
    """Wrap a model so that its linear layers live as planes in the tiers of a config.

    Args:
        model: any nn.Module; changed in place (`unwrap` gives it back).
        config: a preset name ("fp4", the default, "exact", "dense", ...), a path to a TOML file, a dict, or a VBConfig.
        runtime: `vb.runtime` of another model: both share its tiers, its budgets and its policy from then on, each with
            weights in formats of its own.
        **overrides: sections of the config, merged key by key: `weights={"format": "nf4"}`, `tiers={"ssd": {...}}`,
            `mode="train"`. `policy=` also takes a policy of your own (`vbrt.residency.policy.Policy`): an object, of
            which each tier gets a copy, or a factory such as its class, called with each tier's room in bytes.

    Returns:
        The wrapper. Everything of the model is reachable through it; `vb.model` is the same model, swapped. With
        mode = "train" it is a VBTrainingWrapper: weights stay parameters, and the forward sees them in 4 bits.

    Raises:
        ConfigError: the config is wrong, or impossible for this model or machine, or says something else of tiers or
            policy than the runtime; or a policy lacks a method, named.
        WrapError: the model is wrapped already, or the runtime closed.
        TierError: the ssd tier's directory cannot be used.

    Warns, once for a reason, where nothing at all is swapped, more than a tenth of the model is not, or what is not
    does not fit beside the budgets: with the largest part. `vb.plan.warnings` keeps that.
    """
    if not isinstance(model, nn.Module):
        raise WrapError(f"wrap() got {type(model).__name__}; expected a torch.nn.Module")
    if isinstance(model, VBModelWrapper):
        raise WrapError("the model is wrapped already; unwrap() it first")
    policy = user_policy(overrides, runtime)
    asked = load_config(config, **overrides)
    if runtime is not None:
        asked = shared_config(asked, runtime, config, overrides)
    plan = plan_for(model, asked, runtime)
    warn_of_plan(plan, "vbrt.wrap", stacklevel=3)
    attempt = Attempt(model, runtime)
    try:
        return facade_of(model, attach(model, asked, plan, runtime=runtime, policy=policy))
    except BaseException:  # Ctrl-C may come between the two
        attempt.undo()
        raise


def user_policy(overrides: dict[str, Any], runtime: Runtime | None) -> PolicyFactory | None:
    """Take a policy of the user's out of the overrides of a config, if there is one.

    Raises:
        ConfigError: it lacks a method, or the runtime has a policy.
    """
    given = take_policy(overrides, PolicyConfig)
    if given is None:
        return None
    if runtime is not None:
        raise ConfigError("policy=..., runtime=...: models on one runtime share its policy; leave one of them out")
    return policy_factory(given)


def facade_of(model: nn.Module, attachment: Attachment) -> VBModelWrapper:
    """Return the wrapper of a model that is attached to a runtime."""
    kind = VBTrainingWrapper if isinstance(attachment, TrainingAttachment) else VBModelWrapper
    return kind(model, attachment)


def warn_of_plan(plan: Plan, caller: str, *, stacklevel: int) -> None:
    """Warn of what a user should hear who does not look at the plan."""
    for text in plan.warnings:
        warnings.warn(f"{caller}: {text} (all reasons: plan.skipped)", stacklevel=stacklevel)
