"""Draft loop of lossless speculation: a drafter proposes tokens, one pass verifies them.

A round proposes k tokens, and computes the rows after the last token and after each draft exactly, in one pass over the
weights (`verification.py`). Tokens are accepted, one by one as in plain decoding, up to the first wrong draft, in whose
place the right token is known by then. So a round yields 1 to k + 1 tokens for one read of the weights. A round with
nothing drafted is a plain step.

Sampling uses noise by seed, row and position (`sampling_noise.py`), so a draft is accepted if it equals the token that
plain sampling with this seed gives. Rows of a batch advance together, by the smallest number accepted: plain decoding
multiplies one token per row at a time, and shapes must match. A row's surplus tokens are its drafts of the next round.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from vbrt.generation.capture.session import NotNow
from vbrt.generation.speculation.cache_refusals import cache_refusal, past_refusal
from vbrt.generation.speculation.coarse_drafts import CoarsePlanes
from vbrt.generation.speculation.device_timing import Marks
from vbrt.generation.speculation.draft_length import CHOICES, Choice, Round
from vbrt.generation.speculation.drafters import Drafter, NotDraftable
from vbrt.generation.speculation.sequences import Sequences
from vbrt.generation.speculation.verification import (
    TOKENS,
    Decoding,
    Draft,
    NotVerifiable,
    Rows,
    announce,
    batch_refusal,
    model_refusal,
    verified,
    weights_refusal,
    window_refusal,
)
from vbrt.generation.static.cache_kinds import NotRecordable
from vbrt.libraries.transformers_api import cache_of, stop_keeping_past
from vbrt.model.mutation_watch import Watch
from vbrt.report.timeline import ROUND

__all__ = ["EXACTNESS", "speculate"]

EXACTNESS = (TOKENS, "distribution")
_WITHOUT_IT = "it drafts no more in this call"
_RESIDENT = "the weights are resident, so a row costs what a step costs"


def speculate(
    decoding: Decoding, sequences: Sequences, drafters: Mapping[str, Drafter], outputs: Any, kwargs: dict[str, Any]
) -> dict[str, Any]:
    """Decode until all sequences are finished, starting with the outputs of the prompt's pass.

    Args:
        drafters: by name; none: every step is a plain one.
        kwargs: of the prompt's pass, as transformers keeps them between passes.

    Returns:
        The arguments for a next pass.
    """
    kwargs = decoding.after(outputs, kwargs)
    sequences.look(sequences.append(outputs.logits[:, -1]))
    with decoding.recordable() as passes:
        decoding = replace(decoding, passes=passes, recorded=passes.captures)
        return _Loop(decoding, sequences, drafters, outputs, kwargs).run()


class _Hint(NamedTuple):
    """Tokens [B, M] that rows have right already, valid where `known` bool [B, M]."""

    tokens: torch.Tensor
    known: torch.Tensor


class _Loop:
    """A call's decoding. Attributes: kwargs, outputs: of the next pass, and of the last one."""

    def __init__(
        self,
        decoding: Decoding,
        sequences: Sequences,
        drafters: Mapping[str, Drafter],
        outputs: Any,
        kwargs: dict[str, Any],
    ) -> None:
        self._decoding, self._sequences, self._drafters = decoding, sequences, dict(drafters)
        self.outputs, self.kwargs, self._cache = outputs, kwargs, cache_of(kwargs)
        self._hint: _Hint | None = None
        self._names, self._dropped = list(drafters), set[str]()
        self._feed(sequences.length - 1)

    def run(self) -> dict[str, Any]:
        """Decode; return the arguments for a next pass."""
        if self._drafters and not self._sequences.finished:
            self._begin()
        keeps = bool(self._drafters)
        while not self._sequences.finished:
            if not self._drafters or not self._round():
                self._plain_step()
        if keeps:
            stop_keeping_past(self._cache)
        return self.kwargs

    # -- what drafts -------------------------------------------------------------------------------------------------

    def _refusal(self) -> str | None:
        decoding, cache, ids = self._decoding, self._cache, self._sequences.ids
        if decoding.by_recording:
            return weights_refusal(decoding) or cache_refusal(cache)
        return (
            weights_refusal(decoding)
            or model_refusal(decoding)
            or batch_refusal(decoding, len(ids))
            or cache_refusal(cache)
            or window_refusal(decoding, cache, ids)
        )

    def _begin(self) -> None:
        """Begin to draft, if rows can be verified; have the cache keep what eager rows may have to be rewound to."""
        decoding, placed = self._decoding, False
        decoding.pace.will_record(decoding.by_recording)
        self._give_up_if(self._refusal())
        for drafter in self._drafters.values():
            if isinstance(drafter, CoarsePlanes):
                drafter.bind(decoding, self)
                placed = drafter.placed
        if decoding.by_recording and decoding.pace.fixed is None and not decoding.attachment.stack.ledger.travellers:
            announce(decoding.counts, _RESIDENT, expected=True)
            self._drafters.clear()
        elif not decoding.recorded and not placed:
            self._give_up_if(past_refusal(self._cache))
            if self._drafters:
                self._cache.activate_past_recording()

    def _drop(self, drafter: str, reason: str) -> None:
        """Go on without a drafter. It still has a name, so that `choose` is told to do without."""
        announce(self._decoding.counts, f"drafter {drafter}: {reason}", _WITHOUT_IT)
        self._drafters[drafter].close()
        self._dropped.add(drafter)

    def _give_up_if(self, reason: str | None) -> None:
        """Decode plainly from now on, if there is a reason to."""
        if reason:
            announce(self._decoding.counts, reason)
            self._drafters.clear()

    # -- rounds ------------------------------------------------------------------------------------------------------

    def _plain_step(self) -> None:
        decoding, sequences, marks = self._decoding, self._sequences, Marks(self._sequences.ids.device)
        recorder, began = self._timeline()
        marks.mark()
        name, guess = self._guess()
        self._begin_pass()
        self.outputs = decoding.plain_step(sequences.ids, self.kwargs)
        marks.mark()
        self._hint = None
        if self._drafters and decoding.recorded and decoding.passes.rows_alike() is None:
            self._decoding = replace(decoding, recorded=False)  # steps run eagerly from now on
            self._begin()
        self.kwargs = decoding.after(self.outputs, self.kwargs, self._cache)
        right = sequences.look(sequences.append(self.outputs.logits[:, -1]), guess)
        if guess is not None:
            decoding.pace.observe(name, right=right)
        self._feed(1)
        if self._drafters:
            self._note(Round("", 0, 0, 0, 1, 0.0, *marks.seconds()), recorder, began)

    def _guess(self) -> tuple[str, torch.Tensor | None]:
        """What a free drafter would propose for the next token [B], to see what it is worth."""
        for name, drafter in self._drafters.items() if self._decoding.pace.fixed is None else ():
            if drafter.free and name not in self._dropped:
                tokens = drafter.propose(self._sequences, 1)
                return name, tokens[:, 0] if tokens.shape[1] else None
        return "", None

    def _round(self) -> bool:
        """Draft, verify, accept; False if nothing was drafted, or nothing can be verified here."""
        marks, asked = Marks(self._sequences.ids.device), set(self._dropped)
        recorder, began = self._timeline()
        try:
            while True:
                choice = self._choice(asked)
                if not choice.k:
                    return False
                one_time = self._one_time(choice.drafter)
                marks.mark()
                draft = self._draft(choice)
                marks.mark()
                if draft.k:
                    break
                asked.add(choice.drafter)
            self._begin_pass()
            rows = verified(self._decoding, draft)
        except NotNow:
            return False
        except (NotRecordable, NotVerifiable) as error:  # before a token was accepted: out of memory for graphs, say
            self._give_up_if(str(error))
            self._cache.crop(self._sequences.length - 1 - self._cache.get_seq_length())
            return False
        taken, right = _take(self._sequences, draft, iter(rows.logits), self._decoding.watch())
        marks.mark()
        self._feed(taken)
        self._cache.crop(taken - draft.k - 1 if rows.lasting else 0)
        confirmed = min(taken if right else taken - 1, draft.k)
        draft_s, verify_s = marks.seconds()[-2:]
        tried = min(taken, draft.k)
        other = rows.compared or self._one_time(choice.drafter) != one_time
        done = Round(choice.drafter, draft.k, confirmed, tried, taken, draft_s, verify_s, other)
        self._note(done, recorder, began)
        self._go_on(draft, rows, taken)
        return True

    def _choice(self, asked: set[str]) -> Choice:
        """Choose a drafter and a number of drafts; the same on all ranks of a model."""
        decoding = self._decoding
        choice = decoding.pace.choose(self._reach(), asked)
        if decoding.attachment.watcher is None:
            return choice
        code = 0 if not choice.k else self._names.index(choice.drafter) * _CODES + choice.k
        place, k = divmod(decoding.attachment.watcher.least(code), _CODES)
        return Choice(self._names[place] if k else "", k)

    def _reach(self) -> int:
        """Return the maximum number of drafts."""
        room = self._decoding.limit - self._sequences.length - 1
        passes = self._decoding.passes
        if self._decoding.recorded and not passes.rows_ready:
            return 0
        alike = passes.rows_alike()
        return room if alike is None else min(room, alike - 1)

    def _one_time(self, drafter: str) -> tuple[int, int]:
        """Counts of one-time work: a round in which they change takes longer than later ones."""
        return self._drafters[drafter].one_time, self._decoding.passes.one_time

    def _draft(self, choice: Choice) -> Draft:
        sequences, decoding = self._sequences, self._decoding
        try:
            tokens = self._drafters[choice.drafter].propose(sequences, choice.k)
        except NotDraftable as error:
            self._drop(choice.drafter, str(error))
            tokens = sequences.ids[:, :0]
        tokens = tokens[:, : max((k for k in (*CHOICES, choice.k) if k <= min(tokens.shape[1], choice.k)), default=0)]
        if self._hint is not None:
            ahead = min(tokens.shape[1], self._hint.tokens.shape[1])
            known, right = (of[:, :ahead] for of in (self._hint.known, self._hint.tokens))
            tokens = torch.cat([torch.where(known, right, tokens[:, :ahead]), tokens[:, ahead:]], 1)
        passes = [self.kwargs]
        for _ in range(tokens.shape[1]):
            passes.append(decoding.after(self.outputs, passes[-1], self._cache))
        return Draft(sequences.length, torch.cat([sequences.ids, tokens], dim=-1), passes)

    def _go_on(self, draft: Draft, rows: Rows, taken: int) -> None:
        """Take the state after the last accepted token."""
        decoding, sequences = self._decoding, self._sequences
        self.outputs = rows.outputs[min(taken, len(rows.outputs)) - 1]
        self.kwargs = decoding.after(self.outputs, draft.kwargs[taken - 1], self._cache)
        several = len(sequences.ids) > 1 and taken <= draft.k and rows.lasting
        self._hint = _ahead(sequences, draft, list(rows.logits)[taken:], taken) if several else None
        if not decoding.by_recording:
            self._give_up_if(batch_refusal(decoding, len(sequences.ids)))

    def _begin_pass(self) -> None:
        """Forget the states of passes that drafted: on the same cache, or by the model as its own assistant."""
        if self._decoding.states is not None:
            self._decoding.states.begin()

    def _feed(self, rows: int) -> None:
        """Feed the hidden states of the pass's first rows to the drafter that reads them."""
        end, heads = self._sequences.length - 1, self._drafters.get("heads")
        hidden_BTD = None if heads is None else self._decoding.states.of(end - rows, end)
        if hidden_BTD is not None:
            heads.feed(end - rows, hidden_BTD)

    def _timeline(self) -> tuple[Any, Any]:
        """The recorder of a timeline, if one is being recorded, and where a round begins in it."""
        recorder = self._decoding.attachment.stack.guard.recorder
        return recorder, None if recorder is None else recorder.mark()

    def _note(self, done: Round, recorder: Any, began: Any) -> None:
        self._decoding.pace.note(done)
        self._decoding.counts.note(done)
        if recorder is not None:
            text = f"{done.tokens} tokens, {done.accepted} of {done.drafted} drafts right"
            recorder.note(ROUND, text, began, recorder.mark())


