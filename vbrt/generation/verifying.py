"""Verification: the exact logits after the last token and after each draft, by as many rows as there are of these.

| function | rows are computed by | bits |
| --- | --- | --- |
| `in_one_pass` | one pass over all of them | those of a pass of that length |
| `token_by_token` | one pass that sums for each token alone (`rowwise.py`) | those of plain decoding: compared |
| `in_step` | a pass for each, in lockstep (`layers/lockstep.py`) | those of plain decoding, by construction |

`token_by_token` takes the host a fraction of the time of `in_step`. Its first rounds are computed by both; where a bit
differs, or where it refuses a model, `in_step` serves that model from then on, and `stats().fallbacks` has the reason.
"""

import contextlib
import functools
import warnings
import weakref
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from vbrt.generation.pace import Pace
from vbrt.generation.rowwise import one_by_one
from vbrt.generation.shadow import shadow_of
from vbrt.layers.lockstep import in_lockstep
from vbrt.model.attachment import Attachment
from vbrt.report.speculation import SpeculationCounts

__all__ = ["Decoding", "Draft", "Rows", "announce", "verified"]

_CHECKS = 2  # rounds of a batch size that are computed by both
_TOKENS = "tokens"


@dataclass(frozen=True, slots=True)
class Decoding:
    """What a call of `generate` decodes with.

    Attributes:
        model: of transformers; its layers are those of `attachment`.
        pace: how many tokens to draft.
        exactness: "tokens" or "distribution".
        counts: of the model, for its statistics; added to.
        limit: tokens of a sequence at most.
        run_drafts: runs a function that runs the passes of drafts, by recordings where there are some.
    """

    model: Any
    attachment: Attachment
    pace: Pace
    exactness: str
    counts: SpeculationCounts
    limit: int
    run_drafts: Callable[[Callable[[], Any]], Any] | None = None

    def drafting(self) -> AbstractContextManager[Callable[[Callable[[], Any]], Any]]:
        """Return a context manager that gives `run_drafts`."""
        following = getattr(self.model.__dict__.get("generate"), "drafting", None)
        return contextlib.nullcontext(lambda run: run()) if following is None else following(self.limit)

    def step(self, ids: torch.Tensor, tokens: int, kwargs: dict[str, Any]) -> Any:
        """Run a pass over the last tokens of `ids`."""
        return self.model(**self.inputs(ids, tokens, kwargs), return_dict=True)

    def inputs(self, ids: torch.Tensor, tokens: int, kwargs: dict[str, Any]) -> dict[str, Any]:
        """Return the arguments of a pass over the last tokens of `ids`."""
        return self.model.prepare_inputs_for_generation(ids, next_sequence_length=tokens, **kwargs)

    def after(self, outputs: Any, kwargs: dict[str, Any], cache: Any = None) -> dict[str, Any]:
        """Return the arguments of the pass after one token more; `cache`: in the place of the one in `outputs`."""
        encoder_decoder = self.model.config.is_encoder_decoder
        updated = self.model._update_model_kwargs_for_generation(outputs, dict(kwargs), encoder_decoder)
        return updated if cache is None else {**updated, "past_key_values": cache}


class Draft(NamedTuple):
    """Sequences with their drafts behind them, and the arguments of the pass over each last token, k + 1 of them."""

    start: int
    ids: torch.Tensor
    kwargs: list[dict[str, Any]]

    @property
    def k(self) -> int:
        """How many tokens were drafted."""
        return len(self.kwargs) - 1


class Rows(NamedTuple):
    """Logits [B, V] after the last token and after each draft; outputs of the passes, one or as many; `compared`: True
    if they were computed in two ways."""

    logits: list[torch.Tensor]
    outputs: list[Any]
    compared: bool = False


