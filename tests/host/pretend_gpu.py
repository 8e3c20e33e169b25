"""An accelerator for tests that is none: torch's plug-in device type, with the host's memory behind it.

    import tests.pretend_gpu  # before vbrt: it looks for an accelerator once

Tensors on `pretend:0` are tensors of another device to torch and to vbrt: mixing them with a CPU's raises, copies take
`copy_`. Each operator runs as the CPU's on the same memory. The module has streams and events, whose work is done at
once and whose waits are counted, and memory figures; it has no graphs, no pinned memory and no registration.
"""

import contextlib
import itertools
import sys
import time
import types
import weakref

import torch
from torch._C import DispatchKey, DispatchKeySet
from torch.utils import backend_registration
from torch.utils._pytree import tree_leaves, tree_map

__all__ = ["DEVICE", "WITHOUT_STREAMS", "counts"]

NAME = "pretend"
DEVICE = torch.device("cpu")  # set below: the name is unknown until the device is registered
TOTAL_BYTES = 1 << 30
WITHOUT_STREAMS = "without-streams" in sys.argv  # as MPS
_KIND = 20  # c10::DeviceType::PrivateUse1

counts = {"waits": 0, "events": 0, "streams": 0}
_allocated = {"now": 0, "peak": 0}
_cpu = torch.device("cpu")


# -- the device's module ----------------------------------------------------------------------------------------------


class Event:
    def __init__(self, enable_timing=False):
        self.at = None
        counts["events"] += 1

    def record(self, stream=None):
        self.at = time.perf_counter()

    def wait(self, stream=None):
        counts["waits"] += 1

    def synchronize(self):
        pass

    def query(self):
        return True

    def elapsed_time(self, end):
        return 1e3 * (end.at - self.at)


class Stream(torch.Stream):
    _ids = itertools.count(1)

    def __new__(cls, device=None, *, stream_id=None, device_index=0, device_type=_KIND):
        if stream_id is None:
            counts["streams"] += 1
            stream_id = next(cls._ids)
        return super().__new__(cls, stream_id=stream_id, device_index=device_index, device_type=device_type)

    def wait_event(self, event):
        event.wait(self)

    def wait_stream(self, stream):
        counts["waits"] += 1

    def record_event(self, event=None):
        event = event or Event()
        event.record(self)
        return event

    def synchronize(self):
        pass


_current = [Stream(stream_id=0)]


@contextlib.contextmanager
def stream(one):
    before, _current[0] = _current[0], one
    try:
        yield
    finally:
        _current[0] = before


module = types.ModuleType(f"torch.{NAME}")
module.__dict__.update(
    Event=Event,
    Stream=Stream,
    stream=stream,
    set_stream=lambda one: _current.__setitem__(0, one),
    current_stream=lambda device=None: _current[0],
    synchronize=lambda device=None: None,
    is_available=lambda: True,
    is_initialized=lambda: True,
    device_count=lambda: 1,
    current_device=lambda: 0,
    set_device=lambda device: None,
    device=contextlib.nullcontext,
    get_device_name=lambda device=None: "Pretend GPU",
    mem_get_info=lambda device=None: (TOTAL_BYTES - _allocated["now"], TOTAL_BYTES),
    memory_allocated=lambda device=None: _allocated["now"],
    memory_reserved=lambda device=None: _allocated["now"],
    max_memory_allocated=lambda device=None: _allocated["peak"],
    reset_peak_memory_stats=lambda device=None: _allocated.update(peak=_allocated["now"]),
    empty_cache=lambda: None,
    get_amp_supported_dtype=lambda: [torch.bfloat16, torch.float16],
    manual_seed_all=lambda seed: None,
    _is_in_bad_fork=lambda: False,
)
if WITHOUT_STREAMS:
    for name in ("Stream", "Event", "stream", "current_stream", "set_stream"):
        delattr(module, name)
backend_registration._setup_privateuseone_for_python_backend(rename=NAME, backend_module=module)
sys.modules[module.__name__] = module
DEVICE = torch.device(NAME, 0)

# -- tensors: the host's memory under another name --------------------------------------------------------------------

_CPU = DispatchKeySet(DispatchKey.CPU)
_aten = torch.ops.aten
_VIEWS = {_aten.as_strided.default, _aten.view.default, _aten._reshape_alias.default, _aten.unfold.default}


def _freed(nbytes):
    _allocated["now"] -= nbytes


def _storage_on(host):
    """A storage of the device on a CPU tensor's memory, which it keeps."""
    held = host.untyped_storage()
    storage = torch._C._construct_storage_from_data_pointer(held.data_ptr(), DEVICE, held.nbytes())
    storage.held = held  # torch keeps a storage's Python attributes as long as the storage
    _allocated["now"] += held.nbytes()
    _allocated["peak"] = max(_allocated.values())
    weakref.finalize(storage, _freed, held.nbytes())
    return storage


def _adopt(host, into=None):
    """Move a CPU tensor's memory to the device, into a tensor that it has already or a new one."""
    into = torch._C._acc.create_empty_tensor((0,), host.dtype) if into is None else into
    where = _storage_on(host), host.storage_offset(), host.size(), host.stride()
    _aten.set_.source_Storage_storage_offset.redispatch(_CPU, into, *where)
    return into


def _host(tensor):
    """A CPU tensor on the memory of one of the device; anything else as it is."""
    if isinstance(tensor, torch.device):
        return _cpu
    if not isinstance(tensor, torch.Tensor) or tensor.device.type != NAME:
        return tensor
    own = tensor.untyped_storage()
    alias = torch._C._construct_storage_from_data_pointer(own.data_ptr(), _cpu, own.nbytes())
    alias.held = own
    plain = torch.empty(0, dtype=tensor.dtype, device=_cpu)
    return plain.set_(alias, tensor.storage_offset(), tensor.size(), tensor.stride())


def _tensors(argument, value):
    """torch hands over numbers that stand for tensors as numbers."""
    is_number = isinstance(value, bool | int | float) and isinstance(argument.type, torch.TensorType)
    return torch.tensor(value) if is_number else value


def _run(op, *args, **kwargs):
    """Run an operator as the CPU's, on the same memory."""
    if op in _VIEWS:
        return op.redispatch(_CPU, *args, **kwargs)
    if op is _aten._copy_from.default:
        source, target = args[:2]
        _host(target).copy_(_host(source))
        return target
    if op is _aten.record_stream.default:
        return None
    kwargs.pop("pin_memory", None)
    args = [_tensors(*pair) for pair in zip(op._schema.arguments, args, strict=False)]
    given = {id(t): t for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
    hosts = {key: _host(t) for key, t in given.items()}
    inside = lambda value: hosts[id(value)] if isinstance(value, torch.Tensor) else _host(value)  # noqa: E731
    call = tree_map(inside, kwargs)
    outs = {argument.name for argument in op._schema.arguments if argument.is_out} & set(kwargs)
    call |= {name: torch.empty_like(call[name]) for name in outs}  # an alias of the device's memory cannot grow
    found = op(*tree_map(inside, args), **call)
    for name in outs:
        own, got = kwargs[name], call[name]
        hosts[id(own)] = got
        if own.shape == got.shape:
            _host(own).copy_(got)
        else:
            _adopt(got, own)
    originals = {id(host): given[key] for key, host in hosts.items()}

    def outside(value):
        if not isinstance(value, torch.Tensor):
            return value
        return originals[id(value)] if id(value) in originals else _adopt(value)

    return tree_map(outside, found)


_library = torch.library.Library("_", "IMPL")
_library.fallback(_run, "PrivateUse1")
