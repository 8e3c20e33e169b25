"""Linear layers on rows of 4-bit codes: backend "triton" of the ops "linear" and "decode_weight".

`nf4` and `quantile` have a scale byte per 64 columns and a tensor scale; `levels...` have scales of 16 or 32 bits per
16 to 128 columns, and their 16 levels in the page. `affine...`, `signed...`, `zeros...` and `superblock32` have no
table, but an offset per block; `symmetric...` have codes less 8, and their levels as a table only beyond
`FUSED_TOKENS`.

Up to `FUSED_TOKENS` bf16 tokens, one kernel decodes the codes, multiplies on tensor cores and applies bias and
activation as an epilogue; it rounds the levels to bf16, where there are any, and applies block scales and offsets to
fp32 sums. More tokens of tables are handled by `e2m1/persistent_gluon` (`nf4` and `quantile` on sm_90) or
`e2m1/mma_gluon` where that is the fastest, see `launch_table.codes_for`; they round level, scale and their product to
bf16. Otherwise a kernel decodes the weight to the activations' dtype for the vendor's matmul. Unsupported cases (CPU
tensors, a fine plane) fall back to the reference, GPUs without `FUSED_NEEDS` to the decoding kernel. Pages hold the
plain coarse plane.

Legend: M tokens, N outputs, K inputs.
"""

import functools
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vbrt.config.format_records import formats_of
from vbrt.formats import WeightPlanes
from vbrt.formats.nf4 import NF4_LEVELS
from vbrt.formats.sixteen_levels import INT4_LEVELS
from vbrt.kernels import reference
from vbrt.kernels.cuda import devices, differentiable, tuned_configs
from vbrt.kernels.cuda.e2m1 import launches
from vbrt.kernels.cuda.launch_table import MmaLaunch, PersistentLaunch, codes_for, has_rules, launch_for
from vbrt.kernels.cuda.launcher import Launcher, cuda_op, rows_are_aligned
from vbrt.libraries import triton_api

__all__ = [
    "AFFINE",
    "FORMATS",
    "FUSED_NEEDS",
    "FUSED_TOKENS",
    "LEVELS",
    "SERVED",
    "codes_of",
    "decode_weight",
    "family_of",
    "int4_levels",
    "linear",
    "nf4_levels",
    "prepare",
    "route",
    "row_constants",
    "weight_of",
]

#: formats with a table of levels and a scale byte per block
FORMATS = formats_of("table")
#: formats with 16 levels and scales of 16 or 32 bits
LEVELS = formats_of("levels")
#: formats with scales and offsets
AFFINE = formats_of("affine")
SERVED = (*FORMATS, *LEVELS, *AFFINE)
#: maximum tokens of the fused kernel: four groups of 8
FUSED_TOKENS = 32
FUSED_NEEDS = devices.BF16
_ROWS, _COLUMNS, _WARPS = 1, 4096, 4
#: tokens and columns per block for which a lane has 16 bytes of a row instead of 8 or 4
_SPREAD_TOKENS, _SPREAD_BLOCKS = 2, (32, 64)
#: most registers of a thread for so many tokens, so that all programs are resident at once; ragged rows need more
_REGISTERS = 64


@functools.cache
def _kernels() -> Any:
    from vbrt.kernels.cuda.table import decode_triton

    return decode_triton


@functools.cache
def _fused_kernel(dependent: bool) -> Launcher:
    from vbrt.kernels.cuda.table import linear_gluon

    return Launcher(linear_gluon.linear_kernel, dependent=dependent)


@functools.cache
def nf4_levels(index: int) -> Tensor:
    """nf4's levels on a GPU, fp32 [16] by code."""
    return torch.tensor(NF4_LEVELS, dtype=torch.float32, device=torch.device("cuda", index))


@functools.cache
def int4_levels(index: int) -> Tensor:
    """Levels of symmetric int4 on a GPU, fp32 [16] by code."""
    return torch.tensor(INT4_LEVELS, dtype=torch.float32, device=torch.device("cuda", index))


