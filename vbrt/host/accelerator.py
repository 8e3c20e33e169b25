"""The accelerator: the one device type beside the CPU that torch computes on, found by probing torch at import.

    from vbrt.host import accelerator

    accelerator.TYPE                                   # "cuda" (NVIDIA, and AMD with ROCm), "xpu", "mps", a plug-in's
    stream = accelerator.Stream(device)                # streams, events and memory figures under torch.cuda's names
    accelerator.current_stream(device).wait_stream(stream)
    accelerator.LACKS.get("graphs")                    # why an ability is missing; absent: it is there

Functions are those of the device's module (`torch.get_device_module`), bound once: a call costs what a call of torch's
costs. Where a module lacks one, something equivalent stands in, or the call raises LibraryError by name. In a torch
without any accelerator CUDA's module stands in, which answers that no device is there.

| | NVIDIA | ROCm | XPU | MPS |
| --- | --- | --- | --- | --- |
| streams, events | yes | yes | yes | no: copies are synchronous |
| graphs | yes | yes | no | no |
| registration of host memory | yes | yes | no | no |
| the CUDA runtime (`tiers/storage/device_copy.py`) | yes | no | no | no |

What only NVIDIA GPUs have is asked of `vbrt.kernels.cuda.devices`.
"""

import contextlib
import functools
import operator
import types
from collections.abc import Callable
from typing import Any

import torch

from vbrt.errors import LibraryError
from vbrt.host.logger import warn

__all__ = [
    "CUDA",
    "LACKS",
    "TYPE",
    "Event",
    "Graph",
    "Stream",
    "can_device_access_peer",
    "check_error",
    "cudart",
    "current_device",
    "current_stream",
    "default_device",
    "device",
    "device_count",
    "empty_cache",
    "get_device_capability",
    "get_device_name",
    "get_device_properties",
    "get_sync_debug_mode",
    "graph_event",
    "graph_pool_handle",
    "has_streams",
    "is_available",
    "is_current_stream_capturing",
    "is_device",
    "is_used",
    "max_memory_allocated",
    "mem_get_info",
    "memory_allocated",
    "memory_limit",
    "memory_reserved",
    "memory_stats_as_nested_dict",
    "on_cuda",
    "pinned",
    "pins",
    "refusal",
    "reset_peak_memory_stats",
    "sent",
    "set_device",
    "set_stream",
    "set_sync_debug_mode",
    "sleeping_event",
    "stream",
    "stream_key",
    "synchronize",
    "unused",
    "vendor",
]

#: device type of NVIDIA's and AMD's GPUs
CUDA = "cuda"
_found = torch.accelerator.current_accelerator()

#: device type, as in `torch.device(TYPE, index)`
TYPE: str = CUDA if _found is None else _found.type

_module = torch.get_device_module(TYPE)
_name = _module.__name__


def _lacking(name: str) -> Any:
    """Stand-in for a function or class that the device's module lacks: its call raises LibraryError."""

    class Lacking:
        def __new__(cls, *args: object, **kwargs: object) -> Any:
            raise LibraryError(
                f"torch {torch.__version__} has no {_name}.{name}; tiers.gpu.enabled = false computes on the CPU"
            )

    return Lacking


def _of(name: str, stands_in: Any = None) -> Any:
    """A member of the device's module, or what stands in for it."""
    found = getattr(_module, name, None)
    return found if found is not None else stands_in or _lacking(name)


def _without_index(name: str) -> Callable[..., Any]:
    """A function of a module with one device, called with or without one."""
    function = _of(name)
    return lambda device=None: function()


def _zero(device: object = None) -> int:
    return 0


def _none(device: object = None) -> None:
    return None


def _no(*args: object) -> bool:
    return False


def _few_properties(device: object = None) -> types.SimpleNamespace:
    return types.SimpleNamespace(name=TYPE, total_memory=mem_get_info(device)[1])


# -- devices ----------------------------------------------------------------------------------------------------------

