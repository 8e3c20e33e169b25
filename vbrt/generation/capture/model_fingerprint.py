"""Model fingerprint: the Python state that a captured step depends on; a different one invalidates the capture.

A graph replays launches with the addresses, shapes and constants of capture time. `fingerprint` covers what determines
these: classes and their forwards; addresses of parameters, buffers and other tensors; every attribute of modules and
configs that is a constant, a function or a container of these (so also switching, scaling or adding adapters);
functions that forwards look up by name; transformers' tables of implementations; and torch's global switches.
"""

import functools
import sys
import types
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import _get_current_function_mode_stack

from vbrt.generation.capture.code_fingerprint import PLAIN, looked_up, reference, replaced_in_torch
from vbrt.host import accelerator
from vbrt.kernels.observers import is_quiet
from vbrt.layers import SwappedLayer, VBLayer
from vbrt.layers.rebind_forward import is_wrapped_by_plan
from vbrt.libraries.torch_api import is_any_autocast_enabled, mode_stack

__all__ = ["attributes", "changed", "fingerprint", "why_eager"]

_FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, functools.partial)
_WITH_CODE = (types.FunctionType, types.MethodType, functools.partial)
_CALLED = ("forward", "__call__", "_call_impl")  # of a class, when a module is called
_HOOKS = ("_forward_hooks", "_forward_pre_hooks")
#: attributes of every module: tensors, submodules and hooks are covered elsewhere
_OF_ALL = frozenset(vars(nn.Module())) - {"training"}
_MOST_ITEMS = 4096  # containers with more items are not fingerprinted
_DIFFERENT_IN_TRAINING = (nn.modules.dropout._DropoutNd, nn.modules.batchnorm._BatchNorm)
_OURS = ("vbrt.", "transformers.")  # their hooks launch the same kernels in every step
#: transformers' tables of implementations, which models look up in each forward
_INTERFACES = (
    ("transformers.modeling_utils", "ALL_ATTENTION_FUNCTIONS"),
    ("transformers.masking_utils", "ALL_MASK_ATTENTION_FUNCTIONS"),
    ("transformers.integrations.moe", "ALL_EXPERTS_FUNCTIONS"),
)


def fingerprint(model: nn.Module) -> tuple:
    """Return the state that captured steps depend on; equal fingerprints mean that they are valid still."""
    modules = list(model.modules())
    configs = {id(config): config for module in modules if (config := module.__dict__.get("config")) is not None}
    kinds = dict.fromkeys(map(type, modules))
    called = tuple(tuple(reference(getattr(kind, name)) for name in _CALLED) for kind in kinds)
    of_modules, of_configs = tuple(map(_of_module, modules)), tuple(map(_of_config, configs.values()))
    return of_modules, of_configs, called, looked_up(kinds, _functions_of(modules)), _of_torch()


def attributes(model: nn.Module) -> dict[str, dict[str, Any]]:
    """Return fingerprints of each module's attributes and buffers, by name, without those of VB layers."""
    return {
        name: dict(_plain_items(module.__dict__) + _plain_items(module._buffers))
        for name, module in model.named_modules()
    }


def changed(before: dict[str, dict[str, Any]], after: dict[str, dict[str, Any]]) -> str:
    """Return the name of an attribute that a step has changed; "" if there is none."""
    for module, values in after.items():
        was = before.get(module, {})
        for name, value in values.items():
            if not name.startswith("_vb_") and (name not in was or was[name] != value):
                return f"{module}.{name}" if module else name
    return ""


def _of_module(module: nn.Module) -> tuple:
    tensors = tuple(
        None if tensor is None else (tensor.data_ptr(), tensor.dtype, tensor.device, tensor.shape, tensor.stride())
        for held in (module._parameters, module._buffers)
        for tensor in held.values()
    )
    handle = module.__dict__.get("_vb_handle")
    own = None if handle is None else (id(handle), handle.generation, handle.dtype)
    return id(type(module)), tensors, own, _plain_items(module.__dict__)


def _plain_items(values: dict[str, Any]) -> tuple:
    """Return the items that are constants, tensors, functions, or containers of these."""
    return tuple(
        (name, plain)
        for name, value in values.items()
        if name not in _OF_ALL and (plain := value if type(value) in PLAIN else _plain(name, value)) is not _OTHER
    )


_OTHER = object()


