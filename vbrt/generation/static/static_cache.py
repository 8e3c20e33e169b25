"""transformers' caches with their tensors where a graph finds them: at the same addresses in every step.

    statics = Statics(cache, room)     # memory for a cache of this form
    statics.enter(cache)               # its layers keep their tensors there from now on
    ...
    leave(cache)                       # plain layers again

A cache that has been entered stays the object that it was, and its layers count as layers of their class: whoever reads
`layer.keys`, reorders beams or runs a forward eagerly sees what a `DynamicCache` shows. Only while
`statics.recording` is true do layers behave as those of transformers' StaticCache: keys and values are the whole block,
the new token is written at `statics.position`, which the device reads, and models mask what lies beyond it.

| layer | what it becomes |
| --- | --- |
| keys and values that grow (full attention, sliding windows, chunks) | a part of a longer tensor, see `Growing` |
| states of one size (linear attention, convolutions, cross attention) | copies at fixed addresses, see `Fixed` |
| layers that hold nothing (shared keys and values) | stay, and refuse to begin (`Idle`) |
| layers before the prompt, where memory is left from an earlier call | compute it there (`Filling`) |

A layer changes class in place, to one made of a mixin and its own class. What it does not know how to do (cropping,
repeating rows) it does as a plain layer, which it becomes first.
"""

import contextlib
import functools
import math
from abc import ABC, ABCMeta
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from vbrt.generation.static.cache_kinds import (
    OWN,
    NotRecordable,
    fills,
    grows,
    is_empty,
    layers_of,
    length_of,
    linear_layer,
    memory_of,
    read,
    tensors_of,
    write_to,
)
from vbrt.generation.static.length_buckets import Span, span_of
from vbrt.host.host_memory import storage_of

__all__ = ["Fixed", "Growing", "Room", "Statics", "Undo", "is_entered", "leave", "offer", "own", "withdraw"]

#: thousands of times what values are, and finite in 16 bits: what is masked is multiplied by zero
_SPOILED = 1e4


# -- layers -----------------------------------------------------------------------------------------------------------


class _Static(ABC):  # as most of transformers' layers are, or Python would refuse to change their class
    """What layers of a cache have in common whose tensors are in `Statics`."""

    _vb_plain: type  # the class that the layer had

    @property
    def is_compileable(self) -> bool:
        """True while a step is recorded: models then mask what a cache holds beyond its length."""
        return self._vb_statics.recording

    def leave_(self, *, copied: bool = True) -> None:
        """Become a plain layer, with tensors of its own."""
        raise NotImplementedError


