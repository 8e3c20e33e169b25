"""Updates ahead of optimizer.step(): computed within the backward pass, and taken by the step if nothing changed.

    loss.backward()     # each weight whose gradient is complete: its update, out of place, into spare memory
    optimizer.step()    # takes it by exchanging memory

A step takes a result only if it would compute exactly that: the gradient is the same (no other contribution, nobody had
it to write to, no scaling by clipping or by a loss scale), so are the param group's settings, the number of the step,
and the weight's values and moments. Otherwise the step updates the weight as if nothing had been done. The weight and
its state are unchanged until then, so a backward pass without a step, or one that raises, leaves nothing behind.

**When.** What a step takes is predicted by the step before: a weight is updated ahead if its last step would have taken
the result. So work is discarded once when a loop begins to accumulate, to clip below the norm, to scale its loss or to
change settings between backward and step, and not again before a step without that. Only gradients that arise in one
piece count: those of weights that a forward uses several times, and sums of several passes, wait for the step.

**Spare memory** is as much again as low half, ties, moments and high half take. It is allocated after a step, when all
gradients have their place, from the room that the state's tier has left besides sums in fp32; first for the first
layers, for which the next forward waits first. State in files is updated at the step.
"""

import contextlib
import math
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from vbrt.kernels.update import Step
from vbrt.training.full.clipping import Norms
from vbrt.training.full.host_gradients import Complete
from vbrt.training.full.optimizer_update import Prepared, Scaling, Updater
from vbrt.training.full.streamed_parameter import StreamedWeight

__all__ = ["Ahead"]

Groups = Sequence[Mapping[str, Any]]


@dataclass(slots=True, eq=False)
class _Note:
    """Complete gradient since the last step.

    Attributes:
        key: of the gradient.
        step, reading: of the update that it would be, and of the state.
        prepared: the update, if it is made ahead.
        repeated: True if it was not the first one.
    """

    key: object
    step: Step
    reading: object
    prepared: Prepared | None
    repeated: bool


@dataclass(slots=True, eq=False)
class _Place:
    """One weight: the group that steps it, the last complete gradient, and the prediction."""

    weight: "weakref.ref[StreamedWeight]"
    group: Mapping[str, Any] | None = None
    note: _Note | None = None
    trusted: bool = False


class Ahead:
    """Updates ahead of the step of one optimizer's weights in the tiers.

    Args:
        groups: the optimizer's.
        norms: of the gradients.
        room: returns how many bytes of spare memory may be added now.
    """

    def __init__(
        self, updater: Updater, weights: Iterable[StreamedWeight], groups: Groups, norms: Norms, room: Callable[[], int]
    ) -> None:
        self._updater, self._norms, self._room = updater, norms, room
        self._places = {id(weight): _Place(weakref.ref(weight)) for weight in weights}
        self._full, self._lock = False, threading.Lock()
        self._read(groups)
        for weight in self._weights():
            weight.gradient.ahead = partial(self._complete, self._places[id(weight)])

    def _weights(self) -> list[StreamedWeight]:
        found = (place.weight() for place in self._places.values())
        return [weight for weight in found if weight is not None]

    @property
    def spare_bytes(self) -> int:
        """Bytes of spare memory."""
        return sum(weight.state.spare.nbytes for weight in self._weights() if weight.state.spare is not None)

    def _complete(self, place: _Place, gradient: Complete) -> Callable[[], None] | None:
        """Note a complete gradient; return what begins, once it has arrived: the weight's update, if it is to be made
        ahead, and the norm, if the step will ask for it."""
        with self._lock:
            prepared = self._noted(place, gradient)
        weight = place.weight()
        if prepared is None and not self._norms.expected:
            return None

        def arrived() -> None:
            if self._norms.expected and weight is not None:
                self._norms.begin(weight.gradient, gradient)
            if prepared is not None:
                self._updater.prepare(prepared)

        return arrived

    def _noted(self, place: _Place, gradient: Complete) -> Prepared | None:
        weight, group, before = place.weight(), place.group, place.note
        if before is not None:
            self._forget(place)
        if weight is None or group is None or _is_on_device(group["lr"]):
            return None
        state = weight.state
        try:
            step = self._updater.step_of(state, group, Scaling())
        except (KeyError, TypeError, ValueError):  # settings that step() will refuse
            return None
        prepared = None
        if place.trusted and before is None and state.spare is not None and not state.lent:
            prepared = Prepared(state, gradient.memory, step)
        place.note = _Note(gradient.key, step, state.reading, prepared, before is not None)
        return prepared

    def claim(self, weight: StreamedWeight, step: Step) -> Prepared | None:
        """Return what was computed ahead for exactly this step, or None; and predict the next one."""
        place = self._places.get(id(weight))
        if place is None:
            return None
        with self._lock:
            note = place.note
            if note is None:
                return None
            same = note.key == weight.gradient.key and note.step == step and note.reading == weight.state.reading
            if not same or note.repeated or weight.state.lent:
                self._forget(place)
                return None
            place.note, place.trusted = None, True
            return note.prepared

    def _forget(self, place: _Place) -> None:
        """Discard the work on a gradient, and predict that the next step does not take it either."""
        prepared, place.note, place.trusted = place.note.prepared, None, False
        if prepared is not None:
            self._updater.drop(prepared)

    def _read(self, groups: Groups) -> None:
        group_of = {id(parameter): group for group in groups for parameter in group["params"]}
        for place in self._places.values():
            weight = place.weight()
            place.group = None if weight is None else group_of.get(id(weight.parameter))

    def end_step(self, groups: Groups) -> None:
        """End a step: discard what it has not taken, see who is in which group, and allocate spare memory."""
        self._norms.end_step()
        with self._lock:
            self._read(groups)
            self._forget_all()
            lacking = []
            for weight in self._weights():
                state = weight.state
                if state.spare is not None and not state.spare.memory.in_memory:
                    state.spare = None
                if state.spare is None and self._places[id(weight)].trusted and weight.spare_bytes:
                    lacking.append(weight)
            if lacking and not self._full:
                self._allocate(sorted(lacking, key=lambda weight: weight.state.rank))

    def _forget_all(self) -> None:
        for place in self._places.values():
            if place.note is not None:
                self._forget(place)

    def _allocate(self, weights: Iterable[StreamedWeight]) -> None:
        room, every = self._room(), self._weights()
        kept = sum(weight.gradient.later_bytes(math.prod(weight.state.shape)) for weight in every)
        for weight in weights:
            if weight.spare_bytes > room or not weight.place_spare(besides=kept):
                self._full = True
                return
            room -= weight.state.spare.nbytes

    @contextlib.contextmanager
    def released(self) -> Iterator[None]:
        """Release all spare memory for the block; steps after it may allocate some again. Any thread may do so."""
        self._updater.calm()
        with self._lock:
            self._full = True
            self._forget_all()
            for weight in self._weights():
                weight.state.spare = None
        try:
            yield
        finally:
            self._full = False

    def detach(self) -> None:
        """End it: gradients are not followed any more, and the spare memory is released. Idempotent."""
        with self._lock:
            self._forget_all()
            for weight in self._weights():
                weight.gradient.ahead = weight.state.spare = None
            self._places = {}


def _is_on_device(value: object) -> bool:
    """True for a setting whose value the host would wait for."""
    return isinstance(value, Tensor) and value.device != torch.device("cpu")