def _plain(name: Any, value: Any) -> Any:
    """Return a fingerprint of a value; _OTHER for objects of other kinds, and for tensors of VB layers."""
    kind = type(value)
    if kind in PLAIN:
        return value
    if kind in (list, tuple) and len(value) <= _MOST_ITEMS:
        return tuple(_item(name, item) for item in value)
    if kind is dict and len(value) <= _MOST_ITEMS:
        return tuple((_item(name, key), _item(name, item)) for key, item in value.items())
    if isinstance(value, Tensor) and not str(name).startswith("_vb_"):  # VB layers: their handle is fingerprinted
        return id(value), value.data_ptr() if kind in (Tensor, nn.Parameter) else 0
    if kind is types.MethodType:
        return id(value.__self__), reference(value.__func__)
    return reference(value) if isinstance(value, _FUNCTIONS) else _OTHER


def _item(name: Any, value: Any) -> Any:
    plain = _plain(name, value)
    return id(value) if plain is _OTHER else plain


def _of_config(config: Any) -> tuple:
    return _plain_items(vars(config)) if hasattr(config, "__dict__") else ()


def _functions_of(modules: Iterable[nn.Module]) -> list:
    """Return functions that forwards reach without a name: attributes of modules, and transformers' tables."""
    held = [value for module in modules for value in module.__dict__.values() if isinstance(value, _WITH_CODE)]
    tables = (getattr(sys.modules.get(module), name, None) for module, name in _INTERFACES)
    return held + [of[name] for of in tables if of is not None for name in of]


def _of_torch() -> tuple:
    cuda, cudnn, mkldnn = torch.backends.cuda, torch.backends.cudnn, torch.backends.mkldnn
    return (
        cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.math_sdp_enabled(),
        cuda.cudnn_sdp_enabled(),
        replaced_in_torch(),
        *(getattr(of, "fp32_precision", None) for of in (cuda.matmul, cudnn.conv, mkldnn.matmul)),
        cuda.matmul.allow_bf16_reduced_precision_reduction,
        cuda.matmul.allow_fp16_reduced_precision_reduction,
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_num_threads(),
        *(torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) for kind in (accelerator.TYPE, "cpu")),
    )


def why_eager(model: nn.Module, own: Iterable[nn.Module]) -> str:
    """Return why steps of a model cannot be captured in its current state; "" if they can.

    Args:
        own: modules whose hooks run around a step, not within it.
    """
    outside, seen_by = set(map(id, own)), next(_strangers(), None)
    if seen_by is not None:
        return seen_by
    for name, module in model.named_modules():
        why = _why_module(module, inside=id(module) not in outside)
        if why:
            return f"{name or type(model).__name__} {why}"
    return ""


def _why_module(module: nn.Module, *, inside: bool) -> str:
    if module.training and (not inside or isinstance(module, _DIFFERENT_IN_TRAINING)):
        return "is in training mode"
    if inside and "forward" in module.__dict__ and not is_wrapped_by_plan(module):
        return "has an instance-level forward, as accelerate's hooks and compilers set it"
    for hooks in _HOOKS if inside else ():
        for hook in _strange(module.__dict__[hooks].values()):
            return f"has a hook ({_name_of(hook)}), which a graph does not call"
    if isinstance(module, SwappedLayer) and isinstance(module, VBLayer):
        module.notice_writes()
        if module.handle.lent is not None:
            return "has lent its weight as a temporary that is still held, which may be written to"
    return ""


def _strangers() -> Iterator[str]:
    """Yield hooks and modes that observe or change eager calls of this thread, but would miss replays."""
    if is_any_autocast_enabled():
        yield "autocast is on"
    for hooks in ("_global_forward_hooks", "_global_forward_pre_hooks"):
        for hook in _strange(getattr(nn.modules.module, hooks).values()):
            yield f"all modules have a hook ({_name_of(hook)}), which a graph does not call"
    for mode in (*_get_current_function_mode_stack(), *mode_stack()):
        if not is_quiet(mode):
            yield f"a torch mode is active ({type(mode).__qualname__}), which does not see replays"


def _strange(hooks: Iterable[Any]) -> Iterator[Any]:
    return (hook for hook in hooks if not str(getattr(hook, "__module__", "")).startswith(_OURS))


def _name_of(hook: Any) -> str:
    return getattr(hook, "__qualname__", type(hook).__name__)