class Growing(_Static):
    """A layer whose keys and values lie in longer tensors [B, H, room, D]: a mixin before DynamicLayer and its kin."""

    def enter_(self, statics: "Statics", room: "Room", length: int) -> None:
        """Copy what the layer holds, the last of `length` tokens, into the room."""
        held = self.__dict__["keys"], self.__dict__["values"]
        room.fill(held, statics.span.first(self.__dict__.get("sliding_window")), length)  # or it stays a plain layer
        del self.__dict__["keys"], self.__dict__["values"]
        self.__dict__.update(_vb_statics=statics, _vb_room=room, _vb_length=length)
        self.__class__ = _made(Growing, type(self))

    def leave_(self, *, copied: bool = True) -> None:
        keys, values, length = self.keys, self.values, self._vb_length
        if copied:
            keys, values = keys.clone(), values.clone()
        for name in ("_vb_statics", "_vb_room", "_vb_length"):
            del self.__dict__[name]
        self.__class__ = self._vb_plain
        self.keys, self.values = keys, values
        if hasattr(self, "cumulative_length"):
            self.cumulative_length = length

    @property
    def _vb_window(self) -> int | None:
        return self.__dict__.get("sliding_window")

    def _held(self) -> slice:
        """The places of the room that a plain layer would hold now."""
        length, window = self._vb_length, self._vb_window
        begin = 0 if window is None else max(0, length - window + 1)
        return slice(begin - self._vb_room.first, length - self._vb_room.first)

    @property
    def keys(self) -> Tensor:
        """What a plain layer holds: [B, H, tokens, D]. To put others in their place makes it one."""
        return self._vb_room.keys[:, :, self._held()]

    @keys.setter
    def keys(self, keys: Tensor) -> None:
        self.leave_()
        self.keys = keys

    @property
    def values(self) -> Tensor:
        """What a plain layer holds: [B, H, tokens, D]. To put others in their place makes it one."""
        return self._vb_room.values[:, :, self._held()]

    @values.setter
    def values(self, values: Tensor) -> None:
        self.leave_()
        self.values = values

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append tokens; return what the queries attend to, the whole block while a step is recorded."""
        statics, room, tokens = self._vb_statics, self._vb_room, key_states.shape[-2]
        if statics.recording:
            if _has_history(key_states, value_states):
                raise NotRecordable("the forward enables gradients")
            return room.write(key_states, value_states, statics)
        if self._vb_length + tokens > room.first + room.keys.shape[-2] or _has_history(key_states, value_states):
            self.leave_()
            return self.update(key_states, value_states, *args, **kwargs)
        held, at = self._held(), self._vb_length - room.first
        room.keys[:, :, at : at + tokens] = key_states
        room.values[:, :, at : at + tokens] = value_states
        self._vb_length += tokens
        return room.keys[:, :, held.start : at + tokens], room.values[:, :, held.start : at + tokens]

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last -`tokens_to_remove` tokens; as a plain layer where an earlier window is wanted."""
        length, window = max(0, self._vb_length + tokens_to_remove), self._vb_window
        gone = window is not None and length < self._vb_statics.span.start
        if tokens_to_remove > 0 or gone or "conv_states" in self.__dict__:
            self.leave_()
            self.crop(tokens_to_remove)
        else:
            self._vb_length = length

    @property
    def first(self) -> int:
        """The position of the first place of `block`."""
        return self._vb_room.first

    def passed(self) -> slice:
        """Return the places of the room that the window has passed: a plain layer has dropped what is there."""
        return slice(0, self._held().start)

    def block(self) -> tuple[Tensor, Tensor]:
        """Return all places that a step recorded for this span attends to, keys and values [B, H, places, D]."""
        size = self._vb_statics.span.end - self._vb_room.first
        return self._vb_room.keys[:, :, :size], self._vb_room.values[:, :, :size]

    def get_seq_length(self) -> Any:
        """The tokens that the layer has seen; while a step is recorded, a tensor on the device."""
        return self._vb_statics.position[0] if self._vb_statics.recording else self._vb_length

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        """Return how many places the next queries attend to, and the position of the first one."""
        if self._vb_statics.recording:
            return self._vb_statics.span.end - self._vb_room.first, self._vb_room.first
        held = self._held()
        return held.stop - held.start + query_length, held.start + self._vb_room.first

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Have each row continue another one: [B] int64."""
        held, index = self._held(), beam_idx.to(self._vb_room.keys.device)
        for tensor in (self._vb_room.keys, self._vb_room.values):
            tensor[:, :, held] = tensor[:, :, held].index_select(0, index)
        if "conv_states" in self.__dict__:  # of a layer that has both
            linear_layer().reorder_cache(self, beam_idx)


class Filling(ABC):
    """A layer that holds nothing yet, of a cache whose prompt comes: a mixin before DynamicLayer.

    Its first tokens are written where recorded steps of an earlier call attend to them, so that there is one cache, not
    two. From then on it is the plain layer that it was, whose tensors are parts of that memory.
    """

    _vb_plain: type

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Hold the first tokens; return them, as contiguous as a plain layer does."""
        self.__class__, rooms = self._vb_plain, self.__dict__.pop("_vb_rooms")
        rooms = () if _has_history(key_states, value_states) else rooms
        taken = next(filter(None, (room.take(key_states, value_states) for room in rooms)), None)
        if taken is None:
            return self.update(key_states, value_states, *args, **kwargs)
        self.lazy_initialization(key_states, value_states)
        self.keys, self.values = taken
        return key_states.contiguous(), value_states.contiguous()


