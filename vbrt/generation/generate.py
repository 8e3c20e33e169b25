"""`generate` of a wrapped model: transformers' own loop, with decode steps captured and replayed.

    follow(attachment, model)      # overrides `generate` on the instances of the model and of the models in it

Sampling, logits processors, streamers, stopping criteria, beams and assistants remain transformers' code. During a
call, an instance-level `forward` (`_Forward`) shadows the class's and hands each forward to the session (`session.py`).
"""

import contextlib
import functools
import inspect
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from vbrt.errors import ArgumentError, WrapError
from vbrt.generation.capture.batch_steps import BatchSteps
from vbrt.generation.capture.captured_step import Feed
from vbrt.generation.capture.session import CUSTOM, KEEPS_BITS, OFF, STREAMS, Session, Steps
from vbrt.generation.fusion.deterministic_attention import is_steady_on
from vbrt.generation.fusion.graph_backends import Recorder, recorder_for
from vbrt.generation.kv.cache_argument import with_asked_cache
from vbrt.generation.speculation.seeded_generate import Speculation
from vbrt.generation.speculation.seeded_generate import generate as speculating
from vbrt.generation.speculation.verification import Passes
from vbrt.generation.static.static_cache import Statics
from vbrt.host import accelerator
from vbrt.kernels.cuda.compiling import Compilation
from vbrt.kernels.operator_trace import recorder
from vbrt.layers import Weight
from vbrt.layers.experts import ExpertsHandle, why_waits
from vbrt.layers.weights.linear_product import pass_precision
from vbrt.layers.weights.precompile_kernels import compile_ahead
from vbrt.libraries import transformers_api
from vbrt.model.mutation_watch import calls_others
from vbrt.model.pass_hooks import move_rest_
from vbrt.model.phase import DECODE, named_phase, phase_name
from vbrt.report.stats import StepCounts
from vbrt.tiers.schedule.graph_recorder import Recorded

if TYPE_CHECKING:
    from vbrt.model.attachment import Attachment

__all__ = [
    "Followed",
    "Generating",
    "Recordable",
    "follow",
    "generating_modules",
    "limit_of",
    "prompt_of",
    "refuse_text",
]

_PARTS = "prefill_chunk_size"  # of generation configs
_SLICED = (
    "inputs",
    "input_ids",
    "attention_mask",
    "position_ids",
)  # tensors that parts of a prompt have their parts of


