"""Lazy proxies of expert parameters, for readers that only pick one expert's matrix.

DBRX passes matrices from one module to another, which multiplies by them. An `Unread` is a proxy of the parameter, of
its stacked matrices, or of one of them, with shape, dtype and device but no storage. Any operation other than picking a
matrix gets the decoded weight.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from vbrt.layers.experts.expert_stack import FACTS
from vbrt.libraries.torch_api import DisableTorchFunctionSubclass

if TYPE_CHECKING:
    from vbrt.layers.experts.experts_handle import ExpertsHandle

__all__ = ["Unread"]


class Unread(Tensor):
    """Proxy of an experts parameter, of its stacked matrices, or of one of them.

    Attributes:
        handle: of the experts.
        parameter: its name.
        expert: which matrix it is; None for all.
        read: the decoded parameter after the first full read; else None.
    """

    handle: "ExpertsHandle"
    parameter: str
    expert: int | None
    read: Tensor | None

    @classmethod
    def of(cls, handle: "ExpertsHandle", parameter: str, shape: Sequence[int], expert: int | None = None) -> "Unread":
        """Return the proxy of a parameter in a given shape, or of one of its matrices."""
        unread = torch.empty(1, dtype=handle.dtype, device=handle.device).expand(tuple(shape)).as_subclass(cls)
        unread.handle, unread.parameter, unread.expert, unread.read = handle, parameter, expert, None
        return unread

    def content(self) -> Tensor:
        """Return the decoded weight; of the whole parameter the temporary to which writes count."""
        handle = self.handle
        if self.expert is not None:
            with handle.lease([self.expert]) as leased:
                return leased.matrix(handle.spec.part_of(self.parameter), 0).clone()
        if self.read is None:
            self.read = handle.lend(self.parameter)
        site = handle.spec.site_of(self.parameter)
        return self.read if tuple(self.shape) == site.kept_shape else self.read.view(self.shape)

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        with DisableTorchFunctionSubclass():
            if func in FACTS:
                return func(*args)
            picked = _PICKS[func](*args) if func in _PICKS and not kwargs else None
            if picked is not None:
                return picked
            contents = [_content(value) for value in args]
        return func(*contents, **{name: _content(value) for name, value in (kwargs or {}).items()})


def _content(value: Any) -> Any:
    return value.content() if isinstance(value, Unread) else value


def _view(whole: Unread, *shape: Any) -> Unread | None:
    """The matrices of a whole parameter, stacked."""
    sizes = shape[0] if len(shape) == 1 and isinstance(shape[0], tuple | list) else shape
    site = whole.handle.spec.site_of(whole.parameter)
    stacked = (site.matrices, *site.matrix_shape)
    if whole.expert is None and tuple(sizes) in (stacked, (-1, *site.matrix_shape)):
        return Unread.of(whole.handle, whole.parameter, stacked)
    return None


def _item(stacked: Any, index: Any) -> Unread | None:
    """One of stacked matrices."""
    if not isinstance(stacked, Unread) or stacked.expert is not None or stacked.dim() != 3:
        return None
    one = type(index) is int or (type(index) is Tensor and index.dim() == 0 and index.dtype is torch.int64)
    expert = int(index) if one else -1
    if not 0 <= expert < len(stacked):
        return None
    return Unread.of(stacked.handle, stacked.parameter, stacked.shape[1:], expert)


_PICKS = {Tensor.view: _view, Tensor.__getitem__: _item}
