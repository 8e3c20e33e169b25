"""Lazy gradient: a tensor subclass without storage that stands for `parameter.grad` until its values are read.

Most code that reads `.grad` asks for its presence, its type, its norm, or scales it: torch's `clip_grad_norm_`, and
with it accelerate and Trainer, do nothing else. A gradient in host memory is bf16 until then; a norm reads it as it
is, a factor is applied when the update reads it. Every other torch function gets the gradient itself, in the
parameter's dtype, writable: from then on the lazy tensor stands for that one.

Rejected: a replacement for `torch.nn.utils.clip_grad_norm_`, which code that imported it before would not call, and
which would leave accelerate's own reads of `.grad`.
"""

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import Tensor

from vbrt.errors import TierError
from vbrt.libraries.torch_api import DisableTorchFunctionSubclass, tree_flatten, tree_unflatten

__all__ = ["METADATA", "LazyGradient"]

_GETS = (
    "shape dtype device requires_grad is_leaf grad_fn ndim layout is_cuda is_sparse is_quantized is_meta is_mkldnn "
    "is_xla is_mps is_xpu is_cpu is_nested itemsize nbytes names is_mtia is_sparse_csr is_vulkan is_ipu is_maia"
)
_CALLS = (
    "size dim ndimension numel nelement is_floating_point is_complex element_size get_device __hash__ __len__ "
    "is_signed is_same_size"
)
#: torch functions that need no numbers of a tensor
METADATA = {getattr(Tensor, name).__get__ for name in _GETS.split() if hasattr(Tensor, name)}
METADATA |= {getattr(Tensor, name) for name in _CALLS.split()}
METADATA |= {torch.is_floating_point, torch.is_complex, torch.numel}


class Source(Protocol):
    """Gradient in the tiers.

    Attributes:
        name: of the weight.
        dtype: of the parameter.
    """

    name: str
    dtype: torch.dtype

    def tensor(self) -> Tensor | None:
        """Return the gradient in the parameter's dtype, aliasing its memory."""

    def norm(self) -> float:
        """Return its Euclidean norm, fp32."""

    def scale_(self, factor: float) -> None:
        """Scale it in fp32, lazily."""


class LazyGradient(Tensor):
    """Gradient of a weight that trains from the tiers; made by `of`.

    Attributes:
        source: the gradient.
        found: the gradient itself, once it was needed; None before.
    """

    source: Source
    found: Tensor | None

    @classmethod
    def of(cls, source: Source, shape: tuple[int, ...]) -> "LazyGradient":
        """Return a tensor of a shape, in the parameter's dtype, on the CPU, that stands for a gradient."""
        made = torch.full((), float("nan"), dtype=source.dtype, device="cpu").expand(shape).as_subclass(cls)
        made.source, made.found = source, None
        return made

    def resolve(self) -> Tensor:
        """Return the gradient itself. Raises TierError: it is gone."""
        found = self.found
        if found is None:
            found = self.found = self.source.tensor()
        if found is None:
            raise TierError(f"{self.source.name}: this gradient is gone: it was dropped when it could not be read")
        return found

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func in METADATA or (func is Tensor.type and len(args) == 1):
            with DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        short = _SHORT.get(func)
        if short is not None and isinstance(args[0], LazyGradient) and args[0].found is None:
            found = short(*args, **kwargs)
            if found is not None:
                return found
        leaves, spec = tree_flatten((args, kwargs))
        leaves = [leaf.resolve() if isinstance(leaf, LazyGradient) else leaf for leaf in leaves]
        args, kwargs = tree_unflatten(leaves, spec)
        return func(*args, **kwargs)


def _norm(lazy: LazyGradient, ord: Any = 2, *others: Any, **options: Any) -> Tensor | None:
    """torch.linalg.vector_norm of all numbers, of a gradient in fp32."""
    if others or options or ord != 2 or lazy.source.dtype is not torch.float32:
        return None
    return torch.tensor(lazy.source.norm(), dtype=torch.float32, device="cpu")


def _scaled(lazy: LazyGradient, factor: Any, *others: Any, **options: Any) -> Tensor | None:
    """Tensor.mul_ by a number: a factor of 1 changes nothing, and others wait for the update, in fp32."""
    single = type(factor) is Tensor and factor.dim() == 0 and factor.is_cpu
    if others or options or not (single or isinstance(factor, float)):
        return None
    known = float(factor)
    if known != 1.0:
        if lazy.source.dtype is not torch.float32 or (single and factor.dtype is not torch.float32):
            return None
        lazy.source.scale_(known)
    return lazy


_SHORT: dict[Any, Callable[..., Tensor | None]] = {torch.linalg.vector_norm: _norm, Tensor.mul_: _scaled}
