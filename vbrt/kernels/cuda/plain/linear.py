"""Linear layers on published codes of 8 bits, and HQQ's: backend "triton" of the ops "linear" and "decode_weight".

`bytes...`, `zerobytes...`, `offsetbytes...`, `superbytes...`, `floatbytes...`, `unitbytes128`, `floatzeros...` and
`floatzerobytes...`. One kernel multiplies few tokens of 16 bits by codes in registers, and applies block scales and
offsets to fp32 sums; one more, up to `FUSED_TOKENS`, decodes weights in registers, to x's dtype, for `tl.dot`. Others
are multiplied by the vendor's matmul, with a weight that was decoded with the bits of the reference. Pages hold the
plain coarse plane.

Legend: M tokens, N outputs, K inputs.
"""

import functools
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vbrt.config.format_records import formats_of
from vbrt.formats import WeightPlanes, get_format
from vbrt.formats.eight_bits import UnitBytes
from vbrt.kernels import reference
from vbrt.kernels.cuda import devices, differentiable
from vbrt.kernels.cuda.launcher import cuda_op
from vbrt.libraries import triton_api

__all__ = [
    "FORMATS",
    "FUSED_NEEDS",
    "FUSED_TOKENS",
    "WARPS",
    "constants_on",
    "decode_weight",
    "launch_of",
    "linear",
    "route",
]

FORMATS = formats_of("bytes", "plain")
#: maximum tokens of the fused kernels
FUSED_TOKENS = 32
FUSED_NEEDS = devices.BF16
_DECODED_COLUMNS, WARPS = 2048, 4
_DOT_PROGRAMS, _LEAST_STEPS = 16, 4  # warps per multiprocessor, if programs have so many steps


class _Launch(NamedTuple):
    """Launches for codes, measured on an H200: most tokens without `tl.dot`; (rows, columns) of a step of sums for up
    to two tokens, and for more; (rows, columns, warps) of dots; fewest rows of a step of sums for one token, taken
    where the programs would be few."""

    summed: int
    sums: tuple[tuple[int, int], tuple[int, int]]
    dots: tuple[int, int, int]
    fewest: int


#: by what codes are
_LAUNCHES = {
    "e4m3": _Launch(2, ((8, 512), (8, 512)), (32, 128, 2), 4),
    "nibbles": _Launch(4, ((4, 1024), (4, 512)), (64, 64, 4), 4),
    "integers": _Launch(4, ((2, 1024), (4, 512)), (64, 64, 4), 2),
}
_FEW_PROGRAMS = 8  # of sums, per multiprocessor


@functools.cache
def launch_of(format: str) -> _Launch:
    """Launches for a format."""
    of = get_format(format)
    nibbles = "nibbles" if of.record.bits == 4 else "integers"
    return _LAUNCHES["e4m3" if of.code_dtype == "float8_e4m3fn" else nibbles]


@functools.cache
def _kernels() -> Any:
    from vbrt.kernels.cuda.plain import linear_triton

    return linear_triton


class _Operands(NamedTuple):
    """Tensors of a coarse plane, as the kernels take them; a pointer that they do not read is the scales'."""

    codes: Tensor
    scales: Tensor
    offsets: Tensor
    large: Tensor
    least: Tensor


def _operands(coarse: dict[str, Tensor]) -> _Operands:
    codes, scales = coarse["codes"], coarse["scales"]
    found = (
        next((coarse[name] for name in names if name in coarse), scales)
        for names in (("offsets", "zeros", "mins"), ("d", "unit"), ("dmin",))
    )
    return _Operands(codes.view(torch.uint8) if codes.is_floating_point() else codes, scales, *found)


@functools.cache
def _constants(format: str, converts: bool) -> dict[str, Any]:
    """Constants of the kernels; converts: the device converts E4M3 itself."""
    of = get_format(format)
    record, floats = of.record, of.code_dtype == "float8_e4m3fn"
    return {
        "BLOCK": record.block,
        "CODES": "nibbles" if record.bits == 4 else "e4m3" if floats else of.code_dtype,
        "OFFSETS": {None: "none", "floatzeros": "zeros"}.get(record.offsets, record.offsets),
        "SCALE_BYTES": {"superblock": "superblock", "e8m0": "powers"}.get(record.scales, "none"),
        "UNIT": isinstance(of, UnitBytes),
        "CONVERTS": floats and converts,
    }


def constants_on(device: torch.device, format: str) -> dict[str, Any]:
    """Constants of the kernels for a format on a device."""
    return _constants(format, devices.serves(device.index, devices.E4M3))


def _served(planes: WeightPlanes) -> bool:
    codes = planes.coarse.get("codes")
    if planes.format not in FORMATS or planes.fine is not None or codes is None:
        return False
    return codes.is_cuda and devices.serves(codes.device.index, devices.TRITON)


def _is_fused(x: Tensor) -> bool:
    if x.dtype not in (torch.float16, torch.bfloat16):
        return False
    few = _LAUNCHES["integers"].summed  # of fp16, on GPUs before sm_80
    most = FUSED_TOKENS if devices.serves(x.device.index, FUSED_NEEDS) else few * (x.dtype is torch.float16)
    return 0 < x.numel() <= most * x.shape[-1]


def route(x: Tensor, planes: WeightPlanes) -> str:
    """Name a call's kernel: "fused", "decode+matmul" (decoded by a kernel) or "reference"."""
    if not (_served(planes) and x.is_cuda):
        return "reference"
    return "fused" if _is_fused(x) else "decode+matmul"


