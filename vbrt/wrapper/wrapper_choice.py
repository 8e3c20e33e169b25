"""Shared by the entry points: custom policies, warnings of a plan, the wrapper class of an attached model."""

from typing import Any

from torch import nn

from vbrt.config import PolicyConfig
from vbrt.errors import ConfigError
from vbrt.host.logger import warn
from vbrt.model.attachment import Attachment
from vbrt.model.full_training import FullAttachment
from vbrt.model.qat import TrainingAttachment
from vbrt.model.runtime import Runtime
from vbrt.residency.plan import Plan
from vbrt.residency.user_policy import PolicyFactory, policy_factory, take_policy
from vbrt.wrapper.full_wrapper import VBFullWrapper
from vbrt.wrapper.qat_wrapper import VBTrainingWrapper
from vbrt.wrapper.wrapper import VBModelWrapper

__all__ = ["facade_of", "user_policy", "warn_of_plan"]


def user_policy(overrides: dict[str, Any], runtime: Runtime | None) -> PolicyFactory | None:
    """Pop a custom policy from a config's overrides; None without one.

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
    """Return the wrapper of a model attached to a runtime."""
    kinds = {TrainingAttachment: VBTrainingWrapper, FullAttachment: VBFullWrapper}
    return kinds.get(type(attachment), VBModelWrapper)(model, attachment)


def warn_of_plan(plan: Plan, caller: str, *, stacklevel: int) -> None:
    """Emit the plan's warnings."""
    for text in plan.warnings:
        warn(f"{caller}: {text} (all reasons: plan.skipped)", stacklevel=stacklevel)
