"""Linear layers on `nf4` and `quantile` weights: the backend "triton" of the ops "linear" and "decode_weight".

A kernel decodes the weight to the activations' dtype, the vendor's matmul multiplies: at every number of tokens no
slower than any decode followed by that matmul, and far faster than the reference's table gathers. What the kernel does
not serve (CPU tensors, a fine plane, GPUs older than sm_80) goes through the reference.

Legend: M tokens, N outputs, K inputs.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vbrt.errors import KernelError
from vbrt.formats import WeightPlanes
from vbrt.formats.nf4 import NF4_LEVELS
from vbrt.kernels import reference

__all__ = ["FORMATS", "decode_weight", "linear", "route"]

#: the formats that are decoded through a table
FORMATS = ("nf4", "quantile")
_MIN_MAJOR = 8  # bf16 arithmetic
_ROWS, _BLOCKS, _WARPS = 1, 64, 4


@functools.cache
def _kernels() -> Any:
    from vbrt.kernels import table_triton  # compiles nothing, but needs Triton

    return table_triton


@functools.cache
def _major(index: int) -> int:
    return torch.cuda.get_device_capability(index)[0]


@functools.cache
def _nf4_levels(device: torch.device) -> Tensor:
    return torch.tensor(NF4_LEVELS, device=device)


def _served(planes: WeightPlanes) -> bool:
    codes = planes.coarse.get("codes")
    if planes.format not in FORMATS or planes.fine is not None or codes is None:
        return False
    return codes.is_cuda and _major(codes.device.index) >= _MIN_MAJOR


def route(x: Tensor, planes: WeightPlanes) -> str:
    """The way `linear` takes: "decode+matmul" (decoded by a kernel) or "reference"."""
    return "decode+matmul" if _served(planes) and x.is_cuda else "reference"


def decode_weight(planes: WeightPlanes) -> Tensor:
    """The weight [N, K] in planes.dtype, the same bits as the reference; exact when the fine plane is there."""
    return _decode(planes, planes.dtype) if _served(planes) else reference.decode_weight(planes)


def linear(x: Tensor, planes: WeightPlanes, bias: Tensor | None = None, activation: str = "none") -> Tensor:
    """activation(x @ w.T + bias): [..., K] to [..., N], in x's dtype; differentiable in x and bias.

    Raises KernelError for an activation that the reference does not know.
    """
    if route(x, planes) == "reference":
        return reference.linear(x, planes, bias, activation)
    if activation not in reference.ACTIVATIONS:
        known = ", ".join(reference.ACTIVATIONS)
        raise KernelError(f"linear: activation {activation!r}; expected one of {known}")
    if torch.is_grad_enabled() and (x.requires_grad or (bias is not None and bias.requires_grad)):
        y = _Product.apply(x, planes)
        y = y if bias is None else y + bias
    else:
        y = F.linear(x, _decode(planes, x.dtype), bias)
    return y if activation == "none" else reference.ACTIVATIONS[activation](y)


class _Product(torch.autograd.Function):
    """x @ w.T with the gradient for x; the decoded weight is made again for it and not kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, planes: WeightPlanes) -> Tensor:
        ctx.planes = planes
        return F.linear(x, _decode(planes, x.dtype))

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return dy @ _decode(ctx.planes, dy.dtype), None


def _decode(planes: WeightPlanes, dtype: torch.dtype) -> Tensor:
    coarse = planes.coarse
    levels = coarse["levels"] if "levels" in coarse else _nf4_levels(coarse["codes"].device)
    decode = _decode_op if torch.compiler.is_compiling() else _decode_table
    return decode(coarse["codes"], coarse["scales"], levels, coarse["tensor_scale"], planes.shape[1], dtype)


def _decode_table(codes: Tensor, scales: Tensor, levels: Tensor, scale: Tensor, k: int, dtype: torch.dtype) -> Tensor:
    n, blocks = scales.shape
    w_NK = torch.empty(n, k, dtype=dtype, device=codes.device)
    with torch.cuda.device(codes.device):
        _kernels().decode_kernel[(-(-n // _ROWS), -(-blocks // _BLOCKS))](
            codes, scales, levels, scale, w_NK, n, k, blocks, ROWS=_ROWS, BLOCKS=_BLOCKS, SIGNED=len(levels) == 8,
            num_warps=_WARPS,
        )  # fmt: skip
    return w_NK


def _register_op() -> Callable[..., Tensor]:
    decode = torch.library.custom_op(
        "vbrt::table_decode",
        _decode_table,
        mutates_args=(),
        device_types="cuda",
        schema="(Tensor codes, Tensor scales, Tensor levels, Tensor scale, SymInt k, ScalarType dtype) -> Tensor",
    )
    decode.register_fake(
        lambda codes, scales, levels, scale, k, dtype: codes.new_empty(codes.shape[0], k, dtype=dtype)
    )
    return decode


_decode_op = _register_op()
