"""Sampling noise as a function of seed, batch row and position.

Plain decoding, drafting and verification then draw the same token from the same scores (Gumbel-max with common random
numbers; Daliri, Musco and Suresh 2024, "Coupling without communication and drafter-invariant speculative decoding",
arXiv 2408.07978). So sampled tokens are drafted and verified like greedy ones, and the output equals sampling token by
token with the same seed.
"""

from dataclasses import dataclass

import torch

from vbrt.blocks.sampling import gumbel_max_sample

__all__ = ["Noise", "greedy"]

_MASK = (1 << 64) - 1


@dataclass(frozen=True, slots=True)
class Noise:
    """Gumbel-max sampling by (seed, row, position). Device types have different noise for one seed."""

    seed: int

    def draw(self, scores: torch.Tensor, position: int) -> torch.Tensor:
        """Sample tokens int64 [B] from softmax(scores), scores [B, V] being processed logits; -1 for invalid rows.

        `position`: of the token in the sequence, prompt and padding included.
        """
        generator = torch.Generator(scores.device)
        noise = torch.empty(scores.shape, dtype=torch.float64, device=scores.device)
        for row, noise_V in enumerate(noise):
            generator.manual_seed(mixed(self.seed, row, position))
            noise_V.exponential_(generator=generator)
        return gumbel_max_sample(scores, noise=noise, check=False)


def greedy(scores: torch.Tensor, position: int) -> torch.Tensor:
    """Return the tokens int64 [B] of the highest scores [B, V]."""
    return torch.argmax(scores, dim=-1)


def mixed(*numbers: int) -> int:
    """Hash integers to 63 bits (SplitMix64; Steele, Lea and Flood 2014)."""
    state = 0
    for number in numbers:
        state = (state ^ number) + 0x9E3779B97F4A7C15 & _MASK
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state ^ state >> 27) * 0x94D049BB133111EB & _MASK
        state ^= state >> 31
    return state >> 1