class Generating:
    """The `generate` of one model: a callable set on the instance, with a weak reference to it."""

    def __init__(self, model: nn.Module, attachment: "Attachment | None") -> None:
        self._model, self._attachment = weakref.ref(model), None if attachment is None else weakref.ref(attachment)
        self._steps: Steps | None = None
        functools.update_wrapper(self, type(model).generate)
        self.__signature__ = inspect.signature(type(model).generate.__get__(model))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        given = args[0] if args else kwargs.get("inputs", kwargs.get("input_ids"))
        refuse_text(given, "generate")
        attachment = None if self._attachment is None else self._attachment()
        watcher = None if attachment is None else attachment.watcher
        if watcher is None:
            return self._generate(*args, **kwargs)
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
        attachment = None if self._attachment is None else self._attachment()
        has_runtime = attachment is not None and not attachment.closed
        how, kwargs = Speculation.taken(with_asked_cache(self._model(), kwargs), has_runtime=has_runtime)
        if how.asked:
            attachment = self._attached(how)
            move_rest_(self._model(), attachment.stack.device)  # before transformers asks where the model is
            out = speculating(self._model(), attachment, how, self._plainly, args, kwargs)
            attachment.expert_cache.check()
            return out
        return self._plainly(*args, **kwargs)

    def _attached(self, how: Speculation) -> "Attachment":
        attachment = None if self._attachment is None else self._attachment()
        if attachment is None:
            raise WrapError(f"generate: {how}: this copy of the model has no runtime; wrap it, or leave that out")
        attachment.check_open("generate")
        return attachment

    def _plainly(self, *args: Any, **kwargs: Any) -> Any:
        """transformers' own decoding loop, with captured steps where the device allows capture."""
        model = self._model()
        generate = type(model).generate.__get__(model)
        attachment = None if self._attachment is None else self._attachment()
        if attachment is None or attachment.closed or self._recorder() is None:
            return generate(*args, **kwargs)
        if kwargs.get("custom_generate") is not None:
            self.steps.note(CUSTOM)
            return generate(*args, **kwargs)
        mine = model.__dict__.get("forward")
        if isinstance(mine, _Forward) and mine.here():  # reentrant: the model is its own assistant
            with mine.nested():
                return generate(*args, **kwargs)
        move_rest_(model, attachment.stack.device)  # before transformers asks where the model is
        kwargs |= _parts_of_prompt(model, attachment, args, kwargs)
        self.steps.compile_for(prompt_of(model, args, kwargs))
        watched = calls_others(args, kwargs)
        with self.steps.session(limit_of(model, args, kwargs), watched=watched) as session:
            out = _with_forward(model, _Forward(model.forward, session), lambda: generate(*args, **kwargs))
        attachment.hosting.check_results()
        attachment.expert_cache.check()
        return out

    @contextlib.contextmanager
    def passes(self, limit: int, *, watched: bool, feed: Feed | None = None) -> Iterator["Passes"]:
        """Context of forwards of one phase and precision after a prompt, which may be captured.

        Enter it with that phase and precision set.

        Args:
            limit: maximum sequence length, in tokens.
            watched: callbacks of the call may change the model.
            feed: takes the hidden states of replays, if the model has a multi-token head.
        """
        if self._recorder() is None:
            yield Passes()
            return
        with self.steps.session(limit, watched=watched) as session:
            session.prompted, session.feed = True, feed
            yield Recordable(self._model(), session)

    def batch_steps(self, sequences: int, tokens: int) -> BatchSteps | None:
        """Return the decode steps of a continuous batch; None on devices without graphs. `release` them after it.

        Kernels for its passes, of so many sequences and tokens at most, begin to compile.
        """
        attachment = self._attachment()
        if attachment is None or attachment.closed or attachment.stack.device.type != accelerator.TYPE:
            return None
        self.steps.compile_for_batch(sequences, tokens)
        decoding = functools.partial(named_phase, attachment, DECODE, None)
        return BatchSteps(self.steps, Terms(attachment, self._recorder), decoding)

    @property
    def steps(self) -> Steps:
        """Captured steps, shared by all calls."""
        if self._steps is None:
            self._steps = Steps(self._model(), Terms(self._attachment(), self._recorder))
        return self._steps

    def _recorder(self) -> Recorder | None:
        return recorder_for(self._attachment().stack.device)

    def prepare(self) -> None:
        """Start to compile kernels for batch-1 decode steps while weights are encoded or a prompt is read."""
        if self._attachment().stack.device.type == accelerator.TYPE:
            self.steps.compile_ahead(1, soon=False)

    def counts(self) -> StepCounts:
        """Counters of captured and eager steps."""
        return StepCounts() if self._steps is None else self._steps.counts()

    def end(self) -> None:
        """Free captured steps and restore the class's `generate`."""
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
    """Instance-level override of `forward` for the duration of a `generate` call."""

    def __init__(self, plain: Callable[..., Any], session: Session) -> None:
        self._plain, self.session = plain, session
        functools.update_wrapper(self, plain)
        self.__signature__ = inspect.signature(plain)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.session.forward(self._plain, args, kwargs)

    def here(self) -> bool:
        """True if the `generate` call runs in the current thread."""
        return self.session.thread == threading.get_ident()

    @contextlib.contextmanager
    def nested(self) -> Iterator[None]:
        """Reentrant `generate`: its forwards run eagerly."""
        self.session.nested += 1
        try:
            yield
        finally:
            self.session.nested -= 1


def _with_forward(model: nn.Module, forward: _Forward, run: Callable[[], Any]) -> Any:
    if "forward" in model.__dict__:  # set by a hook, a compiler or another thread's call
        return run()
    model.__dict__["forward"] = forward
    try:
        return run()
    finally:
        del model.__dict__["forward"]


