"""Linear layers on weights in tile order: backend "triton" of the ops "linear" and "decode_weight".

Up to thousands of tokens, a kernel reads 4-bit tiles, multiplies on tensor cores and applies bias and activation as an
epilogue; `launch_table.choose` selects it. Where none is the fastest, the weight is decoded to the activations' dtype
for the vendor's matmul. Weights not in tile order (another format, a plain coarse plane) and GPUs without `NEEDS` fall
back to the reference: decode, then matmul. `route` names a call's kernel.

The kernels multiply in bf16 and accumulate in fp32. bf16 activations are used as they are; fp16 and fp32 are split
exactly into two and three bf16 summands, and count as that many times the tokens.

Legend: M tokens, N outputs, K inputs, S summands.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vbrt.formats import WeightPlanes
from vbrt.formats.page import PageLayout
from vbrt.kernels import reference
from vbrt.kernels.cuda import devices, differentiable, tuned_configs
from vbrt.kernels.cuda.e2m1 import launches
from vbrt.kernels.cuda.e2m1.launches import SUMMANDS
from vbrt.kernels.cuda.e2m1.tiles import (
    COLUMNS,
    FORMATS,
    ROWS,
    TILES,
    TiledWeight,
    fits,
    is_tiled,
    pack_tiles,
    tile_layout,
    tiled_weight,
    unpack_tiles,
    weight_of,
)
from vbrt.kernels.cuda.fine import merge
from vbrt.kernels.cuda.launch_table import (
    Choice,
    Launch,
    Matmul,
    MmaLaunch,
    PersistentLaunch,
    WideLaunch,
    choose,
    launch_for,
    turned_for,
)
from vbrt.kernels.cuda.launcher import cuda_op

__all__ = [
    "NEEDS",
    "Packing",
    "code_of",
    "decode_weight",
    "few_tokens_launch",
    "gradient",
    "linear",
    "multiply",
    "packing",
    "plain",
    "route",
    "serves",
    "slice_tiles",
]

#: of all kernels on tiles but the one that merges planes
NEEDS = devices.BF16
_MOST_KEPT = 4  # shapes of activations, such as a prompt's and a training step's
_SLICE_BYTES, _MOST_SLICES, _BLOCK_ROWS, _SLICE_TOKENS = 64 << 20, 4, 256, 2048


# -- kernel selection -------------------------------------------------------------------------------------------------


def multiply(x: Tensor, weight: TiledWeight, bias: Tensor | None, activation: str) -> Tensor:
    """activation(x @ w.T + bias) for any number of tokens, without gradients."""
    return _multiply_by(_choice(x, weight), x, weight, bias, activation)


def _multiply_by(choice: Choice, x: Tensor, weight: TiledWeight, bias: Tensor | None, activation: str) -> Tensor:
    """`multiply` by a launch."""
    x_MK = x.reshape(-1, weight.k)
    if x_MK.shape[0] == 0:
        return x.new_empty(*x.shape[:-1], weight.n)
    if type(choice) is Launch:
        return _narrow(x, x_MK, weight, bias, activation, choice)
    if type(choice) is WideLaunch:
        y = launches.wide(x_MK, weight, bias, activation, choice)
    elif type(choice) is PersistentLaunch:
        y = launches.persistent(x_MK, launches.codes_of(weight), bias, activation, choice)
    elif type(choice) is MmaLaunch:
        y = launches.mma(x_MK, launches.codes_of(weight), bias, activation, choice)
    else:
        y = reference.activate(_decode_and_multiply(x_MK, weight, bias), activation)
    return y.view(*x.shape[:-1], weight.n)


def _choice(x: Tensor, weight: TiledWeight) -> Choice:
    asked = _asked(x, weight)
    return None if asked is None else _launch_for(*asked)


def _asked(x: Tensor, weight: TiledWeight) -> tuple[int, int, int, int, int] | None:
    """Arguments of `_launch_for`; None for activations that no kernel multiplies."""
    summands, tokens = SUMMANDS.get(x.dtype), x.numel() // weight.k
    if summands is None or tokens == 0:
        return None
    return weight.tiles.device.index, tokens, summands, weight.n, weight.tiles.shape[1]


def _launch_for(device: int, tokens: int, summands: int, n: int, columns: int) -> Choice:
    """Launch from `vbrt.tune` on this machine, else from the table."""
    rows = tokens * summands
    found = tuned_configs.found(device, "linear", rows, -(-n // ROWS), columns)
    if found is None or (summands > 1 and type(found) is not Launch):  # searched with bf16
        return choose(devices.gpu(device), tokens, summands, n, columns)
    return None if type(found) is Matmul else found


def code_of(shape: tuple[int, int], dtype: torch.dtype, tokens: int, device: torch.device) -> Hashable:
    """Specialization key of a product of this many tokens, besides the weight's format and shape (N, K); None if it
    only decodes."""
    summands = SUMMANDS.get(dtype)
    if summands is None:
        return None
    n, k = shape
    choice = _launch_for(device.index, tokens, summands, n, -(-k // COLUMNS))
    if type(choice) is PersistentLaunch:
        return choice._replace(cut=min(choice.cut, 1), programs=0)
    if type(choice) is MmaLaunch:
        return choice._replace(splits=min(choice.splits, 2))
    return (choice, launches.token_groups(summands * tokens)) if type(choice) is Launch else choice


def few_tokens_launch(device: int, tokens: int, row_tiles: int, columns: int) -> Launch:
    """Configuration of a small-batch kernel: from `vbrt.tune` on this machine, else from the table."""
    found = tuned_configs.found(device, "linear", tokens, row_tiles, columns)
    return found if type(found) is Launch else launch_for("linear", devices.gpu(device), tokens, row_tiles, columns)


def serves(planes: WeightPlanes) -> bool:
    """True if kernels support these planes: in tile order, without a fine plane, on a GPU with what they need."""
    words = planes.coarse.get(TILES)
    return planes.fine is None and words is not None and words.is_cuda and devices.serves(words.device.index, NEEDS)


def route(x: Tensor, planes: WeightPlanes) -> str:
    """Name the kernel of a call: "fused", "persistent", "decode+matmul", "merge+matmul" (exact) or "reference"."""
    if merge.serves(planes):
        return "merge+matmul"
    if not serves(planes):
        return "reference"
    choice = _choice(x, weight_of(planes))
    if choice is None:
        return "decode+matmul"
    return "persistent" if isinstance(choice, PersistentLaunch) else "fused"


# -- the ops ----------------------------------------------------------------------------------------------------------


def gradient(dy: Tensor, planes: WeightPlanes) -> Tensor:
    """dY W: [..., N] to [..., K], in dY's dtype; not differentiable.

    bf16 by the persistent kernel where that is predicted fastest; else the weight is decoded, and torch multiplies.
    """
    if not serves(planes):
        return dy.matmul(decode_weight(planes).to(dy.dtype))
    n, k = planes.shape
    tokens = dy.numel() // n
    if dy.dtype is torch.bfloat16 and tokens and not torch.compiler.is_compiling():
        gpu = devices.gpu(planes.coarse[TILES].device.index)
        config = turned_for(gpu, tokens, k, -(-n // COLUMNS))
        if config is not None:
            return _turned_product(tuple(dy.shape), planes, config)(dy, None)
    return dy.matmul(_decode(planes, dy.dtype))


def decode_weight(planes: WeightPlanes) -> Tensor:
    """The weight [N, K] in planes.dtype, bit-exact with the reference; the original weight with a fine plane."""
    if merge.serves(planes):
        return merge.merge(planes)
    if not is_tiled(planes.coarse):
        return reference.decode_weight(planes)
    if serves(planes):
        return _decode(planes, planes.dtype)
    return reference.decode_weight(plain(planes))


def linear(x: Tensor, planes: WeightPlanes, bias: Tensor | None = None, activation: str = "none") -> Tensor:
    """activation(x @ w.T + bias): [..., K] to [..., N], in x's dtype; differentiable in x and bias.

    In bf16 the fused kernels' GELU and SiLU of v are within |v| * 2.5e-4 + 3e-4, see `narrow_gluon.activate`. Raises
    KernelError for an unknown activation, or if x's last dimension is not K.
    """
    product = _prepared(x, planes, bias, activation)
    if product is not None:
        return product(x, bias)
    if merge.serves(planes):
        reference.check(x, planes, activation)
        return reference.activate(F.linear(x, merge.merge(planes), bias), activation)
    if not serves(planes):
        return reference.linear(x, plain(planes), bias, activation)
    reference.check(x, planes, activation)
    if reference.wants_grad(x, bias):
        return differentiable.linear(x, planes, bias, activation, multiply=_multiply, gradient=gradient)
    return _multiply(x, planes, bias, activation)


def _multiply(x: Tensor, planes: WeightPlanes, bias: Tensor | None = None, activation: str = "none") -> Tensor:
    if torch.compiler.is_compiling():
        words, scale = planes.coarse[TILES], planes.coarse["tensor_scale"]
        return _linear_op(x, words, scale, bias, planes.format, planes.shape[0], activation)
    weight = weight_of(planes)
    asked = _asked(x, weight)
    choice = None if asked is None else _launch_for(*asked)
    if type(choice) is not PersistentLaunch:
        return _multiply_by(choice, x, weight, bias, activation)
    bias_dtype = None if bias is None else bias.dtype
    product = launches.PersistentProduct(launches.codes_of(weight), tuple(x.shape), bias_dtype, activation, choice)
    _keep(planes, (x.shape, x.dtype, bias_dtype, activation), _Kept(asked, product))
    return product(x, bias)


class _Kept(NamedTuple):
    """A prepared launch, and what it was chosen for."""

    asked: Hashable
    product: launches.PersistentProduct


class _Launches(dict[Hashable, _Kept]):
    """Prepared launches of planes, kept in them. Copies of the planes prepare their own."""

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return type(None), ()


def _prepared(
    x: Tensor, planes: WeightPlanes, bias: Tensor | None, activation: str
) -> launches.PersistentProduct | None:
    """The launch that an earlier call on these planes has prepared, if the same one would be chosen now."""
    known = None if torch.compiler.is_compiling() else planes.prepared
    if type(known) is not _Launches or reference.wants_grad(x, bias):
        return None
    kept = known.get((x.shape, x.dtype, None if bias is None else bias.dtype, activation))
    if kept is None or _launch_for(*kept.asked) is not kept.product.config:  # `vbrt.tune` may have found another
        return None
    return kept.product


def _turned_product(shape: tuple[int, ...], planes: WeightPlanes, config: PersistentLaunch) -> launches.TurnedProduct:
    """The launch that an earlier gradient of this shape has prepared on these planes, or a new one."""
    known, key = planes.prepared, (shape, "gradient")
    kept = known.get(key) if type(known) is _Launches else None
    if kept is None:
        kept = _Kept(None, launches.TurnedProduct(weight_of(planes), shape, config))
        _keep(planes, key, kept)
    return kept.product


def _keep(planes: WeightPlanes, key: Hashable, kept: _Kept) -> None:
    """Keep a launch with the planes that it reads, for as long as they are used."""
    known = planes.prepared
    if type(known) is not _Launches or len(known) >= _MOST_KEPT:
        known = _Launches()
        object.__setattr__(planes, "prepared", known)
    known[key] = kept


def _decode(planes: WeightPlanes, dtype: torch.dtype) -> Tensor:
    if torch.compiler.is_compiling():
        n, k = planes.shape
        return _decode_op(planes.coarse[TILES], planes.coarse["tensor_scale"], planes.format, n, k, dtype)
    return launches.decode(weight_of(planes), dtype)


def plain(planes: WeightPlanes) -> WeightPlanes:
    """The same planes with the coarse one in its format's order."""
    if not is_tiled(planes.coarse):
        return planes
    coarse = unpack_tiles(planes.format, planes.coarse, planes.shape)
    return WeightPlanes(planes.format, planes.shape, planes.dtype, coarse, planes.fine)