def verified(decoding: Decoding, draft: Draft) -> Rows:
    """Compute the rows of a draft exactly; the cache holds all of them afterwards."""
    if not draft.k:
        return in_step(decoding, draft)
    if decoding.exactness != _TOKENS:
        return in_one_pass(decoding, draft)
    known, batch = _known.setdefault(decoding.attachment, _Known()), len(draft.ids)
    if known.wrong or draft.k in known.refused:
        return in_step(decoding, draft)
    cache = draft.kwargs[0]["past_key_values"]
    before, tokens = cache.get_seq_length(), draft.k + 1
    try:
        rows = token_by_token(decoding, draft)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # noqa: BLE001 (models that cannot take its masks say so in many ways)
        known.refused.add(draft.k)
        why = f"a pass cannot be verified token by token: {type(error).__name__}: {error}"
    else:
        if known.checks[batch] >= _CHECKS:
            return rows
        got = [*rows.logits, *_written(cache, tokens)]
        _rewind(cache, before)
        exact = in_step(decoding, draft)
        if all(map(torch.equal, got, [*exact.logits, *_written(cache, tokens)])):
            known.checks[batch] += 1
            return exact._replace(compared=True)
        known.wrong = True
        why = "a pass verified token by token gives other bits than passes of one token"
    announce(decoding.counts, why, "verified in lockstep")
    _rewind(cache, before)
    return in_step(decoding, draft)._replace(compared=True)


@dataclass(slots=True)
class _Known:
    """What is known of `token_by_token` for a model.

    Attributes:
        checks: rounds in which it was right, by batch size.
        refused: numbers of rows for which it does not serve.
        wrong: True if it has given other bits.
    """

    checks: Counter[int] = field(default_factory=Counter)
    refused: set[int] = field(default_factory=set)
    wrong: bool = False


_known: "weakref.WeakKeyDictionary[Attachment, _Known]" = weakref.WeakKeyDictionary()


def in_step(decoding: Decoding, draft: Draft) -> Rows:
    """Compute the rows by passes of one token in lockstep."""
    calls = []
    for row, kwargs in enumerate(draft.kwargs):
        cache = kwargs["past_key_values"]
        own = {**kwargs, "past_key_values": shadow_of(cache, row)} if row else kwargs
        inputs = decoding.inputs(draft.ids[:, : draft.start + row], 1, own)
        calls.append(functools.partial(decoding.model, **inputs, return_dict=True))
    outputs = in_lockstep(calls)
    return Rows([each.logits[:, -1] for each in outputs], outputs)


def in_one_pass(decoding: Decoding, draft: Draft) -> Rows:
    """Compute the rows by one pass."""
    rows, kwargs = draft.k + 1, draft.kwargs[-1]
    if "logits_to_keep" in kwargs:
        kwargs = {**kwargs, "logits_to_keep": rows}
    outputs = decoding.step(draft.ids, rows, kwargs)
    return Rows(list(outputs.logits[:, -rows:].unbind(1)), [outputs])


def token_by_token(decoding: Decoding, draft: Draft) -> Rows:
    """Compute the rows by one pass that sums for each token alone. Raises NotByToken, and whatever the model does."""
    with one_by_one(decoding.model, draft.kwargs[0]["past_key_values"], len(draft.ids), draft.k + 1):
        return in_one_pass(decoding, draft)


# -- the cache as it was ----------------------------------------------------------------------------------------------


def _rewind(cache: Any, length: int) -> None:
    """Take back what a pass has written, or a part of one that has failed."""
    for layer in cache.layers:
        layer.crop(length - layer.get_seq_length())


def _written(cache: Any, tokens: int) -> list[torch.Tensor]:
    """The keys and values of the last tokens."""
    return [of[:, :, -tokens:].clone() for layer in cache.layers for of in (layer.keys, layer.values)]


def announce(counts: SpeculationCounts, reason: str, instead: str = "decoded one token at a time") -> None:
    """Say once, in a warning and in `stats().fallbacks`, what cannot be as it was asked for, and what is instead."""
    text = f"generate: speculate: {reason}; {instead}"
    if text not in counts.reasons:
        counts.reasons.append(text)
        warnings.warn(text, stacklevel=3)
