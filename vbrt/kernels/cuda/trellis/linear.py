"""Linear layers on trellis codes (`t3`): backend "triton" of the ops "linear" and "decode_weight".

Up to `FUSED_TOKENS` bf16 tokens, a kernel scales and rotates inputs, and one decodes the codes in registers,
multiplies on tensor cores and applies scales, bias and activation to fp32 sums. Otherwise a kernel decodes the weight
to the activations' dtype for the vendor's matmul. Unsupported cases (CPU tensors) fall back to the reference, GPUs
without `FUSED_NEEDS` too. Pages hold the plain coarse plane.

Rotated inputs are rounded to bf16 once more, which costs as much as rounding the result does.

Legend: M tokens, N outputs, K inputs, H columns of a block of the rotation.
"""

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vbrt.config.format_records import formats_of
from vbrt.formats import WeightPlanes
from vbrt.formats.t3 import block_of, rotate
from vbrt.kernels import reference
from vbrt.kernels.cuda import devices, differentiable
from vbrt.kernels.cuda.launch_table import Launch
from vbrt.kernels.cuda.launcher import Launcher, cuda_op
from vbrt.libraries import triton_api

__all__ = [
    "FORMATS",
    "FUSED_NEEDS",
    "FUSED_TOKENS",
    "LAUNCH",
    "decode_weight",
    "largest",
    "linear",
    "rotation",
    "rotation_back",
    "route",
]

FORMATS = formats_of("trellis")
#: maximum tokens of the fused kernel, in groups of 8
FUSED_TOKENS = 32
FUSED_NEEDS = devices.BF16
LAUNCH = Launch(1, 4, True)  # warps that split K
#: 64-column groups that a warp loads at a time, by groups of 8 tokens; four of each are right on a GPU, and not in
#: tests/emulator
_UNROLL = {1: 4, 2: 2, 4: 2}
_DECODE_WARPS = 4
_ROTATED_TOKENS = 16  # that a program rotates


@functools.cache
def _fused_launcher() -> Launcher:
    from vbrt.kernels.cuda.trellis import linear_gluon

    return Launcher(linear_gluon.linear_kernel)


@functools.cache
def _rotate_launcher() -> Launcher:
    from vbrt.kernels.cuda.trellis import decode_triton

    return Launcher(decode_triton.rotate_kernel)


@functools.cache
def _decode_kernels() -> Any:
    from vbrt.kernels.cuda.trellis import decode_triton

    return decode_triton


