"""What stands beside a linear layer: the ops "norm_linear" and "gated_linear".

    norm_linear(x, planes, Norm("rms", gain), bias, "none")      activation(norm(x) @ w.T + bias)
    gated_linear(x, gate, up, norm, "silu")                      activation(norm(x) @ gate.T) * (norm(x) @ up.T)

On weights in tile order the norm is a short kernel, while which the linear layer's first weights are loaded, and for up
to `MAX_TOKENS` bf16 tokens the gated pair is one kernel. Otherwise, and for gradients, they are the norm, the linear
layers and the product one after the other; in compiled graphs the norm is the compiler's.

Legend: M tokens, N outputs, K inputs.
"""

import functools
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vbrt.errors import KernelError
from vbrt.formats import WeightPlanes
from vbrt.kernels import reference
from vbrt.kernels.cuda.e2m1 import linear as fp4_linear
from vbrt.kernels.cuda.e2m1.launch_table import Launch
from vbrt.kernels.cuda.e2m1.tiles import TILES
from vbrt.kernels.cuda.launcher import Launcher, alignment, cuda_op
from vbrt.kernels.cuda.table import linear as table_linear

__all__ = [
    "MAX_ROW",
    "MAX_TOKENS",
    "Norm",
    "gated_linear",
    "gated_reference",
    "gates_in_one",
    "norm_linear",
    "norm_reference",
    "normed_sum",
]

MAX_TOKENS = 16  # two groups of 8
_KINDS = ("rms", "layer")
MAX_ROW = 32768  # activations that the norm keeps in registers


@dataclass(frozen=True, slots=True)
class Norm:
    """A norm over the last dimension: x / sqrt(mean x² + eps) * gain, or for "layer" (x - mean) / std * gain + shift.

    Raises KernelError for another kind, or a shift without "layer".
    """

    kind: Literal["rms", "layer"]
    gain: Tensor | None = None
    shift: Tensor | None = None
    eps: float = 1e-5

    def __post_init__(self) -> None:
        if self.kind not in _KINDS:
            raise KernelError(f"norm {self.kind!r}; expected one of {', '.join(_KINDS)}")
        if self.kind == "rms" and self.shift is not None:
            raise KernelError("norm 'rms' has no shift; expected shift = None")

    def __call__(self, x: Tensor) -> Tensor:
        """norm(x), by torch."""
        if self.kind == "rms":
            return F.rms_norm(x, x.shape[-1:], self.gain, self.eps)
        return F.layer_norm(x, x.shape[-1:], self.gain, self.shift, self.eps)


def norm_reference(
    x: Tensor, planes: WeightPlanes, norm: Norm, bias: Tensor | None = None, activation: str = "none"
) -> Tensor:
    """`norm_linear` in plain torch."""
    return reference.linear(norm(x), planes, bias, activation)


def gated_reference(
    x: Tensor, gate: WeightPlanes, up: WeightPlanes, norm: Norm | None = None, activation: str = "silu"
) -> Tensor:
    """`gated_linear` in plain torch."""
    x = x if norm is None else norm(x)
    return reference.linear(x, gate, None, activation) * reference.linear(x, up)


def norm_linear(
    x: Tensor, planes: WeightPlanes, norm: Norm, bias: Tensor | None = None, activation: str = "none"
) -> Tensor:
    """activation(norm(x) @ w.T + bias): [..., K] to [..., N], in x's dtype.

    Raises KernelError for an activation that the reference does not know, or an x whose last dimension is not K.
    """
    reference.check(x, planes, activation)
    return _linear(_normed(x, planes, norm), planes, bias, activation)


def gated_linear(
    x: Tensor, gate: WeightPlanes, up: WeightPlanes, norm: Norm | None = None, activation: str = "silu"
) -> Tensor:
    """activation(norm(x) @ gate.T) * (norm(x) @ up.T): [..., K] to [..., N], in x's dtype.

    Raises KernelError for an activation that the reference does not know, an x whose last dimension is not K, or
    weights of two shapes.
    """
    reference.check(x, gate, activation)
    if gate.shape != up.shape:
        raise KernelError(f"gated_linear: weights {gate.shape} and {up.shape}; expected one shape")
    x = x if norm is None else _normed(x, gate, norm)
    if gate.format != up.format or not _fuses(x, gate, up):
        return _linear(x, gate, None, activation) * _linear(x, up)
    gated = _gated_op if torch.compiler.is_compiling() else _gated
    tensors = (gate.coarse[TILES], gate.coarse["tensor_scale"], up.coarse[TILES], up.coarse["tensor_scale"])
    return gated(x, *tensors, gate.format, *gate.shape, activation)


