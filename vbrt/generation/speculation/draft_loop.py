"""Draft loop of lossless self-speculation: coarse planes of `exact` weights draft, one exact pass verifies.

A round drafts k tokens with coarse passes on the same KV cache that verification uses; then the cache is rewound, and
the last token and the k drafts are computed exactly, which overwrites their keys and values. Tokens are accepted, one
by one as in plain decoding, up to the first wrong draft, in whose place the right token is known by then. So a round
yields 1 to k + 1 tokens for one read of the exact weights.

| exactness | verification of k + 1 rows | tokens |
| --- | --- | --- |
| "tokens" | a separate reduction per token (`verification.py`) | bitwise equal to plain decoding |
| "distribution" | one pass of k + 1 tokens, which may round differently | same distribution |

Sampling uses noise by seed, row and position (`sampling_noise.py`), so a draft is accepted if it equals the token that
plain sampling with this seed gives. Rows of a batch advance together, by the smallest number accepted: plain decoding
multiplies one token per row at a time, and shapes must match. A row's surplus tokens are its drafts of the next round.
"""

import contextlib
import functools
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from vbrt.generation.capture.mutation_watch import Watch
from vbrt.generation.speculation.cache_refusals import cache_refusal, past_refusal
from vbrt.generation.speculation.device_timing import Marks
from vbrt.generation.speculation.sequences import Sequences
from vbrt.generation.speculation.verification import (
    Decoding,
    Draft,
    NotVerifiable,
    announce,
    batch_refusal,
    model_refusal,
    verified,
    window_refusal,
)
from vbrt.generation.static.cache_kinds import NotRecordable
from vbrt.generation.static.static_cache import leave
from vbrt.libraries.transformers_api import cache_of, stop_keeping_past
from vbrt.report.timeline import ROUND

__all__ = ["EXACTNESS", "speculate"]

EXACTNESS = ("tokens", "distribution")
DRAFT, VERIFY = "draft", "verify"


