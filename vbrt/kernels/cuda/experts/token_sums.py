"""Weighted sums over each token's experts, of rows that other kernels wrote per pair.

Legend: T tokens, k experts per token, P = T k pairs, H columns.
"""

import functools

import torch
from torch import Tensor

from vbrt.kernels.cuda import devices
from vbrt.kernels.cuda.launcher import Launcher

__all__ = ["NEEDS", "weighted_sums"]

NEEDS = devices.PTX
_WARPS, _LANE_BYTES = 4, 16


@functools.cache
def _kernel(dependent: bool) -> Launcher:
    from vbrt.kernels.cuda.experts import token_sums_gluon as device

    return Launcher(device.sum_kernel, dependent=dependent)


def weighted_sums(
    rows_PH: Tensor, ids_Tk: Tensor, weights_Tk: Tensor, experts: int, dtype: torch.dtype | None = None
) -> Tensor:
    """Return the sum over each token's experts, [T, H] in `dtype` or the rows', in fp32, in the ids' order."""
    (tokens, k), n, device = ids_Tk.shape, rows_PH.shape[1], rows_PH.device.index
    y_TH = rows_PH.new_empty(tokens, n, dtype=dtype)
    if y_TH.numel() == 0:
        return y_TH
    ids, weights, dependent = ids_Tk.contiguous(), weights_Tk.contiguous(), devices.launches_dependents(device)
    span = 32 * _WARPS * _LANE_BYTES // rows_PH.element_size()
    _kernel(dependent)(
        device,
        (tokens, -(-n // span)),
        (rows_PH, ids, weights, y_TH),
        (experts, n),
        warps=_WARPS,
        specialized=(rows_PH.dtype, ids.dtype, weights.dtype, y_TH.dtype),
        K_EXPERTS=k,
        WARPS=_WARPS,
        SPAN=span,
        DEPENDENT=dependent,
    )
    return y_TH
