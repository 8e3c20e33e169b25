"""Drafters: sources of tokens that verification accepts or rejects; `Ngrams` is prompt lookup, without a model.

| drafter | cost of a proposal |
| --- | --- |
| "ngrams" | some microseconds of the host: continue the last place where the text ended alike |
| "assistant" | one pass of a small model per token (`assistant.py`) |
| "heads" | one pass of the checkpoint's multi-token head per token (`heads.py`) |
| "coarse" | passes over the coarse planes of `exact` weights, on the call's own cache |

A drafter is made for one `generate` call, in which sequences only grow; it finds the tokens that are new to it.
"""

from typing import Protocol

import torch

from vbrt.errors import VBError
from vbrt.generation.speculation.sequences import Sequences

__all__ = ["DRAFTERS", "Drafter", "Ngrams", "NotDraftable"]

#: names of drafters, as in `generate(drafter=...)` and stats
DRAFTERS = ("ngrams", "assistant", "heads", "coarse")


class NotDraftable(VBError):
    """A drafter can propose nothing for the rest of a call; the message gives the reason."""


class Drafter(Protocol):
    """Source of draft tokens for one `generate` call.

    Attributes:
        name: one of DRAFTERS.
        free: proposing costs no pass of a model.
        one_time: count of one-time work so far (the prompt's pass or index, a recording): a proposal that raised it
            took longer than later ones will.
    """

    name: str
    free: bool

    @property
    def one_time(self) -> int: ...

    def propose(self, sequences: Sequences, k: int) -> torch.Tensor:
        """Propose up to k >= 1 tokens after `sequences.ids`, int64 [B, n], on that device; n = 0: nothing.

        Raises:
            NotDraftable: nothing will be proposed in this call any more.
        """

    def close(self) -> None:
        """Free what is held for the call. Idempotent."""


class Ngrams:
    """Prompt lookup (Saxena 2023): the continuation of the longest earlier match of the text's end, in each row.

    A proposal ends behind the first EOS. Rows advance together, so it is as long as the shortest one of a row that has
    not stopped. One device-to-host copy per call brings the new tokens.

    Args:
        mask: attention mask of the prompt [B, L]; masked tokens are not part of the text. None: nothing is masked.
        eos: token ids that end a sequence.
        longest: tokens of a match beyond which a longer one is no better.
    """

    name, free = "ngrams", True

    def __init__(self, mask: torch.Tensor | None, eos: frozenset[int], *, longest: int = 16) -> None:
        self._mask, self._eos, self._longest = mask, eos, max(longest, _SHORTEST)
        self._texts: list[_Text] = []
        self._read = 0  # columns of `sequences.ids` that are indexed

    @property
    def one_time(self) -> int:
        return int(bool(self._texts))

    def propose(self, sequences: Sequences, k: int) -> torch.Tensor:
        running = self._read_back(sequences)
        found: list[list[int]] = []
        for text, runs in zip(self._texts, running, strict=True):
            found.append(text.continuation(k, self._longest, self._eos) if runs else [])
            if runs and not found[-1]:
                return sequences.ids[:, :0]
        shortest = min((len(tokens) for tokens, runs in zip(found, running, strict=True) if runs), default=0)
        rows = [tokens[:shortest] if runs else [0] * shortest for tokens, runs in zip(found, running, strict=True)]
        return sequences.padded(torch.tensor(rows, dtype=torch.int64, device=sequences.ids.device))

    def close(self) -> None:
        self._texts, self._read = [], 0

    def _read_back(self, sequences: Sequences) -> list[int]:
        """Index the new tokens; return `sequences.running`."""
        new = torch.cat([sequences.ids[:, self._read :], sequences.running[:, None]], dim=1).tolist()
        running = [row.pop() for row in new]
        if not self._texts:
            self._texts = [_Text() for _ in new]
            if self._mask is not None:
                # after a prompt as embeddings or in a cache, `ids` has only the last tokens of what the mask is for
                hidden = self._mask.shape[1] - len(new[0])
                seen = self._mask[:, max(hidden, 0) :].tolist()
                new = [_unmasked(tokens, row) for tokens, row in zip(new, seen, strict=True)]
        for text, tokens in zip(self._texts, new, strict=True):
            text.extend(tokens)
        self._read = sequences.length
        return running


def _unmasked(tokens: list[int], mask: list[int]) -> list[int]:
    """Drop masked tokens; those behind the mask's end stay."""
    return [token for token, seen in zip(tokens, mask, strict=False) if seen] + tokens[len(mask) :]


_SHORTEST = 2  # tokens of a match
_PLACES = 64  # newest places of the last two tokens that are compared: bounds a lookup at some 20 us


class _Text:
    """Tokens of one row, with a hash chain per bigram as in LZ77: the newest place where it ends, and from each place
    the one before. An append is one dict access; a lookup compares backwards along one chain."""

    __slots__ = ("_before", "_newest", "_tokens")

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._newest: dict[tuple[int, int], int] = {}
        self._before: list[int] = []

    def extend(self, tokens: list[int]) -> None:
        known, newest, before = self._tokens, self._newest, self._before
        for token in tokens:
            place = len(known)
            known.append(token)
            if not place:
                before.append(-1)
                continue
            pair = known[place - 1], token
            before.append(newest.get(pair, -1))
            newest[pair] = place

    def continuation(self, k: int, longest: int, eos: frozenset[int]) -> list[int]:
        """Return up to k tokens after the newest of the longest earlier matches; empty without one.

        A match that reaches into the continuation repeats with its period, as in LZ77.
        """
        place = self._longest_match(longest)
        if place < 0:
            return []
        text, found = self._tokens, []
        for at in range(place + 1, place + 1 + k):
            found.append(text[at] if at < len(text) else found[at - len(text)])
            if found[-1] in eos:
                break
        return found

    def _longest_match(self, longest: int) -> int:
        """Return the place of the last token of the match; -1 without one."""
        text, end = self._tokens, len(self._tokens) - 1
        best, best_length = -1, 0
        place = self._before[end] if end > 0 else -1
        for _ in range(_PLACES):
            if place < 0:
                break
            length = _SHORTEST
            while length < longest and length <= place and text[place - length] == text[end - length]:
                length += 1
            if length > best_length:
                best, best_length = place, length
            if length >= longest:
                break
            place = self._before[place]
        return best
