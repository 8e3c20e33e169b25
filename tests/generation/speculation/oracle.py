"""A drafter that knows the text: its drafts are right as often as a test wants."""

import random

import torch

from vbrt.generation.speculation import call_drafters

__all__ = ["Oracle", "oracle"]


class Oracle:
    """Proposes what plain decoding gave, `truth` [B, L], with every draft wrong with probability 1 - `share`."""

    name, free, one_time = "ngrams", True, 0
    truth: torch.Tensor
    share = 0.7

    def __init__(self, mask, eos) -> None:
        self.dice = random.Random(1)

    def propose(self, sequences, k):
        tokens = self.truth[:, sequences.length : sequences.length + k].clone()
        for place in range(tokens.shape[1]):
            if self.dice.random() > self.share:
                tokens[:, place] = (tokens[:, place] + 1) % 90
        return tokens

    def close(self):
        pass


def oracle(monkeypatch, truth: torch.Tensor) -> type[Oracle]:
    """Have n-grams come from `truth`."""
    made = type("Oracle", (Oracle,), {"truth": truth})
    monkeypatch.setattr(call_drafters, "Ngrams", made)
    return made
