"""Gradients through frozen experts: of the hidden states, the routing weights and the biases, for any backend.

The product of each pair with its expert's matrix is linear in the input, so its derivative is such a product again,
with the transposed matrices. Nothing of the weights' size is kept: the pages are leased again in the backward pass.

Legend: T tokens, k experts a token, P = T k pairs, E experts, N rows of a matrix, K its columns.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function

from vbrt.formats import WeightPlanes
from vbrt.kernels.experts import ExpertPages, Gate, apply_gate, pairs_of_experts, part_planes, weigh_and_sum
from vbrt.kernels.reference import decode_weight

__all__ = ["ExpertsProduct", "FrozenExperts", "experts_back", "routed_experts"]


def experts_back(
    dy_PN: Tensor,
    ids_Tk: Tensor,
    pages: ExpertPages,
    *,
    part: str = "up",
    decode: Callable[[WeightPlanes], Tensor] = decode_weight,
) -> Tensor:
    """Return the gradient [T, K] of the input of `experts_up` without a gate, from that of its result, in its dtype.

    Of each pair dY W of its expert, summed over a token's experts in fp32 and in the order of `ids_Tk`; sentinels add
    nothing.
    """
    dx_PK = dy_PN.new_zeros(ids_Tk.numel(), pages.shapes[part][1])
    for expert, pairs in pairs_of_experts(ids_Tk, pages.experts):
        dx_PK[pairs] = dy_PN[pairs] @ decode(part_planes(pages, expert, part)).to(dy_PN.dtype)
    if ids_Tk.shape[1] == 1:
        return dx_PK
    return dx_PK.view(*ids_Tk.shape, -1).float().sum(dim=1).to(dy_PN.dtype)


@dataclass(frozen=True, slots=True)
class FrozenExperts:
    """One part of a layer's experts, for autograd.

    Attributes:
        part: "up", "down" or "gate".
        experts: E.
        lease: gives, for ids [T, k], the pages of their experts as a context; called again in the backward pass.
        product, back: the functions of the ops "experts_up" and "experts_back".
    """

    part: str
    experts: int
    lease: Callable[[Tensor], AbstractContextManager[ExpertPages]]
    product: Callable[..., Tensor]
    back: Callable[..., Tensor] = experts_back


class ExpertsProduct(Function):
    """W x + b of each pair, [T, K] to [P, N], or with `back` the transposed product, [P, N] to [T, K].

    Differentiable in x and bias, any number of times.
    """

    @staticmethod
    def forward(x: Tensor, bias_EN: Tensor | None, ids_Tk: Tensor, experts: FrozenExperts, back: bool) -> Tensor:
        with experts.lease(ids_Tk) as pages:
            if back:
                return experts.back(x, ids_Tk, pages, part=experts.part)
            return experts.product(x, ids_Tk, pages, part=experts.part, bias_EN=bias_EN)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        _, bias_EN, ids_Tk, ctx.experts, ctx.back = inputs
        ctx.save_for_backward(ids_Tk)
        ctx.bias = None if bias_EN is None else (len(bias_EN), bias_EN.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        (ids_Tk,) = ctx.saved_tensors
        dx = dbias = None
        if ctx.needs_input_grad[0]:
            dx = ExpertsProduct.apply(dy, None, ids_Tk, ctx.experts, not ctx.back)
        if ctx.needs_input_grad[1]:
            dbias = _sum_by_expert(dy, ids_Tk, *ctx.bias)
        return dx, dbias, None, None, None


def _sum_by_expert(dy_PN: Tensor, ids_Tk: Tensor, experts: int, dtype: torch.dtype) -> Tensor:
    """Return the gradient [E, N] of the biases."""
    ids_P = ids_Tk.reshape(-1).long()
    routed = (ids_P >= 0) & (ids_P < experts)
    sums = dy_PN.new_zeros(experts + 1, dy_PN.shape[1], dtype=torch.float32)
    return sums.index_add(0, torch.where(routed, ids_P, experts), dy_PN.float())[:experts].to(dtype)


def routed_experts(
    x_TH: Tensor,
    ids_Tk: Tensor,
    weights_Tk: Tensor,
    up: FrozenExperts,
    down: FrozenExperts,
    *,
    gate: Gate | None = None,
    biases: tuple[Tensor | None, Tensor | None] = (None, None),
) -> Tensor:
    """Return the routed sums [T, H] in x's dtype, through which autograd sees x, the routing weights and the biases.

    biases: of "up" and "down", [E, N].
    """
    v_PN = ExpertsProduct.apply(x_TH, biases[0], ids_Tk, up, False)
    h_PI = v_PN if gate is None else apply_gate(v_PN, gate)
    rows_PH = ExpertsProduct.apply(h_PI, biases[1], ids_Tk.reshape(-1, 1), down, False)
    return weigh_and_sum(rows_PH, ids_Tk, weights_Tk, down.experts)
