"""Atomic attachment of several models, such as a pipeline's, to one runtime."""

from collections.abc import Mapping

from torch import nn

from vbrt.config import VBConfig
from vbrt.errors import ConfigError
from vbrt.model.attach import Attempt, attach, plan_for
from vbrt.model.attachment import Attachment
from vbrt.model.runtime import Runtime
from vbrt.residency.plan import Plan
from vbrt.residency.user_policy import PolicyFactory

__all__ = ["attach_together"]


def attach_together(
    models: Mapping[str, nn.Module],
    config: VBConfig,
    *,
    runtime: Runtime | None = None,
    policy: PolicyFactory | None = None,
) -> dict[str, Attachment]:
    """Attach models to one runtime, each under its name; all or none: on failure every model is restored.

    Args:
        runtime: shared runtime to join; default: a new one.
        policy: factory of the policy of each tier of a new runtime; default: the one that the config names.

    Raises:
        ConfigError, TierError, WrapError: as `vbrt.wrap`; ConfigError also for mode = "train".
    """
    if config.mode != "infer":
        raise ConfigError(
            f'{config.source}: mode = "{config.mode}" for {", ".join(models)}: models on one runtime infer; wrap '
            "the one that trains by itself"
        )
    attempts: list[Attempt] = []
    built = None
    try:
        if runtime is None:
            built = runtime = Runtime.of_plan(_leading_plan(models, config), config, policy)
        attachments = {}
        for name, model in models.items():
            attempts.append(Attempt(model, runtime))
            attachments[name] = attach(model, config, runtime=runtime, name=name)
        return attachments
    except BaseException:
        for attempt in reversed(attempts):
            attempt.undo()
        if built is not None:
            built.stack.close()
        raise


def _leading_plan(models: Mapping[str, nn.Module], config: VBConfig) -> Plan:
    """Return the plan that the runtime is built for: of a model with routed experts, else of the one with the most
    bytes to swap."""
    plans = [plan_for(model, config) for model in models.values()]
    return max(plans, key=lambda plan: (bool(plan.routed), plan.swapped_bytes))