class Recordable(Passes):
    """Forwards that are captured and replayed where possible."""

    def __init__(self, model: nn.Module, session: Session) -> None:
        self._model, self._session, self._forward = model, session, _Forward(model.forward, session)

    def run(self, passes: Callable[[], Any]) -> Any:
        """Run a function whose forwards may be replayed."""
        return _with_forward(self._model, self._forward, passes)

    def note_eager(self) -> None:
        """Count a step that the caller runs eagerly."""
        self._session.note_eager()

    def rows(self, kwargs: Sequence[dict[str, Any]]) -> list[Any]:
        """Compute consecutive steps in one pass; see `Session.rows`."""
        return self._session.rows(self._model.forward, kwargs)

    @property
    def captures(self) -> bool:
        """True if steps of the current phase and precision are captured."""
        return not self._session.refusal()

    @property
    def rows_ready(self) -> bool:
        """True if `rows` can be computed in this place."""
        return self._session.rows_ready

    def rows_alike(self) -> int | None:
        """Number of the next steps in this place of the cache's static memory; None if it is not in any."""
        return self._session.rows_alike()

    @property
    def one_time(self) -> int:
        """Count of captures so far."""
        return self._session.captures

    def placed(self, cache: Any) -> Statics:
        """Move a cache into static memory. Raises NotRecordable."""
        return self._session.placed(cache)


def refuse_text(given: Any, where: str) -> None:
    """Raise ArgumentError for a text, or a list, where a language model takes token ids."""
    if isinstance(given, str | list | tuple):
        raise ArgumentError(
            f"{where}({given!r:.40}): {type(given).__name__}; expected token ids as a tensor [batch, tokens]: "
            'tokenizer("The sea", return_tensors="pt").input_ids'
        )


