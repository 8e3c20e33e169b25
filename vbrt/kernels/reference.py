"""Reference ops in plain torch, for any device: the specification that faster kernels are tested against.

Legend: M tokens, N outputs, K inputs.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from vbrt.errors import KernelError
from vbrt.formats import WeightPlanes, get_format, merge_fine
from vbrt.formats.format import EncodedGroup, Format

__all__ = [
    "ACTIVATIONS",
    "WeightPlanes",
    "activate",
    "check",
    "codec",
    "decode_weight",
    "encode_many",
    "linear",
    "wants_grad",
]

#: activations of `linear`
ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "none": lambda y: y,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
}


def codec(format: Format) -> Format:
    """Return an encoder for a format, with the reference's bits: here the format itself."""
    return format


def encode_many(
    format: Format, w_ENK: Tensor, amax_E: Sequence[float] | None = None, squares: Tensor | None = None
) -> Iterator[EncodedGroup]:
    """Yield the coarse planes of matrices of one shape, in groups; `amax_E`, `squares`: see `Format.encode_many`.

    Raises FormatError for weights that cannot be encoded."""
    return format.encode_many(w_ENK, amax_E, squares)


def decode_weight(planes: WeightPlanes) -> Tensor:
    """The weight [N, K] in planes.dtype: exact with a fine plane; "dense" returns the stored tensor itself."""
    fmt = get_format(planes.format)
    if fmt.record.lossless:
        return planes.coarse["weight"]
    if planes.fine is None:
        return fmt.decode(planes.coarse, planes.shape, planes.dtype)
    return merge_fine(planes.coarse, planes.fine, fmt, planes.shape, planes.dtype)


def linear(x: Tensor, planes: WeightPlanes, bias: Tensor | None = None, activation: str = "none") -> Tensor:
    """activation(x @ w.T + bias): [..., K] to [..., N], in x's dtype.

    Raises KernelError for an unknown activation.
    """
    y = F.linear(x, decode_weight(planes), bias)
    _check_activation(activation)
    return activate(y, activation)


# -- shared by all implementations ------------------------------------------------------------------------------------


def check(x: Tensor, planes: WeightPlanes, activation: str) -> None:
    """Raise KernelError for an unknown activation, or if x's last dimension is not K."""
    _check_activation(activation)
    if x.shape[-1] != planes.shape[1]:
        raise KernelError(f"linear: x has shape {tuple(x.shape)}; expected (..., {planes.shape[1]})")


def _check_activation(activation: str) -> None:
    if activation not in ACTIVATIONS:
        raise KernelError(f"linear: activation {activation!r}; expected one of {', '.join(ACTIVATIONS)}")


def activate(y: Tensor, activation: str) -> Tensor:
    """Apply an activation by name; "none" returns the tensor itself."""
    return y if activation == "none" else ACTIVATIONS[activation](y)


def wants_grad(x: Tensor, bias: Tensor | None) -> bool:
    """True if a product of x with a frozen weight must be recorded by autograd."""
    return torch.is_grad_enabled() and (x.requires_grad or (bias is not None and bias.requires_grad))
