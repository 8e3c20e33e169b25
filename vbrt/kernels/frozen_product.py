"""Frozen-weight product x Wᵀ + bias for autograd and torch.func.

The product is linear in x and bias, so each derivative is again such a product, with W or Wᵀ. Nothing of the weight's
size is saved: backward takes the planes again.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.autograd import Function

from vbrt.libraries.torch_api import plain_autograd_function

__all__ = ["FrozenWeight", "Product", "as_autocast", "mapped", "sum_rows", "whole"]


class FrozenWeight(Protocol):
    """A weight at the time of a forward. Methods raise WrapError if it has changed since."""

    def times(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x Wᵀ + bias, [..., K] to [..., N]; runs under no_grad."""

    def back(self, dy: Tensor) -> Tensor:
        """dY W, [..., N] to [..., K]; runs under no_grad."""

    def product(self, x: Tensor, *, back: bool) -> Tensor:
        """x Wᵀ, or x W if `back`, differentiable."""


class Product(Function):
    """`weight.times(x, bias)` or `weight.back(x)`; supports backward and jvp of any order, and vmap."""

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
        """`apply` outside of torch.func transforms: skips binding arguments by name, which takes 50 µs."""
        return super(Function, cls).apply(*args)

    @classmethod
    def at_this_level(cls, *args: Any) -> Tensor:
        """`apply` within an operator, which torch.func calls once per transform level."""
        with plain_autograd_function():
            return cls.here(*args)


def mapped(
    info: Any, in_dims: tuple, x: Tensor, bias: Tensor | None, product: Callable[[Tensor, Tensor | None], Tensor]
) -> tuple[Tensor, int | None]:
    """A product under vmap: (result, mapped dimension), as torch expects."""
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
    """Bias gradient [N] from dY [..., N]."""
    return dy.reshape(-1, dy.shape[-1]).sum(0)


def whole(y: Tensor) -> Tensor:
    """y as a non-view without a copy: autograd forbids writes to views created in a custom Function."""
    return torch.ops.aten._unsafe_view(y, y.shape) if y._is_view() else y


def as_autocast(tensor: Tensor | None) -> Tensor | None:
    """Cast a tensor to the dtype of autocast, if that is enabled."""
    if tensor is None or tensor.dtype is torch.float64 or not tensor.is_floating_point():
        return tensor
    kind = tensor.device.type
    return tensor.to(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else tensor
