"""Launches of the kernels for one weight in tile order: narrow, wide, persistent, mma and decode.

`linear` selects one; a launch takes its configuration as an argument. Constants are explained in `narrow_gluon`.

Legend: M tokens, N outputs, K inputs, S summands.
"""

import functools
import importlib
import itertools
import math
import secrets
from collections.abc import Hashable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vbrt.kernels.cuda import devices
from vbrt.kernels.cuda.e2m1.tiles import COLUMNS, ROWS, TiledWeight
from vbrt.kernels.cuda.launch_table import (
    PERSISTENT_ROWS,
    PERSISTENT_WARPS,
    Launch,
    MmaLaunch,
    PersistentLaunch,
    WideLaunch,
    persistent_tiles,
)
from vbrt.kernels.cuda.launcher import Launcher, pairs_are_aligned, rows_are_aligned

__all__ = [
    "SUMMANDS",
    "Codes",
    "PersistentProduct",
    "TurnedProduct",
    "carries_pointers",
    "codes_of",
    "decode",
    "import_device_code",
    "in_bf16",
    "mma",
    "narrow",
    "persistent",
    "readable",
    "reduce",
    "summands_of",
    "token_groups",
    "wide",
]

#: dtype -> number of bf16 summands that represent it exactly
SUMMANDS = {torch.bfloat16: 1, torch.float16: 2, torch.float32: 3}
_DECODE_WARPS = 4
_PAD_WARPS, _PAD_SPAN, _REDUCE_WARPS = 4, 1024, 4
_TICKETS = itertools.count(1 << 61 | secrets.randbits(61))  # unique per call, see `persistent_gluon`
_DESCRIPTORS = 1024  # layouts of activations to remember
_ORDER_MANY = 16384  # tokens times columns from which the ordering kernel uses two warps per program


class _Narrow(NamedTuple):
    linear: Launcher
    pad: Launcher


class _Wide(NamedTuple):
    order: Launcher
    multiply: Launcher


class _Persistent(NamedTuple):
    multiply: Launcher
    describe: Any  # (activations, (M, K), strides, tokens per tile) -> TMA descriptor


@functools.cache
def import_device_code() -> None:
    """Import the small-batch kernel ahead of its first launch, which takes 0.1 s."""
    importlib.import_module("vbrt.kernels.cuda.e2m1.narrow_gluon")


@functools.cache
def _narrow(dependent: bool) -> _Narrow:
    from vbrt.kernels.cuda.e2m1 import narrow_gluon as device

    return _Narrow(*(Launcher(kernel, dependent=dependent) for kernel in (device.linear_kernel, device.pad_kernel)))


@functools.cache
def _decoder() -> Launcher:
    from vbrt.kernels.cuda.e2m1 import narrow_gluon as device

    return Launcher(device.decode_kernel)


@functools.cache
def _wide() -> _Wide:
    from vbrt.kernels.cuda.e2m1 import wide_gluon as device

    return _Wide(*(Launcher(kernel, dependent=True) for kernel in (device.order_kernel, device.wgmma_kernel)))


@functools.cache
def _mma() -> Launcher:
    from vbrt.kernels.cuda.e2m1 import mma_gluon as device

    return Launcher(device.mma_kernel)


@functools.cache
def _reducer(dependent: bool) -> Launcher:
    from vbrt.kernels.cuda.e2m1 import wide_gluon as device

    return Launcher(device.reduce_kernel, dependent=dependent)


@functools.cache
def _persistent() -> _Persistent:
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from vbrt.kernels.cuda.e2m1 import persistent_gluon as device

    swizzle = NVMMASharedLayout(128, 16, 2)
    checked: dict[Hashable, dict[str, Any]] = {}  # fields of descriptors; Triton's own checks take half of a launch

    def describe(x: Tensor, shape: tuple[int, ...], strides: tuple[int, ...], tokens: int) -> Any:
        key = x.dtype, shape, strides, tokens
        fields = checked.get(key)
        if fields is not None:
            made = object.__new__(TensorDescriptor)
            made.__dict__ = {**fields, "base": x}
            return made
        box = [device.box_of(tokens), device.COLUMNS.value]
        made = TensorDescriptor(x, list(shape), list(strides), box, swizzle)
        if len(checked) >= _DESCRIPTORS:
            checked.clear()
        checked[key] = {**made.__dict__, "base": None}  # without the memory
        return made

    return _Persistent(Launcher(device.persistent_kernel, dependent=True), describe)


