"""Decode steps as recordings: what one call of generate runs in the place of the model's forward.

    with steps.session(limit) as session:
        session.forward(plain, args, kwargs)      # the prompt, and whatever is no decode step: `plain` itself

A *step* is a forward on a filled cache with one new token a sequence. The first one moves the cache into `Statics`; it
is recorded for the lengths of a block, and each later one loads the inputs, replays, and copies the results out.
Recordings outlive the call: the next one with the same shapes replays at once.

The first two replays of a kind of step, the first one of each recording, and the first one behind a sliding window are
checked: the same step is computed eagerly, by the plain forward on the plain cache. Where the results differ by more
than rounding, steps of this kind stay eager, and `stats()` says so: a model that keeps a count in Python, that takes
the size of a cache for its length, or that leaves it to the cache to forget what lies before a window, is found rather
than believed.
"""

import inspect
import threading
import time
import warnings
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from vbrt.errors import first_line
from vbrt.generation.capture.captured_step import Kept, PagesMoved, Recording, Terms, answer_captures, difference
from vbrt.generation.capture.model_fingerprint import attributes, changed, fingerprint, why_eager
from vbrt.generation.capture.mutation_watch import Watch
from vbrt.generation.capture.step_io import Call, cache_in, ids_in, new_tokens, take_apart
from vbrt.generation.static.cache_kinds import EMPTY, NotRecordable, cache_form, layers_of, length_of, why_not
from vbrt.generation.static.length_buckets import span_of
from vbrt.generation.static.static_cache import Statics, is_entered, leave, offer, own, withdraw
from vbrt.kernels.cuda.compiling import Compilation
from vbrt.report.stats import StepCounts

__all__ = ["CUSTOM", "KEEPS_BITS", "OFF", "Session", "Steps"]

#: caches of how many forms are kept from one call of generate to the next
_KEPT = 2
#: replays of one kind of step that are compared with eager ones
_CHECKS = 2

NO_CACHE = "there is no cache (use_cache=False)"
SEVERAL = "several tokens a sequence in one forward, as assisted decoding verifies them"
CHANGED = "a callback of the call has changed the model since its first step"
OFF = "compute.captures = false"
KEEPS_BITS = "weights that lose no bits keep those of eager attention on a CPU"
CUSTOM = "custom_generate decodes in its own way"
#: reasons that follow from what was asked for; they are counted, and nobody is warned of them
EXPECTED = (NO_CACHE, SEVERAL, CUSTOM, OFF, KEEPS_BITS)

Plain = Callable[..., Any]


class Differs(NotRecordable):
    """A replay gives something else than the step. Attributes: out: what the step itself has given."""

    def __init__(self, why: str, out: Any) -> None:
        super().__init__(why)
        self.out = out


