"""`generate` of a wrapped model: transformers' own, with decode steps that may be recorded.

    follow(attachment, model)      # the model's `generate`, and those of the models in it, from now on

The loop stays transformers': sampling, processors, streamers, stopping criteria, beams and assistants are its code. For
the length of a call the instance has a `forward` of ours in front of the class's (`session.py`).
"""

import contextlib
import functools
import inspect
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from vbrt.errors import WrapError
from vbrt.generation.capture.mutation_watch import calls_others
from vbrt.generation.capture.session import CUSTOM, KEEPS_BITS, OFF, Session, Steps
from vbrt.generation.fusion.deterministic_attention import is_steady_on
from vbrt.generation.fusion.graph_backends import Recorded, Recorder, recorder_for
from vbrt.generation.kv.cache_argument import with_asked_cache
from vbrt.generation.speculation.seeded_generate import Speculation
from vbrt.generation.speculation.seeded_generate import generate as speculating
from vbrt.generation.speculation.verification import Passes
from vbrt.generation.static.static_cache import Statics
from vbrt.kernels.cuda.compiling import Compilation
from vbrt.kernels.operator_trace import recorder
from vbrt.layers import Weight
from vbrt.layers.experts import ExpertsHandle, why_waits
from vbrt.layers.weights.linear_product import pass_precision
from vbrt.layers.weights.precompile_kernels import compile_ahead
from vbrt.libraries import transformers_api
from vbrt.model.pass_hooks import move_rest_
from vbrt.model.phase import DECODE, phase_name
from vbrt.report.stats import StepCounts

if TYPE_CHECKING:
    from vbrt.model.attachment import Attachment

__all__ = ["Followed", "Generating", "Recordable", "follow", "generating_modules", "limit_of", "prompt_of"]


