"""Linear layers on E2M1 weights in tile order: the backend "triton" of the ops "linear" and "decode_weight".

Up to `fused_limit` tokens a kernel reads 4-bit tiles, multiplies on the tensor cores and applies bias and activation;
on Hopper there are two such kernels, for few and for many tokens, and a third one where `persists` says so. Beyond them
the weight is decoded to the activations' dtype and the vendor's matmul takes over. Weights that are not in tile order
(another format, a plain coarse plane) and GPUs older than sm_80 go through the reference: decode, then matmul; `route`
says which way a call takes.

The fused kernel multiplies in bf16 and sums in fp32. bf16 activations go in as they are; fp16 and fp32 are split into
two and three bf16 summands, which hold all their bits, and count as that many times the tokens.

Legend: M tokens, N outputs, K inputs, S summands.
"""

import functools
import importlib.util
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vbrt.errors import KernelError
from vbrt.formats import WeightPlanes
from vbrt.formats.page import PageLayout
from vbrt.kernels import reference
from vbrt.kernels.cuda.e2m1 import tiles as fp4_tiles
from vbrt.kernels.cuda.e2m1.launch_table import (
    PERSISTENT_ROWS,
    PERSISTENT_TOKENS,
    PERSISTENT_WARPS,
    Launch,
    Wide,
    cut_tiles,
    fused_limit,
    launch_for,
    persistent_tiles,
    persists,
    wide_for,
)
from vbrt.kernels.cuda.e2m1.tiles import ROWS, TILES
from vbrt.kernels.cuda.e2m1.tuning import tuned
from vbrt.kernels.cuda.fine import merge
from vbrt.kernels.cuda.launcher import Launcher, alignment, cuda_op

__all__ = [
    "MIN_MAJOR",
    "Packing",
    "apart",
    "available",
    "decode_weight",
    "launch",
    "linear",
    "linears",
    "major",
    "packing",
    "route",
    "rows_are_aligned",
    "serves",
    "slice_tiles",
    "starts_early",
]

MIN_MAJOR = 8  # mma.m16n8k16 on bf16, fma.rn.bf16x2
_NARROW_TOKENS = 16
_SUMMANDS = {torch.bfloat16: 1, torch.float16: 2, torch.float32: 3}
_DECODE_WARPS = 4
_PAD_WARPS, _PAD_SPAN, _REDUCE_WARPS = 4, 1024, 4
_ORDER_MANY = 16384  # rows of tiles' columns from which a program of the ordering kernel has two warps
_SLICE_BYTES, _MOST_SLICES, _BLOCK_ROWS, _SLICE_TOKENS = 64 << 20, 4, 256, 2048
_MAJORS: dict[int, int] = {}


@dataclass(frozen=True, slots=True)
class Packing:
    """How a kernel wants the coarse plane of one format to lie in its page."""

    format: str
    rows: int = fp4_tiles.ROWS

    def layout(self, shape: tuple[int, int]) -> PageLayout:
        """The page of a weight (N, K); depends on nothing else."""
        return fp4_tiles.tile_layout(self.format, shape)

    def pack(self, coarse: dict[str, Tensor], shape: tuple[int, int]) -> dict[str, Tensor] | None:
        """The coarse tensors of `encode` in this order, or None where that would not be exact."""
        if not fp4_tiles.fits(self.format, coarse):
            return None
        tensors = fp4_tiles.pack_tiles(self.format, coarse, shape)
        if tensors[TILES].is_cuda:  # a launch after the one that wrote them, see fp4_gluon
            torch.zeros(1, dtype=torch.float32, device=tensors[TILES].device)
        return tensors

    def unpack(self, tensors: dict[str, Tensor], shape: tuple[int, int]) -> dict[str, Tensor]:
        """The exact inverse of `pack`."""
        return fp4_tiles.unpack_tiles(self.format, tensors, shape)