class Steps:
    """The decode steps of one model, over all calls of generate.

    Args:
        model: held weakly.
        terms: what its runtime says.
    """

    def __init__(self, model: nn.Module, terms: Terms) -> None:
        self._model, self._terms = weakref.ref(model), terms
        self._kept: OrderedDict[tuple, Kept] = OrderedDict()
        self._good_for: object = None  # the fingerprint and moment that the recordings were made under
        self._checks: Counter[tuple] = Counter()
        self._refused: dict[tuple, str] = {}
        self._lock = threading.Lock()
        self._warned: set[str] = set()
        self.captured = self.recordings = self.record_us = 0
        self.eager: Counter[str] = Counter()
        self.joined: Counter[str] = Counter()
        self.unjoined: Counter[str] = Counter()
        self._foreseen: set[int] = set()  # tokens of passes
        self._begun: list[Compilation] = []
        self._not_begun: Counter[str] = Counter()

    # -- sessions -----------------------------------------------------------------------------------------------------

    @contextmanager
    def session(self, limit: int | None, *, watched: bool = False) -> Iterator["Session"]:
        """Run a call of generate; the recordings are its own until it ends.

        Args:
            limit: the length at which it will stop, if that is known.
            watched: callbacks of the call may change the model.
        """
        owns = self._lock.acquire(blocking=False)
        session = Session(self, limit, None if owns else "another thread generates with this model", watched=watched)
        try:
            yield session
        finally:
            try:
                session.end()
            finally:
                if owns:
                    self._lock.release()

    def refusal(self) -> str:
        """Return why no pass of this phase and precision can be recorded; "" if one can."""
        model = self._model()
        return self._terms.refusal() or why_eager(model, [model])

    def why_not_now(self) -> str:
        """Return why nothing can be recorded in this call; forget recordings of a model that has changed since."""
        why = self.refusal()
        if why:
            return why
        answer_captures()  # before functions are looked at, or the first recording would change one
        self._follow((fingerprint(self._model()), self._terms.moment()))
        return ""

    def _follow(self, state: tuple) -> None:
        if self._good_for != state:
            self.release()
            self._good_for = state

    @property
    def kept(self) -> list[Kept]:
        """What is kept, the last used at the end."""
        return list(self._kept.values())

    def compile_for(self, ids: Tensor | None) -> None:
        """Begin to compile what a prompt [B, S], and the steps behind it, will launch."""
        if ids is not None and ids.ndim > 1:
            self.compile_ahead(ids.shape[0] * ids.shape[1], soon=True)
            self.compile_ahead(ids.shape[0], soon=False)

    def compile_ahead(self, tokens: int, *, soon: bool) -> None:
        """Begin to compile what passes of so many tokens will launch: the next one, if `soon`.

        What fails here is counted, and compiled when it is launched.
        """
        if tokens in self._foreseen:
            return
        try:
            self._begun += self._terms.compile_ahead(tokens, soon=soon)
            self._foreseen.add(tokens)
        except Exception as error:  # noqa: BLE001 - a pass does without
            why = f"{type(error).__name__}: {first_line(error)}"
            if why not in self._not_begun:
                warnings.warn(f"vbrt: nothing is compiled ahead, launches compile: {why}", stacklevel=2)
            self._not_begun[why] += 1

    def still_good(self) -> bool:
        """True if the recordings are of the model as it is, by what changes within a call."""
        return self._good_for is not None and self._good_for[1] == self._terms.moment()

    def watch(self) -> Watch:
        """Return what sees whether the model changes from now on."""
        return Watch(self._model())

    def renew(self) -> str:
        """Forget recordings of pages that have moved; return why no others can be made, "" if they can."""
        self.release()
        return self.why_not_now()

    # -- recordings ---------------------------------------------------------------------------------------------------

    def kept_for(self, cache: Any, limit: int | None) -> Kept:
        """Return memory and recordings for a cache, which is moved there."""
        key, length = cache_form(cache), length_of(cache) or 0
        kept = self._kept.pop(key, None)
        if kept is not None and kept.statics.room < span_of(length).end:
            kept.release()
            kept = None
        if kept is None:
            while len(self._kept) >= _KEPT:
                self._kept.popitem(last=False)[1].release()
            kept = Kept(cache, limit, self._terms)
        self._kept[key] = kept
        kept.statics.enter(cache)
        return kept

    def offer(self, cache: Any) -> None:
        """Have a cache that holds nothing compute its prompt in the memory of an earlier call."""
        offer(cache, self._memory())

    def take_back(self, cache: Any) -> None:
        """Give a cache that took what it was offered tensors of its own."""
        own(cache, self._memory())

    def _memory(self) -> list[Statics]:
        return [kept.statics for kept in reversed(self.kept)]

    def recording(self, plain: Plain, call: Call, kept: Kept) -> Recording:
        """Return the recording of a step, made now if there is none.

        Raises:
            NotRecordable: the step computes something else when it is recorded, or cannot be recorded.
        """
        if call.form in self._refused:
            raise NotRecordable(self._refused[call.form])
        key = call.form, kept.statics.span
        if key not in kept.recordings:
            kept.recordings[key] = self._made(plain, call, kept)
        return kept.recordings[key]

    def _made(self, plain: Plain, call: Call, kept: Kept) -> Recording:
        begun = time.perf_counter_ns()
        try:
            with _attributes_kept(self._model()):
                recording = Recording(plain, call, kept, self._terms)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            why = error if isinstance(error, NotRecordable) else f"{type(error).__name__}: {first_line(error)}"
            self._refused[call.form] = f"a step cannot be recorded: {why}"
            raise NotRecordable(self._refused[call.form]) from error
        self.recordings += 1
        self.joined.update(recording.report.joined)
        self.unjoined.update(recording.report.unjoined)
        self.record_us += (time.perf_counter_ns() - begun) // 1000
        return recording

    def replayed(self, plain: Plain, call: Call, kept: Kept) -> tuple[Any, Recording]:
        """Compute a step by its recording, beside an eager one where it has not been compared often enough."""
        recording = self.recording(plain, call, kept)
        if not self.is_checked(call, recording, kept.statics):
            self._check(plain, call, kept.statics, recording)
        return recording.replay(call, kept.statics), recording

    def is_checked(self, call: Call, recording: Recording, statics: Statics) -> bool:
        """True if replays like this one have been compared with eager steps."""
        return statics.passes_windows in recording.compared and self._checks[call.form] >= _CHECKS

    def _check(self, plain: Plain, call: Call, statics: Statics, recording: Recording) -> None:
        """Compare a replay with the eager step, and undo both. Raises Differs, with the eager step done."""
        behind = statics.passes_windows
        out = recording.tried(call, statics)
        self._terms.begin_pass()
        with statics.undone() as undo, recording.written.undone(undo):
            expected = plain(**call.kwargs(call.given()))
            error = difference(out, expected, joined=recording.report.error or 0.0)
            undo.wanted = not error
        if error:
            self._refused[call.form] = f"a recorded step computes something else than an eager one: {error}"
            raise Differs(self._refused[call.form], expected)
        self._checks[call.form] += 1
        recording.compared.add(behind)

    def end_call(self) -> None:
        """Keep nothing of what a call's steps ran on."""
        for kept in self.kept:
            kept.end_call()

    def release(self) -> None:
        """Free all graphs and caches; the next step makes others."""
        while self._kept:
            self._kept.popitem()[1].release()
        self._good_for = None
        self._checks.clear()
        self._refused.clear()

    # -- counts -------------------------------------------------------------------------------------------------------

    def note(self, why: str) -> None:
        """Count an eager step, and warn of its reason once."""
        self.eager[why] += 1
        if why not in self._warned and why not in EXPECTED:
            self._warned.add(why)
            warnings.warn(f"vbrt: generate runs its decode steps eagerly, without recordings: {why}", stacklevel=2)

    def counts(self) -> StepCounts:
        """Return the counters."""
        numbers = self.captured, sum(self.eager.values()), self.recordings, self.record_us
        held = sum(kept.nbytes for kept in self.kept)
        late = self._not_begun + Counter(each.error for each in self._begun if each.error)
        return StepCounts(*numbers, dict(self.eager), dict(self.joined), dict(self.unjoined), held, dict(late))


