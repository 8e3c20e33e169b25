"""Decode session: one `generate` call, with its steps captured, replayed and checked.

    with steps.session(limit) as session:
        session.forward(plain, args, kwargs)      # the prompt, and anything but a decode step, runs `plain` itself

A *step* is a forward with one new token per sequence on a filled cache. The first step moves the cache into `Statics`
and is captured for one length bucket; each later one loads the inputs, replays, and copies the results out. Captures
outlive the call: the next call with the same shapes replays at once.

Checks: the first two replays of each signature, the first of each capture, and the first past a sliding window are
compared with the same step run eagerly on the plain cache. If they differ by more than rounding, steps of that
signature stay eager, and `stats()` gives the reason. This finds models that count steps in Python, take the cache's
capacity for its length, or rely on the cache to drop tokens before a window.
"""

import inspect
import threading
import time
import weakref
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from vbrt.errors import first_line
from vbrt.generation.capture.batch_steps import NEW_SIZE
from vbrt.generation.capture.captured_step import (
    Feed,
    Kept,
    PagesMoved,
    Recording,
    RowsRecording,
    Terms,
    answer_captures,
    difference,
)
from vbrt.generation.capture.model_fingerprint import attributes, changed, fingerprint, why_eager
from vbrt.generation.capture.step_io import Call, cache_in, ids_in, new_tokens, take_apart
from vbrt.generation.static.cache_kinds import (
    EMPTY,
    NotRecordable,
    cache_form,
    layers_of,
    length_of,
    room_bytes,
    room_wanted,
    why_not,
)
from vbrt.generation.static.length_buckets import span_of
from vbrt.generation.static.static_cache import Statics, is_entered, leave, offer, own, withdraw
from vbrt.host.logger import warn
from vbrt.kernels.cuda.compiling import Compilation
from vbrt.libraries.transformers_attention import register_routes
from vbrt.libraries.transformers_runner import CODED, MASKED
from vbrt.model.mutation_watch import Watch
from vbrt.report.stats import StepCounts

__all__ = ["CUSTOM", "KEEPS_BITS", "OFF", "STREAMS", "NotNow", "Session", "Steps"]

#: static caches kept from one `generate` call to the next, by shape (LRU)
_KEPT = 2
#: replays per signature that are checked against eager steps
_CHECKS = 2
#: tokens of passes that differ in their kernels: each of a few, then multiples
_EACH, _APART = 64, 16

NO_CACHE = "there is no cache (use_cache=False)"
SEVERAL = "several tokens per sequence in one forward, as verification in assisted decoding"
CHANGED = "a callback of the call has changed the model since its first step"
OFF = "compute.captures = false"
STREAMS = "lossless weights stream: eager steps have the plain model's bits, at the speed of the copies"
KEEPS_BITS = "lossless weights on a CPU: captured attention would round differently from eager attention"
CUSTOM = "custom_generate runs its own decoding loop"
#: reasons that follow from what the caller asked for: counted, without a warning
EXPECTED = (NO_CACHE, SEVERAL, CUSTOM, OFF, STREAMS, KEEPS_BITS, NEW_SIZE, CODED, MASKED)

#: why steps are captured, for counts
FIRST = "the first of their shapes"
LENGTHS = "other lengths or arguments"
GROWN = "the KV cache has outgrown its memory"
SHRUNK = "the KV cache needs less than half of its memory, and pages the rest"
DROPPED = "pages or the model have changed, or memory ran out"

Plain = Callable[..., Any]


class NotNow(NotRecordable):
    """Rows cannot be computed in one pass at this place of a call; later they may."""


class Differs(NotRecordable):
    """A replay differs from the eager step. Attributes: out: result of the eager step."""

    def __init__(self, why: str, out: Any) -> None:
        super().__init__(why)
        self.out = out


