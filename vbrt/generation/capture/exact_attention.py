"""Attention of captured steps with the plain model's bits: it runs eagerly, between CUDA graphs.

    attention = ExactAttention(statics)
    with attention.of(model):
        model(...)         # traced: each attention call is one leaf, and reads no masked slot

Library kernels choose their split and their order of summation by the number of keys and by whether there is a mask, so
attention to a masked bucket rounds differently from attention to exactly the tokens. All else of a step has constant
shapes. So each leaf calls the model's own attention function as the plain step does: the keys up to the new token, and
the mask that transformers makes for them, or none. The recorder cuts the graph at the leaves (`outside`).

A mask is a placeholder object while the step is traced. A model that computes with the mask or with the bucket of keys
outside of the attention interface is refused: such steps run eagerly.
"""

import contextlib
import functools
import threading
import types
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from vbrt.generation.fusion.step_graph import StepGraph
from vbrt.generation.fusion.step_rows import current_row
from vbrt.generation.static.cache_kinds import NotRecordable
from vbrt.generation.static.static_cache import Slots, Statics
from vbrt.host.host_memory import storage_of
from vbrt.kernels.operator_trace import StepRefused, recorder, root_of
from vbrt.libraries.transformers_attention import NotRouted, Route
from vbrt.tiers.schedule.graph_recorder import outside

__all__ = ["ExactAttention", "as_captured", "is_captured"]


class _Here(threading.local):
    now: "ExactAttention | None" = None
    captured = False


_here = _Here()


@contextlib.contextmanager
def as_captured(*, wanted: bool = True) -> Iterator[None]:
    """Make transformers assume CUDA graph capture in this thread, so that it does not read mask values on the host."""
    before, _here.captured = _here.captured, wanted
    try:
        yield
    finally:
        _here.captured = before


def is_captured() -> bool:
    """True in `as_captured`."""
    return _here.captured


@dataclass(frozen=True, eq=False, slots=True)
class _Mask:
    """A mask that the model asked for while it was traced.

    Attributes:
        make: the model's mask function.
        given: its arguments, but the padding.
        growing: index of the cache layer that it is for; None for keys of fixed size.
        padding: 2D mask that the model passed, if any.
    """

    make: Callable[..., Tensor | None]
    given: Mapping[str, Any]
    growing: int | None
    padding: Tensor | None

    def __getattr__(self, name: str) -> Any:
        raise NotRecordable(_COMPUTES)

    __getitem__ = __getattr__

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NotRecordable(_COMPUTES)


_COMPUTES = "the model computes with its attention mask outside of transformers' attention interface"


class ExactAttention:
    """Attention of the steps captured on one static cache."""

    def __init__(self, statics: Statics) -> None:
        self._statics = statics
        self._made: dict[tuple[_Mask, int], Tensor | None] = {}

    @contextlib.contextmanager
    def of(self, model: Any) -> Iterator[None]:
        """Trace the model's attention as leaves. Raises NotRecordable: it has no attention interface."""
        self.begin()
        before, _here.now = _here.now, self
        try:
            with _ROUTE.of(model):
                yield
        except NotRouted as error:
            raise NotRecordable(str(error)) from error
        finally:
            _here.now = before

    def begin(self) -> None:
        """Forget the masks of the last step."""
        self._made.clear()

    def growing_with(self, key: Tensor) -> int | None:
        """Index of the growing cache layer whose memory these keys are; None if they have a fixed size."""
        return self._statics.growing_with(key)

    def attend(
        self,
        call: "_Call",
        row: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        padding: Tensor | None,
        given: dict[str, Tensor],
    ) -> Tensor:
        """Attention of one step, [B, 1, H, D], to the keys up to the new token; `row`: steps ahead of the cache."""
        if call.growing is not None:
            slots = self._statics.slots_up_to_next(call.growing, row)
            key, value = key[:, :, slots], value[:, :, slots]
            given = {name: of[..., slots] if name in _OVER_KEYS else of for name, of in given.items()}
        with as_captured(wanted=False):
            mask = None if call.mask is None else self._mask(call.mask, row, padding)
            return call.function(call.module, query, key, value, mask, **call.kwargs, **given)[0]

    def _mask(self, mask: _Mask, row: int, padding: Tensor | None) -> Tensor | None:
        if (mask, row) not in self._made:
            given = dict(mask.given, attention_mask=padding)
            if mask.growing is not None:
                size, first, length = self._statics.sizes_of_next(mask.growing, row)
                given |= {"kv_length": size, "kv_offset": first, "q_offset": length}
                if padding is not None:
                    given["attention_mask"] = padding[:, : length + 1]
            self._made[mask, row] = mask.make(**given)
        return self._made[mask, row]

    def check(self, step: StepGraph) -> None:
        """Raise StepRefused if a traced step reads a bucket of keys elsewhere than in attention."""
        rooms = {storage_of(tensor) for room in self._statics.rooms.values() for tensor in room.tensors}
        memory = {node for node, tensor in step.given.items() if storage_of(tensor) in rooms}
        for node in step.graph.nodes:
            reads = any(root_of(read) in memory for read in node.all_input_nodes)
            if node.op == "call_function" and node.target is not _attend and reads and root_of(node) not in memory:
                name = getattr(node.target, "__name__", node.target)
                raise StepRefused(f"{name} reads keys or values of the cache outside of the attention interface")


