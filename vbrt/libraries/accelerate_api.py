"""accelerate: the hook attribute on modules, and hooks that move weights between devices."""

from typing import Any

from torch import nn

__all__ = ["HOOK", "MOVING_HOOKS", "mover_of"]

#: attribute of a module with the hook whose `pre_forward(module)` libraries call before methods other than `forward`
HOOK = "_hf_hook"
#: class names of hooks that move a module's weights; a `SequentialHook` may contain such hooks
MOVING_HOOKS = ("AlignDevicesHook", "CpuOffload", "SequentialHook")


def mover_of(module: nn.Module) -> str:
    """Name of accelerate's hook that moves a module's weights; "" if there is none."""
    hook: Any = vars(module).get(HOOK)
    kinds = (of.__name__ for of in type(hook).__mro__)
    return next((f"{kind} of accelerate" for kind in kinds if kind in MOVING_HOOKS), "")