def prepare(device: torch.device) -> None:
    """Allocate tables on a GPU ahead of use: during capture they would be placed in that graph's memory pool."""
    index = torch.cuda.current_device() if device.index is None else device.index
    nf4_levels(index), int4_levels(index)


def _served(planes: WeightPlanes) -> bool:
    codes = planes.coarse.get("codes")
    if planes.format not in SERVED or planes.fine is not None or codes is None:
        return False
    return codes.is_cuda and devices.serves(codes.device.index, devices.TRITON)


def route(x: Tensor, planes: WeightPlanes) -> str:
    """Name a call's kernel: "fused", "persistent", "decode+matmul" (decoded by a kernel) or "reference"."""
    if not (_served(planes) and x.is_cuda):
        return "reference"
    if not devices.takes_bf16(x, FUSED_NEEDS):
        return "decode+matmul"
    tokens = x.numel() // x.shape[-1]
    if tokens <= FUSED_TOKENS:
        return "fused"
    launch = _launch_of(tokens, weight_of(planes.coarse))
    if launch is None:
        return "decode+matmul"
    return "persistent" if type(launch) is PersistentLaunch else "fused"


def _launch_of(tokens: int, weight: "_Weight") -> PersistentLaunch | MmaLaunch | None:
    """Launch for more bf16 tokens than `FUSED_TOKENS`; None: decode, then the vendor's matmul."""
    n, row_bytes = weight.codes.shape
    if row_bytes % 16 or weight.stored not in ("none", "middle"):  # rows that copies of 16 bytes cannot read
        return None
    kind = "table" if weight.scales.dtype is torch.uint8 else "levels"
    return codes_for(devices.gpu(weight.codes.device.index), kind, tokens, n, -(-row_bytes // 64))


def decode_weight(planes: WeightPlanes) -> Tensor:
    """The weight [N, K] in planes.dtype, bit-exact with the reference; the original weight with a fine plane."""
    return _decode(planes, planes.dtype) if _served(planes) else reference.decode_weight(planes)


def linear(x: Tensor, planes: WeightPlanes, bias: Tensor | None = None, activation: str = "none") -> Tensor:
    """activation(x @ w.T + bias): [..., K] to [..., N], in x's dtype; differentiable in x and bias.

    Raises KernelError for an unknown activation, or if x's last dimension is not K.
    """
    if not (_served(planes) and x.is_cuda):
        return reference.linear(x, planes, bias, activation)
    reference.check(x, planes, activation)
    if reference.wants_grad(x, bias):
        return differentiable.linear_by_decoding(x, planes, bias, activation, _decode)
    if devices.takes_bf16(x, FUSED_NEEDS):
        return _multiply(x, planes, bias, activation)
    return reference.activate(F.linear(x, _decode(planes, x.dtype), bias), activation)


class _Weight(NamedTuple):
    """A coarse plane in the form of the kernels.

    scale: the tensor scale, or fp16 numbers of the superblocks' scales; least: those of their offsets. levels: None for
    nf4's and symmetric int4's. offsets: values, zeros or bytes of superblocks; middles: values of code 8 instead.
    """

    codes: Tensor
    scales: Tensor
    levels: Tensor | None = None
    scale: Tensor | None = None
    offsets: Tensor | None = None
    least: Tensor | None = None
    middles: Tensor | None = None

    @property
    def stored(self) -> str:
        """How offsets are stored: the kernels' OFFSETS."""
        if self.middles is not None:
            return "middles"
        if self.offsets is None:
            return "middle" if self.levels is None and self.scale is None else "none"
        if self.least is not None:
            return "superblock"
        return "zeros" if self.offsets.dtype is torch.uint8 else "values"

    @property
    def pointers(self) -> tuple[Tensor, ...]:
        """Scales, levels, tensor scale, offsets and superblocks' numbers; any tensor where there are none."""
        table = _table(self)[0] if self.stored == "none" else self.scales
        offsets = self.offsets if self.middles is None else self.middles
        any_if_none = (table if tensor is None else tensor for tensor in (self.scale, offsets, self.least))
        return self.scales, table, *any_if_none

    @property
    def constants(self) -> dict[str, Any]:
        """Constants of the kernels."""
        block = 2 * self.codes.shape[1] // self.scales.shape[1]
        signed = self.levels is not None and len(self.levels) == 8
        return {"BLOCK": block, "SIGNED": signed, "OFFSETS": self.stored}


#: fields of planes that a `_Weight` has, in its order
_FIELDS = (
    *(("codes",), ("scales",), ("levels",), ("tensor_scale", "d"), ("offsets", "zeros", "mins"), ("dmin",)),
    ("middles",),
)


def weight_of(coarse: dict[str, Tensor]) -> _Weight:
    """A plain coarse plane in the form of the kernels."""
    return _Weight(*(next((coarse[name] for name in names if name in coarse), None) for names in _FIELDS))


def _multiply(x: Tensor, planes: WeightPlanes, bias: Tensor | None, activation: str) -> Tensor:
    multiply = _linear_op if torch.compiler.is_compiling() else _product
    return multiply(x, *weight_of(planes.coarse), bias, activation)


def _table(weight: _Weight) -> tuple[Tensor, bool]:
    """(fp32 levels by code, True if they are 8 magnitudes with the sign in bit 3 of a code)."""
    if weight.levels is None:
        constant = nf4_levels if weight.stored == "none" else int4_levels
        return constant(weight.codes.device.index), False
    return weight.levels, len(weight.levels) == 8


def _product(
    x: Tensor,
    codes: Tensor,
    scales: Tensor,
    levels: Tensor | None,
    scale: Tensor | None,
    offsets: Tensor | None,
    least: Tensor | None,
    middles: Tensor | None,
    bias: Tensor | None,
    activation: str,
) -> Tensor:
    """activation(x @ w.T + bias) for any number of bf16 tokens, by the kernel that `route` names."""
    tokens, k = x.numel() // x.shape[-1], x.shape[-1]
    weight = _Weight(codes, scales, levels, scale, offsets, least, middles)
    if tokens <= FUSED_TOKENS:
        return _fused(x, weight, bias, activation)
    launch = _launch_of(tokens, weight)
    if launch is None:
        return reference.activate(F.linear(x, _decode_rows(*weight, k, x.dtype), bias), activation)
    form = _codes_of(weight)
    multiply = launches.mma if type(launch) is MmaLaunch else launches.persistent
    return multiply(x.reshape(-1, k), form, bias, activation, launch).view(*x.shape[:-1], form.n)


def codes_of(coarse: dict[str, Tensor]) -> launches.Codes:
    """A plain coarse plane as `Codes`."""
    return _codes_of(weight_of(coarse))


def _codes_of(weight: _Weight) -> launches.Codes:
    (n, blocks), (table, signed) = weight.scales.shape, _table(weight)
    kind, words = "magnitudes" if signed else "table", weight.codes.view(torch.int32)
    columns, scale = -(-words.shape[1] // 16), table if weight.scale is None else weight.scale
    return launches.Codes(words, kind, scale, n, columns, weight.scales, table, blocks, 8 * words.shape[1] // blocks)


def family_of(block: int) -> str:
    """Family of launches of the fused kernel, for columns per block."""
    return "table wide" if block >= 128 else "table"


def row_constants(k: int, row_bytes: int, block: int, tokens: int) -> dict[str, bool]:
    """Constants of the fused kernels for rows of k columns of x, which have bytes of codes, in blocks of columns."""
    ragged = row_bytes % 64 != 0 or block == 16
    spread = not ragged and tokens <= _SPREAD_TOKENS and block in _SPREAD_BLOCKS and k == 2 * row_bytes
    return {"RAGGED": ragged, "K_TAIL": k != 128 * -(-row_bytes // 64), "SPREAD": spread}


def _most_row_tiles(capability: tuple[int, int], tokens: int, constants: dict[str, Any]) -> int:
    """Tiles of 16 rows of a program at most.

    The registers of a thread then hold their scales and offsets. Four tiles of codes with offsets spill 200 bytes;
    where launches were measured, on Hopper, they take .7 to .8 of the time of two nevertheless.
    """
    if constants["BLOCK"] == 16:
        return 1
    return 2 if tokens > 16 and constants["OFFSETS"] != "none" and not has_rules(capability) else 4


def _fused(x: Tensor, weight: _Weight, bias: Tensor | None, activation: str) -> Tensor:
    k, device = x.shape[-1], weight.codes.device
    n, blocks = weight.scales.shape
    x_MK = x.reshape(-1, k)
    tokens = x_MK.shape[0]
    y = torch.empty(tokens, n, dtype=x.dtype, device=x.device)
    if not rows_are_aligned(x_MK):
        wide = x_MK.new_zeros(tokens, -(-k // 8) * 8)
        wide[:, :k] = x_MK
        x_MK, k = wide, wide.shape[1]
    row_bytes, constants = weight.codes.shape[1], weight.constants
    family, shape = family_of(constants["BLOCK"]), (-(-n // 16), -(-row_bytes // 32))
    found = tuned_configs.found(device.index, family, tokens, *shape)
    gpu = devices.gpu(device.index)
    row_tiles, warps, *_ = found or launch_for(family, gpu, tokens, *shape)
    shaped = row_constants(k, row_bytes, constants["BLOCK"], tokens)
    row_tiles = min(row_tiles, _most_row_tiles(gpu.capability, tokens, constants))
    dependent, bias_or_x = devices.launches_dependents(device.index), x_MK if bias is None else bias.contiguous()
    tensors = x_MK, weight.codes.view(torch.int32), *weight.pointers, bias_or_x, y
    _fused_kernel(dependent)(
        device.index,
        (-(-n // (16 * row_tiles)), 1),
        tensors,
        (tokens, n, k, blocks, x_MK.stride(0), y.stride(0)),
        warps=warps,
        registers=_REGISTERS if tokens <= _SPREAD_TOKENS and row_tiles == 1 and not shaped["RAGGED"] else None,
        specialized=tuple(tensor.dtype for tensor in tensors),
        TOKEN_GROUPS=1 << max(0, (tokens - 1).bit_length() - 3),
        ROW_TILES=row_tiles,
        K_WARPS=warps,
        ACTIVATION=activation,
        HAS_BIAS=bias is not None,
        DEPENDENT=dependent,
        **constants,
        **shaped,
    )
    return y.view(*x.shape[:-1], n)


def _decode(planes: WeightPlanes, dtype: torch.dtype) -> Tensor:
    decode = _decode_op if torch.compiler.is_compiling() else _decode_rows
    return decode(*weight_of(planes.coarse), planes.shape[1], dtype)


def _decode_rows(
    codes: Tensor,
    scales: Tensor,
    levels: Tensor | None,
    scale: Tensor | None,
    offsets: Tensor | None,
    least: Tensor | None,
    middles: Tensor | None,
    k: int,
    dtype: torch.dtype,
) -> Tensor:
    weight = _Weight(codes, scales, levels, scale, offsets, least, middles)
    n, blocks = scales.shape
    constants = weight.constants
    wide = _COLUMNS // constants["BLOCK"]
    w_NK = torch.empty(n, k, dtype=dtype, device=codes.device)
    with torch.cuda.device(codes.device):
        _kernels().decode_kernel[(-(-n // _ROWS), -(-blocks // wide))](
            codes,
            *weight.pointers,
            w_NK,
            n,
            k,
            blocks,
            ROWS=_ROWS,
            BLOCKS=wide,
            **constants,
            num_warps=_WARPS,
            **triton_api.fp_fusion(False),
        )
    return w_NK


_OPERANDS = (
    "Tensor codes, Tensor scales, Tensor? levels, Tensor? scale, Tensor? offsets, Tensor? least, Tensor? middles"
)
_linear_op = cuda_op(
    "table_linear",
    _product,
    f"(Tensor x, {_OPERANDS}, Tensor? bias, str activation) -> Tensor",
    lambda x, codes, *_: x.new_empty(*x.shape[:-1], codes.shape[0]),
)
_decode_op = cuda_op(
    "table_decode",
    _decode_rows,
    f"({_OPERANDS}, SymInt k, ScalarType dtype) -> Tensor",
    lambda codes, scales, levels, scale, offsets, least, middles, k, dtype: codes.new_empty(
        codes.shape[0], k, dtype=dtype
    ),
)
