"""Batch-invariant attention for decode steps: its bits depend on query, keys and mask only.

    with steady_attention():
        model(...)     # masked attention of few queries is `kernels.step.attended`: a separate reduction per query

Library kernels choose the reduction order by the number of queries, sequences and heads, and by memory layout. So a
token's bits would differ between verification and a plain step, or between batch sizes.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from vbrt.host import accelerator
from vbrt.kernels.cuda import devices
from vbrt.kernels.cuda.step_ops import MOST_QUERIES, NEEDS
from vbrt.kernels.operator_trace import recorder
from vbrt.kernels.step import attended

__all__ = ["MOST_COLUMNS", "is_steady_on", "steady_attention"]

MOST_COLUMNS = 256  # head dimension
_MOST_ROWS = 65535  # grid size limit of CUDA (y and z)


def is_steady_on(device: torch.device) -> bool:
    """True if the kernel runs on the device."""
    return device.type == accelerator.CUDA and devices.refusal(device, NEEDS) is None


@contextlib.contextmanager
def steady_attention(*, wanted: bool = True) -> Iterator[None]:
    """Route scaled_dot_product_attention in the block to `attended` where it is eligible; `wanted`: False: a no-op."""
    with _Steady() if wanted else contextlib.nullcontext():
        yield


class _Steady(TorchFunctionMode):
    """Overrides scaled_dot_product_attention by `attended`."""

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
    """Return equivalent arguments of `attended`; None if the call is not eligible."""
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
    )  # counted without GQA: whether K and V come repeated must not change the kernel
    return fits and heads % groups == 0 and heads // groups <= MOST_QUERIES


def _is_mask(mask: Tensor | None, batch: int, queries: int, length: int) -> bool:
    """True for a bool mask [B or 1, 1, S or 1, L], or for no mask with one query."""
    if mask is None:
        return queries == 1
    if mask.dim() != 4 or mask.shape[0] not in (1, batch) or mask.shape[2] not in (1, queries):
        return False
    return mask.shape[1] == 1 and mask.shape[3] == length and mask.dtype is torch.bool and mask.stride(-1) == 1
