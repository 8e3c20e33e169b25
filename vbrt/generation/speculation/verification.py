"""Verification: exact logits after the last token and after each draft, one row for each.

| function | rows are computed by | bits |
| --- | --- | --- |
| `in_one_pass` | one pass over all of them | of a pass of that length |
| `token_by_token` | one pass with a separate reduction per token (`rowwise_pass.py`) | of plain decoding: checked |
| `one_at_a_time` | a pass per row, with the kernels of captured steps | of captured steps, by construction |
| `in_step` | a pass per row, in lockstep (`layers/weights/lockstep.py`) | of eager steps, by construction |

Where `generate` captures steps, plain decoding replays them. The cache is then in static memory (`static_cache.py`),
and rows attend to the whole masked bucket as captured steps do: same kernels, and constant shapes from round to round.
Elsewhere plain decoding is eager, and each row attends to the keys up to its own.

The first rounds of `token_by_token` are computed both ways. If a bit differs, or the model is not supported, the
fallback is `in_step`, or plain decoding where steps are captured; `stats().fallbacks` has the reason.
"""

import contextlib
import functools
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from vbrt.generation.capture.captured_step import computed_as_recorded, difference
from vbrt.generation.capture.mutation_watch import Watch
from vbrt.generation.speculation.bitwise_equivalence import comparisons
from vbrt.generation.speculation.cache_view import shadow_of
from vbrt.generation.speculation.draft_length import MOST, Pace
from vbrt.generation.speculation.rowwise_pass import masks_windows, one_by_one
from vbrt.generation.static.cache_kinds import NotRecordable
from vbrt.generation.static.length_buckets import Span
from vbrt.generation.static.static_cache import Statics
from vbrt.layers.weights.lockstep import in_lockstep
from vbrt.libraries.transformers_api import cache_of, with_cache
from vbrt.model.attachment import Attachment
from vbrt.report.speculation_counters import SpeculationCounts

__all__ = ["Decoding", "Draft", "Passes", "Rows", "announce", "can_verify", "verified", "window_refusal"]

_CHECKS = 2  # rounds per batch size that are computed both ways
_TOKENS = "tokens"


class Passes:
    """Runs functions with forwards of one phase and precision, without capture."""

    def run(self, passes: Callable[[], Any]) -> Any:
        """Run a function."""
        return passes()

    def placed(self, cache: Any) -> Statics:
        """Move a cache into static memory. Raises NotRecordable."""
        raise NotRecordable(f"steps on {type(cache).__name__} are not captured")


