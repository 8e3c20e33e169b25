"""Ops between the layers of a decode step: norms, rotary embeddings, routers, attention of few queries.

    normed(x, rule)                     RMS norm
    summed(x, other, rule)              residual add and its RMS norm
    rotated(parts, cos, sin)            rotary embedding of queries and keys, with optional head norms
    gated(gate, up, "silu")             activation(gate) * up
    projected(x, w)                     product with a small dense matrix, such as a router's
    routed(logits, rule)                top-k experts of each token and their weights
    attended(q, k, v, mask, scale)      attention of few queries to many keys

The plain torch here is the specification. On a GPU each is one launch (`cuda/step_ops.py`; attention two), and in steps
captured on a CPU one C call (`cpu/step.py`). Kernels round wherever a rule specifies a rounding.

Legend: B batch, S tokens, H heads, D columns of a head, K columns, T tokens in total, E experts, L keys.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from vbrt.host.accelerator import on_cuda
from vbrt.kernels.cuda import step_ops
from vbrt.kernels.reference import activate
from vbrt.kernels.step_rules import NormRule, Part, RouteRule

__all__ = [
    "NormRule",
    "Part",
    "RouteRule",
    "attended",
    "gated",
    "normed",
    "projected",
    "rotated",
    "rotated_into",
    "routed",
    "summed",
]


def normed(x: Tensor, rule: NormRule) -> Tensor:
    """RMS norm of x [..., K], in x's dtype."""
    if on_cuda(x):
        return step_ops.norm_rows(x, None, rule)[1]
    wide = x.float()
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + rule.eps)
    if rule.gain is None:
        return wide.to(x.dtype)
    if rule.rounds:
        return (rule.gain if not rule.shift else rule.gain + rule.shift) * wide.to(x.dtype)
    return (wide * (rule.gain.float() + rule.shift)).to(x.dtype)


def summed(x: Tensor, other: Tensor, rule: NormRule) -> tuple[Tensor, Tensor]:
    """(x + other, its RMS norm)."""
    if on_cuda(x):
        return step_ops.norm_rows(x, other, rule)
    total = x + other
    return total, normed(total, rule)


def rotated(parts: Sequence[Part], cos: Tensor, sin: Tensor) -> list[Tensor]:
    """x cos + rotate_half(x) sin of each part, products and sum rounded to x's dtype; cos and sin [B or 1, S, D].

    Partial rotary embedding: if cos has fewer columns than x, the remaining columns pass through; then without a norm.
    Results are [B, H, S, D], stored as [B, S, H, D].
    """
    if on_cuda(parts[0].x):
        return step_ops.rotate(parts, cos, sin)
    return [_rotated(part, cos.unsqueeze(1), sin.unsqueeze(1)) for part in parts]


def _rotated(part: Part, cos: Tensor, sin: Tensor) -> Tensor:
    x = part.x if part.norm is None else normed(part.x, part.norm)
    x, rest = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    half = x.shape[-1] // 2
    turned = torch.cat((-x[..., half:], x[..., :half]), dim=-1)
    y = torch.cat((x * cos + turned * sin, rest), dim=-1)
    return y.transpose(1, 2).contiguous().transpose(1, 2)


def rotated_into(
    parts: Sequence[Part], cos: Tensor, sin: Tensor, value: Tensor, keys: Tensor, values: Tensor, at_S: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """(rotated queries, keys, values): writes rotated keys and `value` [B, H, S, D] into caches [B, H, L, D].

    parts: queries and keys. at_S: int64 [S], cache slots.
    """
    if on_cuda(value):
        return step_ops.rotate(parts, cos, sin, step_ops.Store(value, keys, values, at_S))[0], keys, values
    query, key = rotated(parts, cos, sin)
    keys.index_copy_(2, at_S, key)
    values.index_copy_(2, at_S, value)
    return query, keys, values


def gated(gate: Tensor, up: Tensor, activation: str) -> Tensor:
    """activation(gate) * up, elementwise; activations of `vbrt.kernels.reference.ACTIVATIONS`."""
    return activate(gate, activation) * up


def projected(x: Tensor, w: Tensor) -> Tensor:
    """x [T, K] @ w.T for w [N, K]."""
    return F.linear(x, w)


def routed(logits: Tensor, rule: RouteRule) -> tuple[Tensor, Tensor]:
    """(weights [T, k], ids int64 [T, k]), in descending order."""
    if on_cuda(logits):
        return step_ops.route(logits, rule)
    if rule.first:
        weights, ids = F.softmax(logits, dim=-1, dtype=torch.float32).topk(rule.k, dim=-1)
    else:
        weights, ids = logits.topk(rule.k, dim=-1)
        weights = F.softmax(weights, dim=-1, dtype=torch.float32)
    if rule.renormalized:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights.to(rule.dtype), ids


def attended(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, steady: bool = False) -> Tensor:
    """softmax(q kᵀ scale + mask) v for q [B, H, S, D], k and v [B, G, L, D], H a multiple of G -> [B, H, S, D].

    A fully masked query gives zeros on a GPU, and torch's result on a CPU.

    Args:
        mask: bool (True: attend) [B or 1, 1, 1, L], with `steady` also [B or 1, 1, S, L]; None: no mask.
        steady: batch-invariant on a GPU: each query is reduced separately, so its bits do not depend on B, S or G.
    """
    if on_cuda(q):
        return step_ops.attend(q, k, v, mask, scale, steady=steady)
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scale, enable_gqa=q.shape[1] != k.shape[1])