class Session:
    """One call of generate."""

    def __init__(self, steps: Steps, limit: int | None, why_not: str | None, *, watched: bool) -> None:
        self._steps, self._limit, self._why = steps, limit, why_not
        self._watched, self._watch = watched, None
        self.thread = threading.get_ident()
        self._kept: Kept | None = None
        self._cache: weakref.ref[Any] | None = None
        self._lying: list[weakref.ref[Any]] = []  # layers that may lie where recordings find them; of one cache
        self.prompted, self._stepped = False, False  # whether the prompt has been computed, and looked at for a step
        self._masks: bool | None = None
        self._begin: Callable[[], None] | None = None
        self._last: Call | None = None  # a step, and its recording, that the next one may be like
        self._recording: Recording | None = None
        self.nested = 0

    def defer(self, begin: Callable[[], None]) -> bool:
        """Have the next forward of this call begin its pass, unless it is replayed. False: it is another's forward."""
        if self.nested or threading.get_ident() != self.thread or torch.compiler.is_compiling():
            return False
        self._begin = begin
        return True

    def forward(self, plain: Plain, args: tuple, kwargs: Mapping[str, Any]) -> Any:
        """Compute a forward: by a recording where it is a step that can be recorded."""
        if self.nested or threading.get_ident() != self.thread or torch.compiler.is_compiling():
            return plain(*args, **kwargs)
        found = None if args else cache_in(kwargs)
        if not self.prompted or (found is not None and not _holds_tokens(found[1])):
            begins, self.prompted = not self.prompted, True
            return self._prompt(plain, args, kwargs, found[1] if found is not None and begins else None)
        try:
            out = self._step(plain, found, kwargs)
        except Differs as error:
            self._steps.note(str(error))
            self._let_go(found[1])
            return error.out
        except NotRecordable as error:
            return self._eager(str(error), found, plain, args, kwargs)
        except torch.OutOfMemoryError as error:
            why = f"no memory for it: {first_line(error)}"
        else:
            self._steps.captured += 1
            return out
        self._let_go(found[1], copied=False)  # its memory is its own once the recordings are gone
        self._steps.release()
        self._why = why
        return self._eager(why, found, plain, args, kwargs)

    def _step(self, plain: Plain, found: tuple[str, Any] | None, kwargs: Mapping[str, Any]) -> Any:
        """Compute a step by its recording, made again where pages have moved. Raises NotRecordable."""
        try:
            call = self._next(found, kwargs)
            if call is not None:
                return self._recording.replay(call, self._kept.statics)
            return self._first(plain, found, kwargs)
        except PagesMoved:
            self._let_go(found[1])
            self._why = self._steps.renew()
        return self._first(plain, found, kwargs)

    def _next(self, found: tuple[str, Any] | None, kwargs: Mapping[str, Any]) -> Call | None:
        """Return a step that the last one's recording serves; None if it may need another."""
        last, self._last = self._last, None
        if last is None or found is None or torch.is_grad_enabled():
            return None
        if not self._steps.still_good() or not self._holds(found[1]) or self._is_changed():
            return None
        call, span = last.next(kwargs, self._kept.statics.length), self._kept.statics.span
        if call is None or not span.start <= (call.length or 0) < span.end:
            return None
        if self._kept.statics.passes_windows not in self._recording.compared:
            return None
        self._last = call
        return call

    def _first(self, plain: Plain, found: tuple[str, Any] | None, kwargs: Mapping[str, Any]) -> Any:
        call = self._call(plain, found, kwargs)
        out, self._recording = self._steps.replayed(plain, call, self._kept)
        self._last = call if self._steps.is_checked(call, self._recording, self._kept.statics) else None
        return out

    def _call(self, plain: Plain, found: tuple[str, Any] | None, kwargs: Mapping[str, Any]) -> Call:
        """Take a step apart, with its cache where recordings find it. Raises NotRecordable."""
        why = self._why_eager(found, kwargs)
        if why:
            raise NotRecordable(why)
        name, cache = found
        if not self._steps.still_good():
            self._let_go(cache)
            self._why = self._steps.renew()
            if self._why:
                raise NotRecordable(self._why)
        if self._masks is None:
            self._masks = "decoder_attention_mask" in inspect.signature(plain).parameters
        length = self._kept.statics.length if self._holds(cache) else length_of(cache)
        call = take_apart(kwargs, name, length, masks=self._masks)
        self._place(cache, call.length or 0)
        return call

    def _look(self) -> None:
        """Look at the model, once: whether steps can be recorded, and whether recordings are of it as it is now."""
        if self._why is None:
            self._why = self._steps.why_not_now()
            self._watch = self._steps.watch() if self._watched and not self._why else None

    def _is_changed(self) -> bool:
        return self._watch is not None and self._watch.sees_changes()

    def _why_eager(self, found: tuple[str, Any] | None, kwargs: Mapping[str, Any]) -> str:
        self._look()
        if self._why:
            return self._why
        if self._watch is not None and not self._stepped:
            self._watch.begin_steps()
        self._stepped = True
        if self._is_changed():
            return CHANGED
        if torch.is_grad_enabled():
            return "gradients are enabled"
        if found is None:
            return NO_CACHE
        if new_tokens(kwargs) != 1:
            return SEVERAL
        if kwargs.get("output_attentions"):
            return "output_attentions=True: attention weights are wanted"
        return "" if is_entered(found[1]) else why_not(found[1])

    def _place(self, cache: Any, length: int) -> None:
        """Have the cache lie in static memory that reaches to the end of the span of a length."""
        if not self._holds(cache) or self._kept.statics.room < span_of(length).end:
            self._let_go_others(cache)
            self._let_go(cache)
            self._lying = list(map(weakref.ref, layers_of(cache)))
            self._kept, self._cache = self._steps.kept_for(cache, self._limit), weakref.ref(cache)
            self._last = None  # its recording is of other memory
        statics = self._kept.statics
        if statics.span != statics.span_at(length):
            statics.move_to(statics.span_at(length))
            self._last = None  # its recording is of another span

    def placed(self, cache: Any) -> Statics:
        """Have a cache lie where recorded steps find it. Raises NotRecordable."""
        self._look()
        why = self._why or ("" if is_entered(cache) else why_not(cache))
        if why:
            raise NotRecordable(why)
        length = self._kept.statics.length if self._holds(cache) else length_of(cache)
        self._place(cache, length or 0)
        return self._kept.statics

    def _holds(self, cache: Any) -> bool:
        """True if the cache lies in static memory, all of it."""
        return self._cache is not None and self._cache() is cache and self._kept.statics.holds_all()

    def _eager(self, why: str, found: tuple[str, Any] | None, plain: Plain, args: tuple, kwargs: Mapping) -> Any:
        self._steps.note(why)
        if found is not None:
            self._let_go(found[1])
        return self._plainly(plain, args, kwargs)

    def _prompt(self, plain: Plain, args: tuple, kwargs: Mapping[str, Any], cache: Any | None) -> Any:
        """Compute a prompt. `cache`: the only one of this call so far, which may use the memory of an earlier one."""
        self._steps.compile_for(ids_in(kwargs))
        offered = cache is not None and why_not(cache) == EMPTY and self._why is None and not torch.is_grad_enabled()
        try:
            if offered:
                self._lying = list(map(weakref.ref, layers_of(cache)))
                self._steps.offer(cache)
            out = self._plainly(plain, args, kwargs)
        except torch.OutOfMemoryError:
            self._steps.release()  # the next call has that much more
            raise
        finally:
            if offered:
                withdraw(cache)
        self._look()  # while the device computes the prompt
        return out

    def _plainly(self, plain: Plain, args: tuple, kwargs: Mapping[str, Any]) -> Any:
        begin, self._begin = self._begin, None
        if begin is not None:
            begin()
        return plain(*args, **kwargs)

    def _let_go(self, cache: Any, *, copied: bool = True) -> None:
        if is_entered(cache):
            leave(cache, copied=copied)
        if self._cache is not None and self._cache() is cache:
            self._cache = None

    def _let_go_others(self, cache: Any | None, *, copied: bool = True) -> None:
        """Give layers of other caches of this call, which may lie where this one will, tensors of their own."""
        mine = set() if cache is None else set(map(id, layers_of(cache)))
        alive = [layer for kept in self._lying if (layer := kept()) is not None and id(layer) not in mine]
        if alive:
            self._cache = None
        others = SimpleNamespace(layers=alive)
        leave(others, copied=copied)
        self._steps.take_back(others)

    def end(self) -> None:
        """Give the cache tensors of its own, if somebody has kept it."""
        self._last = self._recording = self._begin = None  # they know the cache, too
        if self._kept is not None:
            self._steps.end_call()
        try:
            self._let_go_others(None)
        except torch.OutOfMemoryError:
            self._steps.release()
            self._let_go_others(None, copied=False)  # its memory is its own now
        self._kept = self._cache = None
        self._lying = []


@contextmanager
def _attributes_kept(model: nn.Module) -> Iterator[None]:
    """Record a step. Raises NotRecordable, with the attributes of modules as they were, where it changes them."""
    before, modules = attributes(model), list(model.modules())
    held = [(of, dict(of)) for module in modules for of in (module.__dict__, module._buffers)]
    name = ""
    try:
        yield
    finally:
        name = changed(before, attributes(model))
        for now, values in held if name else ():
            _put_back(now, values)
    if name:
        raise NotRecordable(f"it changes {name}, which a replay would not")


def _put_back(now: dict[str, Any], before: Mapping[str, Any]) -> None:
    """Have a module's attributes, or buffers, be what they were, but for those of layers of ours."""
    for name in [name for name in now if name not in before and not name.startswith("_vb_")]:
        del now[name]
    now.update({name: value for name, value in before.items() if not name.startswith("_vb_")})


def _holds_tokens(cache: Any) -> bool:
    """True after a prompt: a layer of the cache holds something."""
    return is_entered(cache) or why_not(cache) != EMPTY