def limit_of(model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> int | None:
    """Return the maximum sequence length of a `generate` call; None if its arguments do not set one."""
    prompt = _given(args, kwargs)
    for source in _sources(model, kwargs):
        new, length = _read(source, "max_new_tokens"), _read(source, "max_length")
        if isinstance(new, int) and not getattr(model.config, "is_encoder_decoder", False):
            return None if prompt is None else prompt.shape[-1] + new
        if isinstance(new, int) or isinstance(length, int):
            return new if isinstance(new, int) else length
    return None


def _parts_of_prompt(model: nn.Module, attachment: "Attachment", args: tuple, kwargs: dict[str, Any]) -> dict[str, int]:
    """Return the argument by which transformers computes a prompt in parts, if `gpu_memory` has no room for the
    activations of all of it; none for results that must have plain bits, which parts may round otherwise."""
    room, balance, prompt = attachment.plan.gpu_room, attachment.runtime.balance, prompt_of(model, args, kwargs)
    if room is None or balance is None or prompt is None or prompt.ndim != 2 or prompt.numel() <= room.tokens:
        return {}
    exact = attachment.lossless and attachment.settings.compute.exactness == "bits"
    others = [name for name, value in kwargs.items() if isinstance(value, Tensor) and name not in _SLICED]
    if exact or others or getattr(model.config, "is_encoder_decoder", False):
        return {}
    sources = _sources(model, kwargs)
    asked = any(_read(source, _PARTS) is not None for source in sources)
    if asked or not hasattr(sources[-1], _PARTS) or any(_read(source, "use_cache") is False for source in sources):
        return {}
    balance.note(
        f"prompts of more than {room.tokens} tokens are computed in parts of as many: gpu_memory has room for the "
        "activations of so many; name a larger context"
    )
    return {_PARTS: max(1, room.tokens // prompt.shape[0])}


def prompt_of(model: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Tensor | None:
    """Return the token ids of the first forward; None if it runs on another number of them (beams, several returns)."""
    ids, names = _given(args, kwargs), ("num_beams", "num_return_sequences", *transformers_api.CACHE_ARGUMENTS[:2])
    others = (_read(source, name) for source in _sources(model, kwargs) for name in names)
    is_another = ids is None or ids.is_floating_point() or any(value not in (None, 1) for value in others)
    return None if is_another else ids


def _given(args: tuple, kwargs: dict[str, Any]) -> Tensor | None:
    return next((t for t in (*args[:1], kwargs.get("inputs"), kwargs.get("input_ids")) if torch.is_tensor(t)), None)


def _sources(model: nn.Module, kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Sources of generation options, by descending priority."""
    return kwargs, kwargs.get("generation_config"), getattr(model, "generation_config", None)


def _read(source: Any, name: str) -> Any:
    return source.get(name) if isinstance(source, dict) else getattr(source, name, None)


class Terms:
    """Runtime side of captured steps for one attachment; see `vbrt.generation.capture.session.Terms`."""

    def __init__(self, attachment: "Attachment", new_recorder: Callable[[], Recorder]) -> None:
        self._attachment, self._stack, self.new_recorder = weakref.ref(attachment), attachment.stack, new_recorder

    def kind(self) -> tuple[str, str]:
        """Phase and precision of decode steps now; captures of each kind are kept apart."""
        return self._phase, pass_precision()

    @property
    def _phase(self) -> str:
        """Current phase name for decode steps."""
        attachment = self._attachment()
        named = phase_name(attachment)
        inferred = DECODE if attachment.name_phase is None else attachment.name_phase(DECODE)
        return attachment.prefix + (named or inferred)

    def _keys(self) -> list[str] | None:
        """Page keys that a coarse pass reads; None for full-precision passes."""
        if pass_precision() != "coarse":
            return None
        handles = self._attachment().registry.handles
        if not all(isinstance(handle, Weight) and handle.keys for handle in handles):
            return None
        return [key for handle in handles for key in (handle.keys[:1] if handle.spec.fine else handle.keys)]

    @property
    def joins(self) -> bool:
        """True if captured steps may be fused and so round differently from eager ones."""
        return self._attachment().settings.compute.joins

    @property
    def passes_masks(self) -> bool:
        """True if captured attention skips masked slots: fused (4-bit models), exact or batch-invariant attention."""
        return self.exact or self.steady or (self.joins and not self._attachment().lossless)

    @property
    def steady(self) -> bool:
        """True if lossless steps use batch-invariant attention."""
        attachment = self._attachment()
        rounds = self.joins and attachment.lossless and not self.exact
        return rounds and is_steady_on(self._stack.device)

    @property
    def exact(self) -> bool:
        """True if lossless steps have the plain model's bits."""
        attachment = self._attachment()
        return attachment.lossless and attachment.settings.compute.exactness == "bits"

    def make_room(self, nbytes: int) -> None:
        """Have pages give way to so many bytes, which are about to be allocated, if they are in the way."""
        attachment = self._attachment()
        attachment.runtime.follow_free_memory(nbytes)
        if self._stack.device.type == accelerator.TYPE:
            attachment.expert_cache.follow()  # if it has ended for that: now, not in a step that is captured

    def gives_way(self) -> bool:
        """True while pages have less room than they were given."""
        return self._attachment().runtime.gives_way

    def prepare(self, tokens: int) -> None:
        """Choose the weights that the CPU computes in steps of so many tokens."""
        self._attachment().hosting.follow(self._phase, tokens)

    def moment(self) -> object:
        """Return the runtime state that a capture depends on; replay requires it unchanged."""
        ledger, guard, attachment = self._stack.ledger, self._stack.guard, self._attachment()
        others = guard.recorder is None, guard.routing is None, guard.closed
        return (ledger.changes, ledger.travellers, *others, attachment.head is not None, attachment.hosting.version)

    @property
    def decoder(self) -> nn.Module | None:
        """Decoder whose hidden states a multi-token head reads; None without one."""
        attachment = self._attachment()
        return None if attachment.head is None else attachment.model.get_decoder()

    def refusal(self) -> str:
        """Return why no forward can be captured now; "" if one can."""
        guard, attachment = self._stack.guard, self._attachment()
        if not attachment.settings.compute.captures:
            return OFF
        if guard.routing is not None:
            return "routing is being recorded"
        if self.exact and pass_precision() == "full" and self._stack.ledger.travellers:
            return STREAMS
        if self._stack.device.type == accelerator.TYPE:
            waits = (why_waits(handle) for handle in attachment.registry.handles if isinstance(handle, ExpertsHandle))
            return next(filter(None, waits), "") or attachment.runtime.recordable(self._phase, self._keys()) or ""
        if attachment.lossless and pass_precision() == "full" and not recorder_for(self._stack.device).lossless:
            return KEEPS_BITS
        return "a timeline is being recorded" if guard.recorder is not None else ""

    def begin_pass(self) -> None:
        """Begin an eager pass; while an operator trace runs, as one leaf of it."""
        step = recorder()
        if step is None:
            self._begin()
        else:
            step.leaf(self._begin)

    def compile_ahead(self, tokens: int, *, soon: bool) -> list[Compilation]:
        """Start to compile the 4-bit layers' kernels for `tokens` tokens; `soon`: the next forward needs them."""
        return compile_ahead(self._attachment().registry.handles, (tokens,), self._stack.device, soon=soon)

    def _begin(self) -> None:
        if not self._stack.capturing():
            self._stack.begin_pass(self._phase)

    def recorded(self, recorder: Recorder, body: Callable[[], None]) -> Callable[[], bool]:
        """Capture a pass; return its replay, which returns False and does nothing once pages have moved."""
        if self._stack.device.type != accelerator.TYPE:
            return self._counted(self._recorded_on_host(recorder.record(body, contextlib.nullcontext)))
        ledger, attachment, passes = self._stack.ledger, self._attachment(), []

        @contextlib.contextmanager
        def within() -> Iterator[None]:
            passes.append(attachment.runtime.recording(self._phase, self._keys()))
            with passes[0]:
                yield

        def step() -> None:
            body()
            if passes:
                passes[0].end()  # streamed passes: H2D copies must end within the capture

        captured = ledger.captured
        try:
            graph = recorder.record(step, within)
        finally:
            ledger.captured = captured
            attachment.expert_cache.forget_recording()
        return self._counted(functools.partial(passes[0].replay, graph))

    def _counted(self, replay: Callable[[], bool]) -> Callable[[], bool]:
        """Count replays: other ranks detect progress by them."""

        def again() -> bool:
            done = replay()
            self._attachment().replays += done
            return done

        return again

    def _recorded_on_host(self, tape: Recorded) -> Callable[[], bool]:
        """Return the replay of a CPU tape, which reads pages at their captured addresses."""
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
        """Return layers whose forwards and page hits are counted per pass; experts count per token instead."""
        handles = self._attachment().registry.handles
        return [handle for handle in handles if isinstance(handle, Weight) and not handle.spec.by_rows]


def generating_modules(model: nn.Module) -> list[nn.Module]:
    """Return the modules with transformers' GenerationMixin: the model itself, or models in it."""
    mixin = transformers_api.generation_mixin()
    return [] if mixin is None else [module for module in model.modules() if isinstance(module, mixin)]


def follow(attachment: "Attachment", model: nn.Module) -> None:
    """Override `generate` on the instances until the attachment ends. Idempotent."""
    if attachment.closed or attachment.follower is not None or attachment.settings.mode != "infer":
        return
    modules = generating_modules(model)
    for module in modules:
        module.__dict__["generate"] = Generating(module, attachment)
    attachment.follower = Followed([module.__dict__["generate"] for module in modules])
    for each in attachment.follower.generating:
        each.prepare()


class Followed:
    """The `generate` overrides of all models in one attached model."""

    def __init__(self, generating: list[Generating]) -> None:
        self.generating, self.generates = generating, bool(generating)

    def defer(self, model: nn.Module, begin: Callable[[], None]) -> bool:
        """Defer the start of a pass to the session of the current `generate` call; False if there is none here."""
        forward = model.__dict__.get("forward")
        return isinstance(forward, _Forward) and forward.session.defer(begin)

    def counts(self) -> StepCounts:
        """Sum of the models' step counters."""
        return sum((each.counts() for each in self.generating), StepCounts())

    def end(self) -> None:
        """Remove the overrides and free captured steps. Idempotent."""
        for each in self.generating:
            each.end()