@dataclass(frozen=True, eq=False, slots=True)
class _Call:
    """One attention call of the traced step: what does not change from step to step."""

    function: Callable[..., tuple[Tensor, Any]]
    module: Any
    growing: int | None
    mask: _Mask | None
    kwargs: Mapping[str, Any]


#: arguments of attention functions with a column for each key
_OVER_KEYS = ("position_bias",)


def _attend(attend: Callable[..., Tensor], call: _Call, *tensors: Any) -> Tensor:
    """Leaf of a traced step: `ExactAttention.attend`."""
    return outside(functools.partial(attend, call, current_row(), *tensors))


def _attention(module: Any, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **kwargs: Any) -> Any:
    exact, function = _here.now, _ROUTE.own_attention(module)
    step = recorder()
    if exact is None or step is None:  # another thread's pass
        return function(module, query, key, value, attention_mask, **kwargs)
    if not (attention_mask is None or type(attention_mask) is _Mask):
        raise NotRecordable(f"{type(module).__name__} makes its own attention mask")
    given = {name: value for name, value in kwargs.items() if isinstance(value, Tensor)}
    constant = {name: value for name, value in kwargs.items() if name not in given}
    if held := sorted(name for name, value in constant.items() if _holds_tensors(value)):
        raise NotRecordable(f"{type(module).__name__} passes tensors to its attention within {', '.join(held)}")
    growing = exact.growing_with(key)
    if growing is None and attention_mask is not None and attention_mask.growing is not None:
        raise NotRecordable(f"{type(module).__name__} computes its keys from what the cache holds")
    others = (size for name in set(given) - set(_OVER_KEYS) for size in given[name].shape)
    if growing is not None and key.shape[2] in others:
        raise NotRecordable(f"{type(module).__name__} passes a tensor over all keys to its attention")
    call = _Call(function, module, growing, attention_mask, constant)
    padding = None if attention_mask is None else attention_mask.padding
    return step.leaf(_attend, exact.attend, call, query, key, value, padding, given), None


def _masks(*args: Any, **kwargs: Any) -> Any:
    exact, make = _here.now, _ROUTE.own_masks(kwargs["config"])
    if exact is None or recorder() is None or args:
        return make(*args, **kwargs)
    size, padding = kwargs["kv_length"], kwargs.pop("attention_mask", None)
    if isinstance(size, Slots):
        del kwargs["q_offset"]  # a tensor during capture
    if held := sorted(name for name, value in kwargs.items() if _holds_tensors(value)):
        raise NotRecordable(f"a mask depends on tensors: {', '.join(held)}")
    return _Mask(make, kwargs, size.growing if isinstance(size, Slots) else None, padding)


def _holds_tensors(value: Any) -> bool:
    """True for a tensor, a container of one, or a function over one."""
    if isinstance(value, Tensor):
        return True
    if isinstance(value, list | tuple):
        return any(map(_holds_tensors, value))
    if isinstance(value, dict):
        return any(map(_holds_tensors, value.values()))
    if isinstance(value, functools.partial):
        return any(map(_holds_tensors, (value.func, value.args, value.keywords)))
    if isinstance(value, types.FunctionType):
        return any(_holds_tensors(cell.cell_contents) for cell in value.__closure__ or ())
    return False


_ROUTE = Route("vbrt_exact", _attention, _masks)