device_count: Callable[[], int] = _of("device_count")
current_device: Callable[[], int] = _of("current_device", _zero)
set_device: Callable[[Any], None] = _of("set_device", _none)
#: context manager: makes a device current
device: Callable[[Any], contextlib.AbstractContextManager] = _of("device", contextlib.nullcontext)
get_device_properties: Callable[..., Any] = _of("get_device_properties", _few_properties)
get_device_capability: Callable[..., Any] = _of("get_device_capability")
get_device_name: Callable[..., str] = _of("get_device_name", lambda device=None: TYPE)
can_device_access_peer: Callable[[int, int], bool] = _of("can_device_access_peer", _no)
check_error: Callable[[int], None] = _of("check_error")
#: the runtime that registers host memory; None without one
cudart: Callable[[], Any] | None = getattr(_module, "cudart", None)


def on_cuda(tensor: torch.Tensor) -> bool:
    """True for a tensor on an NVIDIA or AMD GPU, where kernels of `vbrt.kernels.cuda` may run."""
    return tensor.is_cuda


#: True for a tensor in the accelerator's memory; functions, because dynamo does not trace an attrgetter
is_device: Callable[[torch.Tensor], bool] = {
    CUDA: on_cuda,
    "xpu": lambda tensor: tensor.is_xpu,
    "mps": lambda tensor: tensor.is_mps,
}.get(TYPE, lambda tensor: tensor.device.type == TYPE)


@functools.cache
def refusal() -> str | None:
    """Return why vbrt does not compute on the accelerator, with a warning at the first call; None if it does.

    Probes a device other than CUDA's for the dtype of block scales, which MPS may lack.
    """
    if TYPE == CUDA or not _module.is_available():
        return None
    try:
        torch.zeros(1, dtype=torch.uint8, device=TYPE).view(torch.float8_e4m3fn).float()
    except (RuntimeError, TypeError) as error:
        reason = f"{TYPE}: block scales cannot be decoded there ({error}); models run on the CPU"
        warn(reason, stacklevel=2)
        return reason
    return None


def _is_usable() -> bool:
    return _module.is_available() and refusal() is None


is_available: Callable[[], bool] = _module.is_available if TYPE == CUDA else _is_usable


def unused(enabled: bool | str = "auto") -> str | None:
    """Return why `tiers.gpu.enabled` leaves out an accelerator that is there; None if it does not, or none is there.

    "auto" leaves out one that shares the host's memory, whose bytes two tiers would count twice.
    """
    if not enabled or not _module.is_available():
        return None
    if TYPE == "mps" and enabled is not True:
        return f"{TYPE} shares the host's memory: models run on the CPU; tiers.gpu.enabled = true computes on {TYPE}"
    return refusal()


def is_used(enabled: bool | str = "auto") -> bool:
    """True if models compute on the accelerator under `tiers.gpu.enabled`."""
    return bool(enabled) and is_available() and unused(enabled) is None


def default_device() -> torch.device:
    """Return the current device of the accelerator; the CPU without one."""
    return torch.device(TYPE, current_device()) if is_available() else torch.device("cpu")


def vendor(device: torch.device) -> str:
    """Return "nvidia", "amd", "intel" or "apple"; of another device its type, such as "cpu"."""
    if device.type == CUDA:
        return "nvidia" if torch.version.hip is None else "amd"
    return {"xpu": "intel", "mps": "apple"}.get(device.type, device.type)


# -- streams and events -----------------------------------------------------------------------------------------------

Stream: Any = _of("Stream")
Event: Any = _of("Event")
#: context manager: makes a stream current
stream: Callable[[Any], contextlib.AbstractContextManager] = _of("stream")
set_stream: Callable[[Any], None] = _of("set_stream")
current_stream: Callable[..., Any] = _of("current_stream")
is_current_stream_capturing: Callable[[], bool] = _of("is_current_stream_capturing", _no)
#: waits for all work of a device
synchronize: Callable[..., None] = _without_index("synchronize") if TYPE == "mps" else _of("synchronize")
#: what identifies a stream: its handle, or its numbers
stream_key: Callable[[Any], Any] = operator.attrgetter(
    *(("cuda_stream",) if TYPE == CUDA else ("device_index", "stream_id"))
)


