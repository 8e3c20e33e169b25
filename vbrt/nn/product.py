"""x Wᵀ + bias for a frozen weight, as autograd and torch.func see it.

The product is linear in x and in bias, so each of its derivatives is such a product again, with W or with Wᵀ. Nothing
of the weight's size is kept: whoever needs the weight again asks for it again.
"""

from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd import Function

__all__ = ["FrozenWeight", "Product", "as_autocast", "sum_rows", "whole"]


class FrozenWeight(Protocol):
    """A weight at one moment. Both run under no_grad, and raise WrapError where it is another one by now."""

    def times(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x Wᵀ + bias, [..., K] to [..., N]."""

    def back(self, dy: Tensor) -> Tensor:
        """dY W, [..., N] to [..., K]."""


class Product(Function):
    """`weight.times(x, bias)`, or `weight.back(x)`: differentiable any number of times, both ways, and mapped."""

    @staticmethod
    def forward(x: Tensor, bias: Tensor | None, weight: FrozenWeight, back: bool) -> Tensor:
        return whole(weight.back(x) if back else weight.times(x, bias))

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Tensor) -> None:
        _, bias, ctx.weight, ctx.back = inputs
        ctx.bias_dtype = None if bias is None else bias.dtype

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        dx = Product.apply(dy, None, ctx.weight, not ctx.back) if ctx.needs_input_grad[0] else None
        dbias = sum_rows(dy).to(ctx.bias_dtype) if ctx.needs_input_grad[1] else None
        return dx, dbias, None, None

    @staticmethod
    def jvp(ctx: Any, dx: Tensor, dbias: Tensor | None, *_: None) -> Tensor:
        dy = Product.apply(dx, None, ctx.weight, ctx.back)
        return dy if dbias is None else dy + dbias

    @staticmethod
    def vmap(info: Any, in_dims: tuple, x: Tensor, bias: Tensor | None, weight: FrozenWeight,
             back: bool) -> tuple[Tensor, int | None]:
        x_dim, bias_dim, *_ = in_dims
        if x_dim is not None:
            x = x.movedim(x_dim, 0)
        if bias_dim is None:
            return Product.apply(x, bias, weight, back), None if x_dim is None else 0
        y = Product.apply(x, None, weight, back)
        y = y if x_dim is not None else y.expand(info.batch_size, *y.shape)
        bias_BN = bias.movedim(bias_dim, 0)
        return y + bias_BN.reshape(info.batch_size, *[1] * (y.dim() - 2), -1), 0


def sum_rows(dy: Tensor) -> Tensor:
    """The gradient [N] of a bias from dY [..., N]."""
    return dy.reshape(-1, dy.shape[-1]).sum(0)


def whole(y: Tensor) -> Tensor:
    """y as no view of another tensor, without a copy: nobody may write into views that autograd has not seen made."""
    return torch.ops.aten._unsafe_view(y, y.shape) if y._is_view() else y


def as_autocast(tensor: Tensor | None) -> Tensor | None:
    """A tensor in the dtype that autocast, where it is on, multiplies it in."""
    if tensor is None or tensor.dtype is torch.float64 or not tensor.is_floating_point():
        return tensor
    kind = tensor.device.type
    return tensor.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else tensor
