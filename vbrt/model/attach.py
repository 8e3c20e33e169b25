"""From a model and a config to VB layers on a runtime, in place."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import nn

from vbrt.config import VBConfig
from vbrt.layers import KINDS, HandleSpec, Kind, SwappedLayer, WeightHandle, strip
from vbrt.model.attachment import Attachment, Terms
from vbrt.model.machine import check_ssd_directory
from vbrt.model.passes import remove_pass_hooks
from vbrt.model.placement import homes_kept_on_failure, place_beside, place_pages
from vbrt.model.planner import make_plan
from vbrt.model.runtime import Runtime
from vbrt.model.trained import TrainingAttachment
from vbrt.residency.custom import PolicyFactory
from vbrt.residency.plan import Plan, Swap
from vbrt.residency.site import ROOT
from vbrt.training import TrainedWeight, trained_class

__all__ = ["Original", "attach", "plan_for"]


def plan_for(
    model: nn.Module, config: VBConfig, runtime: Runtime | None = None, *, saved: Sequence[Swap] | None = None
) -> Plan:
    """Return the plan of a model on this machine, beside the models on `runtime`; tries the ssd directory first.

    Args:
        config: with the tiers and the policy of the runtime, see `shared_config`.
        saved: see `make_plan`.

    Raises:
        ConfigError, TierError, WrapError: as `vbrt.wrap`.
    """
    if runtime is not None:
        runtime.check_open("attach")
        return make_plan(model, config, saved=saved, beside=place_beside(runtime))
    check_ssd_directory(config)
    return make_plan(model, config, saved=saved)


def attach(
    model: nn.Module,
    config: VBConfig,
    plan: Plan | None = None,
    *,
    runtime: Runtime | None = None,
    policy: PolicyFactory | None = None,
    name: str = "",
) -> Attachment:
    """Swap a model's layers in place; nothing is encoded before their first forward.

    The model keeps its attachment alive; the attachment does not keep the model alive. If anything fails, the model
    is as it was, and so are the other models on the runtime.

    Args:
        plan: one that was made for this model under this config, and nothing has changed since; by default a new one.
        runtime: of models that share their tiers, budgets and policy with this one; by default a new one.
        policy: makes the policy of each tier of a new runtime; by default the one that the config names.
        name: of the model on the runtime; by default that of its class.

    Raises:
        ConfigError, TierError, WrapError: as `vbrt.wrap`.
    """
    if runtime is None:
        plan = plan_for(model, config) if plan is None else plan
        runtime = Runtime.of_plan(plan, config, policy)
        try:
            return _attach(model, runtime, Terms(config, plan, runtime.free_name(name or type(model).__name__)))
        except BaseException:
            runtime.stack.close()
            raise
    with runtime.stack.encoding:  # no page is added, and no other model attached, meanwhile
        plan = plan_for(model, config, runtime) if plan is None else plan
        name = runtime.free_name(name or type(model).__name__)
        with homes_kept_on_failure(runtime):
            return _attach(model, runtime, Terms(config, plan, name, f"{name}/"))


def _attach(model: nn.Module, runtime: Runtime, terms: Terms) -> Attachment:
    original, attachment, config = Original(model), None, terms.settings
    try:
        specs = [HandleSpec.of(swap, config) for swap in terms.plan.swaps]
        specs = [replace(spec, site=replace(spec.site, module=terms.prefix + spec.site.module)) for spec in specs]
        if config.mode == "train":
            kind, class_of, handles = TrainingAttachment, trained_class, list(map(TrainedWeight, specs))
        else:
            kind, class_of, handles = (
                Attachment,
                Kind.layer_class,
                [WeightHandle(spec, runtime.stack) for spec in specs],
            )
        attachment = kind(model, runtime, terms, _swap_layers_(model, terms.plan, handles, class_of))
        if terms.prefix:
            place_pages(runtime)
        return attachment
    except BaseException:
        if attachment is not None:
            attachment.closed = True
        original.restore_()
        raise


class Original:
    """A model before its layers are swapped: classes, parameters and buffers of its modules."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._modules = [
            (module, type(module), dict(module._parameters), dict(module._buffers)) for module in model.modules()
        ]

    def restore_(self) -> None:
        """Undo what attaching has done so far; does not close the tiers."""
        remove_pass_hooks(self.model)
        for module, cls, parameters, buffers in self._modules:
            if isinstance(module, SwappedLayer):
                strip(module)
            module.__class__ = cls
            module._parameters.update(parameters)
            module._buffers.update(buffers)


def _swap_layers_(
    model: nn.Module,
    plan: Plan,
    handles: list[WeightHandle] | list[TrainedWeight],
    class_of: Callable[[Kind], type[SwappedLayer]],
) -> dict[str, SwappedLayer]:
    modules = dict(model.named_modules())
    layers: dict[str, SwappedLayer] = {}
    for swap, handle in zip(plan.swaps, handles, strict=True):
        for site in swap.sites:
            module = modules["" if site.module == ROOT else site.module]
            layers[site.name] = class_of(KINDS[site.kind]).adopt_(module, handle)
    return layers