def graph_event() -> Any:
    """Return an event that a captured graph records at each replay, for streams outside of it; None where there are
    none."""
    return Event(external=True) if TYPE == CUDA and torch.version.hip is None else None


def sleeping_event() -> Any:
    """Return an event whose `synchronize` sleeps, where the device has such: a core that spins takes time from those
    that compute."""
    return Event(blocking=True) if TYPE == CUDA else Event()


def has_streams(device: torch.device) -> bool:
    """True if copies on a device are asynchronous, in streams."""
    return device.type == _STREAMED


# -- graphs -----------------------------------------------------------------------------------------------------------

Graph: Any = _of("CUDAGraph")
graph_pool_handle: Callable[[], Any] = _of("graph_pool_handle")

# -- memory -----------------------------------------------------------------------------------------------------------


def _recommended(device: object = None) -> tuple[int, int]:
    """(free, total) bytes of a GPU that shares the host's memory: of what the system recommends."""
    total = _module.recommended_max_memory()
    return max(0, total - _module.driver_allocated_memory()), total


_ON_MPS = TYPE == "mps"
#: (free, total) bytes of a device
mem_get_info: Callable[..., tuple[int, int]] = _recommended if _ON_MPS else _of("mem_get_info")
memory_allocated: Callable[..., int] = (
    _without_index("current_allocated_memory") if _ON_MPS else _of("memory_allocated")
)
memory_reserved: Callable[..., int] = _without_index("driver_allocated_memory") if _ON_MPS else _of("memory_reserved")
max_memory_allocated: Callable[..., int] = _of("max_memory_allocated")
_process_share: Callable[..., float] = _of("get_per_process_memory_fraction", lambda device: 1.0)


def memory_limit(device: torch.device) -> int:
    """Bytes that torch may reserve on a device: its reserved and the free memory, within the process's share."""
    free, total = mem_get_info(device)
    return min(free + memory_reserved(device), int(_process_share(device) * total))


reset_peak_memory_stats: Callable[..., None] = _of("reset_peak_memory_stats")
memory_stats_as_nested_dict: Callable[..., dict[str, Any]] = _of("memory_stats_as_nested_dict", dict)
empty_cache: Callable[[], None] = _of("empty_cache")
get_sync_debug_mode: Callable[[], int] = _of("get_sync_debug_mode", _zero)
set_sync_debug_mode: Callable[[int | str], None] = _of("set_sync_debug_mode", _none)


@functools.cache
def pins() -> bool:
    """True if torch allocates pinned host memory for the accelerator."""
    if TYPE == CUDA:
        return True
    try:
        torch.empty(1, dtype=torch.uint8, device="cpu", pin_memory=True)
    except RuntimeError:
        return False
    return True


def pinned(tensor: torch.Tensor) -> torch.Tensor:
    """Return a copy of a CPU tensor in pinned memory; the tensor itself where torch pins none."""
    return tensor.pin_memory() if pins() else tensor


def sent(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Send a small pageable tensor of the host's to a device, without waiting: drivers take up to 64 KiB with the
    command, so that it does not queue behind copies of pages."""
    return tensor.to(device, non_blocking=True)


def _lacks() -> dict[str, str]:
    """Return the missing abilities, each with its reason."""
    found = {}
    if not hasattr(_module, "Stream"):
        found["streams"] = f"{_name} has no streams; copies to the device are synchronous"
    if TYPE != CUDA:
        found["graphs"] = f"graphs are captured on CUDA and ROCm only; on {TYPE} steps run eagerly"
    if cudart is None:
        found["registration"] = f"{_name} registers no host memory as pinned; pages in host memory are pageable"
    return found


#: missing ability ("streams", "graphs", "registration") -> reason
LACKS: dict[str, str] = _lacks()
_STREAMED = None if "streams" in LACKS else TYPE