class Steps:
    """Captured decode steps of one model, over all `generate` calls.

    Args:
        model: held weakly.
        terms: its runtime's side.
    """

    def __init__(self, model: nn.Module, terms: Terms) -> None:
        self._model, self._terms = weakref.ref(model), terms
        self._kept: OrderedDict[tuple, Kept] = OrderedDict()
        self._good_for: object = None  # fingerprint and runtime state at capture
        self._checks: Counter[tuple] = Counter()
        self._refused: dict[tuple, str] = {}
        self._lock = threading.Lock()
        self._warned: set[str] = set()
        self.captured = self.record_us = 0
        self.causes: Counter[str] = Counter()
        self._cause = FIRST  # of captures on the next static memory
        self.eager: Counter[str] = Counter()
        self.joined: Counter[str] = Counter()
        self.unjoined: Counter[str] = Counter()
        self._foreseen: set[int] = set()  # token counts per forward that are compiled or compiling
        self._begun: list[Compilation] = []
        self._not_begun: Counter[str] = Counter()

    # -- sessions -----------------------------------------------------------------------------------------------------

    @contextmanager
    def session(self, limit: int | None, *, watched: bool = False) -> Iterator["Session"]:
        """Context of one `generate` call, with exclusive use of the captures.

        Args:
            limit: maximum sequence length, if known.
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

    def kind(self) -> object:
        """Return the kind of the thread's steps."""
        return self._terms.kind()

    def prepare(self, ids: Tensor | None) -> None:
        """Settle what a step computes with, for its token ids [B, S]."""
        if ids is not None and ids.shape[1:2] == (1,):
            self._terms.prepare(ids.shape[0])

    def refusal(self) -> str:
        """Return why no forward of this phase and precision can be captured; "" if one can."""
        model = self._model()
        return self._terms.refusal() or why_eager(model, [model])

    def why_not_now(self) -> str:
        """Return why nothing can be captured in this call; drop stale captures first."""
        why = self.refusal()
        if why:
            return why
        answer_captures()  # before the fingerprint, which this patch would change, and routes
        register_routes()
        self._follow((fingerprint(self._model()), self._terms.moment()))
        return ""

    def _follow(self, state: tuple) -> None:
        if self._good_for != state:
            self.release()
            self._good_for = state

    @property
    def kept(self) -> list[Kept]:
        """Static caches, the most recently used last."""
        return list(self._kept.values())

    def compile_for(self, ids: Tensor | None) -> None:
        """Start to compile kernels for a prompt [B, S] and the steps after it."""
        if ids is not None and ids.ndim > 1:
            self.compile_ahead(ids.shape[0] * ids.shape[1], soon=True)
            self.compile_ahead(ids.shape[0], soon=False)

    def compile_for_batch(self, sequences: int, tokens: int) -> None:
        """Start to compile kernels for passes of a continuous batch: the fullest first, then all sizes.

        For an H200 the four products of an 8B shape are 54 kinds for 1 to 4,096 tokens, of a second or more each, which
        passes meet one after the other as sequences come and go.
        """
        for size in (tokens, sequences, *range(1, min(tokens, _EACH)), *range(_EACH, tokens, _APART)):
            self.compile_ahead(size, soon=True)

    def compile_ahead(self, tokens: int, *, soon: bool) -> None:
        """Start to compile kernels for forwards of `tokens` tokens; `soon`: the next forward needs them.

        Failures are counted; those kernels compile at launch.
        """
        if tokens in self._foreseen:
            return
        try:
            self._begun += self._terms.compile_ahead(tokens, soon=soon)
            self._foreseen.add(tokens)
        except Exception as error:  # noqa: BLE001 - launches compile instead
            why = f"{type(error).__name__}: {first_line(error)}"
            if why not in self._not_begun:
                warn(f"vbrt: nothing is compiled ahead, launches compile: {why}", stacklevel=2)
            self._not_begun[why] += 1

    def still_good(self) -> bool:
        """True if the captures are valid by the state that can change within a call."""
        return self._good_for is not None and self._good_for[1] == self._terms.moment()

    def watch(self) -> Watch:
        """Return a watch for changes of the model from now on."""
        return Watch(self._model())

    def renew(self) -> str:
        """Drop captures after pages have moved; return why no new ones can be made, "" if they can."""
        self.release()
        return self.why_not_now()

    # -- recordings ---------------------------------------------------------------------------------------------------

    def kept_for(self, cache: Any, limit: int | None) -> Kept:
        """Move a cache into static memory, allocated or reused; return that with its captures.

        While pages have given way to other memory, one is kept, and none of more than twice the size that is wanted.
        """
        key, length = cache_form(cache), length_of(cache) or 0
        kept, gives_way = self._kept.pop(key, None), self._terms.gives_way()
        why = "" if kept is None else _unfit(kept.statics.room, cache, length, limit, saves=gives_way)
        if why:
            kept.release()
            kept = None
        if kept is None:
            while len(self._kept) >= (1 if gives_way else _KEPT):
                self._kept.popitem(last=False)[1].release()
            self._terms.make_room(room_bytes(cache, limit))
            refusal = "" if self.still_good() else self.renew()  # pages have moved for it
            if refusal:
                raise NotRecordable(refusal)
            kept = Kept(cache, limit, self._terms, why or self._cause)
            self._cause = FIRST
        self._kept[key] = kept
        kept.statics.enter(cache)
        return kept

    def offer(self, cache: Any) -> None:
        """Let an empty cache run its prompt in static memory of an earlier call."""
        offer(cache, self._memory())

    def take_back(self, cache: Any) -> None:
        """Give a cache that accepted the offer tensors of its own."""
        own(cache, self._memory())

    def _memory(self) -> list[Statics]:
        return [kept.statics for kept in reversed(self.kept)]

    def recording(self, plain: Plain, call: Call, kept: Kept) -> Recording:
        """Return the captured step, captured now on first use.

        Raises:
            NotRecordable: the step cannot be captured, or its replay differs from the eager step.
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
                recording = Recording(self._model(), plain, call, kept, self._terms)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            why = error if isinstance(error, NotRecordable) else f"{type(error).__name__}: {first_line(error)}"
            self._refused[call.form] = f"a step cannot be captured: {why}"
            raise NotRecordable(self._refused[call.form]) from error
        self.causes[LENGTHS if kept.recordings else kept.cause] += 1
        self.joined.update(recording.report.joined)
        self.unjoined.update(recording.report.unjoined)
        self.record_us += (time.perf_counter_ns() - begun) // 1000
        return recording

    def replayed(self, plain: Plain, call: Call, kept: Kept, feed: Feed | None) -> tuple[Any, Recording]:
        """Replay a step, after an eager check if replays like it have not been checked often enough."""
        recording = self.recording(plain, call, kept)
        if not self.is_checked(call, recording, kept.statics):
            self._check(plain, call, kept.statics, recording)
        return recording.replay(call, kept.statics, feed), recording

    def rows(self, calls: Sequence[Call], kept: Kept) -> RowsRecording:
        """Return the captured step for as many rows as there are calls, made now on first use.

        Raises:
            NotNow: the step has not been captured or checked yet.
            NotRecordable: it cannot be computed for several rows.
        """
        key = calls[0].form, kept.statics.span
        step = kept.recordings.get(key)
        if step is None or not self.is_checked(calls[0], step, kept.statics):
            raise NotNow("the step is not captured yet")
        of_rows = *key, len(calls)
        if of_rows not in kept.rows:
            kept.rows[of_rows] = RowsRecording(step, calls, kept, self._terms)
        return kept.rows[of_rows]

    def is_checked(self, call: Call, recording: Recording, statics: Statics) -> bool:
        """True if replays like this one have been checked against eager steps often enough."""
        return statics.passes_windows in recording.compared and self._checks[call.form] >= _CHECKS

    def _check(self, plain: Plain, call: Call, statics: Statics, recording: Recording) -> None:
        """Compare a replay with the eager step, then undo both. Raises Differs, with the eager step applied."""
        behind = statics.passes_windows
        out = recording.tried(call, statics)
        self._terms.begin_pass()
        with statics.undone() as undo, recording.written.undone(undo):
            expected = plain(**call.kwargs(call.given()))
            error = difference(out, expected, joined=recording.report.error or 0.0, exact=recording.exact is not None)
            undo.wanted = not error
        if error:
            self._refused[call.form] = f"a captured step differs from the eager one: {error}"
            raise Differs(self._refused[call.form], expected)
        self._checks[call.form] += 1
        recording.compared.add(behind)

    def end_call(self) -> None:
        """Drop references to the call's tensors."""
        for kept in self.kept:
            kept.end_call()

    def release(self) -> None:
        """Free all graphs and static caches; the next step captures anew."""
        self._cause = DROPPED if self._kept else self._cause
        while self._kept:
            self._kept.popitem()[1].release()
        self._good_for = None
        self._checks.clear()
        self._refused.clear()

    # -- counts -------------------------------------------------------------------------------------------------------

    @property
    def recordings(self) -> int:
        """Number of captured steps."""
        return sum(self.causes.values())

    def note(self, why: str) -> None:
        """Count an eager step by reason; warn once per reason."""
        self.eager[why] += 1
        if why not in self._warned and why not in EXPECTED:
            self._warned.add(why)
            warn(f"vbrt: generate runs its decode steps eagerly, without capture: {why}", stacklevel=2)

    def counts(self) -> StepCounts:
        """Return the counters."""
        numbers = self.captured, sum(self.eager.values()), self.recordings, self.record_us
        causes = dict(self.causes)
        held = sum(kept.nbytes for kept in self.kept)
        late = self._not_begun + Counter(each.error for each in self._begun if each.error)
        return StepCounts(*numbers, dict(self.eager), dict(self.joined), dict(self.unjoined), held, dict(late), causes)


