"""Wrapping of an object that holds models: finds them, and puts them onto one runtime."""

from collections.abc import Mapping
from typing import Any

from torch import nn

from vbrt.config import load_config, with_tier_budget
from vbrt.config.value_checks import shown
from vbrt.errors import ConfigError, WrapError
from vbrt.host import accelerator
from vbrt.layers import SwappedLayer
from vbrt.model.attach_many import attach_together
from vbrt.model.attachment import Attachment, attached_to
from vbrt.model.runtime import Runtime
from vbrt.model.shared_config import shared_config
from vbrt.residency.plan import Plan
from vbrt.wrapper.pipeline import VBPipelineWrapper
from vbrt.wrapper.pipeline_kinds import UNKNOWN, HolderKind, holder_kind_of
from vbrt.wrapper.wrapper import VBModelWrapper
from vbrt.wrapper.wrapper_choice import user_policy, warn_of_plan
from vbrt.wrapper.wrapper_of import attachment_of

__all__ = ["wrap_holder"]


def wrap_holder(holder: object, config: Any, runtime: Runtime | None, overrides: dict[str, Any]) -> VBPipelineWrapper:
    """Wrap all models of an object; arguments and errors as for `vbrt.wrap`."""
    if isinstance(holder, VBPipelineWrapper):
        raise WrapError("the pipeline is wrapped already; unwrap() it first")
    kind = holder_kind_of(holder)
    models = _models_of(holder, kind)
    there = {name: attachment_of(model) for name, model in models.items() if attached_to(model) is not None}
    for attachment in there.values():
        attachment.check_open("wrap")
    runtime = _runtime_of(there, runtime)
    policy = user_policy(overrides, runtime)
    asked = load_config(config, **overrides)
    if runtime is not None:
        asked = shared_config(asked, runtime, config, overrides)
    if asked.gpu_memory is not None:
        raise ConfigError(
            f"{asked.source}: gpu_memory = {shown(asked.gpu_memory)}; is estimated for one model, and a pipeline runs "
            'several, by steps of its own: set the budget of their pages, budget = "6GiB"'
        )
    asked = with_tier_budget(asked, "gpu" if accelerator.is_used(asked.tiers.gpu.enabled) else "cpu")
    new = {name: model for name, model in models.items() if name not in there}
    joined = attach_together(new, asked, runtime=runtime, policy=policy) if new else {}
    try:
        _warn_of_plans({name: attachment.plan for name, attachment in joined.items()})
        attachments = {name: (there | joined)[name] for name in models}
        runtime = next(iter(attachments.values())).runtime
        return VBPipelineWrapper(holder, kind, runtime, attachments)
    except BaseException:  # a warning raised as an error, or Ctrl-C
        for attachment in joined.values():
            attachment.detach()
        raise


def _models_of(holder: object, kind: HolderKind) -> dict[str, nn.Module]:
    """Return an object's models, each once. Raises WrapError: none, several where one is expected, or one that is
    partly wrapped or moved between devices by another library."""
    parts = {name: part for name, part in kind.parts(holder).items() if isinstance(part, nn.Module)}
    models = {name: part.vbrt.module if isinstance(part, VBModelWrapper) else part for name, part in parts.items()}
    first = {id(model): name for name, model in reversed(models.items())}
    models = {name: model for name, model in models.items() if first[id(model)] == name}
    what = type(holder).__name__
    if not models:
        raise WrapError(
            f"wrap() got {what}; expected a torch.nn.Module, or an object that has one among its attributes"
        )
    if kind is UNKNOWN and len(models) > 1:
        ways = ", ".join(f".{name} ({type(model).__name__})" for name, model in models.items())
        raise WrapError(
            f"wrap() got {what}, which holds {len(models)} modules: {ways}; wrap one of them, and "
            "others with runtime=vb.runtime, which shares the tiers"
        )
    for name, model in models.items():
        moved_by = kind.moved_by(model)
        if moved_by:
            raise WrapError(
                f"{what}.{name}: {moved_by} moves this model already, and tiers do that; remove it first, for "
                "a diffusers pipeline by remove_all_hooks(), or load the pipeline again without"
            )
        if attached_to(model) is None and any(isinstance(module, SwappedLayer) for module in model.modules()):
            raise WrapError(f"{what}.{name}: a part of this model is wrapped already; unwrap() that first")
    return models


def _runtime_of(there: Mapping[str, Attachment], runtime: Runtime | None) -> Runtime | None:
    """Return the runtime for all models of an object: that of its already wrapped models, if any.

    Raises WrapError: they have different ones, or another than the given one.
    """
    for name, attachment in there.items():
        if runtime is None:
            runtime = attachment.runtime
        elif attachment.runtime is not runtime:
            raise WrapError(
                f"wrap(): .{name} is wrapped already, with tiers of its own; the models of a pipeline share theirs: "
                'unwrap() it first, or load all with one QuantizationConfig(..., runtime="shared")'
            )
    return runtime


def _warn_of_plans(plans: Mapping[str, Plan]) -> None:
    """Warn of unswapped parts larger than a tenth of all models together."""
    total = sum(plan.dense_bytes for plan in plans.values())
    for name, plan in plans.items():
        if plan.kept_bytes * 10 > total:
            warn_of_plan(plan, f"vbrt.wrap: {name}", stacklevel=5)