def _linear(x: Tensor, planes: WeightPlanes, bias: Tensor | None = None, activation: str = "none") -> Tensor:
    own = table_linear if planes.format in table_linear.FORMATS else fp4_linear
    return own.linear(x, planes, bias, activation)


def gates_in_one(dtype: torch.dtype, tokens: int, n: int, k: int) -> bool:
    """Whether one launch serves a gated pair of two weights (N, K) on x of this dtype, and is the fastest."""
    if n < k:  # few rows, each long: two launches were faster (14336 -> 4096 on an H200: by 6 to 15 %)
        return False
    return dtype is torch.bfloat16 and 0 < tokens <= MAX_TOKENS and k % 8 == 0


def _fuses(x: Tensor, gate: WeightPlanes, up: WeightPlanes) -> bool:
    few = gates_in_one(x.dtype, x.numel() // x.shape[-1], *gate.shape)
    return few and not reference.wants_grad(x, None) and all(fp4_linear.route(x, p) == "fused" for p in (gate, up))


@functools.cache
def _launchers(early: bool) -> tuple[Launcher, ...]:
    from vbrt.kernels.cuda.e2m1 import fused_gluon

    return tuple(Launcher(k, dependent=early) for k in (fused_gluon.gated_kernel, fused_gluon.norm_kernel))


def _norms(x: Tensor, planes: WeightPlanes, norm: Norm) -> bool:
    """Whether the kernel of the norm serves: before a fused linear layer, which can start beside it."""
    vectors = [t for t in (norm.gain, norm.shift) if t is not None]
    if torch.compiler.is_compiling() or any(not t.is_contiguous() for t in vectors):
        return False
    if torch.is_grad_enabled() and any(t.requires_grad for t in (x, *vectors)):
        return False
    few = x.dtype is torch.bfloat16 and 0 < x.shape[-1] <= MAX_ROW and x.numel() > 0
    return few and fp4_linear.route(x, planes) == "fused"


def _normed(x: Tensor, planes: WeightPlanes, norm: Norm) -> Tensor:
    if not _norms(x, planes, norm):
        return norm(x)
    return _launch_norm(x, None, norm)


def _launch_norm(x: Tensor, other: Tensor | None, norm: Norm) -> Tensor | tuple[Tensor, Tensor]:
    """norm(x), or x + other and its norm."""
    k = x.shape[-1]
    x_MK, other_MK = _rows(x, k), None if other is None else _rows(other, k)
    y_MK, device = torch.empty(x_MK.shape, dtype=x.dtype, device=x.device), x.device.index
    sum_MK = None if other is None else torch.empty_like(y_MK)
    early = fp4_linear.starts_early(device)
    given = (other_MK, norm.gain, norm.shift, sum_MK)
    tensors = (x_MK, *(x_MK if t is None else t for t in given), y_MK)
    block = max(512, 1 << (k - 1).bit_length())
    warps = min(16, block // 512)
    constants = (
        block, warps, norm.kind == "layer", norm.gain is not None, norm.shift is not None, other is not None, early,
    )  # fmt: skip
    numbers = (float(norm.eps), k, x_MK.stride(0), tensors[1].stride(0))
    key = (device, numbers[1:], tuple(t.dtype for t in tensors), alignment(*tensors), constants)
    _launchers(early)[1](key, device, (x_MK.shape[0], 1), tensors, numbers, constants, warps)
    y = y_MK.view(x.shape)
    return y if sum_MK is None else (sum_MK.view(x.shape), y)


def _rows(x: Tensor, k: int) -> Tensor:
    """[M, K] whose rows are contiguous."""
    x_MK = x.reshape(-1, k)
    return x_MK if x_MK.stride(1) == 1 else x_MK.contiguous()


def normed_sum(x: Tensor, other: Tensor, gain: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(x + other, its RMS norm times gain), bf16 [..., K] each, K up to 32768; for graphs, see `join`."""
    return _launch_norm(x, other, Norm("rms", gain, None, eps))


class Rule(NamedTuple):
    """Holds up to `tokens` tokens and `row_tiles` tiles of 16 rows (None: any)."""

    tokens: int
    row_tiles: int | None
    launch: Launch


#: the first that holds applies; measured on sm_90 (H200)
_RULES = (
    Rule(8, 264, Launch(2, 16, True)),
    Rule(8, 480, Launch(1, 8, True)),
    Rule(8, 512, Launch(2, 8, True)),  # two programs a multiprocessor; with 384 row tiles 20 % slower
    Rule(8, 924, Launch(1, 4, True)),
    Rule(8, 1320, Launch(2, 4, False)),  # up to here all programs stand beside each other, as up to 924
    Rule(8, None, Launch(1, 4, True)),
    Rule(16, 264, Launch(1, 8, True)),
    Rule(16, 480, Launch(1, 8, False)),
    Rule(16, 512, Launch(2, 8, False)),
    Rule(16, 792, Launch(1, 8, False)),
    Rule(16, 1056, Launch(2, 4, False)),  # as here
    Rule(16, 1188, Launch(1, 8, False)),
    Rule(16, None, Launch(2, 4, False)),
)


def launch_for(tokens: int, row_tiles: int) -> Launch:
    """The gated kernel's configuration for up to `MAX_TOKENS` tokens."""
    return next(r.launch for r in _RULES if tokens <= r.tokens and (r.row_tiles is None or row_tiles <= r.row_tiles))


def _gated(
    x: Tensor, tiles: Tensor, scale: Tensor | None, other: Tensor, other_scale: Tensor | None, format: str, n: int,
    k: int, activation: str, squares: Tensor | None = None, eps: float = 0.0,
) -> Tensor:  # fmt: skip
    """With squares, x is what `fp4_linear.residual` gives beside them, and is divided by its root of mean squares."""
    if squares is not None:
        fp4_linear.check_one_token(x, k, multiple=8)
    tiles, scale = fp4_linear.apart(tiles, scale, format, n, k)
    other, other_scale = fp4_linear.apart(other, other_scale, format, n, k)
    x_MK = x.reshape(-1, k)
    tokens = x_MK.shape[0]
    if not fp4_linear.rows_are_aligned(x_MK):
        x_MK = x_MK.clone(memory_format=torch.contiguous_format)
    y = torch.empty(tokens, n, dtype=x.dtype, device=x.device)
    row_tiles, columns, _ = tiles.shape
    groups = 1 if tokens <= 8 else 2
    launch, device = launch_for(tokens, row_tiles), tiles.device.index
    early = fp4_linear.starts_early(device)
    tensors = (x_MK, tiles, scale, other, other_scale, x_MK if squares is None else squares, y)
    constants = (
        launch.R, groups, launch.WK, launch.PREFETCH, format == "mxfp4", tokens == 16, k % 128 != 0,
        activation, 0 if squares is None else fp4_linear.block_of_squares(k), early,
    )  # fmt: skip
    numbers = (tokens, n, k, columns, x_MK.stride(0), n, float(eps))
    key = (device, n, k, x_MK.stride(0), alignment(*tensors), constants)
    _launchers(early)[0](key, device, (-(-row_tiles // launch.R), 1), tensors, numbers, constants, launch.WK)
    return y.view(*x.shape[:-1], n)


_sum_op = cuda_op(
    "normed_sum",
    normed_sum,
    "(Tensor x, Tensor other, Tensor gain, float eps) -> (Tensor, Tensor)",
    lambda x, other, gain, eps: (x.new_empty(x.shape), x.new_empty(x.shape)),
)
_gated_op = cuda_op(
    "fp4_gated",
    _gated,
    "(Tensor x, Tensor tiles, Tensor? scale, Tensor other, Tensor? other_scale, str format, SymInt n, SymInt k, "
    "str activation, Tensor? squares=None, float eps=0.) -> Tensor",
    lambda x, tiles, scale, other, other_scale, format, n, k, activation, squares=None, eps=0.0: x.new_empty(
        *x.shape[:-1], n
    ),
)