class Session:
    """One `generate` call. Attributes: feed: takes the hidden states of replays, where a step has them."""

    def __init__(self, steps: Steps, limit: int | None, why_not: str | None, *, watched: bool) -> None:
        self._steps, self._limit, self._why = steps, limit, why_not
        self._whys: dict[object, str] = {}  # kind of step -> why it runs eagerly; "": it is captured
        self._eager_why = ""  # of the last eager step
        self._watched, self._watch = watched, None
        self.thread = threading.get_ident()
        self._kept: Kept | None = None
        self._cache: weakref.ref[Any] | None = None
        self._lying: list[weakref.ref[Any]] = []  # weak: layers of one cache, which may be in static memory
        self.prompted, self._stepped = False, False  # prompt computed; watch rebased at the first step
        self._masks: bool | None = None
        self._begin: Callable[[], None] | None = None
        self._last: Call | None = None  # the previous step and its capture, which the next step probably shares
        self._recording: Recording | None = None
        self._ready = set[object]()  # kinds of steps that are captured in this bucket, and checked
        self.nested = 0
        self.feed: Feed | None = None

    def defer(self, begin: Callable[[], None]) -> bool:
        """Let the call's next forward begin its pass, unless it replays. False if that forward is not this call's."""
        if self.nested or threading.get_ident() != self.thread or torch.compiler.is_compiling():
            return False
        self._begin = begin
        return True

    def forward(self, plain: Plain, args: tuple, kwargs: Mapping[str, Any]) -> Any:
        """Run a forward: replayed if it is a step that can be captured."""
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
        self._let_go(found[1], copied=False)  # no copy: it keeps the memory, as captures are released
        self._steps.release()
        self._why = why
        return self._eager(why, found, plain, args, kwargs)

    def _step(self, plain: Plain, found: tuple[str, Any] | None, kwargs: Mapping[str, Any]) -> Any:
        """Replay a step; capture it again if pages have moved. Raises NotRecordable."""
        try:
            call = self._next(found, kwargs)
            if call is not None:
                return self._recording.replay(call, self._kept.statics, self.feed)
            return self._first(plain, found, kwargs)
        except PagesMoved:
            self._renew(found[1])
        return self._first(plain, found, kwargs)

    def _renew(self, cache: Any) -> str:
        """Drop captures after pages have moved; return why no new ones can be made, "" if they can."""
        self._let_go(cache)
        why = self._steps.renew()
        self._whys = {self._steps.kind(): why}
        return why

    def _next(self, found: tuple[str, Any] | None, kwargs: Mapping[str, Any]) -> Call | None:
        """Fast path: return the call if the previous step's capture serves it; None if it may need another."""
        last, self._last = self._last, None
        if last is None or found is None or torch.is_grad_enabled():
            return None
        if not self._steps.still_good() or not self._holds(found[1]) or self._is_changed():
            return None
        if last.form[0] != self._steps.kind():
            return None
        call, span = last.next(kwargs, self._kept.statics.length), self._kept.statics.span
        if call is None or not span.start <= (call.length or 0) < span.end:
            return None
        if self._kept.statics.passes_windows not in self._recording.compared:
            return None
        self._last = call
        return call

    def _first(self, plain: Plain, found: tuple[str, Any] | None, kwargs: Mapping[str, Any]) -> Any:
        self._steps.prepare(ids_in(kwargs))
        call = self._call(plain, found, kwargs)
        out, self._recording = self._steps.replayed(plain, call, self._kept, self.feed)
        checked = self._steps.is_checked(call, self._recording, self._kept.statics)
        self._last = call if checked else None
        if checked:
            self._ready.add(self._steps.kind())
        return out

    def rows(self, plain: Plain, kwargs: Sequence[Mapping[str, Any]]) -> list[Any]:
        """Compute consecutive captured steps in one pass, each with its own bits; return their results.

        Raises:
            NotNow: they cannot be in this place; nothing has changed.
            NotRecordable: they cannot be; nothing has changed.
        """
        found = cache_in(kwargs[0])
        try:
            rows, calls = self._rows(plain, found, kwargs)
            return rows.replay(calls, self.feed)
        except PagesMoved as error:
            self._renew(found[1])
            raise NotNow(str(error)) from error
        except torch.OutOfMemoryError as error:
            self._let_go(found[1], copied=False)  # no copy: it keeps the memory, as captures are released
            self._steps.release()
            self._why = f"no memory for it: {first_line(error)}"
            raise NotRecordable(self._why) from error

    def _rows(
        self, plain: Plain, found: tuple[str, Any], kwargs: Sequence[Mapping[str, Any]]
    ) -> tuple[RowsRecording, list[Call]]:
        first = self._call(plain, found, kwargs[0])
        if len(kwargs) > self._kept.statics.rows_alike():
            raise NotNow("the rows are in several buckets of the cache")
        calls = [first, *(first.next(each, (first.length or 0) + row) for row, each in enumerate(kwargs) if row)]
        if None in calls:
            raise NotRecordable("the rows have arguments of different shapes")
        self._last = None
        return self._steps.rows(calls, self._kept), calls

    @property
    def captures(self) -> int:
        """Count of what has been captured for this call and those before."""
        rows = sum(rows.captures for kept in self._steps.kept for rows in kept.rows.values())
        return self._steps.recordings + rows

    @property
    def rows_ready(self) -> bool:
        """True if the current kind's step is captured in this bucket and checked, so that its rows can be computed."""
        return self._steps.kind() in self._ready and self._cache is not None and self._cache() is not None

    def rows_alike(self) -> int | None:
        """Number of the next steps that one pass can compute; None if the cache is not in static memory."""
        return None if self._cache is None or self._cache() is None else self._kept.statics.rows_alike()

    def _call(self, plain: Plain, found: tuple[str, Any] | None, kwargs: Mapping[str, Any]) -> Call:
        """Flatten a step's arguments, with its cache moved into static memory. Raises NotRecordable."""
        why = self._why_eager(found, kwargs)
        if why:
            raise NotRecordable(why)
        name, cache = found
        if not self._steps.still_good():
            why = self._renew(cache)
            if why:
                raise NotRecordable(why)
        if self._masks is None:
            self._masks = "decoder_attention_mask" in inspect.signature(plain).parameters
        length = self._kept.statics.length if self._holds(cache) else length_of(cache)
        call = take_apart(kwargs, name, length, kind=self._steps.kind(), masks=self._masks)
        self._place(cache, call.length or 0)
        return call

    def refusal(self) -> str:
        """Return why steps of the current kind run eagerly; "": they are captured.

        Inspects the model once per call and kind: can steps be captured, and are existing captures valid.
        """
        if self._why is not None:
            return self._why
        kind = self._steps.kind()
        if kind not in self._whys:
            self._whys[kind] = self._steps.why_not_now()
            if self._watched and self._watch is None and not self._whys[kind]:
                self._watch = self._steps.watch()
        return self._whys[kind]

    def _is_changed(self) -> bool:
        return self._watch is not None and self._watch.sees_changes()

    def _why_eager(self, found: tuple[str, Any] | None, kwargs: Mapping[str, Any]) -> str:
        why = self.refusal()
        if why:
            return why
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
        """Move the cache into static memory of at least the length's bucket, and select that bucket."""
        if not self._holds(cache) or self._kept.statics.room < span_of(length).end:
            self._let_go_others(cache)
            self._let_go(cache)
            self._lying = list(map(weakref.ref, layers_of(cache)))
            self._kept, self._cache = self._steps.kept_for(cache, self._limit), weakref.ref(cache)
            self._last = None  # its capture is on other memory
            self._ready.clear()
        statics = self._kept.statics
        if statics.span != statics.span_at(length):
            statics.move_to(statics.span_at(length))
            self._last = None  # its capture is for another bucket
            self._ready.clear()

    def placed(self, cache: Any) -> Statics:
        """Move a cache into static memory. Raises NotRecordable."""
        why = self.refusal() or ("" if is_entered(cache) else why_not(cache))
        if why:
            raise NotRecordable(why)
        length = self._kept.statics.length if self._holds(cache) else length_of(cache)
        self._place(cache, length or 0)
        return self._kept.statics

    def _holds(self, cache: Any) -> bool:
        """True if the whole cache is in static memory."""
        return self._cache is not None and self._cache() is cache and self._kept.statics.holds_all()

    def note_eager(self) -> None:
        """Count a step that its caller runs eagerly, as the last one was, or as those of its kind are."""
        self._steps.note(self.refusal() or self._eager_why)

    def _eager(self, why: str, found: tuple[str, Any] | None, plain: Plain, args: tuple, kwargs: Mapping) -> Any:
        self._eager_why = why
        self._steps.note(why)
        if found is not None:
            self._let_go(found[1])
        return self._plainly(plain, args, kwargs)

    def _prompt(self, plain: Plain, args: tuple, kwargs: Mapping[str, Any], cache: Any | None) -> Any:
        """Run a prompt. `cache`: the call's only one so far, which may reuse static memory of an earlier call."""
        self._steps.compile_for(ids_in(kwargs))
        offered = cache is not None and why_not(cache) == EMPTY and self._why is None and not self._whys
        offered = offered and not torch.is_grad_enabled()
        try:
            if offered:
                self._lying = list(map(weakref.ref, layers_of(cache)))
                self._steps.offer(cache)
            out = self._plainly(plain, args, kwargs)
        except torch.OutOfMemoryError:
            self._steps.release()  # more memory for the next call
            raise
        finally:
            if offered:
                withdraw(cache)
        self.refusal()  # overlaps with the device's work on the prompt
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
        """Move layers of the call's other caches out of static memory, which this cache is about to take."""
        mine = set() if cache is None else set(map(id, layers_of(cache)))
        alive = [layer for kept in self._lying if (layer := kept()) is not None and id(layer) not in mine]
        if alive:
            self._cache = None
        others = SimpleNamespace(layers=alive)
        leave(others, copied=copied)
        self._steps.take_back(others)

    def end(self) -> None:
        """Give the cache tensors of its own, if the caller still holds it."""
        self._last = self._recording = self._begin = None  # these refer to the cache
        if self._kept is not None:
            self._steps.end_call()
        try:
            self._let_go_others(None)
        except torch.OutOfMemoryError:
            self._steps.release()
            self._let_go_others(None, copied=False)  # no copy: it keeps the memory
        self._kept = self._cache = None
        self._lying = []


def _unfit(room: int, cache: Any, length: int, limit: int | None, *, saves: bool) -> str:
    """Return why a cache gets other static memory than that for `room` tokens; "" if it fits.

    Args:
        saves: memory is short.
    """
    if room < span_of(length).end:
        return GROWN
    return SHRUNK if saves and room > 2 * room_wanted(cache, limit) else ""


@contextmanager
def _attributes_kept(model: nn.Module) -> Iterator[None]:
    """Capture a step. Raises NotRecordable and restores attributes of modules if the step changes any."""
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
    """Restore a module's attributes or buffers, except those of VB layers."""
    for name in [name for name in now if name not in before and not name.startswith("_vb_")]:
        del now[name]
    now.update({name: value for name, value in before.items() if not name.startswith("_vb_")})


def _holds_tokens(cache: Any) -> bool:
    """True after a prompt: at least one layer of the cache holds tokens."""
    return is_entered(cache) or why_not(cache) != EMPTY