class Generating:
    """The `generate` of one model; an attribute of the instance, which it refers to weakly."""

    def __init__(self, model: nn.Module, attachment: "Attachment | None") -> None:
        self._model, self._attachment = weakref.ref(model), None if attachment is None else weakref.ref(attachment)
        self._steps: Steps | None = None
        functools.update_wrapper(self, type(model).generate)
        self.__signature__ = inspect.signature(type(model).generate.__get__(model))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        attachment = None if self._attachment is None else self._attachment()
        watcher = None if attachment is None else attachment.watcher
        if watcher is None:
            return self._generate(*args, **kwargs)
        given = args[0] if args else kwargs.get("inputs", kwargs.get("input_ids"))
        if isinstance(given, Tensor):
            watcher.compare(given, "inputs")
        try:
            out = self._generate(*args, **kwargs)
        except Exception as error:
            watcher.leave(error)
            raise
        tokens = getattr(out, "sequences", out)
        watcher.compare(
            tokens, "tokens, from the same inputs; where they are drawn, torch.manual_seed is needed on all"
        )
        return out

    def _generate(self, *args: Any, **kwargs: Any) -> Any:
        if self._model() is None:
            raise WrapError("generate: the model is gone; keep it in a variable for as long as its generate is called")
        how, kwargs = Speculation.taken(with_asked_cache(self._model(), kwargs))
        if how.asked:
            attachment = self._attached(how)
            move_rest_(self._model(), attachment.stack.device)  # before transformers asks where the model is
            return speculating(self._model(), attachment, how, self._plainly, args, kwargs)
        return self._plainly(*args, **kwargs)

    def _attached(self, how: Speculation) -> "Attachment":
        attachment = None if self._attachment is None else self._attachment()
        if attachment is None:
            raise WrapError(f"generate: {how}: this copy of the model has no runtime; wrap it, or leave that out")
        attachment.check_open("generate")
        return attachment

    def _plainly(self, *args: Any, **kwargs: Any) -> Any:
        """transformers' own decoding, with steps that may be recorded."""
        model = self._model()
        generate = type(model).generate.__get__(model)
        attachment = None if self._attachment is None else self._attachment()
        if attachment is None or attachment.closed or self._recorder() is None:
            return generate(*args, **kwargs)
        if kwargs.get("custom_generate") is not None:
            self.steps.note(CUSTOM)
            return generate(*args, **kwargs)
        mine = model.__dict__.get("forward")
        if isinstance(mine, _Forward) and mine.here():  # a call within a call: assistants that are the model itself
            with mine.nested():
                return generate(*args, **kwargs)
        move_rest_(model, attachment.stack.device)  # before transformers asks where the model is
        self.steps.compile_for(prompt_of(model, args, kwargs))
        watched = calls_others(args, kwargs)
        with self.steps.session(limit_of(model, args, kwargs), watched=watched) as session:
            return _with_forward(model, session, generate, args, kwargs)

    @contextlib.contextmanager
    def passes(self, limit: int, *, watched: bool) -> Iterator["Passes"]:
        """Run a call of passes of one phase and precision, behind a prompt, that may be recorded.

        To be entered in that phase and precision.
        `limit`: tokens of a sequence at most. `watched`: callbacks of the call may change the model.
        """
        if self._recorder() is None:
            yield Passes()
            return
        with self.steps.session(limit, watched=watched) as session:
            session.prompted = True
            yield Recordable(self._model(), session)

    def refusal(self) -> str:
        """Return why steps of the current phase and precision are not recorded; "" if they are."""
        return "the device has no graphs" if self._recorder() is None else self.steps.refusal()

    @property
    def steps(self) -> Steps:
        """The steps of all calls."""
        if self._steps is None:
            self._steps = Steps(self._model(), Terms(self._attachment(), self._recorder))
        return self._steps

    def _recorder(self) -> Recorder | None:
        return recorder_for(self._attachment().stack.device)

    def prepare(self) -> None:
        """Begin to compile what steps of one sequence will launch, while others encode weights or read a prompt."""
        if self._attachment().stack.device.type == "cuda":
            self.steps.compile_ahead(1, soon=False)

    def counts(self) -> StepCounts:
        """What was captured, and what not."""
        return StepCounts() if self._steps is None else self._steps.counts()

    def end(self) -> None:
        """Free what is recorded, and give the model its class's method back."""
        if self._steps is not None:
            self._steps.release()
        model = self._model()
        if model is not None and model.__dict__.get("generate") is self:
            del model.__dict__["generate"]

    # -- copies -------------------------------------------------------------------------------------------------------

    def __deepcopy__(self, memo: dict) -> "Generating":
        copied = memo.get(id(self._model()))
        return Generating(self._model() if copied is None else copied, self._attachment and self._attachment())

    def __reduce__(self) -> tuple:
        return Generating, (self._model(), None)


class _Forward:
    """What stands in front of a class's forward for the length of a call of generate."""

    def __init__(self, plain: Callable[..., Any], session: Session) -> None:
        self._plain, self.session = plain, session
        functools.update_wrapper(self, plain)
        self.__signature__ = inspect.signature(plain)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.session.forward(self._plain, args, kwargs)

    def here(self) -> bool:
        """True if the call of generate is of this thread."""
        return self.session.thread == threading.get_ident()

    @contextlib.contextmanager
    def nested(self) -> Iterator[None]:
        """Run another call within the call: its forwards are plain."""
        self.session.nested += 1
        try:
            yield
        finally:
            self.session.nested -= 1


def _with_forward(
    model: nn.Module, session: Session, generate: Callable[..., Any], args: tuple, kwargs: dict[str, Any]
) -> Any:
    if "forward" in model.__dict__:  # a hook's or a compiler's, or that of another thread's call
        return generate(*args, **kwargs)
    model.__dict__["forward"] = _Forward(model.forward, session)
    try:
        return generate(*args, **kwargs)
    finally:
        del model.__dict__["forward"]


class Recordable(Passes):
    """Passes that are replayed where they can be recorded."""

    def __init__(self, model: nn.Module, session: Session) -> None:
        self._model, self._session = model, session

    def run(self, passes: Callable[[], Any]) -> Any:
        """Run a function that runs passes."""
        return _with_forward(self._model, self._session, passes, (), {})

    def placed(self, cache: Any) -> Statics:
        """Have a cache lie where recorded steps find it. Raises NotRecordable."""
        return self._session.placed(cache)


