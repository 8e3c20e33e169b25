"""Detect observers of an operation: tracers, modes of torch's dispatcher, transforms of torch.func.

A kernel that reads memory by its address is invisible to them. Inputs that are not `is_bare` are computed by operators
of the dispatcher instead, which all observers understand.
"""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.autograd import forward_ad
from torch.fx import Proxy
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack

__all__ = [
    "dispatch_modes",
    "function_modes",
    "is_altered",
    "is_bare",
    "is_known_memory",
    "is_memory",
    "is_quiet",
    "is_recorded",
    "is_tracing",
    "is_transformed",
    "is_watched",
    "traced_call",
    "unwatched",
]

_TYPES = (Tensor, torch.nn.Parameter)
_BARE_KEYS: set[int] = set()  # of dense tensors that are their memory; a few for each kind of device

# no functions around them: forwards that take microseconds ask them each time
_keys_of = torch._C._dispatch_keys
dispatch_modes = torch._C._len_torch_dispatch_stack
_transforms = torch._C._are_functorch_transforms_active
is_tracing = torch._C._is_tracing
_function_modes = torch._C._is_torch_function_mode_enabled
_QUIET = ("vbrt.", "torch.utils._device")  # whose modes leave products as they are


def is_bare(x: Tensor) -> bool:
    """True if x is plain memory and no observer is active: a kernel may read it by its address."""
    return is_known_memory(x) and not is_watched()


def is_known_memory(x: Tensor) -> bool:
    """`is_memory`, quicker for kinds of tensors that it has seen."""
    return type(x) in _TYPES and (_keys_of(x).raw_repr() in _BARE_KEYS or is_memory(x))


def is_watched() -> bool:
    """True if a mode, a transform, a tracer or forward differentiation is active in this thread."""
    if _function_modes() and function_modes():
        return True
    return dispatch_modes() > 0 or _transforms() or is_tracing() or forward_ad._current_level >= 0


def function_modes() -> bool:
    """True if a `TorchFunctionMode` is active that is neither vbrt's nor a default device."""
    if not _function_modes():
        return False
    return not all(map(is_quiet, _get_current_function_mode_stack()))


def is_quiet(mode: object) -> bool:
    """True if a mode is vbrt's or a default device: it sees and changes nothing of products."""
    return type(mode).__module__.startswith(_QUIET)


def is_recorded() -> bool:
    """True if a mode or a tracer records operations with the tensors that they run on."""
    return dispatch_modes() > 0 or is_tracing()


def is_memory(x: Tensor) -> bool:
    """True if x is plain memory: no subclass, no wrapper of torch.func, not sparse, nested, or negated when read."""
    if type(x) not in _TYPES or x.layout is not torch.strided or x.is_nested or x.is_quantized:
        return False
    if x.is_neg() or x.is_conj() or x._is_zerotensor() or torch._C._functorch.is_functorch_wrapped_tensor(x):
        return False
    _BARE_KEYS.add(_keys_of(x).raw_repr())
    return True


def is_transformed() -> bool:
    """True if a transform of torch.func or a level of forward-mode derivatives is active."""
    return _transforms() or forward_ad._current_level >= 0


def is_altered() -> bool:
    """True if a mode that is neither torch's own nor vbrt's may look for calls of the plain layer, to alter them."""
    modes = _get_current_dispatch_mode_stack()
    return function_modes() or not all(getattr(mode, "_mode_key", None) or is_quiet(mode) for mode in modes)


@contextlib.contextmanager
def unwatched() -> Iterator[None]:
    """Suspend all observers and default devices in the block: for work that is not the observed function's own."""
    with _untraced(), _disable_current_modes(), temporarily_clear_interpreter_stack(), torch.no_grad():
        with torch._C.DisableTorchFunction():
            yield


@contextlib.contextmanager
def _untraced() -> Iterator[None]:
    tracing = torch._C._get_tracing_state()
    if tracing is None:  # what sets it is refused in some states
        yield
        return
    torch._C._set_tracing_state(None)
    try:
        yield
    finally:
        torch._C._set_tracing_state(tracing)


def traced_call(module: torch.nn.Module, x: Proxy) -> Proxy:
    """Record a call of the module in a graph of torch.fx."""
    return x.tracer.create_proxy("call_module", x.tracer.path_of_module(module), (x,), {})
