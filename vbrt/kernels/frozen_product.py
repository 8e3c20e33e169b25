"""x Wᵀ + bias for a frozen weight, as autograd and torch.func see it.

The product is linear in x and in bias, so each of its derivatives is such a product again, with W or with Wᵀ. Nothing
of the weight's size is kept: whoever needs the weight again asks for it again.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd import Function

from vbrt.libraries.torch_api import plain_autograd_function

__all__ = ["FrozenWeight", "Product", "as_autocast", "mapped", "sum_rows", "whole"]


class FrozenWeight(Protocol):
    """A weight at one moment. What it gives raises WrapError where it is another one by now."""

    def times(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x Wᵀ + bias, [..., K] to [..., N]; under no_grad."""

    def back(self, dy: Tensor) -> Tensor:
        """dY W, [..., N] to [..., K]; under no_grad."""

    def product(self, x: Tensor, *, back: bool) -> Tensor:
        """x Wᵀ, or x W, through which autograd sees."""


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
        dx = ctx.weight.product(dy, back=not ctx.back) if ctx.needs_input_grad[0] else None
        dbias = sum_rows(dy).to(ctx.bias_dtype) if ctx.needs_input_grad[1] else None
        return dx, dbias, None, None

    @staticmethod
    def jvp(ctx: Any, dx: Tensor, dbias: Tensor | None, *_: None) -> Tensor:
        dy = ctx.weight.product(dx, back=ctx.back)
        return dy if dbias is None else dy + dbias

    @staticmethod
    def vmap(
        info: Any, in_dims: tuple, x: Tensor, bias: Tensor | None, weight: FrozenWeight, back: bool
    ) -> tuple[Tensor, int | None]:
        return mapped(info, in_dims, x, bias, lambda x, bias: Product.apply(x, bias, weight, back))

    @classmethod
    def here(cls, *args: Any) -> Tensor:
        """`apply` where no transform of torch.func is at work: it binds its arguments by name, which takes 50 us."""
        return super(Function, cls).apply(*args)

    @classmethod
    def at_this_level(cls, *args: Any) -> Tensor:
        """`apply` for an operator, which torch.func calls once at each level of its transforms."""
        with plain_autograd_function():
            return cls.here(*args)


def mapped(
    info: Any, in_dims: tuple, x: Tensor, bias: Tensor | None, product: Callable[[Tensor, Tensor | None], Tensor]
) -> tuple[Tensor, int | None]:
    """A product under vmap, as torch wants it: what it gives, and which of its dimensions is the mapped one."""
    x_dim, bias_dim, *_ = in_dims
    if x_dim is not None:
        x = x.movedim(x_dim, 0)
    if bias_dim is None:
        return product(x, bias), None if x_dim is None else 0
    y = product(x, None)
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
