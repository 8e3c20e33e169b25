"""accelerate: the hook that it puts on modules, as an attribute, and which hooks move weights between devices."""

from typing import Any

from torch import nn

__all__ = ["HOOK", "MOVING_HOOKS", "mover_of"]

#: the attribute of a module on which libraries call `pre_forward(module)` before methods other than `forward`
HOOK = "_hf_hook"
#: class names of hooks that move a module's weights; a `SequentialHook` has others in it
MOVING_HOOKS = ("AlignDevicesHook", "CpuOffload", "SequentialHook")


def mover_of(module: nn.Module) -> str:
    """The hook of accelerate that moves a module's weights; "" without one."""
    hook: Any = vars(module).get(HOOK)
    kinds = (of.__name__ for of in type(hook).__mro__)
    return next((f"{kind} of accelerate" for kind in kinds if kind in MOVING_HOOKS), "")
