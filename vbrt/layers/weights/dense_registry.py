"""Registry of dense parameters by their memory, so that a layer finds the weight that already holds a parameter."""

import weakref
from typing import Any

import torch

from vbrt.libraries.torch_api import has_storage

__all__ = ["lie_together", "register_dense", "weight_at"]

_by_place: "weakref.WeakValueDictionary[tuple, Any]" = weakref.WeakValueDictionary()


def register_dense(dense: torch.Tensor, weight: Any) -> None:
    """Register the weight that holds a dense parameter."""
    _by_place[_place(dense)] = weight


def weight_at(dense: torch.Tensor) -> Any:
    """Return the weight that was registered last for this memory, while it lives; else None."""
    return _by_place.get(_place(dense))


def lie_together(one: torch.Tensor, other: torch.Tensor) -> bool:
    """True if two dense weights share memory."""
    return _place(one) == _place(other)


def _place(dense: torch.Tensor) -> tuple[object, ...]:
    """Key of a dense weight: its memory, or its id if it has none."""
    if dense.is_meta or not has_storage(dense) or not dense.numel():
        return (id(dense),)
    address = torch.Tensor.data_ptr(dense)  # not the temporary's own, which would count as handing its memory out
    return (dense.device, address, *dense.shape, *dense.stride(), dense.dtype)
