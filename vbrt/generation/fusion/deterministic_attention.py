"""Attention of decode steps whose bits depend on its query, keys and mask only.

    with steady_attention():
        model(...)     # attention of few queries to masked keys is `kernels.step.attended`, each query summed by itself

Kernels of libraries choose how to sum by how many queries, sequences and heads there are, and where these lie in
memory. So one token would have other bits in a verification than in a step, in another batch, or beside other work.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from vbrt.kernels.cuda import devices
from vbrt.kernels.cuda.step_ops import MOST_QUERIES
from vbrt.kernels.operator_trace import recorder
from vbrt.kernels.step import attended

__all__ = ["MOST_COLUMNS", "is_steady_on", "steady_attention"]

MOST_COLUMNS = 256  # of a head
_MOST_ROWS = 65535  # of a grid


def is_steady_on(device: torch.device) -> bool:
    """True if a device has the kernel."""
    return device.type == "cuda" and devices.available() and devices.major(device.index or 0) >= devices.MIN_MAJOR


@contextlib.contextmanager
def steady_attention(*, wanted: bool = True) -> Iterator[None]:
    """Have torch's attention in the block computed by `attended`, where that takes it; `wanted`: False: by torch."""
    with _Steady() if wanted else contextlib.nullcontext():
        yield


class _Steady(TorchFunctionMode):
    """Puts `attended` in the place of torch's attention."""

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        call = _taken(*args, **(kwargs or {})) if func is F.scaled_dot_product_attention else None
        if call is None:
            return func(*args, **(kwargs or {}))
        step = recorder()
        return attended(*call) if step is None else step.leaf(attended, *call)


def _taken(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **others: Any,
) -> tuple | None:
    """Return the arguments of `attended` that say the same; None if it does not take them."""
    if dropout_p or is_causal or torch.is_grad_enabled() or not is_steady_on(query.device):
        return None
    if query.dim() != 4 or key.shape != value.shape or not _alike(query, key, value) or not _shares(query, key):
        return None
    if not _is_mask(attn_mask, query.shape[0], query.shape[2], key.shape[2]):
        return None
    scale = others.get("scale")
    return query, key, value, attn_mask, query.shape[-1] ** -0.5 if scale is None else scale, True


def _alike(*tensors: Tensor) -> bool:
    return len({t.dtype for t in tensors}) == 1 and all(
        t.stride(-1) == 1 and t.shape[-1] <= MOST_COLUMNS for t in tensors
    )


def _shares(query: Tensor, key: Tensor) -> bool:
    heads, groups = query.shape[1], key.shape[1]
    fits = (
        query.shape[:3].numel() <= _MOST_ROWS
    )  # counted as if no head shared its keys: copies of these change nothing
    return fits and heads % groups == 0 and heads // groups <= MOST_QUERIES


def _is_mask(mask: Tensor | None, batch: int, queries: int, length: int) -> bool:
    """True for a mask [B or 1, 1, S or 1, L] of what is attended to, or none for one query."""
    if mask is None:
        return queries == 1
    if mask.dim() != 4 or mask.shape[0] not in (1, batch) or mask.shape[2] not in (1, queries):
        return False
    return mask.shape[1] == 1 and mask.shape[3] == length and mask.dtype is torch.bool and mask.stride(-1) == 1
