"""Lossless self-speculation: the coarse planes of `exact` weights draft, one pass over the exact weights verifies.

A round drafts k tokens, one coarse pass each, on the very KV cache that verification uses; then the cache is rewound,
and the last token and the k drafts are computed exactly, which writes their exact keys and values. Tokens are taken,
one after the other as plain decoding takes them, up to the first draft that is wrong; that one's place has the right
token by then. So each round gives between 1 and k + 1 tokens for one read of the weights.

| exactness | k + 1 rows are verified by | the tokens are |
| --- | --- | --- |
| "tokens" | sums for each token alone (`verification.py`) | bit for bit those of plain decoding |
| "distribution" | one pass of k + 1 tokens, whose sums may be rounded otherwise | of the same distribution |

Sampling draws with noise by seed, row and position (`sampling_noise.py`), so a draft is confirmed if it is the very
token that plain sampling with this seed gives. Rows of a batch advance together, by what all of them accept: plain
decoding multiplies one token of each row at a time, so these are its shapes. What a row has got right beyond that is
its draft in the next round.
"""

import contextlib
import functools
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from vbrt.generation.capture.mutation_watch import Watch
from vbrt.generation.speculation.cache_view import past_refusal, shadow_refusal
from vbrt.generation.speculation.device_timing import Marks
from vbrt.generation.speculation.sequences import Sequences
from vbrt.generation.speculation.verification import Decoding, Draft, announce, can_verify, verified, window_refusal
from vbrt.generation.static.cache_kinds import NotRecordable
from vbrt.generation.static.static_cache import leave
from vbrt.libraries.transformers_api import cache_of, stop_keeping_past
from vbrt.report.timeline import ROUND

__all__ = ["EXACTNESS", "speculate"]

EXACTNESS = ("tokens", "distribution")
DRAFT, VERIFY = "draft", "verify"


def speculate(decoding: Decoding, sequences: Sequences, outputs: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Decode until all sequences are finished, beginning with the outputs of the prompt's pass.

    Args:
        kwargs: of the prompt's pass, as transformers keeps them between passes.

    Returns:
        The arguments that a next pass would have.
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
        return shadow_refusal(cache) or window_refusal(decoding, cache, sequences.ids)


def _plainly(decoding: Decoding, sequences: Sequences, kwargs: dict[str, Any]) -> dict[str, Any]:
    while not sequences.finished:
        outputs = decoding.step(sequences.ids, 1 if kwargs.get("use_cache") else None, kwargs)
        kwargs = decoding.after(outputs, kwargs)
        sequences.look(sequences.append(outputs.logits[:, -1]))
    return kwargs


def _in_rounds(decoding: Decoding, sequences: Sequences, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Decode in rounds, until all sequences are finished or drafts are of no use."""
    cache, hint, recorded = cache_of(kwargs), None, decoding.is_recorded()
    with contextlib.ExitStack() as opened:
        with decoding.attachment.phase(DRAFT, "coarse"):
            decoding = replace(decoding, passes=opened.enter_context(decoding.recordable()))
            decoding = _placed(decoding, cache) if recorded else decoding
        if decoding.statics is None:
            if refusal := past_refusal(cache):
                announce(decoding.counts, refusal)
                return kwargs
            cache.activate_past_recording()
        elif decoding.pace.fixed is None:
            decoding.pace.tries_plain = not decoding.attachment.stack.ledger.travellers
        try:
            while not sequences.finished and can_verify(decoding, len(sequences.ids)):
                kwargs, hint = _round(decoding, sequences, kwargs, hint)
        except NotRecordable as error:  # before a token was taken: no memory for graphs any more, say
            announce(decoding.counts, str(error))
            cache.crop(sequences.length - 1 - cache.get_seq_length())
    stop_keeping_past(cache)
    return kwargs


def _placed(decoding: Decoding, cache: Any) -> Decoding:
    """Have the cache lie where recorded steps find it, if steps on it can be recorded."""
    with contextlib.suppress(NotRecordable):
        return replace(decoding, statics=decoding.passes.placed(cache))
    return decoding


class _Hint(NamedTuple):
    """Tokens [B, M] that rows have right already, where `known` bool [B, M] says so."""

    tokens: torch.Tensor
    known: torch.Tensor


def _round(
    decoding: Decoding, sequences: Sequences, kwargs: dict[str, Any], hint: _Hint | None
) -> tuple[dict[str, Any], _Hint | None]:
    """Draft, verify, take what is right. Returns the next pass's arguments, and what is known beyond."""
    cache, marks = cache_of(kwargs), Marks(sequences.ids.device)
    recorder = decoding.attachment.stack.guard.recorder
    began = None if recorder is None else recorder.mark()
    marks.mark()
    k = decoding.pace.choose(_reach(decoding, sequences, cache))
    while k and not can_verify(decoding, len(sequences.ids), k):
        k -= 1
    if decoding.attachment.watcher is not None:
        k = decoding.attachment.watcher.least(k)  # ranks that compute this model together draft alike
    draft = decoding.passes.run(functools.partial(_draft, decoding, sequences, kwargs, k, hint))
    marks.mark()
    if decoding.statics is None:
        leave(cache)
    else:  # again, if drafts were eager
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
    """The phase of the passes that verify k drafts: recorded steps are in that of the other recordings."""
    if k:
        return decoding.attachment.phase(VERIFY, None)
    return decoding.attachment.phase(DRAFT, None) if decoding.replays_plain(k) else contextlib.nullcontext()


def _reach(decoding: Decoding, sequences: Sequences, cache: Any) -> int:
    """Return how many tokens can be drafted: all rows that are verified attend to the block of the first."""
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
    """Take tokens up to the first wrong draft. Returns how many, and whether the last one was a right draft.

    watch: of the model since the rows were computed: behind a token whose callbacks change it, rows are of another one.
    """
    for row, logits_BV in enumerate(rows):
        tokens = sequences.append(logits_BV)
        right = sequences.look(tokens, draft.ids[:, draft.start + row] if row < draft.k else None)
        if sequences.finished or not right or (watch is not None and watch.sees_changes()):
            break
    return row + 1, right


def _ahead(sequences: Sequences, draft: Draft, rows: Sequence[torch.Tensor], taken: int) -> _Hint:
    """What rows of a batch have right beyond the tokens that all have taken, by the logits of the verification."""
    known = sequences.ids[:, -1] == draft.ids[:, draft.start + taken - 1]
    tokens, knowns = [], []
    for row in range(taken, draft.k + 1):
        tokens.append(sequences.propose(draft.ids[:, : draft.start + row], rows[row]))
        knowns.append(known)
        if row < draft.k:
            known = known & (tokens[-1] == draft.ids[:, draft.start + row])
    return _Hint(torch.stack(tokens, 1), torch.stack(knowns, 1))