def packing(format: str) -> Packing | None:
    """The page order that `linear` is fast on, or None if it has none for the format."""
    return Packing(format) if format in fp4_tiles.FORMATS else None


@functools.cache
def available() -> bool:
    """Whether Triton with Gluon is installed and torch is built for CUDA. Imports neither's kernels."""
    if torch.version.cuda is None or importlib.util.find_spec("triton") is None:
        return False
    return importlib.util.find_spec("triton.experimental.gluon") is not None


def major(index: int) -> int:
    """The compute capability's first number of a CUDA device."""
    known = _MAJORS.get(index)  # no functools.cache: torch.compile warns when it traces one
    if known is None:
        known = _MAJORS[index] = torch.cuda.get_device_capability(index)[0]
    return known


def starts_early(index: int) -> bool:
    """Whether a CUDA device can start a kernel while the one before it ends."""
    return major(index) >= 9


def rows_are_aligned(x_MK: Tensor) -> bool:
    """Whether 16-bit rows start at multiples of 16 bytes and end there, as the kernels read them."""
    aligned = x_MK.stride(1) == 1 and x_MK.stride(0) % 8 == 0 and x_MK.shape[1] % 8 == 0
    return aligned and x_MK.data_ptr() % 16 == 0


def pairs_are_aligned(x_MK: Tensor) -> bool:
    """Whether 16-bit rows are whole words of 4 bytes."""
    aligned = x_MK.stride(1) == 1 and x_MK.stride(0) % 2 == 0 and x_MK.shape[1] % 2 == 0
    return aligned and x_MK.data_ptr() % 4 == 0


@functools.cache
def _narrow(early: bool) -> Any:
    from vbrt.kernels.cuda.e2m1 import narrow_gluon as fp4_gluon

    kernels = fp4_gluon.linear_kernel, fp4_gluon.pad_kernel, fp4_gluon.siblings_kernel, fp4_gluon.residual_kernel
    return tuple(Launcher(kernel, dependent=early) for kernel in kernels)


@functools.cache
def _decoder() -> Launcher:
    from vbrt.kernels.cuda.e2m1 import narrow_gluon as fp4_gluon

    return Launcher(fp4_gluon.decode_kernel)


@functools.cache
def _persistent() -> tuple[Launcher, Launcher, Any]:
    """(the kernel that clears flags, the kernel, what describes activations to it)."""
    from triton.experimental.gluon.language import NVMMASharedLayout
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from vbrt.kernels.cuda.e2m1 import persistent_gluon as fp4_persistent

    box, swizzle = [fp4_persistent.BOX.value, fp4_persistent.COLUMNS.value], NVMMASharedLayout(128, 16, 2)
    kernels = fp4_persistent.clear_kernel, fp4_persistent.persistent_kernel
    clear, multiply = (Launcher(kernel, dependent=True) for kernel in kernels)
    return clear, multiply, lambda x_MK: TensorDescriptor(x_MK, list(x_MK.shape), list(x_MK.stride()), box, swizzle)


@functools.cache
def _processors(index: int) -> int:
    return torch.cuda.get_device_properties(index).multi_processor_count


@functools.cache
def _wide() -> Any:
    from vbrt.kernels.cuda.e2m1 import wide_gluon as fp4_wgmma

    kernels = fp4_wgmma.order_kernel, fp4_wgmma.wgmma_kernel, fp4_wgmma.reduce_kernel
    return tuple(Launcher(kernel, dependent=True) for kernel in kernels)


def _served(planes: WeightPlanes) -> bool:
    tiles = planes.coarse.get(TILES)
    return tiles is not None and tiles.is_cuda and major(tiles.device.index) >= MIN_MAJOR


def serves(planes: WeightPlanes) -> bool:
    """Whether kernels take these planes: in tile order, without a fine plane, on a GPU that is new enough."""
    return planes.fine is None and _served(planes)