# -- several launches -------------------------------------------------------------------------------------------------


def _narrow(
    x: Tensor, x_MK: Tensor, weight: TiledWeight, bias: Tensor | None, activation: str, config: Launch
) -> Tensor:
    """By the small-batch kernel."""
    tokens, summands = x_MK.shape[0], SUMMANDS[x_MK.dtype]
    shape = *x.shape[:-1], weight.n
    if summands == 1:
        y = x.new_empty(shape)
        launches.narrow(x_MK, weight, bias, y, activation, config)
        return y
    y_SMN = x.new_empty(summands * tokens, weight.n, dtype=torch.float32)
    launches.narrow(launches.summands_of(x_MK), weight, None, y_SMN, "none", config)
    y = y_SMN.view(summands, *shape).sum(0)
    return reference.activate(y if bias is None else y + bias.float(), activation).to(x.dtype)


def _decode_and_multiply(x_MK: Tensor, weight: TiledWeight, bias: Tensor | None) -> Tensor:
    """x @ w.T + bias by torch, in slices of the weight's rows: less scratch memory, and better cache use.

    Bias: the vendor's library adds it only to a contiguous product, and slices would need another pass, so it is passed
    to an unsliced matmul. For rows not aligned to 16 bytes the library rounds before adding the bias, so there it is
    added here.
    """
    (tokens, k), row_tiles = x_MK.shape, weight.tiles.shape[0]
    if bias is not None and k * x_MK.element_size() % 16:
        return _decode_and_multiply(x_MK, weight, None).add_(bias)
    step = slice_tiles(row_tiles, k * x_MK.element_size(), tokens)
    if bias is not None or step >= row_tiles:
        return F.linear(x_MK, launches.decode(weight, x_MK.dtype), bias)
    y_MN = x_MK.new_empty(tokens, weight.n)
    for at in range(0, row_tiles, step):
        rows = slice(ROWS * at, min(weight.n, ROWS * (at + step)))
        part = weight._replace(tiles=weight.tiles[at : at + step], n=rows.stop - rows.start)
        w_RK = launches.decode(part, x_MK.dtype)
        torch.mm(x_MK, w_RK.t(), out=y_MN[:, rows])
        del w_RK  # reused for the next slice
    return y_MN


