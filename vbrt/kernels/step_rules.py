"""Parameters of the ops between the layers of a decode step: see `vbrt.kernels.step`, which is their specification.

Legend: B batch, S tokens, H heads, D columns of a head, K columns, T tokens in all, E experts.
"""

from typing import NamedTuple

import torch
from torch import Tensor

__all__ = ["NormRule", "Part", "RouteRule"]


class NormRule(NamedTuple):
    """RMS norm: x / sqrt(mean(x²) + eps), times a gain.

    Attributes:
        gain: [K], in x's dtype; None: no gain.
        eps: added to the mean square.
        shift: added to the gain, in fp32.
        rounds: True if the quotient is rounded to x's dtype before the multiplication by the gain.
    """

    gain: Tensor | None
    eps: float
    shift: float = 0.0
    rounds: bool = True


class Part(NamedTuple):
    """Heads to rotate, x [B, H, S, D], with an optional norm of each head before."""

    x: Tensor
    norm: NormRule | None = None


class RouteRule(NamedTuple):
    """Routing of logits [T, E] to k experts per token.

    Attributes:
        k: experts per token.
        first: True: softmax over all experts, then top-k; False: top-k, then softmax over the k.
        renormalized: True: divide the k weights by their sum.
        dtype: of the returned weights; probabilities are fp32.
    """

    k: int
    first: bool
    renormalized: bool
    dtype: torch.dtype
