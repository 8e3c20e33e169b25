"""Error feedback (GPTQ): codes that compensate each other's rounding errors, under given block scales.

Columns are rounded in order, and each column's error is distributed to later ones by the correlation of their inputs:
Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers" (2022), with the
Cholesky factor of the inverse of the inputs' second moments. Columns form independent groups, so that a layer's moments
take as much memory as `GROUP` rows of its weight in fp32, and all groups run in parallel. A group's row keeps its
nearest codes if they have the smaller output error.

Legend: N rows, K columns, G groups of C columns, b weights per block, T tokens.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from vbrt.formats.block_formats import BlockFormat
from vbrt.formats.format import Format
from vbrt.formats.rounding import Grid

__all__ = ["GROUP", "Inputs", "compensated", "group_factors", "moments_of"]

GROUP = 256
#: damping, times the mean diagonal: with few tokens, correlations are unreliable
_DAMPING = 0.3
_STEP = 16  # columns whose errors are propagated by one matmul
#: weights per chunk: six fp32 temporaries of them
_WEIGHTS = {"cpu": 1 << 22, "gpu": 1 << 24}


@dataclass(slots=True, eq=False)
class Inputs:
    """Input statistics of a parameter's matrices, on the CPU.

    Attributes:
        squares: mean squares, fp32 [matrices, K], about 1.
        moments: from `moments_of`. Large, so dropped (None) once the weight is encoded: a weight assigned later has its
            scales searched with the squares alone.
    """

    squares: Tensor
    moments: Tensor | None = None


def moments_of(x_TK: Tensor) -> Tensor:
    """Return the sums of outer products of inputs within each group, fp32 [G, C, C]; columns beyond K are zero."""
    k = x_TK.shape[1]
    group = min(GROUP, k)
    x_GTC = F.pad(x_TK.float(), (0, -k % group)).view(len(x_TK), -(-k // group), group).transpose(0, 1)
    with torch.autocast(x_GTC.device.type, enabled=False):
        return x_GTC.mT @ x_GTC


@torch.no_grad()
def compensated(format: Format, w_NK: Tensor, coarse: dict[str, Tensor], moments_GCC: Tensor) -> dict[str, Tensor]:
    """Return a coarse plane with the scales of another and less error of the layer's output.

    Args:
        coarse: from `format.encode`.
        moments_GCC: from `moments_of`, summed over the layer's inputs, in any unit.
    """
    moments_GCC = moments_GCC.to(w_NK.device)
    if format.with_feedback is not None:
        return format.with_feedback(w_NK, coarse, moments_GCC)
    moments_GCC = moments_GCC / moments_GCC.diagonal(dim1=1, dim2=2).mean(1).clamp(min=1e-30).view(-1, 1, 1)
    turns = _Turns(moments_GCC, format._grid(coarse), format)
    scale_NB, rows = format._scales(coarse), max(1, _WEIGHTS["cpu" if w_NK.is_cpu else "gpu"] // w_NK.shape[1])
    parts = zip(w_NK.split(rows), scale_NB.split(rows), strict=True)
    with torch.autocast(w_NK.device.type, enabled=False):  # encoding may happen in a first forward
        return {**coarse, "codes": torch.cat([turns.codes(w_RK, scale_RB) for w_RK, scale_RB in parts])}


def group_factors(moments_GCC: Tensor) -> Tensor:
    """Upper Cholesky factors of the inverses of damped moments, whose diagonals have a mean of 1: fp64 [G, C, C]."""
    eye = torch.eye(moments_GCC.shape[1], dtype=torch.float64, device=moments_GCC.device)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(moments_GCC.double() + _DAMPING * eye))
    return torch.linalg.cholesky(inverse, upper=True)


class _Turns:
    """Rounds the columns of each group in order, with damped moments."""

    def __init__(self, moments_GCC: Tensor, grid: Grid, format: BlockFormat) -> None:
        self._moments, self._grid, self._format = moments_GCC, grid, format
        upper = group_factors(moments_GCC)
        self._factors = (upper / upper.diagonal(dim1=1, dim2=2).unsqueeze(2)).float()

    def codes(self, w_NK: Tensor, scale_NB: Tensor) -> Tensor:
        """Return the codes of a weight under block scales, packed."""
        (n, k), (groups, group, _) = w_NK.shape, self._moments.shape
        w_GCN = F.pad(w_NK.float(), (0, groups * group - k)).t().contiguous().view(groups, group, n)
        scale_KN = scale_NB.t().repeat_interleave(self._format.block, 0)[: groups * group]
        scale_GCN = F.pad(scale_KN, (0, 0, 0, groups * group - len(scale_KN))).view_as(w_GCN)
        divisor_GCN = scale_GCN.masked_fill(scale_GCN == 0, 2.0**-126)
        nearest_GCN = self._grid.nearest(w_GCN / divisor_GCN)
        level_GCN = self._in_turn(w_GCN.clone(), scale_GCN, divisor_GCN)
        losses = (self._loss(w_GCN - level * scale_GCN) for level in (level_GCN, nearest_GCN))
        better_GN = torch.lt(*losses)
        code_GCN = self._grid.codes(torch.where(better_GN.unsqueeze(1), level_GCN, nearest_GCN))
        code_NK = F.pad(code_GCN.reshape(-1, n)[:k].t(), (0, scale_NB.shape[1] * self._format.block - k))
        return self._format.pack_codes(code_NK.reshape(-1, self._format.block).t()).view(n, -1)

    def _in_turn(self, w_GCN: Tensor, scale_GCN: Tensor, divisor_GCN: Tensor) -> Tensor:
        """Return the level of each weight; w_GCN is overwritten."""
        level_GCN = torch.empty_like(w_GCN)
        for first in range(0, w_GCN.shape[1], _STEP):
            last = min(first + _STEP, w_GCN.shape[1])
            lost_GSN = torch.empty_like(w_GCN[:, first:last])
            for at in range(first, last):
                w_GN = w_GCN[:, at]
                level_GN = self._grid.nearest(w_GN / divisor_GCN[:, at])
                level_GCN[:, at] = level_GN
                lost_GN = torch.sub(w_GN, level_GN * scale_GCN[:, at], out=lost_GSN[:, at - first])
                w_GCN[:, at + 1 : last] -= self._factors[:, at, at + 1 : last, None] * lost_GN.unsqueeze(1)
            w_GCN[:, last:] -= self._factors[:, first:last, last:].mT @ lost_GSN
        return level_GCN

    def _loss(self, error_GCN: Tensor) -> Tensor:
        """Return the output error caused by a weight error, [G, N]."""
        return ((self._moments @ error_GCN).mul_(error_GCN)).sum(1)
