"""Fused launches: layers that share an input, a gated pair, a layer with a residual sum and its norm.

    siblings(x, weights)                  x @ w.T for up to three weights
    gated(x, gate, up, "silu")            activation(x @ gate.T) * (x @ up.T)
    residual(x, weight, other, gain)      x @ w.T + other, that times gain, and its sums of squares
    normed_sum(x, other, gain, eps)       x + other, and its RMS norm

All in bf16, for few tokens; `graph_pass` inserts them into torch.compile's graphs. A residual sum with its sums of
squares is an RMS norm except for a factor, which `siblings` and `gated` apply if given a `Norm`.

Legend: M tokens, N outputs, K inputs.
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from vbrt.errors import KernelError
from vbrt.kernels.cuda import devices
from vbrt.kernels.cuda.e2m1.launches import carries_pointers, readable
from vbrt.kernels.cuda.e2m1.linear import few_tokens_launch, multiply
from vbrt.kernels.cuda.e2m1.tiles import COLUMNS, ROWS, TiledWeight, tiled_weight
from vbrt.kernels.cuda.launch_table import Launch, launch_for
from vbrt.kernels.cuda.launcher import Launcher, cuda_op, rows_are_aligned

__all__ = [
    "GATED_TOKENS",
    "MOST_SIBLINGS",
    "NORM_ROW",
    "SIBLING_TOKENS",
    "Norm",
    "gated",
    "gates_in_one",
    "normed_sum",
    "residual",
    "siblings",
]

GATED_TOKENS = 16  # two groups of 8
SIBLING_TOKENS, MOST_SIBLINGS = 8, 3
NORM_ROW = 32768  # maximum columns of the norm, kept in registers


class Norm(NamedTuple):
    """Factor of an RMS norm of one token: sums of squares from `residual`, and epsilon."""

    squares: Tensor
    eps: float


class _Kernels(NamedTuple):
    siblings: Launcher
    residual: Launcher
    gated: Launcher
    normed_sum: Launcher


@functools.cache
def _kernels(dependent: bool) -> _Kernels:
    from vbrt.kernels.cuda.e2m1 import fused_linear_gluon as device

    kernels = device.siblings_kernel, device.residual_kernel, device.gated_kernel, device.norm_kernel
    return _Kernels(*(Launcher(kernel, dependent=dependent) for kernel in kernels))


def _check_one_token(x: Tensor, k: int, multiple: int = 1) -> None:
    """Raises KernelError for an x that kernels with a shared norm do not support."""
    if x.dtype is not torch.bfloat16 or x.numel() != k or k % multiple:
        raise KernelError(
            f"x is {x.dtype} {tuple(x.shape)}; expected torch.bfloat16, one token of {k} columns and "
            f"columns in multiples of {multiple}"
        )


def _squares_block(norm: Norm | None, k: int) -> int:
    """Number of sums of squares that a kernel reads: a power of two, at least four per lane; 0 without a norm."""
    return 0 if norm is None else max(128, 1 << (-(-k // ROWS) - 1).bit_length())


# -- layers that share an input ---------------------------------------------------------------------------------------


def siblings(x: Tensor, weights: Sequence[TiledWeight], norm: Norm | None = None) -> list[Tensor]:
    """x @ w.T for up to three weights: one launch for up to 8 bf16 tokens, otherwise one each."""
    k = weights[0].k
    x_MK = x.reshape(-1, k)
    if norm is not None:
        _check_one_token(x, k, multiple=8)
    elif not _joins(x_MK, len(weights)):
        return [multiply(x, weight, None, "none") for weight in weights]
    leading = x.shape[:-1]
    ys = [x.new_empty(*leading, weight.n) for weight in weights]
    _launch_siblings(x_MK, weights, ys, norm)
    return ys


def _joins(x_MK: Tensor, count: int) -> bool:
    return x_MK.dtype is torch.bfloat16 and 0 < len(x_MK) <= SIBLING_TOKENS and 1 < count <= MOST_SIBLINGS


def _launch_siblings(x_MK: Tensor, weights: Sequence[TiledWeight], ys: Sequence[Tensor], norm: Norm | None) -> None:
    x_MK, word_loads = readable(x_MK)
    tokens, k = x_MK.shape
    first, device, stride = weights[0], x_MK.device.index, x_MK.stride(0)
    row_tiles, columns = [weight.tiles.shape[0] for weight in weights], first.tiles.shape[1]
    config, dependent = few_tokens_launch(device, tokens, sum(row_tiles), columns), devices.launches_dependents(device)
    triples = [part for weight, y in zip(weights, ys, strict=True) for part in (weight.tiles, weight.scale, y)]
    missing = MOST_SIBLINGS - len(weights)
    _kernels(dependent).siblings(
        device,
        (sum(-(-r // config.row_tiles) for r in row_tiles), 1),
        (x_MK, *triples, *triples[:3] * missing, x_MK if norm is None else norm.squares),
        (tokens, *(weight.n for weight in weights), *[0] * missing, k, columns, stride, norm.eps if norm else 0.0),
        warps=config.k_warps,
        specialized=(k, stride),
        ROW_TILES=config.row_tiles,
        K_WARPS=config.k_warps,
        PREFETCH=config.prefetch,
        CARRY_POINTERS=carries_pointers(config, columns, word_loads),
        E8M0_SCALES=first.e8m0_scales,
        K_TAIL=k % COLUMNS != 0,
        WORD_LOADS=word_loads,
        SQUARES=_squares_block(norm, k),
        DEPENDENT=dependent,
    )


# -- a norm shared by the layers around it ----------------------------------------------------------------------------


def residual(x: Tensor, weight: TiledWeight, other: Tensor, gain: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """(x @ w.T + other, that times gain, sums of squares per 16 columns, fp32), for one bf16 token."""
    _check_one_token(x, weight.k)
    x_1K, word_loads = readable(x.reshape(1, weight.k))
    (row_tiles, columns, _), device, n, k = weight.tiles.shape, x.device.index, weight.n, x_1K.shape[1]
    config, dependent = few_tokens_launch(device, 1, row_tiles, columns), devices.launches_dependents(device)
    shape = *x.shape[:-1], n
    total, y, squares = x.new_empty(shape), x.new_empty(shape), x.new_empty(row_tiles, dtype=torch.float32)
    _kernels(dependent).residual(
        device,
        (-(-row_tiles // config.row_tiles), 1),
        (x_1K, weight.tiles, weight.scale, other.contiguous(), gain.contiguous(), total, y, squares),
        (n, k, columns),
        warps=config.k_warps,
        specialized=(n, k),
        ROW_TILES=config.row_tiles,
        K_WARPS=config.k_warps,
        PREFETCH=config.prefetch,
        CARRY_POINTERS=carries_pointers(config, columns, word_loads),
        E8M0_SCALES=weight.e8m0_scales,
        K_TAIL=k % COLUMNS != 0,
        WORD_LOADS=word_loads,
        DEPENDENT=dependent,
    )
    return total, y, squares


# -- a gated pair -----------------------------------------------------------------------------------------------------


def gates_in_one(dtype: torch.dtype, tokens: int, n: int, k: int) -> bool:
    """True if one launch supports a gated pair of two weights (N, K) on x of this dtype, and is the fastest."""
    if n < k:  # few long rows: two launches were faster (14336 -> 4096 on an H200: by 6 to 15 %)
        return False
    return dtype is torch.bfloat16 and 0 < tokens <= GATED_TOKENS and k % 8 == 0


def gated(x: Tensor, gate: TiledWeight, up: TiledWeight, activation: str, norm: Norm | None = None) -> Tensor:
    """activation(x @ gate.T) * (x @ up.T), rounded once; requires `gates_in_one`."""
    n, k = gate.n, gate.k
    if norm is not None:
        _check_one_token(x, k, multiple=8)
    x_MK = x.reshape(-1, k)
    if not rows_are_aligned(x_MK):
        x_MK = x_MK.clone(memory_format=torch.contiguous_format)
    tokens, device, stride = x_MK.shape[0], x_MK.device.index, x_MK.stride(0)
    row_tiles, columns, _ = gate.tiles.shape
    y = x.new_empty(*x.shape[:-1], n)
    config, dependent = _gated_launch(device, tokens, row_tiles), devices.launches_dependents(device)
    squares = x_MK if norm is None else norm.squares
    _kernels(dependent).gated(
        device,
        (-(-row_tiles // config.row_tiles), 1),
        (x_MK, gate.tiles, gate.scale, up.tiles, up.scale, squares, y),
        (tokens, n, k, columns, stride, n, norm.eps if norm else 0.0),
        warps=config.k_warps,
        specialized=(n, k, stride),
        ROW_TILES=config.row_tiles,
        TOKEN_GROUPS=1 if tokens <= 8 else 2,
        K_WARPS=config.k_warps,
        PREFETCH=config.prefetch,
        E8M0_SCALES=gate.e8m0_scales,
        ALL_TOKENS=tokens == 16,
        K_TAIL=k % COLUMNS != 0,
        ACTIVATION=activation,
        SQUARES=_squares_block(norm, k),
        DEPENDENT=dependent,
    )
    return y


def _gated_launch(device: int, tokens: int, row_tiles: int) -> Launch:
    return launch_for("gated", devices.gpu(device), tokens, row_tiles, 0)


# -- a residual sum and its norm --------------------------------------------------------------------------------------


def normed_sum(x: Tensor, other: Tensor, gain: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(x + other, its RMS norm times gain), bf16 [..., K] each, K up to `NORM_ROW`."""
    k = x.shape[-1]
    x_MK, other_MK, gain = _rows(x, k), _rows(other, k), gain.contiguous()
    device, dependent = x.device.index, devices.launches_dependents(x.device.index)
    total, y = x.new_empty(x.shape), x.new_empty(x.shape)
    block = max(512, 1 << (k - 1).bit_length())
    warps = min(16, block // 512)
    strides = x_MK.stride(0), other_MK.stride(0)
    _kernels(dependent).normed_sum(
        device,
        (x_MK.shape[0], 1),
        (x_MK, other_MK, gain, total, y),
        (float(eps), k, *strides),
        warps=warps,
        specialized=(x.dtype, other.dtype, gain.dtype, k, *strides),
        BLOCK=block,
        WARPS=warps,
        DEPENDENT=dependent,
    )
    return total, y


def _rows(x: Tensor, k: int) -> Tensor:
    """[M, K] with contiguous rows."""
    x_MK = x.reshape(-1, k)
    return x_MK if x_MK.stride(1) == 1 else x_MK.contiguous()


# -- operators: weights as tensors, metadata as numbers ---------------------------------------------------------------


def _norm(squares: Tensor | None, eps: float) -> Norm | None:
    return None if squares is None else Norm(squares, eps)


def _weights(tensors: Sequence[Tensor], format: str, ns: Sequence[int], k: int) -> list[TiledWeight]:
    """Weights of one format and K from their pages, or from alternating tiles and scales."""
    if len(tensors) == len(ns):
        return [tiled_weight(page, None, format, n, k) for page, n in zip(tensors, ns, strict=True)]
    return [TiledWeight(tensors[2 * i], tensors[2 * i + 1], format, n, k) for i, n in enumerate(ns)]


def _siblings(
    x: Tensor, weights: list[Tensor], format: str, ns: list[int], squares: Tensor | None = None, eps: float = 0.0
) -> list[Tensor]:
    return siblings(x, _weights(weights, format, ns, x.shape[-1]), _norm(squares, eps))


def _gated(
    x: Tensor,
    weights: list[Tensor],
    format: str,
    n: int,
    activation: str,
    squares: Tensor | None = None,
    eps: float = 0.0,
) -> Tensor:
    gate, up = _weights(weights, format, (n, n), x.shape[-1])
    return gated(x, gate, up, activation, _norm(squares, eps))


def _residual(
    x: Tensor, tiles: Tensor, scale: Tensor | None, other: Tensor, gain: Tensor, format: str, n: int
) -> tuple[Tensor, Tensor, Tensor]:
    return residual(x, tiled_weight(tiles, scale, format, n, x.shape[-1]), other, gain)


cuda_op(
    "normed_sum",
    normed_sum,
    "(Tensor x, Tensor other, Tensor gain, float eps) -> (Tensor, Tensor)",
    lambda x, other, gain, eps: (x.new_empty(x.shape), x.new_empty(x.shape)),
)
cuda_op(
    "fp4_gated",
    _gated,
    "(Tensor x, Tensor[] weights, str format, SymInt n, str activation, Tensor? squares=None, float eps=0.) -> Tensor",
    lambda x, weights, format, n, activation, squares=None, eps=0.0: x.new_empty(*x.shape[:-1], n),
)
cuda_op(
    "fp4_linears",
    _siblings,
    "(Tensor x, Tensor[] weights, str format, SymInt[] ns, Tensor? squares=None, float eps=0.) -> Tensor[]",
    lambda x, weights, format, ns, squares=None, eps=0.0: [x.new_empty(*x.shape[:-1], n) for n in ns],
)
cuda_op(
    "fp4_residual",
    _residual,
    "(Tensor x, Tensor tiles, Tensor? scale, Tensor other, Tensor gain, str format, SymInt n) "
    "-> (Tensor, Tensor, Tensor)",
    lambda x, tiles, scale, other, gain, format, n: (
        other.new_empty(*x.shape[:-1], n),
        other.new_empty(*x.shape[:-1], n),
        other.new_empty(-(-n // ROWS), dtype=torch.float32),
    ),
)
