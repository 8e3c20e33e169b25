"""Two things that stand beside a linear layer, in its launch: the ops "norm_linear" and "gated_linear".

    norm_linear(x, planes, Norm("rms", gain), bias, "none")      activation(norm(x) @ w.T + bias)
    gated_linear(x, gate, up, norm, "silu")                      activation(norm(x) @ gate.T) * (norm(x) @ up.T)

For up to `MAX_TOKENS` bf16 tokens on weights in tile order they are one kernel: decoding a token is bound by memory and
launches, and the statistics of the norm are gathered while the weights stream by. Otherwise, and for gradients, they
are the norm, the linear layers and the product one after the other.

Legend: M tokens, N outputs, K inputs.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vbrt.errors import KernelError
from vbrt.formats import WeightPlanes
from vbrt.kernels import fp4_linear, reference, table_linear
from vbrt.kernels.fp4_tiles import TILES

__all__ = ["MAX_TOKENS", "Norm", "folded", "gated_linear", "gated_reference", "norm_linear", "norm_reference"]

#: two groups of 8 tokens; beyond that the separate norm costs less than gathering its statistics in each program
MAX_TOKENS = 16
_KINDS = ("rms", "layer")


@dataclass(frozen=True, slots=True)
class Norm:
    """A norm over the last dimension: x / sqrt(mean x² + eps) * gain, or for "layer" (x - mean) / std * gain + shift.

    columns: what `folded` keeps of the weights that follow.
    Raises KernelError for another kind, or a shift without "layer".
    """

    kind: Literal["rms", "layer"]
    gain: Tensor | None = None
    shift: Tensor | None = None
    eps: float = 1e-5
    columns: Tensor | None = None

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


@torch.no_grad()
def folded(norm: Norm, *weights: WeightPlanes) -> Norm:
    """The norm with fp32 [2 * weights, N] of what its gain and shift become behind these weights, one or the two of
    `gated_linear`: done once, it makes each fused layer norm cheaper. Valid for these weights, gain and shift only."""
    if norm.kind == "rms":
        return norm
    columns = []
    for planes in weights:
        w_NK = _decoded(replace(planes, dtype=torch.float32))
        k, device = planes.shape[1], w_NK.device
        for vector, value in ((norm.gain, 1.0), (norm.shift, 0.0)):
            columns.append(w_NK @ (torch.full((k,), value, device=device) if vector is None else vector.float()))
    return replace(norm, columns=torch.stack(columns))


def _decoded(planes: WeightPlanes) -> Tensor:
    return (table_linear if planes.format in table_linear.FORMATS else fp4_linear).decode_weight(planes)


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
    if not _fuses(x, (planes,), norm, bias):
        return _linear(norm(x), planes, bias, activation)
    return _run(x, planes, None, norm, bias, activation)


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
    if gate.format != up.format or not _fuses(x, (gate, up), norm, None):
        x = x if norm is None else norm(x)
        return _linear(x, gate, None, activation) * _linear(x, up)
    return _run(x, gate, up, norm, None, activation)


def _linear(x: Tensor, planes: WeightPlanes, bias: Tensor | None = None, activation: str = "none") -> Tensor:
    own = table_linear if planes.format in table_linear.FORMATS else fp4_linear
    return own.linear(x, planes, bias, activation)


def _fuses(x: Tensor, weights: tuple[WeightPlanes, ...], norm: Norm | None, bias: Tensor | None) -> bool:
    k = x.shape[-1]
    few = x.dtype is torch.bfloat16 and 0 < x.numel() <= MAX_TOKENS * k and k % 8 == 0
    if not few or any(fp4_linear.route(x, planes) != "fused" for planes in weights):
        return False
    tiles = weights[0].coarse[TILES]
    kind = _kind(norm.kind, norm.columns) if norm else "none"
    if norm and norm.columns is not None and norm.columns.shape != (2 * len(weights), weights[0].shape[0]):
        raise KernelError(f"norm columns {tuple(norm.columns.shape)}; expected what folded(norm, *weights) returns")
    if launch_for(kind, len(weights) == 2, x.numel() // k, tiles.shape[0]) is None:
        return False
    vectors = [t for t in ((norm.gain, norm.shift) if norm else ()) if t is not None]
    if any(t.dtype is not torch.bfloat16 or not t.is_contiguous() for t in vectors):
        return False
    return not (torch.is_grad_enabled() and any(t.requires_grad for t in (x, bias, *vectors) if t is not None))


def _run(
    x: Tensor, planes: WeightPlanes, other: WeightPlanes | None, norm: Norm | None, bias: Tensor | None, activation: str
) -> Tensor:
    second = (None, None) if other is None else (other.coarse[TILES], other.coarse["tensor_scale"])
    vectors = (None, None, None) if norm is None else (norm.gain, norm.shift, norm.columns)
    kind, eps = ("none", 0.0) if norm is None else (norm.kind, norm.eps)
    fused = _fused_op if torch.compiler.is_compiling() else _fused
    return fused(
        x, planes.coarse[TILES], planes.coarse["tensor_scale"], *second, *vectors, bias,
        kind, eps, planes.format, *planes.shape, activation,
    )  # fmt: skip


@functools.cache
def _kernels() -> Any:
    from vbrt.kernels import fused_gluon  # compiles nothing, but needs Triton

    return fused_gluon


@functools.cache
def _constant(value: float, k: int, device: torch.device) -> Tensor:
    return torch.full((k,), value, dtype=torch.bfloat16, device=device)


class Launch(NamedTuple):
    """R row tiles a program, WK warps that split K, PREFETCH: the next tiles are read before these are used."""

    R: int
    WK: int
    PREFETCH: bool


class Rule(NamedTuple):
    """Holds up to `tokens` tokens, `row_tiles` tiles of 16 rows (None: any). No launch: the separate ones are
    faster."""

    tokens: int
    row_tiles: int | None
    launch: Launch | None


#: (norm, whether gated) -> rules, the first that holds applies; measured on sm_90 (H200) against the separate launches
_RULES: dict[tuple[str, bool], tuple[Rule, ...]] = {
    ("rms", False): (
        Rule(8, 320, Launch(1, 16, True)),
        Rule(8, 512, Launch(1, 8, True)),
        Rule(8, 1280, Launch(2, 4, True)),
        Rule(8, None, Launch(4, 4, False)),
        Rule(16, 320, Launch(1, 8, False)),
        Rule(16, 512, Launch(2, 8, False)),
        Rule(16, 1280, Launch(2, 4, False)),
        Rule(16, None, None),
    ),
    ("layer", False): (
        Rule(8, None, Launch(2, 8, False)),
        Rule(16, 320, Launch(2, 8, False)),
        Rule(16, 512, Launch(1, 4, True)),
        Rule(16, None, None),
    ),
    ("folded", False): (
        Rule(8, 512, Launch(1, 8, True)),
        Rule(8, 1280, Launch(2, 4, True)),
        Rule(8, None, Launch(4, 4, False)),
        Rule(16, 512, Launch(2, 8, False)),
        Rule(16, 1280, Launch(4, 4, False)),
        Rule(16, None, None),
    ),
    ("none", True): (
        Rule(8, 512, Launch(1, 8, True)),
        Rule(8, None, Launch(1, 4, True)),
        Rule(16, 512, Launch(1, 8, False)),
        Rule(16, None, Launch(2, 4, False)),
    ),
    ("rms", True): (
        Rule(8, 320, Launch(1, 8, True)),
        Rule(8, 512, Launch(1, 8, False)),
        Rule(8, 1280, Launch(2, 4, False)),
        Rule(8, None, Launch(2, 8, False)),
        Rule(16, 320, Launch(1, 8, True)),
        Rule(16, 1280, Launch(1, 4, True)),
        Rule(16, None, None),
    ),
    ("layer", True): (Rule(16, 512, Launch(1, 8, False)), Rule(16, None, None)),
}
_RULES["folded", True] = _RULES["rms", True]  # not timed: it does hardly more


def _kind(norm: str, columns: Tensor | None) -> str:
    """The norm, as the rules name it."""
    return "folded" if columns is not None else norm


def launch_for(norm: str, gated: bool, tokens: int, row_tiles: int) -> Launch | None:
    """The configuration for up to `MAX_TOKENS` tokens, or None where separate launches are faster."""
    for rule in _RULES[norm, gated]:
        if tokens <= rule.tokens and (rule.row_tiles is None or row_tiles <= rule.row_tiles):
            return rule.launch
    return None


def _fused(
    x: Tensor, tiles: Tensor, scale: Tensor, other: Tensor | None, other_scale: Tensor | None, gain: Tensor | None,
    shift: Tensor | None, columns: Tensor | None, bias: Tensor | None, norm: str, eps: float, format: str,
    n: int, k: int, activation: str,
) -> Tensor:  # fmt: skip
    x_MK = x.reshape(-1, k)
    tokens = x_MK.shape[0]
    if not fp4_linear.rows_are_aligned(x_MK):
        x_MK = x_MK.clone(memory_format=torch.contiguous_format)
    if norm == "layer":
        gain = _constant(1.0, k, x.device) if gain is None else gain
        shift = _constant(0.0, k, x.device) if shift is None else shift
    y = torch.empty(tokens, n, dtype=x.dtype, device=x.device)
    row_tiles, column_tiles, _ = tiles.shape
    groups = 1 if tokens <= 8 else 2
    launch = launch_for(_kind(norm, columns), other is not None, tokens, row_tiles) or Launch(2, 8, False)
    unused = x_MK
    with torch.cuda.device(tiles.device):
        _kernels().fused_kernel[(-(-row_tiles // launch.R),)](
            x_MK, tiles, scale, unused if other is None else other, unused if other is None else other_scale,
            unused if gain is None else gain, unused if shift is None else shift,
            unused if columns is None else columns,
            unused if bias is None else bias.contiguous(), y,
            eps, tokens, n, k, column_tiles, x_MK.stride(0), y.stride(0),
            R=launch.R, NT=groups, WK=launch.WK, PREFETCH=launch.PREFETCH, E8=format == "mxfp4",
            FULL=tokens == 8 * groups, TAIL=k % 128 != 0, ACTIVATION=activation, BIAS=bias is not None,
            GATED=other is not None, NORM=norm, GAIN=gain is not None, FOLDED=columns is not None, num_warps=launch.WK,
        )  # fmt: skip
    return y.view(*x.shape[:-1], n)


def _register_op() -> Callable[..., Tensor]:
    fused = torch.library.custom_op(
        "vbrt::fp4_fused",
        _fused,
        mutates_args=(),
        device_types="cuda",
        schema="(Tensor x, Tensor tiles, Tensor scale, Tensor? other, Tensor? other_scale, Tensor? gain, Tensor? shift,"
        " Tensor? columns, Tensor? bias, str norm, float eps, str format, SymInt n, SymInt k, str activation)"
        " -> Tensor",
    )

    @fused.register_fake
    def _(x, tiles, scale, other, other_scale, gain, shift, columns, bias, norm, eps, format, n, k, activation):
        return x.new_empty(*x.shape[:-1], n)

    return fused


_fused_op = _register_op()
