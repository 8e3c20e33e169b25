"""Verification: exact logits after the last token and after each draft, one row for each.

| rows | computed by | bits |
| --- | --- | --- |
| "tokens", captured steps | the step's calls, row after row: `fusion/step_rows.py` | plain decoding's, by design |
| "tokens", eager steps | one pass with a separate reduction per token (`rowwise_pass.py`) | plain decoding's: checked |
| "distribution" | one pass over all of them | of a pass of that length |

The first rounds of a row-wise pass are checked: after it, the cache is rewound, and the round's tokens come from plain
steps, whose logits, keys and values must be the pass's. So a check costs one pass. If a bit differs, this batch size is
decoded plainly from then on; if the model is not supported, every batch size is. `stats().fallbacks` has the reason.
"""

import contextlib
import functools
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from vbrt.errors import TierError, VBError
from vbrt.generation.speculation.bitwise_equivalence import comparisons
from vbrt.generation.speculation.draft_length import Pace
from vbrt.generation.speculation.pass_states import PassStates
from vbrt.generation.speculation.rowwise_pass import masks_windows, one_by_one
from vbrt.generation.static.cache_kinds import NotRecordable
from vbrt.host import accelerator
from vbrt.host.logger import warn
from vbrt.libraries.transformers_api import cache_of, with_cache
from vbrt.model.attachment import Attachment
from vbrt.model.mutation_watch import Watch
from vbrt.report.speculation_counters import SpeculationCounts

__all__ = [
    "DECODED_PLAINLY",
    "TOKENS",
    "VERIFY",
    "Decoding",
    "Draft",
    "NotVerifiable",
    "Passes",
    "Rows",
    "announce",
    "batch_refusal",
    "model_refusal",
    "verified",
    "weights_refusal",
    "window_refusal",
]

#: `exactness`: tokens and logits of plain decoding, bit for bit
TOKENS = "tokens"
#: phase of passes that verify
VERIFY = "verify"
_BY_CALLS_BEFORE = (
    "the CPU may compute missed experts, so rounding depends on which ones the GPU has by then; "
    'experts.miss = "fetch" or exactness="distribution" drafts'
)
_CHECKS = 2  # rounds per batch size that are computed both ways


class NotVerifiable(VBError):
    """Drafts cannot be verified with plain decoding's bits; the message gives the reason."""


class Passes:
    """Runs functions with forwards of one token, without capture."""

    def run(self, passes: Callable[[], Any]) -> Any:
        """Run a function."""
        return passes()

    def note_eager(self) -> None:
        """Count a step that the caller runs eagerly, where steps are counted."""

    def rows(self, kwargs: Sequence[dict[str, Any]]) -> list[Any]:
        """Compute consecutive steps in one pass, each with its own bits; see `Session.rows`."""
        raise NotRecordable("steps are not captured")

    @property
    def captures(self) -> bool:
        """True if steps of the current phase and precision are captured."""
        return False

    @property
    def rows_ready(self) -> bool:
        """True if `rows` can be computed in this place."""
        return False

    def rows_alike(self) -> int | None:
        """Number of the next steps in this place of the cache's static memory; None if it is not in any."""
        return None

    @property
    def one_time(self) -> int:
        """Count of captures so far."""
        return 0

    def placed(self, cache: Any) -> object:
        """Move a cache into static memory. Raises NotRecordable."""
        raise NotRecordable(f"steps on {type(cache).__name__} are not captured")