def limit_of(model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> int | None:
    """Return the length at which a call of generate stops at the latest, if its arguments say so."""
    prompt = _given(args, kwargs)
    for source in _sources(model, kwargs):
        new, length = _read(source, "max_new_tokens"), _read(source, "max_length")
        if isinstance(new, int) and not getattr(model.config, "is_encoder_decoder", False):
            return None if prompt is None else prompt.shape[-1] + new
        if isinstance(new, int) or isinstance(length, int):
            return new if isinstance(new, int) else length
    return None


def prompt_of(model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Tensor | None:
    """Return the token ids of a call's first forward; None if that will compute another number of them."""
    ids, names = _given(args, kwargs), ("num_beams", "num_return_sequences", *transformers_api.CACHE_ARGUMENTS[:2])
    others = (_read(source, name) for source in _sources(model, kwargs) for name in names)
    is_another = ids is None or ids.is_floating_point() or any(value not in (None, 1) for value in others)
    return None if is_another else ids


def _given(args: tuple, kwargs: dict[str, Any]) -> Tensor | None:
    return next((t for t in (*args[:1], kwargs.get("inputs"), kwargs.get("input_ids")) if torch.is_tensor(t)), None)


def _sources(model: nn.Module, kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Where options of a call may stand, the first one wins."""
    return kwargs, kwargs.get("generation_config"), getattr(model, "generation_config", None)


def _read(source: Any, name: str) -> Any:
    return source.get(name) if isinstance(source, dict) else getattr(source, name, None)


class Terms:
    """What steps ask of a model's place on its runtime; see `vbrt.generation.capture.session.Terms`."""

    def __init__(self, attachment: "Attachment", new_recorder: Callable[[], Recorder]) -> None:
        self._attachment, self._stack, self.new_recorder = weakref.ref(attachment), attachment.stack, new_recorder

    @property
    def _phase(self) -> str:
        """The phase of a decode step now."""
        attachment = self._attachment()
        named = phase_name(attachment)
        inferred = DECODE if attachment.name_phase is None else attachment.name_phase(DECODE)
        return attachment.prefix + (named or inferred)

    def _keys(self) -> list[str] | None:
        """The pages that a coarse pass takes; None for other passes."""
        if pass_precision() != "coarse":
            return None
        handles = self._attachment().registry.handles
        if not all(isinstance(handle, Weight) and handle.keys for handle in handles):
            return None
        return [key for handle in handles for key in (handle.keys[:1] if handle.spec.fine else handle.keys)]

    @property
    def joins(self) -> bool:
        """True if recorded steps may round in other places than eager ones."""
        return self._attachment().settings.compute.joins

    @property
    def passes_masks(self) -> bool:
        """True if attention of recorded steps passes over masked places: that of 4-bit models is joined."""
        return self.steady or (self.joins and not self._attachment().lossless)

    @property
    def steady(self) -> bool:
        """True if attention of exact steps may be a kernel of ours, and is."""
        return self.joins and self._attachment().lossless and is_steady_on(self._stack.device)

    def moment(self) -> object:
        """Return what must be as it was when a step was recorded."""
        ledger, guard = self._stack.ledger, self._stack.guard
        return (
            self._phase,
            ledger.changes,
            ledger.travellers,
            guard.recorder is None,
            guard.routing is None,
            guard.closed,
        )

    def refusal(self) -> str:
        """Return why no pass can be recorded now; "" if one can."""
        guard, attachment = self._stack.guard, self._attachment()
        if not attachment.settings.compute.captures:
            return OFF
        if guard.routing is not None:
            return "routing is being recorded"
        if self._stack.device.type == "cuda":
            waits = (why_waits(handle) for handle in attachment.registry.handles if isinstance(handle, ExpertsHandle))
            return next(filter(None, waits), "") or attachment.runtime.recordable(self._phase, self._keys()) or ""
        if attachment.lossless and pass_precision() == "full" and not recorder_for(self._stack.device).lossless:
            return KEEPS_BITS
        return "a timeline is being recorded" if guard.recorder is not None else ""

    def begin_pass(self) -> None:
        """Begin a pass that is not replayed; noted by who records the step's operations."""
        step = recorder()
        if step is None:
            self._begin()
        else:
            step.leaf(self._begin)

    def compile_ahead(self, tokens: int, *, soon: bool) -> list[Compilation]:
        """Begin to compile the kernels of 4-bit layers for passes of so many tokens; `soon`: for the next one."""
        return compile_ahead(self._attachment().registry.handles, (tokens,), self._stack.device, soon=soon)

    def _begin(self) -> None:
        if not self._stack.capturing():
            self._stack.begin_pass(self._phase)

    def recorded(self, recorder: Recorder, body: Callable[[], None]) -> Callable[[], bool]:
        """Record a pass and return what replays it: False, with nothing done, once pages have moved."""
        if self._stack.device.type != "cuda":
            return self._counted(self._recorded_on_host(recorder.record(body, contextlib.nullcontext)))
        ledger, attachment, passes = self._stack.ledger, self._attachment(), []

        def within() -> Any:
            passes.append(attachment.runtime.recording(self._phase, self._keys()))
            return passes[0]

        def step() -> None:
            body()
            if passes:
                passes[0].end()  # the copies of a streamed pass end within the capture

        captured = ledger.captured
        try:
            graph = recorder.record(step, within)
        finally:
            ledger.captured = captured
            attachment.expert_cache.forget_recording()
        return self._counted(functools.partial(passes[0].replay, graph))

    def _counted(self, replay: Callable[[], bool]) -> Callable[[], bool]:
        """Have replays count: other ranks see by that whether this one goes on."""

        def again() -> bool:
            done = replay()
            self._attachment().replays += done
            return done

        return again

    def _recorded_on_host(self, tape: Recorded) -> Callable[[], bool]:
        """Return what replays a tape, which computes with pages where they lay when it was recorded."""
        stack, ledger, changes = self._stack, self._stack.ledger, self._stack.ledger.changes

        def again() -> bool:
            if ledger.retired or ledger.lost:
                with stack.guard.lock:
                    stack.decider.catch_up()
            if ledger.changes != changes:
                return False
            tape.replay()
            return True

        return again

    def handles(self) -> list[Any]:
        """Return what counts forwards, and has pages that count hits: not experts, which count by token."""
        handles = self._attachment().registry.handles
        return [handle for handle in handles if isinstance(handle, Weight) and not handle.spec.by_rows]


def generating_modules(model: nn.Module) -> list[nn.Module]:
    """Return the modules that transformers can generate with: the model, or models in it."""
    mixin = transformers_api.generation_mixin()
    return [] if mixin is None else [module for module in model.modules() if isinstance(module, mixin)]


def follow(attachment: "Attachment", model: nn.Module) -> None:
    """Put a `generate` of ours on the instances, until the attachment ends. Does nothing where that was done."""
    if attachment.closed or attachment.follower is not None or attachment.settings.mode != "infer":
        return
    modules = generating_modules(model)
    for module in modules:
        module.__dict__["generate"] = Generating(module, attachment)
    attachment.follower = Followed([module.__dict__["generate"] for module in modules])
    for each in attachment.follower.generating:
        each.prepare()


class Followed:
    """The `generate` of all models in one attached model."""

    def __init__(self, generating: list[Generating]) -> None:
        self.generating = generating

    def defer(self, model: nn.Module, begin: Callable[[], None]) -> bool:
        """Have a call of generate begin the pass that a forward of the model is, if this thread is in one."""
        forward = model.__dict__.get("forward")
        return isinstance(forward, _Forward) and forward.session.defer(begin)

    def counts(self) -> StepCounts:
        """What they captured together."""
        return sum((each.counts() for each in self.generating), StepCounts())

    def end(self) -> None:
        """Leave the models as they were, without recordings. Idempotent."""
        for each in self.generating:
            each.end()