class Idle(_Static):
    """A layer that holds nothing, and will not begin to within a recorded step."""

    def enter_(self, statics: "Statics") -> None:
        self.__dict__["_vb_statics"] = statics

    def leave_(self, *, copied: bool = True) -> None:
        del self.__dict__["_vb_statics"]
        self.__class__ = self._vb_plain

    def update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Begin as a plain layer does; refused while a step is recorded."""
        if self._vb_statics.recording:
            raise NotRecordable("a layer of the cache begins to hold keys after the prompt")
        self.leave_()
        return self.update(*args, **kwargs)


def _as_plain(name: str) -> Any:
    def method(self: _Static, *args: Any, **kwargs: Any) -> Any:
        self.leave_()
        return getattr(self, name)(*args, **kwargs)

    method.__name__, method.__doc__ = name, "As a plain layer, which this becomes."
    return method


for _name in ("batch_repeat_interleave", "batch_select_indices", "reset", "offload", "activate_past_recording"):
    setattr(_Static, _name, _as_plain(_name))
Idle.crop = _as_plain("crop")


@functools.cache
def _made(mixin: type[_Static], plain: type) -> type:
    first = mixin if isinstance(plain, ABCMeta) else _bare(mixin)
    return type(f"{mixin.__name__}{plain.__name__}", (first, plain), {"_vb_plain": plain})


_OF_CLASSES = ("__dict__", "__weakref__", "__abstractmethods__", "_abc_impl")


def _bare(mixin: type[_Static]) -> type:
    """A mixin for a class that is no ABC: the same members, without that base, by which Python tells layouts apart."""
    members = {name: of for kind in (_Static, mixin) for name, of in vars(kind).items() if name not in _OF_CLASSES}
    return mixin.register(type(mixin.__name__, (), members))


def leave(cache: Any, *, copied: bool = True) -> None:
    """Turn every layer of a cache into the plain one that it was, with tensors of its own.

    Args:
        copied: False to let it have those of `Statics`, which nobody must use any more.
    """
    for layer in layers_of(cache):
        if isinstance(layer, _Static):
            layer.leave_(copied=copied)
        if "_vb_fixed" in layer.__dict__:  # of a layer that has both, too
            layer.__dict__.pop("_vb_fixed").leave_(layer, copied=copied)


def is_entered(cache: Any) -> bool:
    """True if layers of a cache keep their tensors in `Statics`."""
    return any(isinstance(layer, _Static) or "_vb_fixed" in layer.__dict__ for layer in layers_of(cache))


def offer(cache: Any, memory: Sequence["Statics"]) -> None:
    """Have the layers of a cache that holds nothing put their first tokens where recorded steps will want them.

    memory: of caches that have ended, the best first; layers of other shapes, or longer prompts, leave it alone.
    """
    for index, layer in enumerate(layers_of(cache)):
        rooms = [statics.rooms[index] for statics in memory if index in statics.rooms]
        if rooms and fills(cache, layer):
            layer.__class__ = _made(Filling, type(layer))
            layer.__dict__["_vb_rooms"] = rooms


def withdraw(cache: Any) -> None:
    """Have layers that still hold nothing be plain again."""
    for layer in layers_of(cache):
        if layer.__dict__.pop("_vb_rooms", None) is not None:
            layer.__class__ = layer._vb_plain


def own(cache: Any, memory: Sequence["Statics"], *, but: "Statics | None" = None) -> None:
    """Give plain layers of a cache tensors of their own, where theirs are parts of what was offered.

    but: memory that the cache is about to enter: what already lies at its place there stays.
    """
    rooms = {storage_of(tensor) for statics in memory for room in statics.rooms.values() for tensor in room.tensors}
    for index, layer in enumerate(layers_of(cache)):
        stay = but.rooms[index].tensors if but is not None and index in but.rooms else ()
        for name in OWN[:2]:
            tensor = layer.__dict__.get(name)
            if not isinstance(tensor, Tensor) or storage_of(tensor) not in rooms:
                continue
            if not any(tensor.data_ptr() == place.data_ptr() and tensor.stride() == place.stride() for place in stay):
                layer.__dict__[name] = tensor.clone()


# -- memory -----------------------------------------------------------------------------------------------------------


class Room:
    """Memory of one layer that grows, made when it is filled first: of two caches no more than a layer is there twice.

    Attributes:
        keys, values: [B, H, room, D].
        first: the position of place 0.
    """

    keys: Tensor
    values: Tensor

    def __init__(self, room: int) -> None:
        self._room, self.first = room, 0

    def fill(self, held: tuple[Tensor, Tensor], first: int, length: int) -> None:
        """Hold the last of `length` tokens, with position `first` in place 0; what lies beyond is zero."""
        if not self.tensors:
            self.keys, self.values = (_longer(tensor, self._room) for tensor in held)
        self.first = first
        begin, end = length - held[0].shape[-2] - first, length - first
        for tensor, now in zip(self.tensors, held, strict=True):
            if storage_of(now) != storage_of(tensor):  # else it was computed here, see `Filling`
                tensor[:, :, max(begin, 0) : end] = now[:, :, max(-begin, 0) :]
            tensor[:, :, end:] = 0

    def take(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor] | None:
        """Hold the first tokens of a sequence; return where they are. None, and nothing done, if they do not fit."""
        new, size = (keys, values), keys.shape[-2]
        if not self.tensors or size > self._room or not all(map(_suits, new, self.tensors)):
            return None
        self.first = 0
        for tensor, now in zip(self.tensors, new, strict=True):
            tensor[:, :, :size] = now
        return self.keys[:, :, :size], self.values[:, :, :size]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Keys and values; none before the first `fill`."""
        return (self.keys, self.values) if "keys" in self.__dict__ else ()

    def shift(self, first: int, length: int) -> None:
        """Move what is held so that place 0 is position `first`, up to `length`."""
        by, end = first - self.first, length - self.first
        for tensor in (self.keys, self.values):
            tensor[:, :, : end - by] = tensor[:, :, by:end].clone()
        self.first = first

    def write(self, keys: Tensor, values: Tensor, statics: "Statics") -> tuple[Tensor, Tensor]:
        """Write one token where the device says, in a step that is recorded; return the block."""
        at, size = statics.position - self.first if self.first else statics.position, statics.span.end - self.first
        block_keys, block_values = self.keys[:, :, :size], self.values[:, :, :size]
        block_keys.index_copy_(2, at, keys)
        block_values.index_copy_(2, at, values)
        return block_keys, block_values