def decode_weight(planes: WeightPlanes) -> Tensor:
    """The weight [N, K] in planes.dtype, bit-exact with the reference."""
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
    if not _is_fused(x):
        return reference.activate(F.linear(x, _decode(planes, x.dtype), bias), activation)
    multiply = _linear_op if torch.compiler.is_compiling() else _multiply
    return reference.activate(multiply(x, *_operands(planes.coarse), bias, planes.format), activation)


def _multiply(
    x: Tensor, codes: Tensor, scales: Tensor, offsets: Tensor, large: Tensor, least: Tensor, bias: Tensor | None,
    format: str,
) -> Tensor:  # fmt: skip
    """x @ w.T + bias for up to `FUSED_TOKENS` tokens of 16 bits."""
    (n, blocks), k = scales.shape, x.shape[-1]
    x_MK = x.reshape(-1, k)
    x_MK = x_MK if x_MK.stride(1) == 1 else x_MK.contiguous()
    operands, constants = (codes, scales, offsets, large, least), constants_on(x.device, format)
    launch = launch_of(format)
    run = _sums if len(x_MK) <= launch.summed else _dots
    with torch.cuda.device(x.device):
        return run(x_MK, operands, bias, (n, blocks), constants, launch).view(*x.shape[:-1], n)


def _sums(
    x_MK: Tensor, operands: tuple[Tensor, ...], bias: Tensor | None, shape: tuple[int, int], constants: dict[str, Any],
    launch: _Launch,
) -> Tensor:  # fmt: skip
    (tokens, k), (n, blocks) = x_MK.shape, shape
    rows, columns = launch.sums[tokens > 2]
    if tokens == 1 and n < rows * _FEW_PROGRAMS * devices.gpu(x_MK.device.index).processors:
        rows = launch.fewest
    y_MN = x_MK.new_empty(tokens, n)
    _kernels().sums_kernel[(-(-n // rows),)](
        *operands, x_MK, x_MK if bias is None else bias.contiguous(), y_MN, tokens, n, k, blocks, x_MK.stride(0),
        TOKENS=1 << (tokens - 1).bit_length(), ROWS=rows, BLOCKS=columns // constants["BLOCK"],
        HAS_BIAS=bias is not None, num_warps=WARPS, **constants, **triton_api.fp_fusion(True),
    )  # fmt: skip
    return y_MN


def _dots(
    x_MK: Tensor, operands: tuple[Tensor, ...], bias: Tensor | None, shape: tuple[int, int], constants: dict[str, Any],
    launch: _Launch,
) -> Tensor:  # fmt: skip
    (tokens, k), (n, blocks), (rows, columns, warps) = x_MK.shape, shape, launch.dots
    tiles, step = -(-n // rows), max(1, columns // constants["BLOCK"])
    programs = _DOT_PROGRAMS // warps * devices.gpu(x_MK.device.index).processors
    splits = max(1, min(programs // tiles, blocks // (step * _LEAST_STEPS)))
    share = -(-blocks // (splits * step)) * step
    splits = -(-blocks // share)
    part_SMN = torch.empty(splits, tokens, n, dtype=torch.float32, device=x_MK.device)
    _kernels().dots_kernel[(tiles, splits)](
        *operands, x_MK, part_SMN, tokens, n, k, blocks, x_MK.stride(0), share,
        TOKENS=16 if tokens <= 16 else 32, ROWS=rows, BLOCKS=step, num_warps=warps, **constants,
        **triton_api.fp_fusion(False),
    )  # fmt: skip
    y_MN = part_SMN.sum(0) if splits > 1 else part_SMN[0]
    return (y_MN if bias is None else y_MN + bias).to(x_MK.dtype)


def _decode(planes: WeightPlanes, dtype: torch.dtype) -> Tensor:
    decode = _decode_op if torch.compiler.is_compiling() else _decode_codes
    return decode(*_operands(planes.coarse), planes.format, planes.shape[1], dtype)


def _decode_codes(
    codes: Tensor, scales: Tensor, offsets: Tensor, large: Tensor, least: Tensor, format: str, k: int,
    dtype: torch.dtype,
) -> Tensor:  # fmt: skip
    (n, blocks), constants = scales.shape, constants_on(codes.device, format)
    w_NK = torch.empty(n, k, dtype=dtype, device=codes.device)
    wide = _DECODED_COLUMNS // constants["BLOCK"]
    with torch.cuda.device(codes.device):
        _kernels().decode_kernel[(n, -(-blocks // wide))](
            codes, scales, offsets, large, least, w_NK, n, k, blocks,
            BLOCKS=wide, num_warps=WARPS, **constants, **triton_api.fp_fusion(False),
        )  # fmt: skip
    return w_NK


_OPERANDS = "Tensor codes, Tensor scales, Tensor offsets, Tensor large, Tensor least"
_linear_op = cuda_op(
    "plain_linear",
    _multiply,
    f"(Tensor x, {_OPERANDS}, Tensor? bias, str format) -> Tensor",
    lambda x, codes, *_: x.new_empty(*x.shape[:-1], codes.shape[0]),
)
_decode_op = cuda_op(
    "plain_decode",
    _decode_codes,
    f"({_OPERANDS}, str format, SymInt k, ScalarType dtype) -> Tensor",
    lambda codes, scales, offsets, large, least, format, k, dtype: codes.new_empty(codes.shape[0], k, dtype=dtype),
)
