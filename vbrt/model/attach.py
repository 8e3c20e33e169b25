"""Attach a model to a runtime: swap its layers for VB layers, in place, with rollback on failure."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from torch import nn

from vbrt.config import VBConfig
from vbrt.layers import KINDS, HandleSpec, Kind, SwappedLayer, Weight, strip
from vbrt.layers.experts import ExpertsHandle, ExpertsSpec
from vbrt.layers.modules.sharded_linear import sharded_class
from vbrt.model.attachment import Attachment, Terms
from vbrt.model.full_training import FullAttachment
from vbrt.model.machine_memory import check_ssd_directory
from vbrt.model.pass_hooks import PassHook, remove_pass_hooks
from vbrt.model.placement import current_homes, place_beside, place_pages, restore_homes
from vbrt.model.planner import make_plan
from vbrt.model.qat import TrainingAttachment
from vbrt.model.runtime import Runtime
from vbrt.residency.plan import Plan, Swap
from vbrt.residency.user_policy import PolicyFactory
from vbrt.residency.weight_site import ROOT
from vbrt.tiers import TierStack
from vbrt.training import FullWeight, TrainedExpertsWeight, TrainedWeight, full_class, trained_class
from vbrt.training.full.host_gradients import Outlet

__all__ = ["Attempt", "attach", "attach_held", "make_handles", "plan_for"]


def plan_for(
    model: nn.Module, config: VBConfig, runtime: Runtime | None = None, *, saved: Sequence[Swap] | None = None
) -> Plan:
    """Return the plan of a model on this machine, next to the models on `runtime`; checks the ssd directory first.

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
    """Swap a model's layers in place; weights are encoded lazily, at their first forward.

    The model keeps its attachment alive, not vice versa. On failure, the model and the other models on the runtime are
    restored.

    Args:
        plan: plan of this model under this config, still up to date; default: a new one.
        runtime: shared runtime (tiers, budgets, policy) to join; default: a new one.
        policy: factory of the policy of each tier of a new runtime; default: the one that the config names.
        name: of the model on the runtime; default: its class name.

    Raises:
        ConfigError, TierError, WrapError: as `vbrt.wrap`.
    """
    attempt = Attempt(model, runtime)
    try:
        if runtime is None:
            plan = plan_for(model, config) if plan is None else plan
            attempt.built = runtime = Runtime.of_plan(plan, config, policy)
            return _attach(model, runtime, Terms(config, plan, name or type(model).__name__))
        with runtime.stack.encoding:  # excludes page additions and other attachments
            plan = plan_for(model, config, runtime) if plan is None else plan
            name = runtime.free_name(name or type(model).__name__)
            attachment = _attach(model, runtime, Terms(config, plan, name, f"{name}/"))
            place_pages(runtime)
            return attachment
    except BaseException:
        attempt.undo()
        raise


def _attach(model: nn.Module, runtime: Runtime, terms: Terms) -> Attachment:
    if terms.settings.mode == "train":
        weights = [_trained(swap, terms) for swap in terms.plan.swaps]
        return TrainingAttachment(model, runtime, terms, _swap_layers_(model, terms.plan, weights, trained_class))
    if terms.settings.mode == "full":
        outlet = Outlet(runtime.stack.device, max((swap.site.parameters for swap in terms.plan.swaps), default=0))
        held = [FullWeight(_spec(swap, terms), runtime.stack, outlet) for swap in terms.plan.swaps]
        return FullAttachment(model, runtime, terms, _swap_layers_(model, terms.plan, held, full_class), outlet)
    return attach_held(model, runtime, terms, make_handles(terms, runtime.stack))


def make_handles(terms: Terms, stack: TierStack) -> list[Weight | ExpertsHandle]:
    """Return an empty handle for each swap of a plan, in order."""
    return [_handle(swap, terms, stack) for swap in terms.plan.swaps]


def attach_held(
    model: nn.Module, runtime: Runtime, terms: Terms, handles: Sequence[Weight | ExpertsHandle]
) -> Attachment:
    """Swap a model's layers in place, with handles from `make_handles` that may hold weights already."""
    return Attachment(model, runtime, terms, _swap_layers_(model, terms.plan, handles, Kind.layer_class))


def _spec(swap: Swap, terms: Terms) -> HandleSpec:
    spec = HandleSpec.of(swap, terms.settings)
    return replace(spec, site=replace(spec.site, module=terms.prefix + spec.site.module))


def _trained(swap: Swap, terms: Terms) -> TrainedWeight | TrainedExpertsWeight:
    if swap.experts:
        return TrainedExpertsWeight(ExpertsSpec.of(swap, terms.settings, terms.prefix))
    return TrainedWeight(_spec(swap, terms))


def _handle(swap: Swap, terms: Terms, stack: TierStack) -> Weight | ExpertsHandle:
    if swap.experts:
        return ExpertsHandle(ExpertsSpec.of(swap, terms.settings, terms.prefix), stack)
    return Weight(_spec(swap, terms), stack)


class Attempt:
    """Snapshot for the rollback of an attachment that fails or is interrupted.

    Attributes:
        built: the runtime built for the attachment; None if it joined one.
    """

    def __init__(self, model: nn.Module, runtime: Runtime | None) -> None:
        self._model, self._runtime = model, runtime
        self._modules = [
            (module, type(module), dict(module._parameters), dict(module._buffers)) for module in model.modules()
        ]
        self._hooks = set(model._forward_pre_hooks)
        self._homes = None if runtime is None else current_homes(runtime)
        self.built: Runtime | None = None

    def undo(self) -> None:
        """Restore the model, free its pages, and restore the homes of other models' pages. Idempotent."""
        hooks = self._model._forward_pre_hooks
        begun = [hook for hook_id, hook in hooks.items() if isinstance(hook, PassHook) and hook_id not in self._hooks]
        for hook in begun:
            hook.attachment.close()
        if begun:
            remove_pass_hooks(self._model)
        self._restore_modules()
        if self.built is not None:
            self.built.stack.close()
        if self._homes is not None:
            restore_homes(self._runtime, self._homes)

    def _restore_modules(self) -> None:
        """Restore classes, parameters and buffers."""
        for module, cls, parameters, buffers in self._modules:
            if isinstance(module, SwappedLayer) and not issubclass(cls, SwappedLayer):
                strip(module)
            module.__class__ = cls
            module._parameters.update(parameters)
            module._buffers.update(buffers)


def _swap_layers_(
    model: nn.Module,
    plan: Plan,
    handles: Sequence[Weight | ExpertsHandle | TrainedWeight | TrainedExpertsWeight | FullWeight],
    class_of: Callable[[Kind], type[SwappedLayer]],
) -> dict[str, SwappedLayer]:
    modules = dict(model.named_modules())
    layers: dict[str, SwappedLayer] = {}
    for swap, handle in zip(plan.swaps, handles, strict=True):
        kinds = {site.module: site.kind for site in swap.sites}
        for name, held_by in swap.modules.items():
            module = modules["" if held_by == ROOT else held_by]
            layers[name] = sharded_class(class_of(KINDS[kinds[held_by]]), module).adopt_(module, handle)
    return layers