_CODES = 64  # more than there are drafts in a round


def _take(sequences: Sequences, draft: Draft, rows: Iterator[torch.Tensor], watch: Watch | None) -> tuple[int, bool]:
    """Accept tokens up to the first wrong draft. Returns how many, and whether the last was a right draft.

    watch: on the model since the rows were computed: once a callback changes it, the remaining rows are stale.
    """
    for row in range(draft.k + 1):
        tokens = sequences.append(next(rows))
        right = sequences.look(tokens, draft.ids[:, draft.start + row] if row < draft.k else None)
        if sequences.finished or not right or (watch is not None and watch.sees_changes()):
            break
    return row + 1, right


def _ahead(sequences: Sequences, draft: Draft, rest: Sequence[torch.Tensor], taken: int) -> _Hint:
    """Surplus: tokens that rows of a batch have right beyond those accepted by all, from the verification's logits.

    rest: logits of the rows after those taken.
    """
    known = sequences.ids[:, -1] == draft.ids[:, draft.start + taken - 1]
    tokens, knowns = [], []
    for row, logits_BV in enumerate(rest, taken):
        tokens.append(sequences.propose(draft.ids[:, : draft.start + row], logits_BV))
        knowns.append(known)
        if row < draft.k:
            known = known & (tokens[-1] == draft.ids[:, draft.start + row])
    return _Hint(torch.stack(tokens, 1), torch.stack(knowns, 1))
