"""Verification: exact logits after the last token and after each draft, one row for each.

| function | rows are computed by | bits |
| --- | --- | --- |
| `in_one_pass` | one pass over all of them | of a pass of that length |
| `token_by_token` | one pass with a separate reduction per token (`rowwise_pass.py`) | of plain decoding: checked |
| `one_at_a_time` | a pass per row: plain decoding's steps | of plain decoding, by construction |

Where `generate` captures steps, plain decoding replays them. The cache is then in static memory (`static_cache.py`),
and rows attend to the whole masked bucket as captured steps do: same kernels, and constant shapes from round to round.
Elsewhere plain decoding is eager, and each row attends to the keys up to its own.

`one_at_a_time` reads the weights for each row, so it gains nothing: it is the reference for the first rows of the first
rounds of `token_by_token`. If a bit differs, this batch size is decoded plainly from then on; if the model is not
supported, every batch size is. `stats().fallbacks` has the reason.
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

from vbrt.errors import TierError, VBError
from vbrt.generation.capture.captured_step import computed_as_recorded, difference
from vbrt.generation.capture.mutation_watch import Watch
from vbrt.generation.speculation.bitwise_equivalence import comparisons
from vbrt.generation.speculation.draft_length import Pace
from vbrt.generation.speculation.rowwise_pass import masks_windows, one_by_one
from vbrt.generation.static.cache_kinds import NotRecordable
from vbrt.generation.static.length_buckets import Span
from vbrt.generation.static.static_cache import Statics
from vbrt.host import accelerator
from vbrt.libraries.transformers_api import cache_of, with_cache
from vbrt.model.attachment import Attachment
from vbrt.report.speculation_counters import SpeculationCounts

__all__ = [
    "Decoding",
    "Draft",
    "NotVerifiable",
    "Passes",
    "Rows",
    "announce",
    "batch_refusal",
    "model_refusal",
    "verified",
    "window_refusal",
]

_CHECKS = 2  # rounds per batch size that are computed both ways
_COMPARED = 4  # first rows of such a round: each is a pass over all weights
_TOKENS = "tokens"


class NotVerifiable(VBError):
    """Drafts cannot be verified with plain decoding's bits; the message gives the reason."""


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
        statics: static memory with the cache, if steps on it can be captured; else None.
        in_buckets: True if plain decoding replays captured steps, which attend to masked buckets of that memory.
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
    in_buckets: bool = False
    watched: bool = False

    @property
    def bucket(self) -> Statics | None:
        """Memory whose bucket rows attend to; None if they attend to the keys up to their own."""
        return self.statics if self.in_buckets else None

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
        own = self.model.__dict__.get("generate")
        return own is not None and not own.refusal()

    def attends_to_buckets(self) -> bool:
        """True if captured steps of plain decoding, where there are any, attend to masked buckets."""
        return self.model.__dict__["generate"].attends_to_buckets

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
    """Compute the rows of a draft exactly; the cache then holds all of them.

    Raises:
        NotVerifiable: row-wise verification is impossible, or inexact; the cache is as before.
        NotRecordable: captured steps are.
    """
    if draft.k and decoding.exactness != _TOKENS:
        with _without_plans(draft.ids.device):
            return in_one_pass(decoding, draft)
    if decoding.replays_plain(draft.k):
        return _by_recording(decoding, draft)
    return _as_decoded(decoding, draft)


def _as_decoded(decoding: Decoding, draft: Draft) -> Rows:
    """Compute the rows with plain decoding's bits: by `token_by_token`, if that is bitwise equal."""
    known, case = _known_of(decoding), _case(decoding, len(draft.ids))
    if decoding.bucket is not None:
        _compare_recorded(decoding, draft, known)
    if not draft.k:
        return one_at_a_time(decoding, draft, 1)
    before, few, wanted = draft.cache.get_seq_length(), min(draft.k + 1, _COMPARED), None
    if known.checks[case] < _CHECKS:
        wanted = one_at_a_time(decoding, draft, few).logits + _entries(draft, before, few)
        _rewind(draft.cache, before)
    try:
        rows = token_by_token(decoding, draft)
    except (torch.OutOfMemoryError, TierError):  # say nothing about the model
        raise
    except Exception as error:  # models that cannot take its masks say so in many ways
        known.refused = f"row-wise verification failed: {type(error).__name__}: {error}"
        _rewind(draft.cache, before)
        raise NotVerifiable(known.refused) from error
    if wanted is None:
        return rows
    if not all(map(torch.equal, rows.logits[:few] + _entries(draft, before, few), wanted)):
        known.unlike[case] = f"row-wise verification is not bitwise equal to {case[0]}"
        _rewind(draft.cache, before)
        raise NotVerifiable(known.unlike[case])
    known.checks[case] += 1
    return rows._replace(compared=True)


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
        why = known.unlike[_case(decoding, batch)] = f"a captured step differs from the eager one: {error}"
        raise NotRecordable(why)
    known.as_eager.add(case)


