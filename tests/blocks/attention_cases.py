"""What attention is, for the tests on every device."""

import torch

INF = float("inf")


def definition(q, k, v, mask=None, causal=False):
    """In float64, with everything written out; rows that attend to nothing are zeros."""
    q, k, v = (t.double() for t in (q, k, v))
    k, v = (t.repeat_interleave(q.shape[1] // k.shape[1], 1) for t in (k, v))
    scores = q @ k.mT / q.shape[-1] ** 0.5
    if mask is not None:
        scores = scores.masked_fill(~mask, -INF) if mask.dtype is torch.bool else scores + mask.double()
    if causal:
        rows, keys = scores.shape[-2:]
        later = torch.arange(keys, device=q.device) > torch.arange(rows, device=q.device)[:, None] + keys - rows
        scores = scores.masked_fill(later, -INF)
    dead = (scores == -INF).all(-1, keepdim=True)
    return scores.masked_fill(dead, 0).softmax(-1).masked_fill(dead, 0) @ v
