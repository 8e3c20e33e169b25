"""From a model and a config to VB layers on a runtime, in place."""

from torch import nn

from vbrt.config import VBConfig
from vbrt.layers import HandleSpec, SwappedLayer, TrainedWeight, WeightHandle, layer_class, shed
from vbrt.model.attachment import Attachment
from vbrt.model.machine import check_ssd_directory
from vbrt.model.passes import remove_pass_hooks
from vbrt.model.planner import make_plan
from vbrt.model.runtime import Runtime
from vbrt.model.trained import TrainingAttachment
from vbrt.residency.plan import Plan
from vbrt.residency.site import ROOT

__all__ = ["Original", "attach", "plan_for"]


def plan_for(model: nn.Module, config: VBConfig) -> Plan:
    """Return the plan of a model on this machine, whose ssd directory is tried first.

    Raises:
        ConfigError, TierError, WrapError: as `vbrt.wrap`.
    """
    check_ssd_directory(config)
    return make_plan(model, config)


def attach(model: nn.Module, config: VBConfig, plan: Plan | None = None) -> Attachment:
    """Swap a model's layers in place, on a runtime of its own; nothing is encoded before their first forward.

    The model keeps its attachment alive; the attachment does not keep the model alive. If anything fails, the model
    is as it was.

    Args:
        plan: one that was made for this model under this config, and nothing has changed since; by default a new one.

    Raises:
        ConfigError, TierError, WrapError: as `vbrt.wrap`.
    """
    plan = plan_for(model, config) if plan is None else plan
    original, runtime = Original(model), Runtime.of_plan(plan, config)
    try:
        specs = [HandleSpec.of(swap, config) for swap in plan.swaps]
        kind, handles = Attachment, []
        if config.mode == "train":
            kind, handles = TrainingAttachment, list(map(TrainedWeight, specs))
        else:
            handles = [WeightHandle(spec, runtime.stack) for spec in specs]
        return kind(model, runtime, (config, plan), _swap_layers_(model, plan, handles, config.mode))
    except BaseException:
        original.restore_()
        runtime.stack.close()
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
                shed(module)
            module.__class__ = cls
            module._parameters.update(parameters)
            module._buffers.update(buffers)


def _swap_layers_(
    model: nn.Module, plan: Plan, handles: list[WeightHandle] | list[TrainedWeight], mode: str
) -> dict[str, SwappedLayer]:
    modules = dict(model.named_modules())
    layers: dict[str, SwappedLayer] = {}
    for swap, handle in zip(plan.swaps, handles, strict=True):
        for name in (swap.name, *swap.aliases):
            module = modules["" if name == ROOT else name]
            layers[name] = layer_class(swap.kind, mode).adopt_(module, handle)
    return layers