@dataclass(slots=True)
class _Known:
    """What is known about `token_by_token` for a model.

    Attributes:
        checks: successful rounds, by reference and batch size.
        refused: why it is impossible; "": it is not, or was not tried.
        unlike: why it is inexact, by reference and batch size.
        masks_windows: whether the model masks windows itself; None: unknown.
        as_eager: (batch size, bucket, window moved) for which captured kernels matched an eager step.
    """

    checks: Counter[tuple[str, int]] = field(default_factory=Counter)
    refused: str = ""
    unlike: dict[tuple[str, int], str] = field(default_factory=dict)
    masks_windows: bool | None = None
    as_eager: set[tuple[int, Span, bool]] = field(default_factory=set)


_all_known: "weakref.WeakKeyDictionary[Attachment, _Known]" = weakref.WeakKeyDictionary()


def _known_of(decoding: Decoding) -> _Known:
    return _all_known.setdefault(decoding.attachment, _Known())


def _case(decoding: Decoding, batch: int) -> tuple[str, int]:
    """Return the passes that rows must equal, and the batch size: library kernels depend on both."""
    return ("single-token passes" if decoding.bucket is None else "captured steps"), batch


def model_refusal(decoding: Decoding) -> str:
    """Return why no draft of the model can be verified, by an earlier attempt; "" if unknown."""
    return _known_of(decoding).refused if decoding.exactness == _TOKENS else ""


def batch_refusal(decoding: Decoding, batch: int) -> str:
    """Return why no draft for `batch` rows can be verified, by an earlier attempt; "" if unknown."""
    return _known_of(decoding).unlike.get(_case(decoding, batch), "") if decoding.exactness == _TOKENS else ""


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


def _by_recording(decoding: Decoding, draft: Draft) -> Rows:
    """Compute the only row by a captured step."""
    outputs = decoding.passes.run(functools.partial(decoding.step, draft.ids, 1, draft.kwargs[0]))
    return Rows([outputs.logits[:, -1]], [outputs])


def one_at_a_time(decoding: Decoding, draft: Draft, rows: int) -> Rows:
    """Compute the first rows by consecutive single-token passes: with the kernels of captured steps, or eagerly."""
    outputs = []
    for row, kwargs in enumerate(draft.kwargs[:rows]):
        inputs = {**decoding.inputs(draft.ids[:, : draft.start + row], 1, kwargs), "return_dict": True}
        if decoding.bucket is None:
            outputs.append(decoding.model(**inputs))
        else:
            outputs.append(computed_as_recorded(decoding.model, inputs, decoding.bucket))
    return Rows([each.logits[:, -1] for each in outputs], outputs)


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
    with one_by_one(decoding.model, draft.cache, (len(draft.ids), draft.k + 1), decoding.bucket):
        rows = in_one_pass(decoding, draft)
    return rows._replace(compared=comparisons() > before)


# -- rewinding the cache ----------------------------------------------------------------------------------------------


def _rewind(cache: Any, length: int) -> None:
    """Drop tokens beyond `length` from all layers, also after a failed pass."""
    for layer in cache.layers:
        layer.crop(length - layer.get_seq_length())


def _entries(draft: Draft, start: int, tokens: int) -> list[torch.Tensor]:
    """Return keys and values of `tokens` tokens from position `start`, unless the last row's window is past them."""
    found = []
    for layer in draft.cache.layers:
        if hasattr(layer, "block"):  # static memory
            block, first, begin = layer.block(), layer.first, start
        else:
            block = layer.keys, layer.values
            first = layer.get_seq_length() - block[0].shape[2]
            begin = max(start, start + draft.k + 2 - layer.sliding_window) if layer.is_sliding else start
        end = max(begin, start + tokens)
        found += [of[:, :, begin - first : end - first].clone() for of in block]
    return found


@contextlib.contextmanager
def _without_plans(device: torch.device) -> Iterator[None]:
    """Disable cuDNN attention in the block: the host builds a new plan for each length."""
    if device.type != accelerator.TYPE or not torch.backends.cuda.cudnn_sdp_enabled():
        yield
        return
    torch.backends.cuda.enable_cudnn_sdp(False)
    try:
        yield
    finally:
        torch.backends.cuda.enable_cudnn_sdp(True)


def announce(counts: SpeculationCounts, reason: str) -> None:
    """Record in `stats().fallbacks` why a call decodes plainly, and warn, once per reason."""
    text = f"generate: speculate: {reason}; decoded one token at a time"
    if text not in counts.reasons:
        counts.reasons.append(text)
        warnings.warn(text, stacklevel=3)
