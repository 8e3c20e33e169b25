"""Linear layers recorded by autograd, with gradients for x and bias; the weight is frozen.

For the backward pass only the planes are referenced, and nothing of the weight's size is saved: a gradient decodes the
weight again, or multiplies by its codes. The implementation passes its two products as functions (x, planes), which
choose between an operator and a launch themselves: torch.compile traces into both.

Legend: N outputs, K inputs.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vbrt.formats import WeightPlanes
from vbrt.kernels import reference

__all__ = ["linear", "linear_by_decoding"]

_Matmul = Callable[[Tensor, WeightPlanes], Tensor]


def linear(
    x: Tensor, planes: WeightPlanes, bias: Tensor | None, activation: str, *, multiply: _Matmul, gradient: _Matmul
) -> Tensor:
    """activation(x @ w.T + bias): [..., K] to [..., N], in x's dtype; differentiable in x and bias.

    multiply(x, planes): x @ w.T, in x's dtype. gradient(dy, planes): dy @ w, [..., N] to [..., K], in dy's dtype. Both
    run without gradients.
    """
    y = _Product.apply(x, planes, multiply, gradient)
    return reference.activate(y if bias is None else y + bias, activation)


def linear_by_decoding(
    x: Tensor,
    planes: WeightPlanes,
    bias: Tensor | None,
    activation: str,
    decode: Callable[[WeightPlanes, torch.dtype], Tensor],
) -> Tensor:
    """`linear` by torch's matmul, on the weight [N, K] that `decode(planes, dtype)` returns, once for each pass."""
    return linear(
        x,
        planes,
        bias,
        activation,
        multiply=lambda x, planes: F.linear(x, decode(planes, x.dtype)),
        gradient=lambda dy, planes: dy @ decode(planes, dy.dtype),
    )


class _Product(torch.autograd.Function):
    """x @ w.T with the gradient for x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, planes: WeightPlanes, multiply: _Matmul, gradient: _Matmul) -> Tensor:
        ctx.planes, ctx.gradient = planes, gradient
        return multiply(x, planes)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None]:
        return ctx.gradient(dy, ctx.planes), None, None, None
