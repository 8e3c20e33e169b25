"""Sequences of a `generate` call: plain decoding's handling of each step's logits.

Processors, stopping criteria and streamers are called as `transformers` does: once per new token, in order, with the
tokens before it. Drafting uses `propose`, which has no side effects.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch

from vbrt.errors import ArgumentError

__all__ = ["Draw", "Sequences"]

Draw = Callable[[torch.Tensor, int], torch.Tensor]
"""(processed scores [B, V], position) -> tokens [B]."""

#: processors of transformers that are stateful, or call a model or a user's function
_NOT_PURE = {
    "SynthIDTextWatermarkLogitsProcessor",
    "UnbatchedClassifierFreeGuidanceLogitsProcessor",
    "PrefixConstrainedLogitsProcessor",
    "WhisperTimeStampLogitsProcessor",
    "WhisperNoSpeechDetection",
}


class Sequences:
    """Token ids int64 [B, L] that grow by one token per step, and the recorded scores.

    Attributes:
        ids: prompt and tokens so far.
        unfinished: int64 [B], 1 for rows that have not stopped.
        finished: True once all rows have stopped.
        scores, logits: per step float32 [B, V], processed and raw, if the config asks for them; else None.
        pure: processors without side effects, which may run on unverified tokens.
    """

    def __init__(
        self, ids: torch.Tensor, processors: Sequence[Any], criteria: Any, config: Any, streamer: Any, draw: Draw
    ) -> None:
        self.ids, self._processors, self._criteria = ids, processors, criteria
        self._streamer, self._draw = streamer, draw
        self.unfinished = torch.ones(len(ids), dtype=torch.int64, device=ids.device)
        self.finished = False
        keeps = config.return_dict_in_generate
        self.scores: tuple[torch.Tensor, ...] | None = () if keeps and config.output_scores else None
        self.logits: tuple[torch.Tensor, ...] | None = () if keeps and config.output_logits else None
        pad = config._pad_token_tensor
        pads = any(hasattr(criterion, "eos_token_id") for criterion in criteria)
        self._pad = pad.to(ids.device) if pads and pad is not None else None
        self.pure = [processor for processor in processors if _is_pure(processor)]

    @property
    def length(self) -> int:
        """Tokens per sequence so far, prompt and padding included."""
        return self.ids.shape[1]

    def append(self, logits_BV: torch.Tensor) -> torch.Tensor:
        """Select the next token of each row from its logits; return the tokens int64 [B]."""
        logits_BV = logits_BV.to(copy=True, dtype=torch.float32, device=self.ids.device)
        scores_BV = self._processors(self.ids, logits_BV)
        if self.scores is not None:
            self.scores += (scores_BV,)
        if self.logits is not None:
            self.logits += (logits_BV,)
        tokens = self.padded(self._draw(scores_BV, self.length))
        self.ids = torch.cat([self.ids, tokens[:, None]], dim=-1)
        self.unfinished = self.unfinished & ~self._criteria(self.ids, self.scores)
        if self._streamer is not None:
            self._streamer.put(tokens.cpu())
        return tokens

    def look(self, tokens: torch.Tensor, guessed: torch.Tensor | None = None) -> bool:
        """Synchronize with the tokens of `append`; update `finished`.

        Returns:
            True if all tokens equal the guessed ones, padding of stopped rows included.

        Raises:
            ArgumentError: a row's logits are invalid.
        """
        right = tokens if guessed is None else tokens == guessed
        left, all_right, lowest = torch.stack([self.unfinished.max(), right.min().long(), tokens.min()]).tolist()
        if lowest < 0:
            raise ArgumentError("generate: a row of logits has NaN, +inf or nothing but -inf: no token can be drawn")
        self.finished = left == 0
        return guessed is not None and bool(all_right)

    def propose(self, ids: torch.Tensor, logits_BV: torch.Tensor) -> torch.Tensor:
        """Predict the tokens int64 [B] that follow `ids` under these logits, with pure processors only."""
        scores_BV = logits_BV.to(copy=True, dtype=torch.float32, device=ids.device)
        for processor in self.pure:
            scores_BV = processor(ids, scores_BV)
        return self.padded(self._draw(scores_BV, ids.shape[1]).clamp_(min=0))

    @property
    def running(self) -> torch.Tensor:
        """int64 [B], 0 for rows whose next tokens are padding. Stopped rows of a call without EOS keep decoding."""
        return self.unfinished if self._pad is not None else torch.ones_like(self.unfinished)

    def padded(self, tokens: torch.Tensor) -> torch.Tensor:
        """Replace the tokens [B] or [B, n] of stopped rows by padding."""
        if self._pad is None:
            return tokens
        unfinished = self.unfinished if tokens.ndim == 1 else self.unfinished[:, None]
        return tokens * unfinished + self._pad * (1 - unfinished)

    def end(self) -> None:
        """End the stream."""
        if self._streamer is not None:
            self._streamer.end()


def _is_pure(processor: Any) -> bool:
    kind = type(processor)
    return kind.__module__ == "transformers.generation.logits_process" and kind.__name__ not in _NOT_PURE