def _suits(tensor: Tensor, room: Tensor) -> bool:
    """True if a tensor [B, H, tokens, D] can lie in memory [B, H, room, D]."""
    shape = (*tensor.shape[:2], room.shape[2], *tensor.shape[3:])
    return shape == room.shape and tensor.dtype is room.dtype and tensor.device == room.device


def _has_history(*tensors: Tensor) -> bool:
    """True if a copy of a tensor would have gradients flow back through it."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


@torch.inference_mode(False)  # what is made in inference mode could be written there only
def _longer(tensor: Tensor, room: int) -> Tensor:
    shape = (*tensor.shape[:2], room, tensor.shape[3])
    return torch.zeros(shape, dtype=tensor.dtype, device=tensor.device)  # what is masked is multiplied, too: no NaN


class Fixed:
    """Tensors of a layer that keep their size, each with a copy at a fixed address.

    A step may write into them or put others in their place: `settle` then copies these back, in the recorded step too.
    """

    def __init__(self, layer: Any, names: tuple[tuple[str, Any], ...]) -> None:
        self._layer: Any = None
        self._names = names
        self.tensors = [torch.empty_like(read(layer, name)) for name in names]

    def enter_(self, layer: Any) -> None:
        self._layer = layer
        layer.__dict__["_vb_fixed"] = self
        self.settle()

    def settle(self) -> None:
        """Have the layer hold the tensors at the fixed addresses, with what it holds now."""
        for name, fixed in zip(self._names, self.tensors, strict=True):
            now = read(self._layer, name)
            if now is not fixed:
                fixed.copy_(now)
                write_to(self._layer, name, fixed)

    def leave_(self, layer: Any, *, copied: bool = True) -> None:
        """Give the layer that was entered tensors of its own."""
        for name, fixed in zip(self._names, self.tensors, strict=True):
            if copied and read(layer, name) is fixed:
                write_to(layer, name, fixed.clone())
        self.forget()

    def forget(self) -> None:
        """Hold no layer."""
        self._layer = None


class Undo:
    """What a block says of its end. Attributes: wanted: False to keep what it has done."""

    wanted = True


class Statics:
    """Memory for a cache of one form, and where a recorded step reads and writes it.

    Attributes:
        room: tokens that growing layers have memory for.
        span: the lengths that the steps recorded now serve.
        position: int64 [1], the place of the new token, read by the device.
        recording: whether layers behave as a static cache's.
        steady: whether steps on it attend as `deterministic_attention.py` does.
        rooms: memory of growing layers, by their index.
    """

    @torch.inference_mode(False)  # what is made in inference mode could be written there only
    def __init__(self, cache: Any, room: int, *, wide: bool = False, steady: bool = False) -> None:
        """wide: steps pass over masked places, so one recording may serve more lengths; not where windows move."""
        self.room, self.recording, self.steady, length = room, False, steady, length_of(cache)
        self._wide = wide and not any(layer.__dict__.get("sliding_window") for layer in layers_of(cache))
        self.span = self.span_at(length or 0)
        device = next(memory_of(cache)).device
        self.position = torch.full((1,), length or 0, dtype=torch.int64, device=device)
        self._growing: list[Any] = []
        self._passed_at: int | float = math.inf  # the length at which a window passes the first place of a room
        self._at: int | None = None  # what `position` holds, if that is known
        self.rooms: dict[int, Room] = {}
        self._fixed: dict[int, Fixed] = {}
        for index, layer in enumerate(layers_of(cache)):
            self._add(cache, index, layer)

    def _add(self, cache: Any, index: int, layer: Any) -> None:
        growing = grows(cache, layer)
        names = tuple(name for name in tensors_of(layer) if not (growing and name[0] in OWN))
        if growing:
            window = layer.__dict__.get("sliding_window")
            room = self.room if window is None else min(self.room, room_for_window(window, self.room))
            self.rooms[index] = Room(room)
        if names and not is_empty(layer):
            self._fixed[index] = Fixed(layer, names)

    def enter(self, cache: Any) -> None:
        """Have the layers of a cache of this form keep their tensors here, and copy them."""
        self.forget()
        own(cache, [self], but=self)  # a room is filled before layers behind it are read
        length = length_of(cache) or 0
        self.span = self.span_at(length)
        for index, layer in enumerate(layers_of(cache)):
            if index in self._fixed:
                self._fixed[index].enter_(layer)
            if index in self.rooms:
                Growing.enter_(layer, self, self.rooms[index], length)
                self._growing.append(layer)
            elif index not in self._fixed and hasattr(layer, "keys"):
                layer.__class__ = _made(Idle, type(layer))
                layer.enter_(self)
        self._note_windows()

    def _note_windows(self) -> None:
        windows = ((layer._vb_window, layer._vb_room.first) for layer in self._growing)
        self._passed_at = min((window + first for window, first in windows if window is not None), default=math.inf)

    @property
    def passes_windows(self) -> bool:
        """True if the next step finds places that a window has passed, which a recorded one must mask."""
        return (self.length or 0) >= self._passed_at

    @contextlib.contextmanager
    def spoiled(self) -> Iterator[None]:
        """Have places that windows have passed hold, in the block, values that no step could attend to unnoticed."""
        found = [(layer._vb_room, layer.passed()) for layer in self._growing]
        parts = [part[:, :, at] for room, at in found for part in (room.keys, room.values) if at.stop > at.start]
        before = [part.clone() for part in parts]
        try:
            for keys, values in zip(parts[::2], parts[1::2], strict=True):
                keys.zero_()
                values.fill_(_SPOILED)
            yield
        finally:
            for part, held in zip(parts, before, strict=True):
                part.copy_(held)

    def put_at(self, position: int) -> None:
        """Have the device write the next token at a position; a replay leaves it behind its own."""
        if self._at != position:
            self.position.fill_(position)
        self._at = None  # until the step has run

    def holds_all(self) -> bool:
        """True if every growing layer of the cache that was entered is here still."""
        return all(layer.__dict__.get("_vb_statics") is self for layer in self._growing)

    @property
    def length(self) -> int | None:
        """The tokens that the cache has seen; None if no layer counts them."""
        return self._growing[0]._vb_length if self._growing else None

    def span_at(self, length: int) -> Span:
        """Return the lengths that a step recorded at this one serves, as far as there is room."""
        span = span_of(length, wide=self._wide)
        return Span(span.start, min(span.end, self.room)) if self._wide else span

    def move_to(self, span: Span) -> None:
        """Serve another block of lengths: layers with windows let go of what lies before them."""
        self.span = span
        for layer in self._growing:
            if layer._vb_room.first != span.first(layer._vb_window):
                layer._vb_room.shift(span.first(layer._vb_window), layer._vb_length)
        self._note_windows()

    def settle(self) -> None:
        """Have states that were put in the place of those at fixed addresses lie there again."""
        for fixed in self._fixed.values():
            fixed.settle()

    def tensors(self) -> list[Tensor]:
        """Return all tensors."""
        rooms = [tensor for room in self.rooms.values() for tensor in room.tensors]
        return [self.position, *rooms, *self.states()]

    def states(self) -> list[Tensor]:
        """Return the tensors of one size, which a step may overwrite."""
        return [tensor for fixed in self._fixed.values() for tensor in fixed.tensors]

    @contextlib.contextmanager
    def undone(self) -> Iterator["Undo"]:
        """Undo, on leaving, what steps in the block have done to the cache, unless told not to."""
        self.settle()
        growing, undo = list(self._growing), Undo()
        lengths, states = [layer._vb_length for layer in growing], [state.clone() for state in self.states()]
        try:
            yield undo
        finally:
            self.settle()
            self._at = None
            if undo.wanted:
                for layer, length in zip(growing, lengths, strict=True):
                    layer._vb_length = length
                for state, before in zip(self.states(), states, strict=True):
                    state.copy_(before)

    def advance(self, position: int) -> None:
        """Note that the device has appended a token, and where."""
        for layer in self._growing:
            layer._vb_length += 1
        self._at = position + 1

    @contextlib.contextmanager
    def as_recorded(self) -> Iterator[None]:
        """Have layers behave, in the block, as while a step is recorded; the step in it appends a token."""
        length = self.length
        self.put_at(length or 0)
        self.recording = True
        try:
            yield
        finally:
            self.recording = False
        self.settle()
        self.advance(length or 0)
        self._at = None  # the device's position has not moved

    def forget(self) -> None:
        """Hold no layer of a cache."""
        self._growing.clear()
        for fixed in self._fixed.values():
            fixed.forget()

    @property
    def nbytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors())


def room_for_window(window: int, room: int) -> int:
    """Return the places that a layer with a sliding window needs in a cache with room for so many tokens."""
    span = span_of(room)
    return window + 2 * (span.end - span.start)
