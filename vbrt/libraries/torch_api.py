"""torch: private parts of `torch._C`, functorch, fake tensors, the dispatcher and the compiler that vbrt uses.

All except the compiler's are looked up at import, so a torch that lacks one is rejected by name before a model is
touched; `OPTIONAL` parts fall back to slower public functions, or to None. They are bound as module attributes because
some are called in every forward.

| compiler part | without it |
| --- | --- |
| `never_lower` | slow compilation, with a warning |
| graph passes, their options | KernelError from `vbrt.compile_options` |
| names of dynamo's guards, `guards_attribute` | KernelError |
| `skip_frames_of`, and the marks of `kernels/uncompiled.py` | dynamo is imported, with a warning |

Tested versions: `vbrt.libraries.versions`. Inductor is imported only when its parts are used.
"""

import importlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from vbrt.config.argument_checks import check_one_of
from vbrt.errors import KernelError, LibraryError
from vbrt.host import accelerator
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
    "flash_varlen",
    "function_modes_enabled",
    "functorch_enabled",
    "get_unwrapped",
    "graph_pass_base",
    "guards_beside",
    "has_flash_varlen",
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
    "may_overwrite",
    "mode_stack",
    "moves_in_place",
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

#: required for a forward or a training pass
REQUIRED: dict[str, str] = {}
#: only reduce host overhead
OPTIONAL: dict[str, str] = {}
_ABSENT = object()


def _required(name: str, path: str) -> Any:
    """A part of torch. Raises LibraryError if it is missing."""
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
moves_in_place = _required("moves_in_place", ":_has_compatible_shallow_copy_type")
current_graph_task = _required("current_graph_task", "_C:_current_graph_task_id")
will_execute = _required("will_execute", "_C:_will_engine_execute_node")
tree_leaves = _required("tree_leaves", "utils._pytree:tree_leaves")
tree_flatten = _required("tree_flatten", "utils._pytree:tree_flatten")
tree_unflatten = _required("tree_unflatten", "utils._pytree:tree_unflatten")
TreeSpec = _required("TreeSpec", "utils._pytree:TreeSpec")
_keeps_graph = _optional("keeps_graph", "_C:_autograd._get_current_graph_task_keep_graph")
_storage_uses = _optional("storage_uses", "_C:_storage_Use_Count")


def may_overwrite(saved: torch.Tensor) -> bool:
    """True if nobody can read a tensor that a backward pass has saved once this pass has: no other tensor has its
    storage, and the pass keeps no graph. False if torch does not tell."""
    if _keeps_graph is None or _storage_uses is None or _keeps_graph():
        return False
    storage = saved.untyped_storage()
    return _storage_uses(storage._cdata) == 2  # the tensor, and `storage`


# -- devices ----------------------------------------------------------------------------------------------------------


def _of_accelerator(name: str, function: str, public: Callable[..., Any]) -> Callable[..., Any]:
    """A private function of CUDA's and ROCm's module, or the public one of the accelerator."""
    private = _optional(name, f"_C:_cuda_{function}")
    return public if private is None or accelerator.TYPE != accelerator.CUDA else private


def _set_stream(stream_id: int, device_index: int, device_type: int) -> None:
    numbers = {"stream_id": stream_id, "device_index": device_index, "device_type": device_type}
    accelerator.set_stream(accelerator.Stream(**numbers))


current_device = _of_accelerator("current_device", "getDevice", accelerator.current_device)
raw_stream = _of_accelerator(
    "raw_stream", "getCurrentRawStream", lambda device: accelerator.stream_key(accelerator.current_stream(device))
)
set_stream = _of_accelerator("set_stream", "setStream", _set_stream)
is_capturing = _of_accelerator("is_capturing", "isCurrentStreamCapturing", accelerator.is_current_stream_capturing)
end_allocate_to_pool = _optional("end_allocate_to_pool", "_C:_cuda_endAllocateToPool")
_flash_forward = _optional("flash_forward", ":ops.aten._flash_attention_forward")


