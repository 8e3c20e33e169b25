"""Lossless self-speculation: the coarse planes of `exact` weights draft, one pass over the exact weights verifies.

A round drafts k tokens, one coarse pass each, on the very KV cache that verification uses; then the cache is rewound,
and the last token and the k drafts are computed exactly, which writes their exact keys and values. Tokens are taken,
one after the other as plain decoding takes them, up to the first draft that is wrong; that one's place has the right
token by then. So each round gives between 1 and k + 1 tokens for one read of the weights.

| exactness | k + 1 rows are verified by | the tokens are |
| --- | --- | --- |
| "tokens" | k + 1 passes of one token in lockstep (`layers/lockstep.py`) | bit for bit those of plain decoding |
| "distribution" | one pass of k + 1 tokens, whose sums may be rounded otherwise | of the same distribution |

Sampling draws with noise by seed, row and position (`noise.py`), so a draft is confirmed if it is the very token that
plain sampling with this seed gives. Rows of a batch advance together, by what all of them accept: plain decoding
multiplies one token of each row at a time, so these are its shapes. What a row has got right beyond that is its draft
in the next round.
"""

import contextlib
import functools
import warnings
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from vbrt.generation.pace import Pace
from vbrt.generation.sequences import Sequences
from vbrt.generation.shadow import shadow_of, shadow_refusal
from vbrt.generation.timing import Marks
from vbrt.layers.lockstep import in_lockstep
from vbrt.model.attachment import Attachment
from vbrt.report.speculation import SpeculationCounts

__all__ = ["EXACTNESS", "Decoding", "announce", "speculate"]

EXACTNESS = ("tokens", "distribution")
DRAFT, VERIFY = "draft", "verify"


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