@functools.cache
def _turned() -> Launcher:
    from vbrt.kernels.cuda.e2m1 import turned_gluon as device

    return Launcher(device.turned_kernel, dependent=True)


# -- activations ------------------------------------------------------------------------------------------------------


def readable(x_MK: Tensor) -> tuple[Tensor, bool]:
    """Return (x in a form that the small-batch kernels can read, True if word by word)."""
    if rows_are_aligned(x_MK):
        return x_MK, False
    # beyond one token group, word loads take longer than the launch of a copy
    if x_MK.shape[0] <= 8 and pairs_are_aligned(x_MK):
        return x_MK, True
    return _padded(x_MK), False


def summands_of(x_MK: Tensor) -> Tensor:
    """bf16 [S * M, K] that add up to x: each takes the 8 leading bits of the previous remainder."""
    parts, rest = [], x_MK.float()
    for _ in range(SUMMANDS[x_MK.dtype]):
        parts.append(rest.bfloat16())
        rest = rest - parts[-1].float()
    return torch.cat(parts)


def _padded(x_MK: Tensor) -> Tensor:
    """Contiguous copy, zero-padded to a multiple of eight columns."""
    (tokens, k), device = x_MK.shape, x_MK.device.index
    width = -(-k // 8) * 8
    o_MK = x_MK.new_empty(tokens, width)
    dependent = devices.launches_dependents(device)
    _narrow(dependent).pad(
        device,
        (tokens, -(-width // _PAD_SPAN)),
        (x_MK, o_MK),
        (k, width, *x_MK.stride()),
        warps=_PAD_WARPS,
        specialized=(x_MK.dtype, k, *x_MK.stride()),
        WARPS=_PAD_WARPS,
        SPAN=_PAD_SPAN,
        DEPENDENT=dependent,
    )
    return o_MK


# -- kernels ----------------------------------------------------------------------------------------------------------


def carries_pointers(config: Launch, columns: int, word_loads: bool) -> bool:
    """True if a small-batch kernel increments its pointers, which requires whole rounds of its warps along K."""
    return config.carry_pointers and columns % config.k_warps == 0 and not word_loads


def token_groups(tokens: int) -> int:
    """Number of 8-token groups that a small-batch kernel is compiled for."""
    return 1 << max(0, (tokens - 1).bit_length() - 3)


def narrow(x_MK: Tensor, weight: TiledWeight, bias: Tensor | None, y: Tensor, activation: str, config: Launch) -> None:
    """y [..., N] = activation(x @ w.T + bias) by the small-batch kernel; x in bf16, y contiguous."""
    x_MK, word_loads = readable(x_MK)
    tokens, k = x_MK.shape
    row_tiles, columns, _ = weight.tiles.shape
    groups = token_groups(tokens)
    device, n, stride = weight.tiles.device.index, weight.n, x_MK.stride(0)
    dependent = devices.launches_dependents(device)
    bias_or_x = x_MK if bias is None else bias.contiguous()
    _narrow(dependent).linear(
        device,
        (-(-row_tiles // config.row_tiles), 1),
        (x_MK, weight.tiles, weight.scale, bias_or_x, y),
        (tokens, n, k, columns, stride, n),
        warps=config.k_warps,
        specialized=(n, k, stride, y.dtype, bias_or_x.dtype),
        ROW_TILES=config.row_tiles,
        TOKEN_GROUPS=groups,
        K_WARPS=config.k_warps,
        PREFETCH=config.prefetch,
        CARRY_POINTERS=carries_pointers(config, columns, word_loads),
        E8M0_SCALES=weight.e8m0_scales,
        ALL_TOKENS=tokens == 8 * groups > 8,
        K_TAIL=k % COLUMNS != 0,
        ACTIVATION=activation,
        HAS_BIAS=bias is not None,
        WORD_LOADS=word_loads,
        DEPENDENT=dependent,
    )


class Codes(NamedTuple):
    """A weight (n, k) in the form of the kernels for many tokens.

    kind: "e4m3", "e8m0" (scales in tiles), "table", "magnitudes" or "int8". words: codes, int32, in tile order or, for
    the latter three, [n, words] in the format's order. scale: tensor scale, fp32 [1], or any tensor if the format has
    none. columns: number of 128-column groups. Except in tiles also scales [n, blocks] of `block` columns each. For
    tables levels, fp32 [16], or [8] if bit 3 of a code is the sign; else any tensor.

    The persistent kernel takes tiles, and tables with scales of one byte per 64 columns.
    """

    words: Tensor
    kind: str
    scale: Tensor
    n: int
    columns: int
    scales: Tensor
    levels: Tensor
    blocks: int = 0
    block: int = 64


def codes_of(weight: TiledWeight) -> Codes:
    """A weight in tile order as `Codes`."""
    tiles, kind = weight.tiles, "e8m0" if weight.e8m0_scales else "e4m3"
    return Codes(tiles, kind, weight.scale, weight.n, tiles.shape[1], weight.scale, weight.scale)


def persistent(x_MK: Tensor, weight: Codes, bias: Tensor | None, activation: str, config: PersistentLaunch) -> Tensor:
    """activation(x @ w.T + bias) in one launch, or two if the activations are permuted first; x in bf16."""
    bias_dtype = None if bias is None else bias.dtype
    return PersistentProduct(weight, tuple(x_MK.shape), bias_dtype, activation, config)(x_MK, bias)


class PersistentProduct:
    """Launch of the persistent kernel, prepared for a weight, a shape of activations in bf16, and the dtype of a bias.

    Training steps and prompts repeat it: the host spends as long on preparing a launch as on a call.
    """

    __slots__ = ("_constants", "_grid", "_leading", "_numbers", "_operands", "_rows", "_sums", "_weight", "config")

    def __init__(
        self, weight: Codes, shape: tuple[int, ...], bias: torch.dtype | None, activation: str, config: PersistentLaunch
    ) -> None:
        (*leading, k), n, cut = shape, weight.n, config.cut
        tokens, processors = math.prod(leading), devices.gpu(weight.words.device.index).processors
        most = cut * -(-weight.columns // 2) if cut else persistent_tiles(tokens, n, config.tokens)
        programs = min(config.programs or processors, most)
        self.config, self._weight = config, weight
        self._leading, self._rows, self._grid = (*leading, n), (tokens, k), (programs, 1)
        self._sums = (programs, PERSISTENT_ROWS * config.tokens) if cut else None
        self._operands = weight.words, weight.scales, weight.levels, weight.scale
        self._numbers = tokens, n, weight.columns, weight.blocks, n, cut
        self._constants = {
            "warps": PERSISTENT_WARPS,
            "specialized": (n, bias or torch.bfloat16),  # y stands for a bias that is not there
            "TOKENS": config.tokens,
            "CUT_TILES": cut > 0,
            "CODES": weight.kind,
            "ORDERED": config.ordered,
            "ACTIVATION": activation,
            "HAS_BIAS": bias is not None,
            "DEPENDENT": True,
        }

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """activation(x @ w.T + bias)."""
        kernels, device = _persistent(), self._weight.words.device.index
        shape, strides = self._rows, (self._rows[1], 1)
        if self.config.ordered or shape[1] % 8 or not x.is_contiguous() or x.data_ptr() % 16:
            x = self._readable(x.reshape(shape), device)
            shape, strides = tuple(x.shape), x.stride()
        y = x.new_empty(self._leading)
        sums = flags = y
        if self._sums is not None:
            sums = x.new_empty(self._sums, dtype=torch.float32)
            flags = x.new_empty(2 * self._sums[0], dtype=torch.int64)
        described = kernels.describe(x, shape, strides, self.config.tokens)
        self._launch(device, bias, (sums, flags, y), (described, *self._numbers, next(_TICKETS)))
        return y

    def _launch(self, device: int, bias: Tensor | None, made: tuple[Tensor, ...], numbers: tuple[Any, ...]) -> None:
        """Launch the kernel that writes the last one of `made`."""
        tensors = *self._operands, made[-1] if bias is None else bias.contiguous(), *made
        _persistent().multiply(device, self._grid, tensors, numbers, **self._constants)

    def _readable(self, x_MK: Tensor, device: int) -> Tensor:
        if self.config.ordered:
            return _ordered(x_MK, self._weight.columns, self.config.tokens, device)
        return _for_copies(x_MK)


class TurnedProduct(PersistentProduct):
    """Launch of the persistent kernel for dy @ w, prepared for a weight in tile order and a shape of dy in bf16."""

    __slots__ = ()

    def __init__(self, weight: TiledWeight, shape: tuple[int, ...], config: PersistentLaunch) -> None:
        super().__init__(turned_codes(weight), shape, None, "none", config)
        self._operands = weight.tiles, weight.scale
        tokens, n, columns, row_tiles, _, cut = self._numbers
        self._numbers = tokens, n, columns, row_tiles, cut
        used = "warps", "TOKENS", "CUT_TILES", "CODES", "DEPENDENT"
        self._constants = {name: self._constants[name] for name in used} | {"specialized": (n,)}

    def _launch(self, device: int, bias: Tensor | None, made: tuple[Tensor, ...], numbers: tuple[Any, ...]) -> None:
        _turned()(device, self._grid, (*self._operands, *made), numbers, **self._constants)


def turned_codes(weight: TiledWeight) -> Codes:
    """A weight as the kernel for dy @ w takes it: n columns, sums over groups of 128 rows, and its row tiles."""
    return codes_of(weight)._replace(n=weight.k, columns=-(-weight.n // COLUMNS), blocks=weight.tiles.shape[0])


def _for_copies(x_MK: Tensor) -> Tensor:
    """x with rows aligned for TMA."""
    rows_fit = rows_are_aligned(x_MK) and x_MK.stride(0) >= x_MK.shape[1]
    return x_MK if rows_fit else _padded(x_MK)


def _ordered(x_MK: Tensor, columns: int, block: int, device: int) -> Tensor:
    """bf16 x with columns permuted to tile order, zeros beyond K, and at least one block of token rows.

    Rows beyond the last token are read but never stored: TMA is slower for out-of-bounds rows.
    """
    o_MK = x_MK.new_empty(max(block, x_MK.shape[0]), COLUMNS * columns)
    _order(x_MK, o_MK, _Partials(1, o_MK, 0, o_MK), device)
    return o_MK


class _Partials(NamedTuple):
    """Buffers for partial sums of the wide kernel's programs.

    count: parts [M, N] that another launch reduces; 1 if the programs do. counters: int32, a power of two of them, or
    any tensor if `counters_used` is 0; sums: fp32, those of each program.
    """

    count: int
    counters: Tensor
    counters_used: int
    sums: Tensor


def _partials(y_MN: Tensor, blocks: int, summands: int, config: WideLaunch) -> _Partials:
    if summands > 1 or not config.reduces_itself:
        return _Partials(config.splits * summands, y_MN, 0, y_MN)
    used = 1 << (blocks - 1).bit_length()
    size = ROWS * config.warps * config.tokens
    sums = y_MN.new_empty(blocks * config.splits, size, dtype=torch.float32)
    return _Partials(1, y_MN.new_empty(used, dtype=torch.int32), used, sums)


def wide(x_MK: Tensor, weight: TiledWeight, bias: Tensor | None, activation: str, config: WideLaunch) -> Tensor:
    """activation(x @ w.T + bias) in two launches, or three if one reduces partial sums."""
    tokens, summands, n, device = x_MK.shape[0], SUMMANDS[x_MK.dtype], weight.n, weight.tiles.device.index
    rows, (row_tiles, columns, _) = summands * tokens, weight.tiles.shape
    token_blocks = -(-rows // config.tokens)
    blocks = token_blocks * -(-row_tiles // config.warps)
    y_MN = x_MK.new_empty(tokens, n)
    partials = _partials(y_MN, blocks, summands, config)
    x_RK = x_MK.new_empty(token_blocks * config.tokens, COLUMNS * columns, dtype=torch.bfloat16)
    _order(x_MK, x_RK, partials, device)
    whole = partials.count == 1
    bias_or_y = y_MN if bias is None else bias.contiguous()
    out = y_MN if whole else x_MK.new_empty(partials.count, tokens, n, dtype=torch.float32)
    _wide().multiply(
        device,
        (blocks * config.splits, 1),
        (x_RK, weight.tiles, weight.scale, bias_or_y, partials.sums, partials.counters, out),
        (rows, n, columns, -(-columns // config.splits), n),
        warps=config.warps,
        specialized=(n, y_MN.dtype, bias_or_y.dtype),
        TOKENS=config.tokens,
        WARPS=config.warps,
        SPLITS=config.splits,
        RING=config.ring,
        PARTIAL=not whole,
        E8M0_SCALES=weight.e8m0_scales,
        ACTIVATION=activation if whole else "none",
        HAS_BIAS=whole and bias is not None,
    )
    if not whole:
        reduce(out, bias, y_MN, activation)
    return y_MN


def mma(x_MK: Tensor, weight: Codes, bias: Tensor | None, activation: str, config: MmaLaunch) -> Tensor:
    """activation(x @ w.T + bias) by `mma.sync`, in one launch, or two if K is split or x is not in bf16."""
    tokens, summands, n, columns = x_MK.shape[0], SUMMANDS[x_MK.dtype], weight.n, weight.columns
    y_MN = x_MK.new_empty(tokens, n)
    x_RK = in_bf16(x_MK)
    rows, k = x_RK.shape
    parts = config.splits * summands
    out = y_MN if parts == 1 else x_MK.new_empty(parts, tokens, n, dtype=torch.float32)
    bias_or_y = y_MN if bias is None else bias.contiguous()
    blocks = -(-rows // config.tokens) * -(-n // (ROWS * config.warps * config.row_tiles))
    sizes = rows, n, k, columns, -(-columns // config.splits), config.splits, weight.blocks, weight.words.shape[-1]
    _mma()(
        weight.words.device.index,
        (blocks * config.splits, 1),
        (x_RK, weight.words, weight.scales, weight.levels, weight.scale, bias_or_y, out),
        (*sizes, x_RK.stride(0), n),
        warps=config.warps,
        specialized=(n, k, x_RK.stride(0), out.dtype, bias_or_y.dtype, weight.scales.dtype),
        TOKENS=config.tokens,
        WARPS=config.warps,
        ROW_TILES=config.row_tiles,
        RING=config.ring,
        PARTIAL=parts > 1,
        CODES=weight.kind,
        BLOCK=weight.block,
        K_TAIL=k % COLUMNS != 0,
        ACTIVATION=activation if parts == 1 else "none",
        HAS_BIAS=parts == 1 and bias is not None,
    )
    if parts > 1:
        reduce(out, bias, y_MN, activation)
    return y_MN


def in_bf16(x_MK: Tensor) -> Tensor:
    """bf16 [S * M, K] that add up to x, rows padded to whole 16 bytes."""
    x_RK = x_MK if x_MK.dtype is torch.bfloat16 else summands_of(x_MK)
    return x_RK if rows_are_aligned(x_RK) else _padded(x_RK)


def _order(x_MK: Tensor, x_RK: Tensor, partials: _Partials, device: int) -> None:
    """Fill x_RK with x as bf16 summands, columns in tile order; clear the counters."""
    (tokens, k), columns = x_MK.shape, x_RK.shape[1] // COLUMNS
    warps = 2 if tokens * columns >= _ORDER_MANY else 1
    _wide().order(
        device,
        (tokens, -(-columns // (8 * warps))),
        (x_MK, x_RK, partials.counters),
        (tokens, k, columns, *x_MK.stride()),
        warps=warps,
        specialized=(x_MK.dtype, k, *x_MK.stride()),
        SUMMANDS=SUMMANDS[x_MK.dtype],
        COUNTERS=partials.counters_used,
        WARPS=warps,
    )


def reduce(parts_PMN: Tensor, bias: Tensor | None, y_MN: Tensor, activation: str) -> None:
    """y = activation(sum of the parts + bias)."""
    (tokens, n), device = y_MN.shape, y_MN.device.index
    bias_or_y, dependent = y_MN if bias is None else bias.contiguous(), devices.launches_dependents(device)
    _reducer(dependent)(
        device,
        (-(-n // (128 * _REDUCE_WARPS)), tokens),
        (parts_PMN, bias_or_y, y_MN),
        (tokens, n),
        warps=_REDUCE_WARPS,
        specialized=(n, bias_or_y.dtype, y_MN.dtype),
        PARTS=len(parts_PMN),
        ACTIVATION=activation,
        HAS_BIAS=bias is not None,
        WARPS=_REDUCE_WARPS,
        DEPENDENT=dependent,
    )


def decode(weight: TiledWeight, dtype: torch.dtype) -> Tensor:
    """The weight [N, K] in a dtype, bit-exact with the format's `decode`."""
    tiles, n, k = weight.tiles, weight.n, weight.k
    w_NK = torch.empty(n, k, dtype=dtype, device=tiles.device)
    row_tiles, columns, _ = tiles.shape
    _decoder()(
        tiles.device.index,
        (row_tiles * -(-columns // _DECODE_WARPS), 1),
        (tiles, weight.scale, w_NK),
        (n, k, columns),
        warps=_DECODE_WARPS,
        specialized=(k, dtype),
        E8M0_SCALES=weight.e8m0_scales,
        WARPS=_DECODE_WARPS,
    )
    return w_NK
