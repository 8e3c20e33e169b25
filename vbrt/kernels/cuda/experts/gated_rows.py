"""Gates of rows that other kernels wrote per pair, as one launch.

Legend: P pairs, N columns of a matrix.
"""

import functools

import torch
from torch import Tensor

from vbrt.kernels.cuda import devices
from vbrt.kernels.cuda.launcher import Launcher
from vbrt.kernels.experts import Gate

__all__ = ["gated_rows"]

_WARPS, _SPAN = 4, 512  # columns of a program


@functools.cache
def _kernel(dependent: bool) -> Launcher:
    from vbrt.kernels.cuda.experts import gated_rows_gluon as device

    return Launcher(device.gate_kernel, dependent=dependent)


def gated_rows(v_PN: Tensor, gate: Gate, dtype: torch.dtype) -> Tensor:
    """Return g(v), [P, N] or, gated, [P, N / 2], in `dtype`; v is contiguous. See `kernels.experts.apply_gate`."""
    (pairs, n), device = v_PN.shape, v_PN.device.index
    columns = n // 2 if gate.gated else n
    y_PN = v_PN.new_empty(pairs, columns, dtype=dtype)
    if not y_PN.numel():
        return y_PN
    dependent = devices.launches_dependents(device)
    _kernel(dependent)(
        device,
        (pairs, -(-columns // _SPAN)),
        (v_PN, y_PN),
        (n,),
        warps=_WARPS,
        specialized=(v_PN.dtype, dtype),
        GATING="none" if not gate.gated else "interleaved" if gate.interleaved else "halves",
        FUNCTION=gate.function,
        ALPHA=gate.alpha if gate.gated else 1.0,
        LIMIT=gate.limit,
        SHIFT=gate.shift,
        WARPS=_WARPS,
        SPAN=_SPAN,
        DEPENDENT=dependent,
    )
    return y_PN