@functools.cache
def rotation(block: int, device: torch.device) -> Tensor:
    """Rotation of inputs, bf16 [H, H]: x @ it, columns in the order in which a warp's lanes take them.

    Of each 64 columns, lane t of four has 16: columns 2 t and 2 t + 1 of both halves of each tile.
    """
    turned = rotate(torch.eye(block, dtype=torch.float32, device=device)) * (64 / block)
    place = torch.arange(block, dtype=torch.int64, device=device).view(block // 64, 4, 2, 4, 2).permute(0, 3, 1, 2, 4)
    return turned[:, place.reshape(-1)].bfloat16()


@functools.cache
def rotation_back(block: int, device: torch.device) -> Tensor:
    """bf16 [H, H] of 1 and -1: rotated weights @ it."""
    return rotate(torch.eye(block, dtype=torch.float32, device=device)).mul_(8).t().contiguous().bfloat16()


def _served(planes: WeightPlanes) -> bool:
    codes = planes.coarse.get("codes")
    if planes.format not in FORMATS or planes.fine is not None or codes is None:
        return False
    return codes.is_cuda and devices.serves(codes.device.index, FUSED_NEEDS)


def route(x: Tensor, planes: WeightPlanes) -> str:
    """Name a call's kernel: "fused", "decode+matmul" (decoded by a kernel) or "reference"."""
    if not (_served(planes) and x.is_cuda):
        return "reference"
    few = devices.takes_bf16(x, FUSED_NEEDS) and x.numel() // x.shape[-1] <= FUSED_TOKENS
    return "fused" if few else "decode+matmul"


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
    if devices.takes_bf16(x, FUSED_NEEDS):
        multiply = _linear_op if torch.compiler.is_compiling() else _product
        return multiply(x, *_fields(planes), bias, activation)
    return reference.activate(F.linear(x, _decode(planes, x.dtype), bias), activation)


def _fields(planes: WeightPlanes) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    coarse = planes.coarse
    return coarse["codes"], coarse["scales"], coarse["columns"], coarse["tensor_scale"]


def _rotated(x_MK: Tensor, columns: Tensor) -> Tensor:
    """bf16 [M, Kp] in the order of `rotation`."""
    (tokens, k), kp, block = x_MK.shape, len(columns), block_of(x_MK.shape[1])
    x_MK = x_MK if x_MK.stride(1) == 1 else x_MK.contiguous()
    rotated = torch.empty(tokens, kp, dtype=x_MK.dtype, device=x_MK.device)
    _rotate_launcher()(
        x_MK.device.index,
        (-(-tokens // _ROTATED_TOKENS), kp // block),
        (x_MK, columns, rotation(block, x_MK.device), rotated),
        (tokens, k, kp // 64, x_MK.stride(0)),
        warps=_DECODE_WARPS,
        specialized=(k, x_MK.stride(0)),
        ROWS=_ROTATED_TOKENS,
        BLOCK=block,
    )
    return rotated


def _product(
    x: Tensor, codes: Tensor, scales: Tensor, columns: Tensor, unit: Tensor, bias: Tensor | None, activation: str
) -> Tensor:
    """activation(x @ w.T + bias) for any number of bf16 tokens, by the kernel that `route` names."""
    k, n, groups = x.shape[-1], len(scales), codes.shape[1] // 96
    x_MK, block = x.reshape(-1, k), block_of(k)
    tokens = len(x_MK)
    if tokens > FUSED_TOKENS:
        w_NK = _decode_codes(codes, scales, columns, unit, k, x.dtype)
        return reference.activate(F.linear(x, w_NK, bias), activation)
    rotated = _rotated(x_MK, columns)
    y = torch.empty(tokens, n, dtype=x.dtype, device=x.device)
    bias = None if bias is None else bias.contiguous()
    token_groups = 1 << max(0, (tokens - 1).bit_length() - 3)
    unroll = _UNROLL[token_groups]
    _fused_launcher()(
        x.device.index,
        (-(-n // 16), 1),
        (rotated, codes, scales, unit, rotated if bias is None else bias, y),
        (tokens, n, groups, y.stride(0)),
        warps=LAUNCH.k_warps,
        specialized=() if bias is None else (bias.dtype,),
        TOKEN_GROUPS=token_groups,
        K_WARPS=LAUNCH.k_warps,
        UNROLL=unroll,
        BLOCK=block,
        ACTIVATION=activation,
        HAS_BIAS=bias is not None,
        WHOLE=groups % (LAUNCH.k_warps * unroll) == 0,
    )
    return y.view(*x.shape[:-1], n)


def _decode(planes: WeightPlanes, dtype: torch.dtype) -> Tensor:
    decode = _decode_op if torch.compiler.is_compiling() else _decode_codes
    return decode(*_fields(planes), planes.shape[1], dtype)


def largest(dtype: torch.dtype) -> float:
    """Magnitude that decoded weights end at."""
    return min(torch.finfo(dtype).max, torch.finfo(torch.float32).max)


def _decode_codes(codes: Tensor, scales: Tensor, columns: Tensor, unit: Tensor, k: int, dtype: torch.dtype) -> Tensor:
    n, groups, block = len(scales), codes.shape[1] // 96, block_of(k)
    w_NK = torch.empty(n, k, dtype=dtype, device=codes.device)
    with torch.cuda.device(codes.device):
        _decode_kernels().decode_kernel[(-(-n // 16), groups * 64 // block)](
            codes,
            scales,
            columns,
            unit,
            rotation_back(block, codes.device),
            w_NK,
            n,
            k,
            groups,
            largest(dtype),
            BLOCK=block,
            num_warps=_DECODE_WARPS,
            **triton_api.fp_fusion(True),
        )
    return w_NK


_linear_op = cuda_op(
    "trellis_linear",
    _product,
    "(Tensor x, Tensor codes, Tensor scales, Tensor columns, Tensor unit, Tensor? bias, str activation) -> Tensor",
    lambda x, codes, scales, columns, unit, bias, activation: x.new_empty(*x.shape[:-1], scales.shape[0]),
)
_decode_op = cuda_op(
    "trellis_decode",
    _decode_codes,
    "(Tensor codes, Tensor scales, Tensor columns, Tensor unit, SymInt k, ScalarType dtype) -> Tensor",
    lambda codes, scales, columns, unit, k, dtype: codes.new_empty(scales.shape[0], k, dtype=dtype),
)
