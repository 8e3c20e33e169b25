"""SwappedLayer: a module whose class was changed in place, and can be changed back.

Hooks, attributes and every reference to the module stay valid.

Rejected: replacing modules in their parents, which loses hooks, breaks lists and closures that hold the old
module, and must rebuild each subclass's attributes.
"""

import sys
import types
from typing import Any

from torch import nn

from vbrt.errors import WrapError
from vbrt.layers.rebind_forward import rebind_
from vbrt.layers.weights.weight_shards import restore_sharded_

__all__ = ["SwappedLayer", "strip"]

#: who leaves the marks of FSDP1 on modules; FSDP2's are the same
_FSDP1 = "torch.distributed.fsdp._dynamo_utils"


class SwappedLayer(nn.Module):
    """Mixin in front of a module's class: the class was swapped in place, and can be restored."""

    _vb_handle: Any

    @classmethod
    def plain_class(cls) -> type[nn.Module]:
        """Class of the module before the swap: the first one behind this mixin."""
        return next(c for c in cls.__mro__ if not issubclass(c, SwappedLayer))

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "_is_fsdp_managed_module" and _is_called_by(_FSDP1):
            raise WrapError(
                f"{self._vb_handle.spec.name}: FullyShardedDataParallel (FSDP1) flattens the parameters of a module, "
                "which a VB layer computes with one by one; use fully_shard (FSDP2) or DistributedDataParallel"
            )
        super().__setattr__(name, value)

    @property
    def trained_parameters(self) -> tuple[str, ...]:
        """Names of trained parameters that forwards see in 4 bits."""
        return ()

    @property
    def dense(self) -> nn.Parameter | None:
        """Dense parameter at the weight's site."""
        return self._parameters[self._vb_handle.spec.site.parameter]

    def freeze_(self) -> None:
        """Do nothing: the module's own parameters say whether they train."""

    @classmethod
    def _take_(cls, module: Any, handle: Any) -> Any:
        """Turn a module into this class in place; its parameters stay."""
        module.__class__ = cls
        rebind_(module, cls)
        module.__dict__["_vb_handle"] = handle
        handle.layers.add(module)
        return module

    def _become_plain(self) -> None:
        plain = type(self).plain_class()
        for name, value in list(self.__dict__.items()):
            if isinstance(value, types.MethodType) and value.__self__ is self:  # accelerate's hooks keep `forward` so
                self.__dict__[name] = types.MethodType(getattr(plain, value.__name__), self)
        self.__class__ = plain
        strip(self)

    def _not_to_be_replaced(self, name: str) -> WrapError:
        return WrapError(
            f"{self._vb_handle.spec.name}.{name} cannot be removed or computed from something else (as by "
            "prune, weight_norm, spectral_norm and parametrizations): apply them before wrapping, or "
            "unwrap() first"
        )

    def __prepare_scriptable__(self) -> None:  # torch.jit.script looks up a replacement here
        name = self._vb_handle.spec.name
        raise WrapError(
            f"{name}: torch.jit.script cannot compile a {type(self).__name__}; use torch.jit.trace or "
            "torch.compile, or script the model after unwrap()"
        )


def _is_called_by(module: str) -> bool:
    """True if one of the last callers on the stack is code of a module."""
    frame, left = sys._getframe(2), 3
    while frame is not None and left:
        if frame.f_globals.get("__name__") == module:
            return True
        frame, left = frame.f_back, left - 1
    return False


def strip(module: nn.Module) -> None:
    """Remove a swapped layer's attributes from a plain module. Idempotent."""
    handle = module.__dict__.get("_vb_handle")
    if handle is not None:
        handle.layers.discard(module)
    if "_vb_shardings" in module.__dict__:
        restore_sharded_(module)
    if "forward" in module.__dict__:
        rebind_(module, module.plain_class() if isinstance(module, SwappedLayer) else type(module))
    for name in [name for name in module.__dict__ if name.startswith("_vb_")]:
        module.__dict__.pop(name, None)
