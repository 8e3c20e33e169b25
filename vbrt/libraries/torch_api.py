"""torch's private parts: what vbrt asks of `torch._C`, of functorch, fake tensors and the dispatcher, of its compiler.

All but the compiler's are looked up when this module is imported, so a torch that lacks one is refused by name before a
model is touched; `OPTIONAL` ones are torch's public functions then, which take longer, or None. Functions are bound
here, since some are called in every forward.

| of the compiler | without it |
| --- | --- |
| `never_lower` | slow compilation, announced |
| passes over graphs, their options | KernelError from `vbrt.compile_options` |
| names of dynamo's guards, `guards_attribute` | KernelError |
| `skip_frames_of`, and the marks of `kernels/uncompiled.py` | dynamo's import, announced |

`vbrt.libraries.versions` says with which versions all of it has been run. Imports inductor when asked for its parts.
"""

import importlib
import sys
from collections.abc import Callable
from typing import Any

import torch

from vbrt.config.argument_checks import check_one_of
from vbrt.errors import KernelError, LibraryError
from vbrt.libraries.probe import announce, find, version_of
from vbrt.libraries.versions import tested_range

__all__ = [
    "GUARD_OPTION",
    "OPTIONAL",
    "PASS_OPTION",
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
    "decompositions",
    "disable_current_modes",
    "disabled_torch_function",
    "dispatch_keys",
    "dispatch_mode_at",
    "dispatch_modes",
    "end_allocate_to_pool",
    "function_modes_enabled",
    "functorch_enabled",
    "get_unwrapped",
    "graph_pass_base",
    "guards_attribute",
    "has_overlap",
    "has_storage",
    "hash_of_files",
    "interpreter_stack",
    "is_any_autocast_enabled",
    "is_batchedtensor",
    "is_capturing",
    "is_fake",
    "is_functorch_wrapped",
    "is_tracing",
    "mode_stack",
    "never_lower",
    "options_of_mode",
    "plain_autograd_function",
    "raw_stream",
    "set_stream",
    "set_tracing_state",
    "skip_frames_of",
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

current_device: Callable[[], int] = _optional("current_device", "_C:_cuda_getDevice") or torch.cuda.current_device
raw_stream: Callable[[int], int] = _optional("raw_stream", "_C:_cuda_getCurrentRawStream") or (
    lambda device: torch.cuda.current_stream(device).cuda_stream
)
set_stream = _optional("set_stream", "_C:_cuda_setStream")
is_capturing = _optional("is_capturing", "_C:_cuda_isCurrentStreamCapturing")
end_allocate_to_pool = _optional("end_allocate_to_pool", "_C:_cuda_endAllocateToPool")

# -- the compiler -----------------------------------------------------------------------------------------------------

#: options of torch.compile: a pass over graphs after autograd, and which of dynamo's guards to keep
PASS_OPTION, GUARD_OPTION = "post_grad_custom_pre_pass", "guard_filter_fn"


def never_lower(op: OpOverload) -> None:
    """Tell inductor, if it is loaded, to call an operator that it has no code for.

    Left to find that out itself, torch 2.11 formats the expression of the operator's inputs, for a log that is off;
    the text doubles with each norm before it: a model whose first such operator was behind 8 layers took minutes.
    """
    lowering = sys.modules.get("torch._inductor.lowering")
    if lowering is None:
        return
    try:
        if op not in lowering.lowerings:
            tag = torch._library.utils.get_layout_constraint_tag(op, with_default=True)
            lowering.make_fallback(op, lowering.tag_to_layout_constraint(tag))
    except AttributeError as error:
        announce(
            f"torch {torch.__version__}: {error}; tested with {tested_range('torch')}. torch.compile may take minutes "
            "on models with 4-bit layers"
        )


def graph_pass_base() -> type:
    """The class of inductor's passes over graphs."""
    return _of_inductor("custom_graph_pass", "CustomGraphPass")


def hash_of_files(paths: tuple[str, ...]) -> Any:
    """A hash of files, by which inductor identifies a pass in its cache."""
    return _of_inductor("custom_graph_pass", "get_hash_for_files")(paths)


def decompositions() -> dict[Any, Any]:
    """Inductor's decompositions of operators. Takes seconds, which compiling takes anyway."""
    return _of_inductor("decomposition", "select_decomp_table")()


def options_of_mode(mode: str) -> dict[str, Any]:
    """The options of torch.compile that a mode stands for."""
    _of_inductor("config", PASS_OPTION)
    modes = _of_inductor("", "list_mode_options")()
    check_one_of(mode, modes, "compile_options(): mode")
    return modes[mode]


def _of_inductor(module: str, name: str) -> Any:
    """Raises KernelError if inductor has no such name."""
    try:
        return getattr(importlib.import_module(f"torch._inductor.{module}".rstrip(".")), name)
    except (ImportError, AttributeError) as error:
        raise KernelError(
            f"vbrt.compile_options: torch {torch.__version__}: {error}; expected torch {tested_range('torch')}. "
            "torch.compile(model) without these options works, in more launches"
        ) from error


def guards_attribute(guard: Any, attribute: str) -> bool:
    """True if one of dynamo's guards is on the attribute of some module."""
    try:
        return guard.name.endswith(f".{attribute}")
    except AttributeError as error:
        raise KernelError(f"torch {torch.__version__}: {error}; expected torch {tested_range('torch')}") from error


def skip_frames_of(function: Any) -> bool:
    """Tell dynamo, which need not be imported, to leave a function's own frames as they are, not those it calls.

    False: this torch has no such thing, which is announced.
    """
    try:
        frames = torch._C._dynamo.eval_frame
        own, called = frames._FrameAction.SKIP, frames._FrameAction.DEFAULT
        frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(own, called))
    except (AttributeError, TypeError) as error:  # a name, or the arguments of one
        announce(
            f"torch {torch.__version__}: {error}; tested with {tested_range('torch')}. Importing vbrt imports torch's "
            "compiler, which takes two seconds"
        )
        return False
    return True