@dataclass(frozen=True, slots=True)
class Decoding:
    """State of a `generate` call with speculation.

    Attributes:
        model: of transformers; its layers belong to `attachment`.
        pace: chooses drafter and number of drafts.
        exactness: "tokens" or "distribution".
        counts: the model's speculation counters.
        limit: maximum sequence length.
        passes: runs steps.
        recorded: plain steps are captured.
        watched: callbacks of the call may change the model.
        states: hidden states of passes, if a drafter reads them.
    """

    model: Any
    attachment: Attachment
    pace: Pace
    exactness: str
    counts: SpeculationCounts
    limit: int
    passes: Passes = field(default_factory=Passes)
    recorded: bool = False
    watched: bool = False
    states: PassStates | None = None

    @property
    def by_recording(self) -> bool:
        """True if rows are computed by the captured step's calls."""
        return self.recorded and self.exactness == TOKENS

    def recordable(self) -> AbstractContextManager[Passes]:
        """Return a context manager for `passes`."""
        own = getattr(self.model.__dict__.get("generate"), "passes", None)
        feed = None if self.states is None else self.states.note
        return contextlib.nullcontext(Passes()) if own is None else own(self.limit, watched=self.watched, feed=feed)

    def watch(self) -> Watch | None:
        """Return a mutation watch from now on, if callbacks may change the model."""
        return Watch(self.model) if self.watched else None

    def plain_step(self, ids: torch.Tensor, kwargs: dict[str, Any]) -> Any:
        """Run plain decoding's step: captured where those are."""
        step = functools.partial(self.step, ids, 1 if kwargs.get("use_cache") else None, kwargs)
        if self.recorded:
            return self.passes.run(step)
        self.passes.note_eager()
        return step()

    def step(self, ids: torch.Tensor, tokens: int | None, kwargs: dict[str, Any]) -> Any:
        """Run a pass over the last `tokens` tokens of `ids`; None: all."""
        return self.model(**self.inputs(ids, tokens, kwargs))

    def inputs(self, ids: torch.Tensor, tokens: int | None, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of a pass over the last `tokens` tokens of `ids`."""
        made = self.model.prepare_inputs_for_generation(ids, next_sequence_length=tokens, **kwargs)
        return {**made, "return_dict": True}

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
    """Rows after the last token and after each draft.

    Attributes:
        outputs: of the passes, one or k + 1.
        logits: [B, V] of each row, in order.
        lasting: True if the cache holds all rows; False: those whose logits were taken, each by a pass of its own.
        compared: True if computed both ways, so that the time is not representative.
    """

    outputs: list[Any]
    logits: Iterable[torch.Tensor]
    lasting: bool = True
    compared: bool = False


def verified(decoding: Decoding, draft: Draft) -> Rows:
    """Compute the rows of a draft exactly.

    Raises:
        NotVerifiable: row-wise verification is impossible; the cache is as before.
        NotRecordable: captured steps cannot compute them (NotNow: in this place); the cache is as before.
    """
    if decoding.by_recording:
        outputs = decoding.passes.rows(_inputs_of_rows(decoding, draft))
        return Rows(outputs, [each.logits[:, -1] for each in outputs])
    with decoding.attachment.phase(VERIFY, None):
        if decoding.exactness == TOKENS:
            return _as_decoded(decoding, draft)
        with _without_plans(draft.ids.device):
            return in_one_pass(decoding, draft)


def _inputs_of_rows(decoding: Decoding, draft: Draft) -> list[dict[str, Any]]:
    """Return the arguments of each row's step."""
    return [decoding.inputs(draft.ids[:, : draft.start + row], 1, kwargs) for row, kwargs in enumerate(draft.kwargs)]


def _as_decoded(decoding: Decoding, draft: Draft) -> Rows:
    """Compute the rows with plain decoding's bits by a row-wise pass, if that is bitwise equal."""
    known, batch, before = _known_of(decoding), len(draft.ids), draft.cache.get_seq_length()
    try:
        rows = token_by_token(decoding, draft)
    except (torch.OutOfMemoryError, TierError):  # say nothing about the model
        raise
    except Exception as error:  # models that cannot take its masks say so in many ways
        known.refused = f"row-wise verification failed: {type(error).__name__}: {error}"
        _rewind(draft.cache, before)
        raise NotVerifiable(known.refused) from error
    if known.checks[batch] >= _CHECKS:
        return rows
    got = rows.logits, _entries(draft, range(before, before + draft.k + 1))
    _rewind(draft.cache, before)
    outputs: list[Any] = []
    return Rows(outputs, _checked(decoding, draft, got, outputs), lasting=False, compared=True)


def _checked(decoding: Decoding, draft: Draft, got: tuple[list, list], outputs: list[Any]) -> Iterator[torch.Tensor]:
    """Compute rows by plain steps, as they are taken, and compare them with those of a row-wise pass."""
    known, batch, before = _known_of(decoding), len(draft.ids), draft.cache.get_seq_length()
    logits, entries = got
    known.checks[batch] += 1
    for row, kwargs in enumerate(draft.kwargs):
        outputs.append(decoding.step(draft.ids[:, : draft.start + row], 1, kwargs))
        wanted = [outputs[row].logits[:, -1], *(each[0] for each in _entries(draft, [before + row]))]
        pairs = zip([logits[row], *(each[row] for each in entries)], wanted, strict=True)
        if not all(torch.equal(mine, plain) for mine, plain in pairs if mine is not None):
            known.unlike[batch] = "row-wise verification is not bitwise equal to single-token passes"
        yield wanted[0]


@dataclass(slots=True)
class _Known:
    """What is known about row-wise passes of a model.

    Attributes:
        checks: rounds that were checked, by batch size: library kernels depend on it.
        refused: why they are impossible; "": they are not, or were not tried.
        unlike: why they are inexact, by batch size.
        masks_windows: whether the model masks windows itself; None: unknown.
    """

    checks: Counter[int] = field(default_factory=Counter)
    refused: str = ""
    unlike: dict[int, str] = field(default_factory=dict)
    masks_windows: bool | None = None


_all_known: "weakref.WeakKeyDictionary[Attachment, _Known]" = weakref.WeakKeyDictionary()


def _known_of(decoding: Decoding) -> _Known:
    return _all_known.setdefault(decoding.attachment, _Known())


def weights_refusal(decoding: Decoding) -> str:
    """Return why tokens of the model's own plain decoding are no measure for drafts; "" if they are."""
    missed = decoding.exactness == TOKENS and decoding.attachment.expert_cache.computes_misses
    return _BY_CALLS_BEFORE if missed else ""


def model_refusal(decoding: Decoding) -> str:
    """Return why no draft of the model can be verified, by an earlier attempt; "" if unknown."""
    return _known_of(decoding).refused if decoding.exactness == TOKENS else ""


def batch_refusal(decoding: Decoding, batch: int) -> str:
    """Return why no draft for `batch` rows can be verified, by an earlier attempt; "" if unknown."""
    return _known_of(decoding).unlike.get(batch, "") if decoding.exactness == TOKENS else ""


def window_refusal(decoding: Decoding, cache: Any, ids: torch.Tensor) -> str | None:
    """Return why several tokens cannot share a pass once a sliding window has moved; None if they can."""
    windows = [layer.sliding_window for layer in cache.layers if getattr(layer, "is_sliding", False)]
    if not windows or decoding.limit <= min(windows):
        return None
    known = _known_of(decoding)
    if known.masks_windows is None:
        with decoding.attachment.phase(VERIFY, None):
            known.masks_windows = masks_windows(decoding.model, ids[:1, -1:])
    kind = type(decoding.model).__name__
    return None if known.masks_windows else f"{kind} relies on its cache to drop tokens before a window"


def in_one_pass(decoding: Decoding, draft: Draft) -> Rows:
    """Compute the rows by one pass."""
    rows, kwargs = draft.k + 1, draft.kwargs[-1]
    if "logits_to_keep" in kwargs:
        kwargs = {**kwargs, "logits_to_keep": rows}
    outputs = decoding.step(draft.ids, rows, kwargs)
    return Rows([outputs], list(outputs.logits[:, -rows:].unbind(1)))


def token_by_token(decoding: Decoding, draft: Draft) -> Rows:
    """Compute the rows by one row-wise pass. Raises NotByToken, and the model's own errors."""
    before = comparisons()
    with one_by_one(decoding.model, draft.cache, (len(draft.ids), draft.k + 1)):
        rows = in_one_pass(decoding, draft)
    return rows._replace(compared=comparisons() > before)


# -- rewinding the cache ----------------------------------------------------------------------------------------------


def _rewind(cache: Any, length: int) -> None:
    """Drop tokens beyond `length` from all layers, also after a failed pass."""
    for layer in cache.layers:
        layer.crop(length - layer.get_seq_length())


def _entries(draft: Draft, places: Sequence[int]) -> list[list[torch.Tensor | None]]:
    """Return, for each tensor of keys or values in the cache, those at these positions; None: behind a window."""
    found = []
    for layer in draft.cache.layers:
        first = layer.get_seq_length() - layer.keys.shape[2]
        for of in (layer.keys, layer.values):
            found.append([of[:, :, at - first].clone() if at >= first else None for at in places])
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


DECODED_PLAINLY = "decoded one token at a time"


def announce(counts: SpeculationCounts, reason: str, instead: str = DECODED_PLAINLY, *, expected: bool = False) -> None:
    """Record in `stats().fallbacks` why a call has no drafts and what it does instead, once per reason; warn unless it
    is `expected`."""
    text = f"generate: speculate: {reason}; {instead}"
    if text not in counts.reasons:
        counts.reasons.append(text)
        if not expected:
            warn(text, stacklevel=3)
