"""Static cache: transformers' caches with their tensors at fixed addresses, for captured graphs.

    statics = Statics(cache, room)     # memory for caches of this signature
    statics.enter(cache)               # moves its tensors there
    ...
    leave(cache)                       # plain layers again

An entered cache remains the same object with layers of their own class (by inheritance): reading `layer.keys`,
reordering beams, or an eager forward behaves as on a `DynamicCache`. Only while `statics.recording` is true do layers
behave like transformers' StaticCache: keys and values are the whole bucket, the new token is written at
`statics.position`, a device tensor, and models mask the slots after it.

| layer | becomes |
| --- | --- |
| growing keys and values (full attention, sliding windows, chunks) | part of a longer tensor, see `Growing` |
| states of fixed size (linear attention, convolutions, cross attention) | copies at fixed addresses, see `Fixed` |
| layers without tensors (shared keys and values) | unchanged, but they refuse to begin (`Idle`) |
| layers before the prompt, if an earlier call left memory | run the prompt in that memory (`Filling`) |

A layer's class is swapped in place for one of a mixin and its own class. For unsupported operations (repeating or
selecting rows, reset) it first becomes a plain layer again.
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

#: poison for masked slots: far above real values, but finite in fp16, since masked values are multiplied by zero
_SPOILED = 1e4


# -- layers -----------------------------------------------------------------------------------------------------------


class _Static(ABC):  # an ABC, like most of transformers' layers: else Python refuses the class swap
    """Base of layers whose tensors are in `Statics`."""

    _vb_plain: type  # original class

    @property
    def is_compileable(self) -> bool:
        """True during capture, unless attention is exact: models then mask slots beyond the cache's length."""
        return self._vb_statics.recording and not self._vb_statics.exact

    def leave_(self, *, copied: bool = True) -> None:
        """Become a plain layer with its own tensors."""
        raise NotImplementedError


class Slots(int):
    """Size of a bucket, which knows the layer it is of. Attributes: growing: index of that layer."""

    growing: int

    def __new__(cls, size: int, growing: int) -> "Slots":
        made = super().__new__(cls, size)
        made.growing = growing
        return made


class Growing(_Static):
    """Mixin before DynamicLayer and its subclasses: keys and values are views of longer tensors [B, H, room, D]."""

    def enter_(self, statics: "Statics", room: "Room", length: int) -> None:
        """Copy the layer's tokens, the last of `length`, into the room."""
        held = self.__dict__["keys"], self.__dict__["values"]
        room.fill(held, statics.span.first(self.__dict__.get("sliding_window")), length)  # may raise
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

    def _held(self, ahead: int = 0) -> slice:
        """Slots that a plain layer would hold after `ahead` tokens more."""
        length, window = self._vb_length + ahead, self._vb_window
        begin = 0 if window is None else max(0, length - window + 1)
        return slice(begin - self._vb_room.first, length - self._vb_room.first)

    @property
    def keys(self) -> Tensor:
        """Keys [B, H, tokens, D] as of a plain layer. Assignment turns the layer into a plain one."""
        return self._vb_room.keys[:, :, self._held()]

    @keys.setter
    def keys(self, keys: Tensor) -> None:
        self.leave_()
        self.keys = keys

    @property
    def values(self) -> Tensor:
        """Values [B, H, tokens, D] as of a plain layer. Assignment turns the layer into a plain one."""
        return self._vb_room.values[:, :, self._held()]

    @values.setter
    def values(self, values: Tensor) -> None:
        self.leave_()
        self.values = values

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append tokens; return keys and values to attend to: the whole bucket during capture."""
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
        own = slice(held.start, at + tokens)  # contiguous as a plain layer's: cuDNN plans each layout of keys anew
        return room.keys[:, :, own].contiguous(), room.values[:, :, own].contiguous()

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last -`tokens_to_remove` tokens; as a plain layer if that needs an earlier window position."""
        length, window = max(0, self._vb_length + tokens_to_remove), self._vb_window
        gone = window is not None and length < self._vb_statics.span.start
        if tokens_to_remove > 0 or gone or "conv_states" in self.__dict__:
            self.leave_()
            self.crop(tokens_to_remove)
        else:
            self._vb_length = length

    def passed(self) -> slice:
        """Return the slots behind the window, which a plain layer has dropped."""
        return slice(0, self._held().start)

    def get_seq_length(self) -> Any:
        """Number of tokens; a device tensor during capture."""
        return self._vb_statics.position[0] if self._vb_statics.recording else self._vb_length

    def get_mask_sizes(self, query_length: Any) -> tuple[int, int]:
        """Return how many slots the next queries attend to, and the position of the first."""
        statics = self._vb_statics
        if not statics.recording:
            return self.plain_sizes(query_length)
        size = statics.span.end - self._vb_room.first
        return Slots(size, statics.index_of(self)) if statics.exact else size, self._vb_room.first

    def plain_sizes(self, query_length: int, ahead: int = 0) -> tuple[int, int]:
        """Return to how many tokens the next queries attend on a plain layer, and the position of the first.

        ahead: tokens that the layer has appended before that.
        """
        held = self._held(ahead)
        return held.stop - held.start + query_length, held.start + self._vb_room.first

    def slots_up_to_next(self, ahead: int = 0) -> slice:
        """Return the slots of a plain layer that has appended `ahead` tokens, and then one more."""
        held = self._held(ahead)
        return slice(held.start, held.stop + 1)

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorder beams: row i continues row beam_idx[i], int64 [B]."""
        held, index = self._held(), beam_idx.to(self._vb_room.keys.device)
        for tensor in (self._vb_room.keys, self._vb_room.values):
            tensor[:, :, held] = tensor[:, :, held].index_select(0, index)
        if "conv_states" in self.__dict__:  # hybrid layer
            linear_layer().reorder_cache(self, beam_idx)


class Filling(ABC):
    """Mixin before DynamicLayer: an empty layer that takes its prompt into static memory of an earlier call.

    This avoids a second copy of the cache when steps are captured. Afterwards it is a plain layer again, whose tensors
    are views of that memory.
    """

    _vb_plain: type

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Store the first tokens; return them contiguous, as a plain layer does."""
        self.__class__, rooms = self._vb_plain, self.__dict__.pop("_vb_rooms")
        rooms = () if _has_history(key_states, value_states) else rooms
        taken = next(filter(None, (room.take(key_states, value_states) for room in rooms)), None)
        if taken is None:
            return self.update(key_states, value_states, *args, **kwargs)
        self.lazy_initialization(key_states, value_states)
        self.keys, self.values = taken
        return key_states.contiguous(), value_states.contiguous()