def flash_varlen(
    query_MHK: torch.Tensor,
    key_NGK: torch.Tensor,
    value_NGK: torch.Tensor,
    begins_M: torch.Tensor,
    begins_N: torch.Tensor,
    longest_M: int,
    longest_N: int,
    *,
    scale: float | None,
    left: int,
) -> torch.Tensor:
    """Causal attention within sequences that lie behind each other, on an NVIDIA GPU, as [M, H, K].

    Args:
        query_MHK, key_NGK, value_NGK: 16 bits; H a multiple of G. The last queries of a sequence are at its last keys.
        begins_M, begins_N: int32 [sequences + 1]: where each begins, and the last one's end.
        longest_M, longest_N: tokens of a sequence, at most.
        left: keys before a query's own that it sees; -1: all.
    """
    window = {} if left < 0 else {"window_size_left": left}
    lengths = begins_M, begins_N, longest_M, longest_N
    return _flash_forward(query_MHK, key_NGK, value_NGK, *lengths, 0.0, True, False, scale=scale, **window)[0]


has_flash_varlen = _flash_forward is not None

# -- the compiler -----------------------------------------------------------------------------------------------------

#: options of torch.compile: a post-autograd graph pass, and a filter for dynamo's guards
PASS_OPTION, GUARD_OPTION = "post_grad_custom_pre_pass", "guard_filter_fn"


def never_lower(op: OpOverload) -> None:
    """Register a fallback with inductor, if it is loaded, for an operator without a lowering.

    Without it, torch 2.11 formats the expression of the operator's inputs for a disabled log; the text doubles with
    each norm before it, and a model whose first such operator came after 8 layers took minutes.
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
    """Base class of inductor's graph passes."""
    return _of_inductor("custom_graph_pass", "CustomGraphPass")


def hash_of_files(paths: tuple[str, ...]) -> Any:
    """Hash of source files, which identifies a pass in inductor's cache."""
    return _of_inductor("custom_graph_pass", "get_hash_for_files")(paths)


def decompositions() -> dict[Any, Any]:
    """Inductor's operator decompositions. Imports inductor, which takes seconds."""
    return _of_inductor("decomposition", "select_decomp_table")()


def options_of_mode(mode: str) -> dict[str, Any]:
    """torch.compile options of a mode."""
    _of_inductor("config", PASS_OPTION)
    modes = _of_inductor("", "list_mode_options")()
    check_one_of(mode, modes, "compile_options(): mode")
    return modes[mode]


def _of_inductor(module: str, name: str) -> Any:
    """A part of inductor. Raises KernelError if it is missing."""
    try:
        return getattr(importlib.import_module(f"torch._inductor.{module}".rstrip(".")), name)
    except (ImportError, AttributeError) as error:
        raise KernelError(
            f"vbrt.compile_options: torch {torch.__version__}: {error}; expected torch {tested_range('torch')}. "
            "torch.compile(model) without these options works, in more launches"
        ) from error


def guards_beside(guards: Sequence[Any], attribute: str) -> list[bool]:
    """Which of dynamo's guards are not on this attribute of a module.

    Dynamo, which calls a filter between two builds of its guards, may then build those anew of objects that a property
    makes at each read, such as transformers 5.24's `config.per_layer_config`: torch 2.11 has an AssertionError for a
    second object as long as the first one lives.
    """
    try:
        for guard in guards:
            guard.orig_guard.obj_weakref = None
        return [not guard.name.endswith(f".{attribute}") for guard in guards]
    except AttributeError as error:
        raise KernelError(f"torch {torch.__version__}: {error}; expected torch {tested_range('torch')}") from error


def skip_frames_of(function: Any) -> bool:
    """Make dynamo skip a function's own frames but not its callees', without importing dynamo.

    Returns False, with a warning, if this torch cannot.
    """
    try:
        frames = torch._C._dynamo.eval_frame
        own, called = frames._FrameAction.SKIP, frames._FrameAction.DEFAULT
        frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(own, called))
    except (AttributeError, TypeError) as error:  # a missing name, or a changed signature
        announce(
            f"torch {torch.__version__}: {error}; tested with {tested_range('torch')}. Importing vbrt imports torch's "
            "compiler, which takes two seconds"
        )
        return False
    return True