def speculate(decoding: Decoding, sequences: Sequences, outputs: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Decode until all sequences are finished, beginning with the outputs of the prompt's pass.

    Args:
        kwargs: of the prompt's pass, as transformers keeps them between passes.

    Returns:
        The arguments that a next pass would have.
    """
    kwargs = decoding.after(outputs, kwargs)
    sequences.look(sequences.append(outputs.logits[:, -1]))
    if decoding.pace.fixed == 0:
        return _plainly(decoding, sequences, kwargs)
    cache = kwargs.get("past_key_values")
    refusal = shadow_refusal(cache)
    if refusal is not None:
        announce(decoding.counts, refusal)
        return _plainly(decoding, sequences, kwargs)
    cache.activate_past_recording()
    hint = None
    with contextlib.ExitStack() as opened:
        with decoding.attachment.phase(DRAFT, "coarse"):
            run = opened.enter_context(decoding.drafting())
        decoding = replace(decoding, run_drafts=run)
        while not sequences.finished:
            kwargs, hint = _round(decoding, sequences, kwargs, hint)
    for layer in cache.layers:
        if hasattr(layer, "record_past"):
            layer.record_past = False  # as transformers leaves a cache
    return kwargs


def announce(counts: SpeculationCounts, reason: str) -> None:
    """Say once, in a warning and in `stats().fallbacks`, why drafts were asked for and the model decodes without."""
    text = f"generate: speculate: {reason}; decoded one token at a time"
    if text not in counts.reasons:
        counts.reasons.append(text)
        warnings.warn(text, stacklevel=3)


def _plainly(decoding: Decoding, sequences: Sequences, kwargs: dict[str, Any]) -> dict[str, Any]:
    while not sequences.finished:
        outputs = decoding.step(sequences.ids, 1 if kwargs.get("use_cache") else None, kwargs)
        kwargs = decoding.after(outputs, kwargs)
        sequences.look(sequences.append(outputs.logits[:, -1]))
    return kwargs


class _Hint(NamedTuple):
    """Tokens [B, M] that rows have right already, where `known` bool [B, M] says so."""

    tokens: torch.Tensor
    known: torch.Tensor


class _Draft(NamedTuple):
    """Sequences with their drafts behind them, and the arguments of the pass over each last token, k + 1 of them."""

    start: int
    ids: torch.Tensor
    kwargs: list[dict[str, Any]]

    @property
    def k(self) -> int:
        return len(self.kwargs) - 1


def _round(
    decoding: Decoding, sequences: Sequences, kwargs: dict[str, Any], hint: _Hint | None
) -> tuple[dict[str, Any], _Hint | None]:
    """Draft, verify, take what is right. Returns the next pass's arguments, and what is known beyond."""
    cache, marks = kwargs["past_key_values"], Marks(sequences.ids.device)
    marks.mark()
    k = decoding.pace.choose(decoding.limit - sequences.length - 1)
    draft = decoding.run_drafts(functools.partial(_draft, decoding, sequences, kwargs, k, hint))
    marks.mark()
    cache.crop(-k)
    rows, outputs = (_rows_in_step if decoding.exactness == "tokens" else _rows_at_once)(decoding, draft)
    marks.mark()
    taken, right = _take(sequences, draft, rows)
    cache.crop(taken - k - 1)
    draft_s, verify_s = marks.seconds()
    confirmed = taken if right else taken - 1
    decoding.pace.note(k, min(confirmed, k), min(taken, k), (draft_s, verify_s))
    decoding.counts.note(k, min(confirmed, k), taken, (draft_s, verify_s))
    ahead = _ahead(sequences, draft, rows, taken) if len(sequences.ids) > 1 and taken <= k else None
    return decoding.after(outputs[min(taken, len(outputs)) - 1], draft.kwargs[taken - 1], cache), ahead


def _draft(decoding: Decoding, sequences: Sequences, kwargs: dict[str, Any], k: int, hint: _Hint | None) -> _Draft:
    ids, passes, cache = sequences.ids, [kwargs], kwargs["past_key_values"]
    with decoding.attachment.phase(DRAFT, "coarse"):
        for place in range(k):
            outputs = decoding.step(ids, 1, passes[-1])
            tokens = sequences.propose(ids, outputs.logits[:, -1])
            if hint is not None and place < hint.tokens.shape[1]:
                tokens = torch.where(hint.known[:, place], hint.tokens[:, place], tokens)
            ids = torch.cat([ids, tokens[:, None]], dim=-1)
            passes.append(decoding.after(outputs, passes[-1], cache))
    return _Draft(sequences.length, ids, passes)


def _rows_in_step(decoding: Decoding, draft: _Draft) -> tuple[list[torch.Tensor], list[Any]]:
    """Verify by passes of one token in lockstep: logits [B, V] after each token, and the outputs."""
    calls = []
    for row, kwargs in enumerate(draft.kwargs):
        cache = kwargs["past_key_values"]
        own = {**kwargs, "past_key_values": shadow_of(cache, row)} if row else kwargs
        inputs = decoding.inputs(draft.ids[:, : draft.start + row], 1, own)
        calls.append(functools.partial(decoding.model, **inputs, return_dict=True))
    with decoding.attachment.phase(VERIFY, None) if draft.k else contextlib.nullcontext():
        outputs = in_lockstep(calls)
    return [each.logits[:, -1] for each in outputs], outputs


def _rows_at_once(decoding: Decoding, draft: _Draft) -> tuple[list[torch.Tensor], list[Any]]:
    """Verify by one pass over all rows."""
    rows, kwargs = draft.k + 1, draft.kwargs[-1]
    if "logits_to_keep" in kwargs:
        kwargs = {**kwargs, "logits_to_keep": rows}
    with decoding.attachment.phase(VERIFY, None) if draft.k else contextlib.nullcontext():
        outputs = decoding.step(draft.ids, rows, kwargs)
    return list(outputs.logits[:, -rows:].unbind(1)), [outputs]


def _take(sequences: Sequences, draft: _Draft, rows: Sequence[torch.Tensor]) -> tuple[int, bool]:
    """Take tokens up to the first wrong draft. Returns how many, and whether the last one was a right draft."""
    for row, logits_BV in enumerate(rows):
        tokens = sequences.append(logits_BV)
        right = sequences.look(tokens, draft.ids[:, draft.start + row] if row < draft.k else None)
        if sequences.finished or not right:
            break
    return row + 1, right


def _ahead(sequences: Sequences, draft: _Draft, rows: Sequence[torch.Tensor], taken: int) -> _Hint:
    """What rows of a batch have right beyond the tokens that all have taken, by the logits of the verification."""
    known = sequences.ids[:, -1] == draft.ids[:, draft.start + taken - 1]
    tokens, knowns = [], []
    for row in range(taken, draft.k + 1):
        tokens.append(sequences.propose(draft.ids[:, : draft.start + row], rows[row]))
        knowns.append(known)
        if row < draft.k:
            known = known & (tokens[-1] == draft.ids[:, draft.start + row])
    return _Hint(torch.stack(tokens, 1), torch.stack(knowns, 1))
