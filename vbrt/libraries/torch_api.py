"""torch's private parts: what vbrt asks of `torch._C`, of functorch, fake tensors and the dispatcher.

All of them are looked up when this module is imported, so a torch that lacks one is refused by name before a model is
touched; `OPTIONAL` ones are None then, and whoever uses them goes another way. Functions are bound here, since some are
called in every forward.
"""

from typing import Any

from vbrt.errors import LibraryError
from vbrt.libraries.probe import find, version_of

__all__ = [
    "OPTIONAL",
    "REQUIRED",
    "AutoDispatchBelowAutograd",
    "DisableTorchFunction",
    "DisableTorchFunctionSubclass",
    "FakeTensor",
    "FakeTensorMode",
    "OpOverload",
    "TorchDispatchMode",
    "TransformType",
    "TreeSpec",
    "current_device",
    "current_graph_task",
    "disable_current_modes",
    "disabled_torch_function",
    "dispatch_keys",
    "dispatch_mode_at",
    "dispatch_modes",
    "end_allocate_to_pool",
    "function_modes_enabled",
    "functorch_enabled",
    "get_unwrapped",
    "has_overlap",
    "has_storage",
    "interpreter_stack",
    "is_any_autocast_enabled",
    "is_batchedtensor",
    "is_capturing",
    "is_fake",
    "is_functorch_wrapped",
    "is_tracing",
    "mode_stack",
    "plain_autograd_function",
    "raw_stream",
    "set_stream",
    "set_tracing_state",
    "tracing_state",
    "tree_flatten",
    "tree_leaves",
    "tree_unflatten",
    "will_execute",
    "without_functorch",
]

#: what a forward or a pass cannot do without
REQUIRED: dict[str, str] = {}
#: what only makes host code shorter
OPTIONAL: dict[str, str] = {}
_ABSENT = object()


def _required(name: str, path: str) -> Any:
    """A part of torch. Raises LibraryError where there is none."""
    REQUIRED[name] = path
    found = find("torch", path, _ABSENT)
    if found is _ABSENT:
        where = "torch." + path.replace(":", ".").lstrip(".")
        raise LibraryError(f"torch {version_of('torch')} has no {where}; install a torch that vbrt was tested with")
    return found


def _optional(name: str, path: str) -> Any:
    OPTIONAL[name] = path
    return find("torch", path)


# -- dispatch ---------------------------------------------------------------------------------------------------------

dispatch_keys = _required("dispatch_keys", "_C:_dispatch_keys")
dispatch_modes = _required("dispatch_modes", "_C:_len_torch_dispatch_stack")
dispatch_mode_at = _required("dispatch_mode_at", "_C:_get_dispatch_stack_at")
mode_stack = _required("mode_stack", "utils._python_dispatch:_get_current_dispatch_mode_stack")
disable_current_modes = _required("disable_current_modes", "utils._python_dispatch:_disable_current_modes")
TorchDispatchMode = _required("TorchDispatchMode", "utils._python_dispatch:TorchDispatchMode")
function_modes_enabled = _required("function_modes_enabled", "_C:_is_torch_function_mode_enabled")
disabled_torch_function = _required("disabled_torch_function", "_C:_disabled_torch_function_impl")
DisableTorchFunction = _required("DisableTorchFunction", "_C:DisableTorchFunction")
DisableTorchFunctionSubclass = _required("DisableTorchFunctionSubclass", "_C:DisableTorchFunctionSubclass")
AutoDispatchBelowAutograd = _required("AutoDispatchBelowAutograd", "_C:_AutoDispatchBelowAutograd")
is_any_autocast_enabled = _required("is_any_autocast_enabled", "_C:_is_any_autocast_enabled")
OpOverload = _required("OpOverload", "_ops:OpOverload")

# -- tracing, functorch, fake tensors ---------------------------------------------------------------------------------

is_tracing = _required("is_tracing", "_C:_is_tracing")
tracing_state = _required("tracing_state", "_C:_get_tracing_state")
set_tracing_state = _required("set_tracing_state", "_C:_set_tracing_state")
functorch_enabled = _required("functorch_enabled", "_C:_are_functorch_transforms_active")
get_unwrapped = _required("get_unwrapped", "_C:_functorch.get_unwrapped")
is_batchedtensor = _required("is_batchedtensor", "_C:_functorch.is_batchedtensor")
is_functorch_wrapped = _required("is_functorch_wrapped", "_C:_functorch.is_functorch_wrapped_tensor")
interpreter_stack = _required("interpreter_stack", "_C:_functorch.get_interpreter_stack")
TransformType = _required("TransformType", "_C:_functorch.TransformType")
without_functorch = _required("without_functorch", "_functorch.pyfunctorch:temporarily_clear_interpreter_stack")
plain_autograd_function = _required("plain_autograd_function", "_functorch.utils:enable_single_level_autograd_function")
is_fake = _required("is_fake", "_subclasses.fake_tensor:is_fake")
FakeTensor = _required("FakeTensor", "_subclasses.fake_tensor:FakeTensor")
FakeTensorMode = _required("FakeTensorMode", "_subclasses.fake_tensor:FakeTensorMode")

# -- tensors and autograd ---------------------------------------------------------------------------------------------

has_storage = _required("has_storage", "_C:_has_storage")
has_overlap = _required("has_overlap", ":_debug_has_internal_overlap")
current_graph_task = _required("current_graph_task", "_C:_current_graph_task_id")
will_execute = _required("will_execute", "_C:_will_engine_execute_node")
tree_leaves = _required("tree_leaves", "utils._pytree:tree_leaves")
tree_flatten = _required("tree_flatten", "utils._pytree:tree_flatten")
tree_unflatten = _required("tree_unflatten", "utils._pytree:tree_unflatten")
TreeSpec = _required("TreeSpec", "utils._pytree:TreeSpec")

# -- devices ----------------------------------------------------------------------------------------------------------

current_device = _optional("current_device", "_C:_cuda_getDevice")
raw_stream = _optional("raw_stream", "_C:_cuda_getCurrentRawStream")
set_stream = _optional("set_stream", "_C:_cuda_setStream")
is_capturing = _optional("is_capturing", "_C:_cuda_isCurrentStreamCapturing")
end_allocate_to_pool = _optional("end_allocate_to_pool", "_C:_cuda_endAllocateToPool")