class Idle(_Static):
    """A layer without tensors, which must not begin to hold any during capture."""

    def enter_(self, statics: "Statics") -> None:
        self.__dict__["_vb_statics"] = statics

    def leave_(self, *, copied: bool = True) -> None:
        del self.__dict__["_vb_statics"]
        self.__class__ = self._vb_plain

    def update(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Begin as a plain layer; raises NotRecordable during capture."""
        if self._vb_statics.recording:
            raise NotRecordable("a layer of the cache begins to hold keys after the prompt")
        self.leave_()
        return self.update(*args, **kwargs)


def _as_plain(name: str) -> Any:
    def method(self: _Static, *args: Any, **kwargs: Any) -> Any:
        self.leave_()
        return getattr(self, name)(*args, **kwargs)

    method.__name__, method.__doc__ = name, "Become a plain layer, then call its method."
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
    """Mixin without the ABC base, for classes that are not ABCs: layouts must match for the class swap."""
    members = {name: of for kind in (_Static, mixin) for name, of in vars(kind).items() if name not in _OF_CLASSES}
    return mixin.register(type(mixin.__name__, (), members))


def leave(cache: Any, *, copied: bool = True) -> None:
    """Turn every layer of a cache back into a plain one with its own tensors.

    Args:
        copied: False: hand over the tensors of `Statics`, which must not be used afterwards.
    """
    for layer in layers_of(cache):
        if isinstance(layer, _Static):
            layer.leave_(copied=copied)
        if "_vb_fixed" in layer.__dict__:  # also hybrid layers
            layer.__dict__.pop("_vb_fixed").leave_(layer, copied=copied)


def is_entered(cache: Any) -> bool:
    """True if the cache has layers in `Statics`."""
    return any(isinstance(layer, _Static) or "_vb_fixed" in layer.__dict__ for layer in layers_of(cache))


def offer(cache: Any, memory: Sequence["Statics"]) -> None:
    """Let an empty cache write its prompt into existing static memory, where captured steps will need it.

    memory: of ended caches, the best first; layers of other shapes and longer prompts do not use it.
    """
    for index, layer in enumerate(layers_of(cache)):
        rooms = [statics.rooms[index] for statics in memory if index in statics.rooms]
        if rooms and fills(cache, layer):
            layer.__class__ = _made(Filling, type(layer))
            layer.__dict__["_vb_rooms"] = rooms


def withdraw(cache: Any) -> None:
    """Revert layers that are still empty to plain ones."""
    for layer in layers_of(cache):
        if layer.__dict__.pop("_vb_rooms", None) is not None:
            layer.__class__ = layer._vb_plain


def own(cache: Any, memory: Sequence["Statics"], *, but: "Statics | None" = None) -> None:
    """Give plain layers of a cache their own tensors where they are views of offered memory.

    but: memory that the cache is about to enter: tensors already in place there stay.
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
    """Static memory of one growing layer, allocated on first fill: so a copy between caches doubles one layer at a
    time.

    Attributes:
        keys, values: [B, H, room, D].
        first: position of slot 0.
    """

    keys: Tensor
    values: Tensor

    def __init__(self, room: int) -> None:
        self._room, self.first = room, 0

    def fill(self, held: tuple[Tensor, Tensor], first: int, length: int) -> None:
        """Store the last of `length` tokens, with position `first` at slot 0; zero the rest."""
        if not self.tensors:
            self.keys, self.values = (_longer(tensor, self._room) for tensor in held)
        self.first = first
        begin, end = length - held[0].shape[-2] - first, length - first
        for tensor, now in zip(self.tensors, held, strict=True):
            if storage_of(now) != storage_of(tensor):  # else already in place, see `Filling`
                tensor[:, :, max(begin, 0) : end] = now[:, :, max(-begin, 0) :]
            tensor[:, :, end:] = 0

    def take(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor] | None:
        """Store the first tokens of a sequence and return their views; None, unchanged, if they do not fit."""
        new, size = (keys, values), keys.shape[-2]
        if not self.tensors or size > self._room or not all(map(_suits, new, self.tensors)):
            return None
        self.first = 0
        for tensor, now in zip(self.tensors, new, strict=True):
            tensor[:, :, :size] = now
        return self.keys[:, :, :size], self.values[:, :, :size]

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """Keys and values; empty before allocation."""
        return (self.keys, self.values) if "keys" in self.__dict__ else ()

    def shift(self, first: int, length: int) -> None:
        """Move tokens up to `length` so that slot 0 is position `first`."""
        by, end = first - self.first, length - self.first
        for tensor in (self.keys, self.values):
            tensor[:, :, : end - by] = tensor[:, :, by:end].clone()
        self.first = first

    def write(self, keys: Tensor, values: Tensor, statics: "Statics") -> tuple[Tensor, Tensor]:
        """Write one token at the device's position, during capture; return the bucket."""
        at, size = statics.position - self.first if self.first else statics.position, statics.span.end - self.first
        block_keys, block_values = self.keys[:, :, :size], self.values[:, :, :size]
        block_keys.index_copy_(2, at, keys)
        block_values.index_copy_(2, at, values)
        return block_keys, block_values


def _suits(tensor: Tensor, room: Tensor) -> bool:
    """True if a tensor [B, H, tokens, D] fits memory [B, H, room, D]."""
    shape = (*tensor.shape[:2], room.shape[2], *tensor.shape[3:])
    return shape == room.shape and tensor.dtype is room.dtype and tensor.device == room.device


def _has_history(*tensors: Tensor) -> bool:
    """True if autograd would record a copy of a tensor."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


@torch.inference_mode(False)  # inference tensors are writable only in inference mode
def _longer(tensor: Tensor, room: int) -> Tensor:
    shape = (*tensor.shape[:2], room, tensor.shape[3])
    return torch.zeros(shape, dtype=tensor.dtype, device=tensor.device)  # masked slots are multiplied, too: no NaN


class Fixed:
    """Copies at fixed addresses of a layer's fixed-size tensors.

    A step may write into them or rebind the attributes; `settle` copies rebound ones back, during capture too.
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
        """Bind the layer to the fixed tensors, with its current contents."""
        for name, fixed in zip(self._names, self.tensors, strict=True):
            now = read(self._layer, name)
            if now is not fixed:
                fixed.copy_(now)
                write_to(self._layer, name, fixed)

    def leave_(self, layer: Any, *, copied: bool = True) -> None:
        """Give the entered layer its own tensors."""
        for name, fixed in zip(self._names, self.tensors, strict=True):
            if copied and read(layer, name) is fixed:
                write_to(layer, name, fixed.clone())
        self.forget()

    def forget(self) -> None:
        """Drop the reference to the layer."""
        self._layer = None


class Undo:
    """Handle of an undo block. Attributes: wanted: False to keep the block's effects."""

    wanted = True


class Statics:
    """Static memory for caches of one signature, read and written by captured steps.

    Attributes:
        room: token capacity of growing layers.
        span: current length bucket.
        position: int64 [1] on the device, the new token's slot.
        recording: True while layers behave like a static cache's.
        exact: True while steps attend as `capture/exact_attention.py` does.
        steady: True if steps use the attention of `deterministic_attention.py`.
        rooms: memory of growing layers, by index.
    """

    @torch.inference_mode(False)  # inference tensors are writable only in inference mode
    def __init__(self, cache: Any, room: int, *, wide: bool = False, steady: bool = False) -> None:
        """wide: attention skips masked slots, so buckets may be larger; not with sliding windows."""
        self.room, self.recording, self.exact, self.steady, length = room, False, False, steady, length_of(cache)
        self._wide = wide and not any(layer.__dict__.get("sliding_window") for layer in layers_of(cache))
        self.span = self.span_at(length or 0)
        device = next(memory_of(cache)).device
        self.position = torch.full((1,), length or 0, dtype=torch.int64, device=device)
        self._growing: list[Any] = []
        self._passed_at: int | float = math.inf  # length at which a window passes slot 0 of a room
        self._at: int | None = None  # host copy of `position`, if known
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
        """Move the tensors of a cache of this signature here."""
        self.forget()
        own(cache, [self], but=self)  # filling a room must not overwrite tensors of later layers
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
        """True if the next step sees slots behind a window, which captured attention must mask."""
        return (self.length or 0) >= self._passed_at

    def rows_alike(self) -> int:
        """Number of steps from the next on that are in its bucket, and on its side of where a window moves."""
        length = self.length or 0
        end = self.span.end if length >= self._passed_at else min(self.span.end, self._passed_at)
        return max(0, int(end) - length)

    @contextlib.contextmanager
    def spoiled(self) -> Iterator[None]:
        """Poison slots behind windows in the block: a step that attends to them gives visibly wrong results."""
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

    def index_of(self, layer: Any) -> int:
        """Index of a growing layer."""
        return next(at for at, each in enumerate(self._growing) if each is layer)

    def growing_with(self, key: Tensor) -> int | None:
        """Index of the growing layer whose memory these keys are; None if they are in none."""
        memory = storage_of(key)
        return next((at for at, each in enumerate(self._growing) if storage_of(each._vb_room.keys) == memory), None)

    def slots_up_to_next(self, growing: int, ahead: int = 0) -> slice:
        """Slots of the keys that a step attends to in a growing layer, its own token's included.

        ahead: steps after the next.
        """
        return self._growing[growing].slots_up_to_next(ahead)

    def sizes_of_next(self, growing: int, ahead: int = 0) -> tuple[int, int, int]:
        """Number of tokens that a step attends to in a growing layer, position of the first, and length before it."""
        layer = self._growing[growing]
        return *layer.plain_sizes(1, ahead), layer._vb_length + ahead

    def put_at(self, position: int) -> None:
        """Set the device's position for the next token; replays advance it themselves."""
        if self._at != position:
            self.position.fill_(position)
        self._at = None  # unknown until the step has run

    def holds_all(self) -> bool:
        """True if every growing layer of the entered cache is still here."""
        return all(layer.__dict__.get("_vb_statics") is self for layer in self._growing)

    @property
    def length(self) -> int | None:
        """Number of tokens in the cache; None if no layer counts them."""
        return self._growing[0]._vb_length if self._growing else None

    def span_at(self, length: int) -> Span:
        """Return the bucket of a length, limited to the room."""
        span = span_of(length, wide=self._wide)
        return Span(span.start, min(span.end, self.room)) if self._wide else span

    def move_to(self, span: Span) -> None:
        """Switch to another bucket; window layers drop tokens before their window."""
        self.span = span
        for layer in self._growing:
            if layer._vb_room.first != span.first(layer._vb_window):
                layer._vb_room.shift(span.first(layer._vb_window), layer._vb_length)
        self._note_windows()

    def settle(self) -> None:
        """Copy rebound states back to their fixed addresses."""
        for fixed in self._fixed.values():
            fixed.settle()

    def tensors(self) -> list[Tensor]:
        """Return all static tensors."""
        rooms = [tensor for room in self.rooms.values() for tensor in room.tensors]
        return [self.position, *rooms, *self.states()]

    def states(self) -> list[Tensor]:
        """Return the fixed-size tensors, which a step may overwrite."""
        return [tensor for fixed in self._fixed.values() for tensor in fixed.tensors]

    @contextlib.contextmanager
    def undone(self) -> Iterator["Undo"]:
        """Undo the block's steps on exit (lengths and states), unless `wanted` is set to False."""
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

    def advance(self, position: int, tokens: int = 1) -> None:
        """Account for tokens that the device has appended from `position` on."""
        for layer in self._growing:
            layer._vb_length += tokens
        self._at = position + tokens

    def forget(self) -> None:
        """Drop references to the cache's layers."""
        self._growing.clear()
        for fixed in self._fixed.values():
            fixed.forget()

    @property
    def nbytes(self) -> int:
        """Bytes of all static tensors."""
        return sum(tensor.numel() * tensor.element_size() for tensor in self.tensors())


def room_for_window(window: int, room: int) -> int:
    """Return the slots for a layer with a sliding window, at this token capacity."""
    span = span_of(room)
    return window + 2 * (span.end - span.start)
