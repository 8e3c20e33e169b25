"""What a recording has read of a model in Python: another model state needs another recording.

A graph replays launches: addresses, shapes and constants are those of the moment when it was recorded. `fingerprint` is
what these can depend on: classes, addresses of parameters and buffers, every plain attribute of every module and
of its config (so adapters that are switched, scaled or added), and torch's own switches.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from vbrt.layers import SwappedLayer, VBLayer
from vbrt.layers.bound import is_wrapped_by_plan

__all__ = ["fingerprint", "why_eager"]

_PLAIN = frozenset((bool, int, float, str, type(None), torch.dtype, torch.device))
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
_DIFFERENT_IN_TRAINING = (nn.modules.dropout._DropoutNd, nn.modules.batchnorm._BatchNorm)
_OURS = ("vbrt.", "transformers.")  # whose hooks launch the same in every step


def fingerprint(model: nn.Module) -> tuple:
    """Return what recordings of a model's step depend on; equal where they are good still."""
    modules = tuple(_of_module(module) for module in model.modules())
    return modules, _of_config(getattr(model, "config", None)), _of_torch()


def _of_module(module: nn.Module) -> tuple:
    tensors = tuple(
        None if tensor is None else (tensor.data_ptr(), tensor.dtype, tensor.device)
        for held in (module._parameters, module._buffers)
        for tensor in held.values()
    )
    handle = module.__dict__.get("_vb_handle")
    own = None if handle is None else (id(handle), handle.generation, handle.dtype)
    return id(type(module)), tensors, own, _plain_items(module.__dict__)


def _plain_items(values: dict[str, Any]) -> tuple:
    """Return the items that are constants, or short containers of them."""
    return tuple((name, plain) for name, value in values.items() if (plain := _plain(value)) is not _OTHER)


_OTHER = object()


def _plain(value: Any) -> Any:
    kind = type(value)
    if kind in _PLAIN:
        return value
    if kind in (list, tuple) and len(value) <= 64:
        return tuple(item if type(item) in _PLAIN else id(item) for item in value)
    if kind is dict and len(value) <= 64 and all(type(item) in _PLAIN for item in value.values()):
        return tuple(value.items())
    return _OTHER


def _of_config(config: Any) -> tuple:
    return () if config is None else _plain_items(vars(config))


def _of_torch() -> tuple:
    cuda = torch.backends.cuda
    return (
        cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.math_sdp_enabled(),
        cuda.cudnn_sdp_enabled(),
        torch.get_float32_matmul_precision(),
        cuda.matmul.allow_bf16_reduced_precision_reduction,
        torch.are_deterministic_algorithms_enabled(),
        torch.get_num_threads(),
        *(torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device) for device in ("cuda", "cpu")),
    )


def why_eager(model: nn.Module, own: Iterable[nn.Module]) -> str:
    """Return why steps of a model cannot be recorded as it is now; "" if they can.

    Args:
        own: modules whose hooks run around a step, not within it.
    """
    outside = set(map(id, own))
    for name, module in model.named_modules():
        why = _why_module(module, inside=id(module) not in outside)
        if why:
            return f"{name or type(model).__name__} {why}"
    return ""


def _why_module(module: nn.Module, *, inside: bool) -> str:
    if module.training and (not inside or isinstance(module, _DIFFERENT_IN_TRAINING)):
        return "is in training mode"
    if inside and "forward" in module.__dict__ and not is_wrapped_by_plan(module):
        return "has a forward of its own on the instance, as accelerate's hooks and compilers put there"
    for hooks in _HOOKS if inside else ():
        for hook in module.__dict__[hooks].values():
            if not str(getattr(hook, "__module__", "")).startswith(_OURS):
                return f"has a hook ({getattr(hook, '__qualname__', type(hook).__name__)}), which a graph does not call"
    if isinstance(module, SwappedLayer) and isinstance(module, VBLayer):
        module.notice_writes()
        if module.handle.lent is not None:
            return "has lent its weight as a temporary that is still held, and may be written to"
    return ""