def route(x: Tensor, planes: WeightPlanes) -> str:
    """The way `linear` takes: "fused", "decode+matmul" (decoded by a kernel), "merge+matmul" (exact) or "reference".

    "persistent" is fused too, by the kernel for the most tokens.
    """
    if merge.serves(planes):
        return "merge+matmul"
    if not serves(planes):
        return "reference"
    return _way(x.dtype, x.numel() // max(1, x.shape[-1]), planes.coarse[TILES], planes.shape[0])


def _way(dtype: torch.dtype, tokens: int, tiles: Tensor, n: int) -> str:
    summands, family = _SUMMANDS.get(dtype), major(tiles.device.index)
    if summands is None:
        return "decode+matmul"
    if tokens * summands <= _NARROW_TOKENS:  # so that torch.compile may ask for few tokens that it has no number for
        return "fused"
    if summands == 1 and persists(family, tokens, n, tiles.shape[1]):
        return "persistent"
    return "fused" if tokens * summands <= fused_limit(family) else "decode+matmul"


def decode_weight(planes: WeightPlanes) -> Tensor:
    """The weight [N, K] in planes.dtype, the same bits as the reference; exact when the fine plane is there."""
    if merge.serves(planes):
        return merge.merge(planes)
    if not fp4_tiles.is_tiled(planes.coarse):
        return reference.decode_weight(planes)
    if planes.fine is None and _served(planes):
        return _decode(planes, planes.dtype)
    return reference.decode_weight(_plain(planes))


def linear(x: Tensor, planes: WeightPlanes, bias: Tensor | None = None, activation: str = "none") -> Tensor:
    """activation(x @ w.T + bias): [..., K] to [..., N], in x's dtype; differentiable in x and bias.

    In bf16 the fused kernels' GELU and SiLU of v are within |v| * 2.5e-4 + 3e-4, see `fp4_gluon.activate`. Raises
    KernelError for an activation that the reference does not know, or an x whose last dimension is not K.
    """
    if merge.serves(planes):
        reference.check(x, planes, activation)
        return reference.activate(F.linear(x, merge.merge(planes), bias), activation)
    if not serves(planes):
        return reference.linear(x, _plain(planes), bias, activation)
    reference.check(x, planes, activation)
    if reference.wants_grad(x, bias):
        y = _Product.apply(x, planes)
        return reference.activate(y if bias is None else y + bias, activation)
    return _multiply(x, planes, bias, activation)


def _multiply(x: Tensor, planes: WeightPlanes, bias: Tensor | None, activation: str) -> Tensor:
    run = _linear_op if torch.compiler.is_compiling() else _tiled_linear
    n, k = planes.shape
    return run(x, planes.coarse[TILES], planes.coarse["tensor_scale"], bias, planes.format, n, k, activation)


class _Product(torch.autograd.Function):
    """x @ w.T with the gradient for x; the decoded weight is made again for it and not kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, planes: WeightPlanes) -> Tensor:
        ctx.planes = planes
        return _multiply(x, planes, None, "none")

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return dy @ _decode(ctx.planes, dy.dtype), None


def _plain(planes: WeightPlanes) -> WeightPlanes:
    """The same planes with the coarse one as its format encodes it."""
    if not fp4_tiles.is_tiled(planes.coarse):
        return planes
    coarse = fp4_tiles.unpack_tiles(planes.format, planes.coarse, planes.shape)
    return WeightPlanes(planes.format, planes.shape, planes.dtype, coarse, planes.fine)


def _decode_and_multiply(
    x_MK: Tensor, tiles: Tensor, scale: Tensor, bias: Tensor | None, format: str, n: int
) -> Tensor:
    """x @ w.T + bias by torch, a slice of the weight's rows at a time: less scratch memory, and more of it in cache.

    With a bias at once: the vendor's matmul adds it only to a contiguous product; to others it takes another pass. It
    also rounds twice as far when it adds one to a product of rows that do not start at multiples of 16 bytes.
    """
    tokens, k = x_MK.shape
    if bias is not None and k * x_MK.element_size() % 16:
        return _decode_and_multiply(x_MK, tiles, scale, None, format, n).add_(bias)
    step = slice_tiles(tiles.shape[0], k * x_MK.element_size(), tokens)
    if bias is not None or step >= tiles.shape[0]:
        return F.linear(x_MK, _decode_tiles(tiles, scale, format, n, k, x_MK.dtype), bias)
    y_MN = x_MK.new_empty(tokens, n)
    for at in range(0, tiles.shape[0], step):
        rows = slice(ROWS * at, min(n, ROWS * (at + step)))
        w_RK = _decode_tiles(tiles[at : at + step], scale, format, rows.stop - rows.start, k, x_MK.dtype)
        torch.mm(x_MK, w_RK.t(), out=y_MN[:, rows])
        del w_RK  # its memory is the next slice's
    return y_MN


def slice_tiles(row_tiles: int, row_bytes: int, tokens: int) -> int:
    """How many tiles of rows are decoded at a time: whole blocks of cuBLAS, about 64 MiB, at most four slices.

    On an H200 two to four slices are as fast as one or faster from 2048 tokens on, by the shape, and more are slower;
    at 1024 tokens one was the fastest for four shapes of five, by 2 to 11 %.
    """
    if tokens < _SLICE_TOKENS:
        return row_tiles
    slices = min(_MOST_SLICES, -(-row_tiles * ROWS * row_bytes // _SLICE_BYTES))
    block = _BLOCK_ROWS // ROWS
    return -(-row_tiles // (slices * block)) * block


def _decode(planes: WeightPlanes, dtype: torch.dtype) -> Tensor:
    tiles = planes.coarse[TILES]
    if torch.compiler.is_compiling():
        n, k = planes.shape
        return _decode_op(tiles, planes.coarse["tensor_scale"], planes.format, n, k, dtype)
    return _decode_tiles(tiles, planes.coarse["tensor_scale"], planes.format, *planes.shape, dtype)


def _decode_tiles(tiles: Tensor, scale: Tensor, format: str, n: int, k: int, dtype: torch.dtype) -> Tensor:
    w_NK = torch.empty(n, k, dtype=dtype, device=tiles.device)
    rows, columns, _ = tiles.shape
    tensors = (tiles, scale, w_NK)
    _decoder()(
        (tiles.device.index, n, k, dtype, format, alignment(*tensors)), tiles.device.index,
        (rows * -(-columns // _DECODE_WARPS), 1), tensors, (n, k, columns), (format == "mxfp4", _DECODE_WARPS),
        _DECODE_WARPS,
    )  # fmt: skip
    return w_NK


def _summands(x_MK: Tensor) -> Tensor:
    """bf16 [S * M, K] that add up to x: each takes the 8 leading bits of what the ones before it left."""
    parts, rest = [], x_MK.float()
    for _ in range(_SUMMANDS[x_MK.dtype]):
        parts.append(rest.bfloat16())
        rest = rest - parts[-1].float()
    return torch.cat(parts)


def _tiled_linear(
    x: Tensor, tiles: Tensor, scale: Tensor | None, bias: Tensor | None, format: str, n: int, k: int, activation: str
) -> Tensor:
    """`linear` without gradients on a weight's tiles: the operator vbrt::fp4_linear, for any number of tokens."""
    tiles, scale = apart(tiles, scale, format, n, k)
    x_MK = x.reshape(-1, k)
    tokens = x_MK.shape[0]
    if tokens == 0:
        return x.new_empty(*x.shape[:-1], n)
    way = _way(x.dtype, tokens, tiles, n)
    if way == "persistent":
        y = _launch_persistent(x_MK, tiles, scale, bias, n, format, activation)
    elif way == "fused":
        y = _fused(x_MK, tiles, scale, bias, n, format, activation)
    else:
        y = reference.activate(_decode_and_multiply(x_MK, tiles, scale, bias, format, n), activation)
    return y.view(*x.shape[:-1], n)


def _fused(
    x_MK: Tensor, tiles: Tensor, scale: Tensor, bias: Tensor | None, n: int, format: str, activation: str
) -> Tensor:
    tokens, summands = x_MK.shape[0], _SUMMANDS[x_MK.dtype]
    wide = wide_for(major(tiles.device.index), tokens * summands, *tiles.shape[:2])
    if wide is not None:
        return _launch_wide(x_MK, tiles, scale, bias, n, format, activation, wide)
    if summands == 1:
        y = torch.empty(tokens, n, dtype=x_MK.dtype, device=x_MK.device)
        _launch(x_MK, tiles, scale, bias, y, format, activation)
        return y
    y_SMN = torch.empty(summands * tokens, n, dtype=torch.float32, device=x_MK.device)
    _launch(_summands(x_MK), tiles, scale, None, y_SMN, format, "none")
    y = y_SMN.view(-1, tokens, n).sum(0)
    return reference.activate(y if bias is None else y + bias.float(), activation).to(x_MK.dtype)


def apart(tiles: Tensor, scale: Tensor | None, format: str, n: int, k: int) -> tuple[Tensor, Tensor]:
    """Tiles and their scale, of the two or, without a scale, of a `fp4_tiles.page_of` both."""
    return fp4_tiles.parts_of(tiles, format, (n, k)) if scale is None else (tiles, scale)


def _launch(
    x_MK: Tensor, tiles: Tensor, scale: Tensor, bias: Tensor | None, y_MN: Tensor, format: str, activation: str
) -> None:
    rows, columns, _ = tiles.shape
    config = _config(tiles.device.index, x_MK.shape[0], rows, columns)
    launch(x_MK, tiles, scale, bias, y_MN, format, activation, config)


def _config(device: int, tokens: int, row_tiles: int, columns: int) -> Launch:
    found = tuned(device).get((-(-tokens // 8), row_tiles, columns))
    return found or launch_for(major(device), tokens, row_tiles, columns)


def launch(
    x_MK: Tensor, tiles: Tensor, scale: Tensor, bias: Tensor | None, y_MN: Tensor, format: str, activation: str,
    config: Launch,
) -> None:  # fmt: skip
    """The kernel for few tokens, x in bf16, on one configuration."""
    x_MK, loose = _readable(x_MK)
    tokens, k = x_MK.shape
    row_tiles, columns, _ = tiles.shape
    groups = 1 << max(0, (tokens - 1).bit_length() - 3)
    device, n = tiles.device.index, y_MN.shape[1]
    early = starts_early(device)
    if bias is not None and not bias.is_contiguous():
        bias = bias.contiguous()
    tensors = (x_MK, tiles, scale, x_MK if bias is None else bias, y_MN)
    constants = (
        config.R, groups, config.WK, config.PREFETCH, _carries(config, columns, loose), format == "mxfp4",
        tokens == 8 * groups > 8, k % 128 != 0, activation, bias is not None, loose, early,
    )  # fmt: skip
    stride = x_MK.stride(0)
    key = (device, n, k, stride, y_MN.dtype, tensors[3].dtype, alignment(*tensors), constants)
    numbers = (tokens, n, k, columns, stride, n)
    _narrow(early)[0](key, device, (-(-row_tiles // config.R), 1), tensors, numbers, constants, config.WK)


def _carries(config: Launch, columns: int, loose: bool) -> bool:
    return config.CARRY and columns % config.WK == 0 and not loose


def linears(
    x: Tensor, tiles: list[Tensor], scales: list[Tensor], format: str, ns: list[int], k: int,
    squares: Tensor | None = None, eps: float = 0.0,
) -> list[Tensor]:  # fmt: skip
    """x @ w.T of up to three weights: one launch for up to 8 bf16 tokens, otherwise one each.

    Without scales, tiles are what `fp4_tiles.page_of` has made. With squares, x is what `residual` gives beside them,
    and is divided by its root of mean squares.
    """
    given = zip(tiles, scales or [None] * len(tiles), ns, strict=True)
    tiles, scales = zip(*(apart(t, s, format, n, k) for t, s, n in given), strict=True)
    x_MK = x.reshape(-1, k)
    if squares is not None:
        check_one_token(x, k, multiple=8)
    elif x.dtype is not torch.bfloat16 or not 0 < x_MK.shape[0] <= 8 or not 1 < len(tiles) <= 3:
        each = zip(tiles, scales, ns, strict=True)
        return [_tiled_linear(x, t, s, None, format, n, k, "none") for t, s, n in each]
    x_MK, loose = _readable(x_MK)
    tokens, k = x_MK.shape
    ys = [torch.empty(tokens, n, dtype=x.dtype, device=x.device) for n in ns]
    rows, columns, device = [t.shape[0] for t in tiles], tiles[0].shape[1], x.device.index
    config, early = _config(device, tokens, sum(rows), columns), starts_early(device)
    triples = [part for triple in zip(tiles, scales, ys, strict=True) for part in triple]
    tensors = (x_MK, *(triples * 3)[:9], x_MK if squares is None else squares)
    constants = (
        config.R, config.WK, config.PREFETCH, _carries(config, columns, loose), format == "mxfp4", k % 128 != 0, loose,
        0 if squares is None else block_of_squares(k), early,
    )  # fmt: skip
    numbers = (tokens, *ns, *[0] * (3 - len(ns)), k, columns, x_MK.stride(0), float(eps))
    key = (device, k, x_MK.stride(0), alignment(*tensors), constants)
    blocks = sum(-(-r // config.R) for r in rows)
    _narrow(early)[2](key, device, (blocks, 1), tensors, numbers, constants, config.WK)
    return [y.view(*x.shape[:-1], n) for y, n in zip(ys, ns, strict=True)]


def residual(
    x: Tensor, tiles: Tensor, scale: Tensor | None, other: Tensor, gain: Tensor, format: str, n: int, k: int
) -> tuple[Tensor, Tensor, Tensor]:
    """(x @ w.T + other, that times gain, the sums of squares of each 16 of it, fp32): for one bf16 token.

    Together an RMS norm but for its factor, which `linears` and `fused_linear.gated` take from the squares.
    """
    check_one_token(x, k)
    tiles, scale = apart(tiles, scale, format, n, k)
    x_1K, loose = _readable(x.reshape(1, k))
    (row_tiles, columns, _), device, k = tiles.shape, x.device.index, x_1K.shape[1]
    config, early = _config(device, 1, row_tiles, columns), starts_early(device)
    total, y = (torch.empty(1, n, dtype=x.dtype, device=x.device) for _ in range(2))
    squares = torch.empty(row_tiles, dtype=torch.float32, device=x.device)
    tensors = (x_1K, tiles, scale, other.contiguous(), gain.contiguous(), total, y, squares)
    constants = (
        config.R, config.WK, config.PREFETCH, _carries(config, columns, loose), format == "mxfp4", k % 128 != 0, loose,
        early,
    )  # fmt: skip
    key = (device, n, k, alignment(*tensors), constants)
    grid = (-(-row_tiles // config.R), 1)
    _narrow(early)[3](key, device, grid, tensors, (n, k, columns), constants, config.WK)
    shape = *x.shape[:-1], n
    return total.view(shape), y.view(shape), squares


def check_one_token(x: Tensor, k: int, multiple: int = 1) -> None:
    """Raises KernelError for an x that the kernels which share a norm do not take."""
    if x.dtype is not torch.bfloat16 or x.numel() != k or k % multiple:
        raise KernelError(
            f"x is {x.dtype} {tuple(x.shape)}; expected torch.bfloat16, one token of {k} columns and "
            f"columns in multiples of {multiple}"
        )


def block_of_squares(k: int) -> int:
    """How many of the sums of squares of K numbers a kernel reads: a power of two, four a lane and more."""
    return max(128, 1 << (-(-k // ROWS) - 1).bit_length())


def _readable(x_MK: Tensor) -> tuple[Tensor, bool]:
    """(x as the kernel for few tokens can read it, whether a word at a time)."""
    if rows_are_aligned(x_MK):
        return x_MK, False
    # for more than one group of tokens so many loads take longer than a launch
    if x_MK.shape[0] <= 8 and pairs_are_aligned(x_MK):
        return x_MK, True
    return _padded(x_MK), False


def _padded(x_MK: Tensor) -> Tensor:
    """A contiguous copy with zeros up to a multiple of eight columns."""
    (tokens, k), device = x_MK.shape, x_MK.device.index
    width = -(-k // 8) * 8
    o_MK = x_MK.new_empty(tokens, width)
    key = (device, x_MK.dtype, k, x_MK.stride(), alignment(x_MK, o_MK))
    grid = (tokens, -(-width // _PAD_SPAN))
    early = starts_early(device)
    constants = (_PAD_WARPS, _PAD_SPAN, early)
    _narrow(early)[1](key, device, grid, (x_MK, o_MK), (k, width, *x_MK.stride()), constants, _PAD_WARPS)
    return o_MK


def _launch_persistent(
    x_MK: Tensor, tiles: Tensor, scale: Tensor, bias: Tensor | None, n: int, format: str, activation: str
) -> Tensor:
    """activation(x @ w.T + bias) in one launch, or in two where tiles are cut; x in bf16."""
    rows_fit = rows_are_aligned(x_MK) and x_MK.stride(0) >= x_MK.shape[1]  # as the copy engine wants them
    x_MK = x_MK if rows_fit else _padded(x_MK)
    (tokens, _), device, columns = x_MK.shape, tiles.device.index, tiles.shape[1]
    clear, multiply, described = _persistent()
    cut = cut_tiles(tokens, n, columns, _processors(device))
    programs = min(_processors(device), cut * -(-columns // 2) if cut else persistent_tiles(tokens, n))
    y_MN = x_MK.new_empty(tokens, n)
    sums, flags = y_MN, y_MN
    if cut:
        sums = x_MK.new_empty(programs, PERSISTENT_ROWS * PERSISTENT_TOKENS, dtype=torch.float32)
        flags = x_MK.new_empty(1 << (2 * programs - 1).bit_length(), dtype=torch.int32)
        clear((device, len(flags)), device, (1, 1), (flags,), (), (len(flags),), 1)
    tensors = (tiles, scale, y_MN if bias is None else bias.contiguous(), sums, flags, y_MN)
    constants = (cut > 0, format == "mxfp4", activation, bias is not None, True)
    multiply(
        (device, n, tensors[2].dtype, alignment(*tensors), constants), device, (programs, 1), tensors,
        (described(x_MK), tokens, n, columns, n, cut), constants, PERSISTENT_WARPS,
    )  # fmt: skip
    return y_MN


def _launch_wide(
    x_MK: Tensor, tiles: Tensor, scale: Tensor, bias: Tensor | None, n: int, format: str, activation: str, config: Wide
) -> Tensor:
    """activation(x @ w.T + bias) by two launches, or three where one adds up partial results."""
    (tokens, k), device = x_MK.shape, tiles.device.index
    summands = _SUMMANDS[x_MK.dtype]
    rows = summands * tokens
    row_tiles, columns, _ = tiles.shape
    order, multiply, _ = _wide()
    x_RK = x_MK.new_empty(-(-rows // config.TOKENS) * config.TOKENS, 128 * columns, dtype=torch.bfloat16)
    y_MN = x_MK.new_empty(tokens, n)
    blocks = x_RK.shape[0] // config.TOKENS * -(-row_tiles // config.WARPS)
    parts, count, sums, counts = config.SPLITS * summands, 0, y_MN, y_MN
    if config.meets and summands == 1:
        parts, count = 1, 1 << (blocks - 1).bit_length()
        counts = x_MK.new_empty(count, dtype=torch.int32)
        sums = x_MK.new_empty(blocks * config.SPLITS, ROWS * config.WARPS * config.TOKENS, dtype=torch.float32)
    warps = 2 if tokens * columns >= _ORDER_MANY else 1
    constants: tuple[Any, ...] = (summands, count, warps)
    tensors: tuple[Tensor, ...] = (x_MK, x_RK, counts)
    order(
        (device, x_MK.dtype, k, x_MK.stride(), alignment(*tensors), constants), device,
        (tokens, -(-columns // (8 * warps))), tensors, (tokens, k, columns, *x_MK.stride()), constants, warps,
    )  # fmt: skip
    given = y_MN if bias is None else bias.contiguous()
    out = y_MN if parts == 1 else x_MK.new_empty(parts, tokens, n, dtype=torch.float32)
    tensors = (x_RK, tiles, scale, given, sums, counts, out)
    last = (activation, bias is not None) if parts == 1 else ("none", False)
    constants = (*config, parts > 1, format == "mxfp4", *last)
    multiply(
        (device, n, y_MN.dtype, given.dtype, alignment(*tensors), constants), device, (blocks * config.SPLITS, 1),
        tensors, (rows, n, columns, -(-columns // config.SPLITS), n), constants, config.WARPS,
    )  # fmt: skip
    if parts > 1:
        _reduce(out, bias, y_MN, parts, activation)
    return y_MN


def _reduce(part: Tensor, bias: Tensor | None, y_MN: Tensor, parts: int, activation: str) -> None:
    """y = activation(sum of the parts + bias)."""
    (tokens, n), device = y_MN.shape, y_MN.device.index
    tensors = (part, y_MN if bias is None else bias.contiguous(), y_MN)
    constants = (parts, activation, bias is not None, _REDUCE_WARPS)
    key = (device, n, tuple(t.dtype for t in tensors), alignment(*tensors), constants)
    grid = (-(-n // (128 * _REDUCE_WARPS)), tokens)
    _wide()[2](key, device, grid, tensors, (tokens, n), constants, _REDUCE_WARPS)


_linear_op = cuda_op(
    "fp4_linear",
    _tiled_linear,
    "(Tensor x, Tensor tiles, Tensor? scale, Tensor? bias, str format, SymInt n, SymInt k, str activation) -> Tensor",
    lambda x, tiles, scale, bias, format, n, k, activation: x.new_empty(*x.shape[:-1], n),
)
_decode_op = cuda_op(
    "fp4_decode",
    _decode_tiles,
    "(Tensor tiles, Tensor scale, str format, SymInt n, SymInt k, ScalarType dtype) -> Tensor",
    lambda tiles, scale, format, n, k, dtype: tiles.new_empty(n, k, dtype=dtype),
)
_linears_op = cuda_op(
    "fp4_linears",
    linears,
    "(Tensor x, Tensor[] tiles, Tensor[] scales, str format, SymInt[] ns, SymInt k, Tensor? squares=None, "
    "float eps=0.) -> Tensor[]",
    lambda x, tiles, scales, format, ns, k, squares=None, eps=0.0: [x.new_empty(*x.shape[:-1], n) for n in ns],
)
_residual_op = cuda_op(
    "fp4_residual",
    residual,
    "(Tensor x, Tensor tiles, Tensor? scale, Tensor other, Tensor gain, str format, SymInt n, SymInt k) "
    "-> (Tensor, Tensor, Tensor)",
    lambda x, tiles, scale, other, gain, format, n, k: (
        other.new_empty(*x.shape[:-1], n),
        other.new_empty(*x.shape[:-1], n),
        other.new_empty(-(-n // ROWS), dtype=torch.float32),
    ),
)