@dataclass(frozen=True, slots=True)
class Decoding:
    """State of a `generate` call with speculation.

    Attributes:
        model: of transformers; its layers belong to `attachment`.
        pace: chooses the number of drafts.
        exactness: "tokens" or "distribution".
        counts: the model's speculation counters.
        limit: maximum sequence length.
        passes: runs the drafts.
        statics: static memory with the cache, if plain decoding replays captured steps; None if it is eager.
        watched: callbacks of the call may change the model.
    """

    model: Any
    attachment: Attachment
    pace: Pace
    exactness: str
    counts: SpeculationCounts
    limit: int
    passes: Passes | None = None
    statics: Statics | None = None
    watched: bool = False

    def recordable(self) -> AbstractContextManager[Passes]:
        """Return a context manager for `passes` of the current phase and precision."""
        own = getattr(self.model.__dict__.get("generate"), "passes", None)
        return contextlib.nullcontext(Passes()) if own is None else own(self.limit, watched=self.watched)

    def watch(self) -> Watch | None:
        """Return a mutation watch from now on, if callbacks may change the model."""
        return Watch(self.model) if self.watched else None

    def replays_plain(self, k: int) -> bool:
        """True if a round of k drafts is a captured step of plain decoding."""
        return k == 0 and self.statics is not None and self.pace.tries_plain

    def is_recorded(self) -> bool:
        """True if steps of the current phase and precision are captured."""
        why = getattr(self.model.__dict__.get("generate"), "refusal", None)
        return why is not None and not why()

    def step(self, ids: torch.Tensor, tokens: int, kwargs: dict[str, Any]) -> Any:
        """Run a pass over the last `tokens` tokens of `ids`."""
        return self.model(**self.inputs(ids, tokens, kwargs), return_dict=True)

    def inputs(self, ids: torch.Tensor, tokens: int, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of a pass over the last `tokens` tokens of `ids`."""
        return self.model.prepare_inputs_for_generation(ids, next_sequence_length=tokens, **kwargs)

    def after(self, outputs: Any, kwargs: dict[str, Any], cache: Any = None) -> dict[str, Any]:
        """Return the arguments of the pass after one more token; `cache`: replaces the one in `outputs`."""
        encoder_decoder = self.model.config.is_encoder_decoder
        updated = self.model._update_model_kwargs_for_generation(outputs, dict(kwargs), encoder_decoder)
        return updated if cache is None else with_cache(updated, cache)


class Draft(NamedTuple):
    """Sequences followed by their drafts, and the arguments of each of the k + 1 passes."""

    start: int
    ids: torch.Tensor
    kwargs: list[dict[str, Any]]

    @property
    def k(self) -> int:
        """Number of drafts."""
        return len(self.kwargs) - 1

    @property
    def cache(self) -> Any:
        """The call's cache."""
        return cache_of(self.kwargs[0])


class Rows(NamedTuple):
    """Logits [B, V] after the last token and after each draft; outputs of the passes, one or k + 1; `compared`: True if
    computed both ways, so that the time is not representative."""

    logits: list[torch.Tensor]
    outputs: list[Any]
    compared: bool = False


def verified(decoding: Decoding, draft: Draft) -> Rows:
    """Compute the rows of a draft exactly; the cache then holds all of them."""
    if draft.k and decoding.exactness != _TOKENS:
        with _without_plans(draft.ids.device):
            return in_one_pass(decoding, draft)
    if decoding.replays_plain(draft.k):
        return _by_recording(decoding, draft)
    return _as_decoded(decoding, draft, _AS_RECORDED if decoding.statics is not None else _IN_STEP)


class _Certain(NamedTuple):
    """Reference for rows: a way that has plain decoding's bits by construction.

    Attributes:
        rows: computes at least the requested number of first rows.
        few: rows to compare per round.
        name: of these passes, for messages.
        instead: fallback if `token_by_token` does not match, for messages.
    """

    rows: Callable[[Decoding, Draft, int], Rows]
    few: int
    name: str
    instead: str


def _as_decoded(decoding: Decoding, draft: Draft, certain: _Certain) -> Rows:
    """Compute the rows with plain decoding's bits: by `token_by_token` if that is bitwise equal."""
    known, batch, tokens = _known_of(decoding), len(draft.ids), draft.k + 1
    if decoding.statics is not None:
        _compare_recorded(decoding, draft, known)
    if not draft.k or draft.k in known.refused or (certain.name, batch) in known.unlike:
        return certain.rows(decoding, draft, tokens)
    before, few, wanted = draft.cache.get_seq_length(), min(tokens, certain.few), None
    if known.checks[certain.name, batch] < _CHECKS:
        wanted = certain.rows(decoding, draft, few).logits[:few] + _entries(draft, before, few)
        _rewind(draft.cache, before)
    try:
        rows = token_by_token(decoding, draft)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # noqa: BLE001 (models that cannot take its masks say so in many ways)
        known.refused.add(draft.k)
        why = f"row-wise verification failed: {type(error).__name__}: {error}"
    else:
        if wanted is None:
            return rows
        if all(map(torch.equal, rows.logits[:few] + _entries(draft, before, few), wanted)):
            known.checks[certain.name, batch] += 1
            return rows._replace(compared=True)
        known.unlike.add((certain.name, batch))
        why = f"row-wise verification is not bitwise equal to {certain.name}"
    announce(decoding.counts, why, certain.instead)
    _rewind(draft.cache, before)
    return certain.rows(decoding, draft, tokens)._replace(compared=True)


def _compare_recorded(decoding: Decoding, draft: Draft, known: "_Known") -> None:
    """Check a step with captured kernels against an eager one, as plain decoding would. Raises NotRecordable."""
    statics, batch = decoding.statics, len(draft.ids)
    case = batch, statics.span, statics.passes_windows
    if case in known.as_eager:
        return
    inputs = {**decoding.inputs(draft.ids[:, : draft.start], 1, draft.kwargs[0]), "return_dict": True}
    with statics.undone(), statics.spoiled():
        got = computed_as_recorded(decoding.model, inputs, statics)
    with statics.undone():
        error = difference(got, decoding.model(**inputs))
    if error:
        known.unlike.add((_AS_RECORDED.name, batch))
        raise NotRecordable(f"a captured step differs from the eager one: {error}")
    known.as_eager.add(case)


@dataclass(slots=True)
class _Known:
    """What is known about `token_by_token` for a model.

    Attributes:
        checks: successful rounds, by reference and batch size.
        refused: numbers of drafts that failed.
        unlike: (reference, batch size) with a bitwise difference.
        masks_windows: whether the model masks windows itself; None: unknown.
        as_eager: (batch size, bucket, window moved) for which captured kernels matched an eager step.
    """

    checks: Counter[tuple[str, int]] = field(default_factory=Counter)
    refused: set[int] = field(default_factory=set)
    unlike: set[tuple[str, int]] = field(default_factory=set)
    masks_windows: bool | None = None
    as_eager: set[tuple[int, Span, bool]] = field(default_factory=set)


_all_known: "weakref.WeakKeyDictionary[Attachment, _Known]" = weakref.WeakKeyDictionary()


def _known_of(decoding: Decoding) -> _Known:
    return _all_known.setdefault(decoding.attachment, _Known())


def window_refusal(decoding: Decoding, cache: Any, ids: torch.Tensor) -> str | None:
    """Return why several tokens cannot share a pass once a sliding window has moved; None if they can."""
    windows = [layer.sliding_window for layer in cache.layers if getattr(layer, "is_sliding", False)]
    if not windows or decoding.limit <= min(windows):
        return None
    known = _known_of(decoding)
    if known.masks_windows is None:
        known.masks_windows = masks_windows(decoding.model, ids[:1, -1:])
    kind = type(decoding.model).__name__
    return None if known.masks_windows else f"{kind} relies on its cache to drop tokens before a window"


def can_verify(decoding: Decoding, batch: int, k: int | None = None) -> bool:
    """True unless k drafts (None: any number) for `batch` rows would be verified one by one, as slow as decoding."""
    known = _known_of(decoding)
    slow = decoding.statics is not None and decoding.exactness == _TOKENS
    return not (slow and ((_AS_RECORDED.name, batch) in known.unlike or k in known.refused))


def in_step(decoding: Decoding, draft: Draft, rows: int) -> Rows:
    """Compute all rows by single-token passes in lockstep."""
    calls = []
    for row, kwargs in enumerate(draft.kwargs):
        own = with_cache(kwargs, shadow_of(draft.cache, row)) if row else kwargs
        inputs = decoding.inputs(draft.ids[:, : draft.start + row], 1, own)
        calls.append(functools.partial(decoding.model, **inputs, return_dict=True))
    outputs = in_lockstep(calls)
    return Rows([each.logits[:, -1] for each in outputs], outputs)


def _by_recording(decoding: Decoding, draft: Draft) -> Rows:
    """Compute the only row by a captured step."""
    outputs = decoding.passes.run(functools.partial(decoding.step, draft.ids, 1, draft.kwargs[0]))
    return Rows([outputs.logits[:, -1]], [outputs])


def one_at_a_time(decoding: Decoding, draft: Draft, rows: int) -> Rows:
    """Compute the first rows by consecutive single-token passes, with the kernels of captured steps."""
    outputs = []
    for row, kwargs in enumerate(draft.kwargs[:rows]):
        inputs = decoding.inputs(draft.ids[:, : draft.start + row], 1, kwargs)
        outputs.append(computed_as_recorded(decoding.model, {**inputs, "return_dict": True}, decoding.statics))
    return Rows([each.logits[:, -1] for each in outputs], outputs)


_AS_RECORDED = _Certain(one_at_a_time, 4, "captured steps", "decoded one token at a time")
_IN_STEP = _Certain(in_step, MOST + 1, "single-token passes", "verified in lockstep")


def in_one_pass(decoding: Decoding, draft: Draft) -> Rows:
    """Compute the rows by one pass."""
    rows, kwargs = draft.k + 1, draft.kwargs[-1]
    if "logits_to_keep" in kwargs:
        kwargs = {**kwargs, "logits_to_keep": rows}
    outputs = decoding.step(draft.ids, rows, kwargs)
    return Rows(list(outputs.logits[:, -rows:].unbind(1)), [outputs])


def token_by_token(decoding: Decoding, draft: Draft) -> Rows:
    """Compute the rows by one row-wise pass. Raises NotByToken, and the model's own errors."""
    before = comparisons()
    with one_by_one(decoding.model, draft.cache, (len(draft.ids), draft.k + 1), decoding.statics):
        rows = in_one_pass(decoding, draft)
    return rows._replace(compared=comparisons() > before)


# -- rewinding the cache ----------------------------------------------------------------------------------------------


def _rewind(cache: Any, length: int) -> None:
    """Drop tokens beyond `length` from all layers, also after a failed pass."""
    for layer in cache.layers:
        layer.crop(length - layer.get_seq_length())


def _entries(draft: Draft, start: int, tokens: int) -> list[torch.Tensor]:
    """Return keys and values of `tokens` tokens from position `start`; outside of static memory, of the last ones."""
    found = []
    for layer in draft.cache.layers:
        block = layer.block() if hasattr(layer, "block") else (layer.keys[:, :, -tokens:], layer.values[:, :, -tokens:])
        first = start - layer.first if hasattr(layer, "block") else 0
        found += [of[:, :, first : first + tokens].clone() for of in block]
    return found


@contextlib.contextmanager
def _without_plans(device: torch.device) -> Iterator[None]:
    """Disable cuDNN attention in the block: the host builds a new plan for each length."""
    if device.type != "cuda" or not torch.backends.cuda.cudnn_sdp_enabled():
        yield
        return
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)


def announce(counts: SpeculationCounts, reason: str, instead: str = "decoded one token at a time") -> None:
    """Record a fallback and its reason in `stats().fallbacks`, and warn, once per text."""
    text = f"generate: speculate: {reason}; {instead}"
    if text not in counts.reasons:
        counts.reasons.append(text)
        warnings.warn(text, stacklevel=3)