def speculate(decoding: Decoding, sequences: Sequences, outputs: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Decode until all sequences are finished, starting with the outputs of the prompt's pass.

    Args:
        kwargs: of the prompt's pass, as transformers keeps them between passes.

    Returns:
        The arguments for a next pass.
    """
    kwargs = decoding.after(outputs, kwargs)
    sequences.look(sequences.append(outputs.logits[:, -1]))
    cache = cache_of(kwargs)
    if decoding.pace.fixed != 0:
        refusal = _refusal(decoding, sequences, cache)
        if refusal is None:
            kwargs = _in_rounds(decoding, sequences, kwargs)
        else:
            announce(decoding.counts, refusal)
    if sequences.finished:
        return kwargs
    with decoding.recordable() as passes:
        return passes.run(functools.partial(_plainly, decoding, sequences, kwargs))


def _refusal(decoding: Decoding, sequences: Sequences, cache: Any) -> str | None:
    with decoding.attachment.phase(VERIFY, None):
        return model_refusal(decoding) or cache_refusal(cache) or window_refusal(decoding, cache, sequences.ids)


def _plainly(decoding: Decoding, sequences: Sequences, kwargs: dict[str, Any]) -> dict[str, Any]:
    while not sequences.finished:
        outputs = decoding.step(sequences.ids, 1 if kwargs.get("use_cache") else None, kwargs)
        kwargs = decoding.after(outputs, kwargs)
        sequences.look(sequences.append(outputs.logits[:, -1]))
    return kwargs


def _in_rounds(decoding: Decoding, sequences: Sequences, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Decode in rounds until all sequences are finished or drafts cannot be verified."""
    cache, hint, recorded = cache_of(kwargs), None, decoding.is_recorded()
    decoding = replace(decoding, in_buckets=recorded and decoding.attends_to_buckets())
    with contextlib.ExitStack() as opened:
        with decoding.attachment.phase(DRAFT, "coarse"):
            decoding = replace(decoding, passes=opened.enter_context(decoding.recordable()))
            decoding = _placed(decoding, cache)
        eager = decoding.statics is None
        refusal = batch_refusal(decoding, len(sequences.ids)) or (past_refusal(cache) if eager else None)
        if refusal:
            announce(decoding.counts, refusal)
            return kwargs
        if eager:
            cache.activate_past_recording()
        elif decoding.pace.fixed is None:
            decoding.pace.tries_plain = recorded and not decoding.attachment.stack.ledger.travellers
        try:
            while not sequences.finished:
                kwargs, hint = _round(decoding, sequences, kwargs, hint)
        except (NotRecordable, NotVerifiable) as error:  # before a token was accepted: out of memory for graphs, say
            announce(decoding.counts, str(error))
            cache.crop(sequences.length - 1 - cache.get_seq_length())
    stop_keeping_past(cache)
    return kwargs


def _placed(decoding: Decoding, cache: Any) -> Decoding:
    """Move the cache into static memory, if steps on it can be captured."""
    with contextlib.suppress(NotRecordable):
        return replace(decoding, statics=decoding.passes.placed(cache))
    return decoding


class _Hint(NamedTuple):
    """Tokens [B, M] that rows have right already, valid where `known` bool [B, M]."""

    tokens: torch.Tensor
    known: torch.Tensor


def _round(
    decoding: Decoding, sequences: Sequences, kwargs: dict[str, Any], hint: _Hint | None
) -> tuple[dict[str, Any], _Hint | None]:
    """Draft, verify, accept. Returns the next pass's arguments, and rows' surplus tokens."""
    cache, marks = cache_of(kwargs), Marks(sequences.ids.device)
    recorder = decoding.attachment.stack.guard.recorder
    began = None if recorder is None else recorder.mark()
    marks.mark()
    k = decoding.pace.choose(_reach(decoding, sequences, cache))
    if decoding.attachment.watcher is not None:
        k = decoding.attachment.watcher.least(k)  # all ranks of a model must draft equally
    draft = decoding.passes.run(functools.partial(_draft, decoding, sequences, kwargs, k, hint))
    marks.mark()
    if decoding.statics is None:
        leave(cache)
    else:  # drafts may have run eagerly
        decoding = replace(decoding, statics=decoding.passes.placed(cache))
    cache.crop(-k)
    with _phase_of_rows(decoding, k):
        rows = verified(decoding, draft)
    marks.mark()
    taken, right = _take(sequences, draft, rows.logits, decoding.watch())
    cache.crop(taken - k - 1)
    draft_s, verify_s = marks.seconds()
    confirmed = taken if right else taken - 1
    decoding.pace.note(k, min(confirmed, k), min(taken, k), None if rows.compared else (draft_s, verify_s))
    decoding.counts.note(k, min(confirmed, k), taken, (draft_s, verify_s))
    if recorder is not None:
        recorder.note(ROUND, f"{taken} tokens, {min(confirmed, k)} of {k} drafts right", began, recorder.mark())
    ahead = _ahead(sequences, draft, rows.logits, taken) if len(sequences.ids) > 1 and taken <= k else None
    return decoding.after(rows.outputs[min(taken, len(rows.outputs)) - 1], draft.kwargs[taken - 1], cache), ahead


def _phase_of_rows(decoding: Decoding, k: int) -> AbstractContextManager:
    """Phase of the passes that verify k drafts; captured plain steps share the phase of the other captures."""
    if k:
        return decoding.attachment.phase(VERIFY, None)
    return decoding.attachment.phase(DRAFT, None) if decoding.replays_plain(k) else contextlib.nullcontext()


def _reach(decoding: Decoding, sequences: Sequences, cache: Any) -> int:
    """Return the maximum number of drafts: all verified rows must be in the first row's length bucket."""
    room = decoding.limit - sequences.length - 1
    if decoding.statics is None:
        return room
    with decoding.attachment.phase(DRAFT, "coarse"):
        span = decoding.passes.placed(cache).span
    return min(room, span.end - sequences.length)


def _draft(decoding: Decoding, sequences: Sequences, kwargs: dict[str, Any], k: int, hint: _Hint | None) -> Draft:
    ids, passes, cache = sequences.ids, [kwargs], cache_of(kwargs)
    with decoding.attachment.phase(DRAFT, "coarse"):
        for place in range(k):
            outputs = decoding.step(ids, 1, passes[-1])
            tokens = sequences.propose(ids, outputs.logits[:, -1])
            if hint is not None and place < hint.tokens.shape[1]:
                tokens = torch.where(hint.known[:, place], hint.tokens[:, place], tokens)
            ids = torch.cat([ids, tokens[:, None]], dim=-1)
            passes.append(decoding.after(outputs, passes[-1], cache))
    return Draft(sequences.length, ids, passes)


def _take(sequences: Sequences, draft: Draft, rows: Sequence[torch.Tensor], watch: Watch | None) -> tuple[int, bool]:
    """Accept tokens up to the first wrong draft. Returns how many, and whether the last was a right draft.

    watch: on the model since the rows were computed: once a callback changes it, the remaining rows are stale.
    """
    for row, logits_BV in enumerate(rows):
        tokens = sequences.append(logits_BV)
        right = sequences.look(tokens, draft.ids[:, draft.start + row] if row < draft.k else None)
        if sequences.finished or not right or (watch is not None and watch.sees_changes()):
            break
    return row + 1, right


def _ahead(sequences: Sequences, draft: Draft, rows: Sequence[torch.Tensor], taken: int) -> _Hint:
    """Surplus: tokens that rows of a batch have right beyond those accepted by all, from the verification's logits."""
    known = sequences.ids[:, -1] == draft.ids[:, draft.start + taken - 1]
    tokens, knowns = [], []
    for row in range(taken, draft.k + 1):
        tokens.append(sequences.propose(draft.ids[:, : draft.start + row], rows[row]))
        knowns.append(known)
        if row < draft.k:
            known = known & (tokens[-1] == draft.ids[:, draft.start + row])
    return _Hint(torch.stack(tokens, 1), torch.stack(knowns, 1))
