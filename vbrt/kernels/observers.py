"""Observers of operations: tracers, dispatcher modes and torch.func transforms, which kernels must not bypass.

A kernel that reads memory by address is invisible to observers. Inputs that are not `is_bare` take dispatcher operators
instead, which all observers understand.
"""

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.fx import Proxy
from torch.overrides import _get_current_function_mode_stack

from vbrt.libraries.torch_api import (
    DisableTorchFunction,
    disable_current_modes,
    dispatch_keys,
    dispatch_modes,
    function_modes_enabled,
    functorch_enabled,
    is_functorch_wrapped,
    is_tracing,
    mode_stack,
    set_tracing_state,
    tracing_state,
    without_functorch,
)

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
_BARE_KEYS: set[int] = set()  # dispatch keys of dense tensors seen so far; a few per device type

# called without wrappers: microseconds matter in forwards
_QUIET = ("vbrt.", "torch.utils._device")  # modules of modes that do not affect products


def is_bare(x: Tensor) -> bool:
    """True if x is plain memory and no observer is active: a kernel may read it by its address."""
    return is_known_memory(x) and not is_watched()


def is_known_memory(x: Tensor) -> bool:
    """`is_memory` with a cache of dispatch keys."""
    return type(x) in _TYPES and (dispatch_keys(x).raw_repr() in _BARE_KEYS or is_memory(x))


def is_watched() -> bool:
    """True if a mode, transform, tracer or forward-mode differentiation is active in this thread."""
    if function_modes_enabled() and function_modes():
        return True
    return dispatch_modes() > 0 or functorch_enabled() or is_tracing() or forward_ad._current_level >= 0


def function_modes() -> bool:
    """True if a `TorchFunctionMode` is active that is neither vbrt's nor a default device."""
    if not function_modes_enabled():
        return False
    return not all(map(is_quiet, _get_current_function_mode_stack()))


def is_quiet(mode: object) -> bool:
    """True if a mode is vbrt's or a default device, which neither observes nor changes products."""
    return type(mode).__module__.startswith(_QUIET)


def is_recorded() -> bool:
    """True if a mode or tracer records operations with their tensors."""
    return dispatch_modes() > 0 or is_tracing()


def is_memory(x: Tensor) -> bool:
    """True if x is plain memory: no subclass, functorch wrapper, sparse or nested layout, or lazy negation."""
    if type(x) not in _TYPES or x.layout is not torch.strided or x.is_nested or x.is_quantized:
        return False
    if x.is_neg() or x.is_conj() or x._is_zerotensor() or is_functorch_wrapped(x):
        return False
    _BARE_KEYS.add(dispatch_keys(x).raw_repr())
    return True


def is_transformed() -> bool:
    """True if a torch.func transform or forward-mode differentiation is active."""
    return functorch_enabled() or forward_ad._current_level >= 0


def is_altered() -> bool:
    """True if a foreign mode (not torch's, not vbrt's) may intercept calls of the plain layer."""
    modes = mode_stack()
    return function_modes() or not all(getattr(mode, "_mode_key", None) or is_quiet(mode) for mode in modes)


@contextlib.contextmanager
def unwatched() -> Iterator[None]:
    """Suspend all observers and default devices in the block, for vbrt's internal work."""
    with _untraced(), disable_current_modes(), without_functorch(), torch.no_grad():
        with DisableTorchFunction():
            yield


@contextlib.contextmanager
def _untraced() -> Iterator[None]:
    tracing = tracing_state()
    if tracing is None:  # setting it is refused in some states
        yield
        return
    set_tracing_state(None)
    try:
        yield
    finally:
        set_tracing_state(tracing)


def traced_call(module: torch.nn.Module, x: Proxy) -> Proxy:
    """Add a call of the module to a torch.fx graph."""
    return x.tracer.create_proxy("call_module", x.tracer.path_of_module(module), (x,), {})