def slice_tiles(row_tiles: int, row_bytes: int, tokens: int) -> int:
    """Row tiles per slice: whole cuBLAS blocks, about 64 MiB, at most four slices.

    On an H200, from 2048 tokens on two to four slices are as fast as one or faster, by shape, and more are slower; at
    1024 tokens one was the fastest for four shapes of five, by 2 to 11 %.
    """
    if tokens < _SLICE_TOKENS:
        return row_tiles
    slices = min(_MOST_SLICES, -(-row_tiles * ROWS * row_bytes // _SLICE_BYTES))
    block = _BLOCK_ROWS // ROWS
    return -(-row_tiles // (slices * block)) * block


# -- pages ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Packing:
    """Page order of a format's coarse plane that `linear` is fast on: tiles of `rows` rows."""

    format: str
    rows: int = ROWS

    def layout(self, shape: tuple[int, int]) -> PageLayout:
        """Page layout for a weight (N, K); depends on nothing else."""
        return tile_layout(self.format, shape)

    def pack(self, coarse: dict[str, Tensor], shape: tuple[int, int]) -> dict[str, Tensor] | None:
        """Reorder the coarse tensors of `encode`; None if that would not be exact."""
        if not fits(self.format, coarse):
            return None
        tensors = pack_tiles(self.format, coarse, shape)
        if tensors[TILES].is_cuda:  # one launch after the writer, see narrow_gluon
            torch.zeros(1, dtype=torch.float32, device=tensors[TILES].device)
            launches.import_device_code()  # overlaps with the loader's I/O instead of delaying the first forward
        return tensors

    def unpack(self, tensors: dict[str, Tensor], shape: tuple[int, int]) -> dict[str, Tensor]:
        """Exact inverse of `pack`."""
        return unpack_tiles(self.format, tensors, shape)


def packing(format: str) -> Packing | None:
    """Page order for a format; None if `linear` uses the format's own."""
    return Packing(format) if format in FORMATS else None


# -- operators --------------------------------------------------------------------------------------------------------


def _fp4_linear(
    x: Tensor, tiles: Tensor, scale: Tensor | None, bias: Tensor | None, format: str, n: int, activation: str
) -> Tensor:
    return multiply(x, tiled_weight(tiles, scale, format, n, x.shape[-1]), bias, activation)


def _fp4_decode(tiles: Tensor, scale: Tensor, format: str, n: int, k: int, dtype: torch.dtype) -> Tensor:
    return launches.decode(TiledWeight(tiles, scale, format, n, k), dtype)


_linear_op = cuda_op(
    "fp4_linear",
    _fp4_linear,
    "(Tensor x, Tensor tiles, Tensor? scale, Tensor? bias, str format, SymInt n, str activation) -> Tensor",
    lambda x, tiles, scale, bias, format, n, activation: x.new_empty(*x.shape[:-1], n),
)
_decode_op = cuda_op(
    "fp4_decode",
    _fp4_decode,
    "(Tensor tiles, Tensor scale, str format, SymInt n, SymInt k, ScalarType dtype) -> Tensor",
    lambda tiles, scale, format, n, k, dtype: tiles.new_empty(n, k, dtype=dtype),
)
