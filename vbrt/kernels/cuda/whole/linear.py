"""Linear layers on 8-bit integers (`mxint8`): backend "triton" of the ops "linear" and "decode_weight".

Up to `FUSED_TOKENS` bf16 tokens, one kernel converts the codes in registers, multiplies on tensor cores and applies
bias and activation as an epilogue; more are handled by `e2m1/mma_gluon` where it is the fastest, see
`launch_table.codes_for`. Otherwise a kernel decodes the weight to the activations' dtype for the vendor's matmul.
Unsupported cases (CPU tensors) fall back to the reference, GPUs without `FUSED_NEEDS` to the decoding kernel. Pages
hold the plain coarse plane.

Legend: M tokens, N outputs, K inputs.
"""

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vbrt.config.format_records import formats_of
from vbrt.formats import WeightPlanes
from vbrt.kernels import reference
from vbrt.kernels.cuda import devices, differentiable, tuned_configs
from vbrt.kernels.cuda.e2m1 import launches
from vbrt.kernels.cuda.launch_table import Launch, MmaLaunch, codes_for
from vbrt.kernels.cuda.launcher import Launcher, cuda_op, rows_are_aligned
from vbrt.libraries import triton_api

__all__ = ["FORMATS", "FUSED_NEEDS", "FUSED_TOKENS", "LAUNCH", "codes_of", "decode_weight", "linear", "route"]

FORMATS = formats_of("int8")
#: maximum tokens of the fused kernel, in groups of 8
FUSED_TOKENS = 32
FUSED_NEEDS = devices.BF16
LAUNCH = Launch(1, 8, True)  # warps that split K
_UNROLL = 2  # 64-column groups that a warp loads at a time
_BLOCKS, _DECODE_WARPS = 64, 4


@functools.cache
def _fused_launcher() -> Launcher:
    from vbrt.kernels.cuda.whole import linear_gluon

    return Launcher(linear_gluon.linear_kernel)


@functools.cache
def _decode_kernels() -> Any:
    from vbrt.kernels.cuda.whole import decode_triton

    return decode_triton


def _served(planes: WeightPlanes) -> bool:
    codes = planes.coarse.get("codes")
    if planes.format not in FORMATS or planes.fine is not None or codes is None:
        return False
    return codes.is_cuda and devices.serves(codes.device.index, devices.TRITON)


def route(x: Tensor, planes: WeightPlanes) -> str:
    """Name a call's kernel: "fused", "decode+matmul" (decoded by a kernel) or "reference"."""
    if not (_served(planes) and x.is_cuda):
        return "reference"
    if not devices.takes_bf16(x, FUSED_NEEDS):
        return "decode+matmul"
    tokens = x.numel() // x.shape[-1]
    return "fused" if tokens <= FUSED_TOKENS or _launch_of(tokens, planes.coarse["scales"]) else "decode+matmul"


def _launch_of(tokens: int, scales: Tensor) -> MmaLaunch | None:
    """Launch for more bf16 tokens than `FUSED_TOKENS`; None: decode, then the vendor's matmul."""
    n, blocks = scales.shape
    return codes_for(devices.gpu(scales.device.index), "int8", tokens, n, -(-blocks // 4))


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
        return multiply(x, planes.coarse["codes"], planes.coarse["scales"], bias, activation)
    return reference.activate(F.linear(x, _decode(planes, x.dtype), bias), activation)


def _product(x: Tensor, codes: Tensor, scales: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    """activation(x @ w.T + bias) for any number of bf16 tokens, by the kernel that `route` names."""
    k, (n, blocks) = x.shape[-1], scales.shape
    x_MK = x.reshape(-1, k)
    tokens = len(x_MK)
    if tokens > FUSED_TOKENS:
        launch = _launch_of(tokens, scales)
        if launch is None:
            return reference.activate(F.linear(x, _decode_codes(codes, scales, k, x.dtype), bias), activation)
        return launches.mma(x_MK, _codes_of(codes, scales), bias, activation, launch).view(*x.shape[:-1], n)
    y = torch.empty(tokens, n, dtype=x.dtype, device=x.device)
    if not rows_are_aligned(x_MK):
        wide = x_MK.new_zeros(tokens, -(-k // 8) * 8)
        wide[:, :k] = x_MK
        x_MK, k = wide, wide.shape[1]
    bias = None if bias is None else bias.contiguous()
    warps = (tuned_configs.found(x.device.index, "whole", tokens, -(-n // 16), -(-k // 64)) or LAUNCH).k_warps
    _fused_launcher()(
        x.device.index,
        (-(-n // 16), 1),
        (x_MK, codes.view(torch.int32), scales, x_MK if bias is None else bias, y),
        (tokens, n, k, blocks, x_MK.stride(0), y.stride(0)),
        warps=warps,
        specialized=() if bias is None else (bias.dtype,),
        TOKEN_GROUPS=1 << max(0, (tokens - 1).bit_length() - 3),
        K_WARPS=warps,
        UNROLL=_UNROLL,
        ACTIVATION=activation,
        HAS_BIAS=bias is not None,
    )
    return y.view(*x.shape[:-1], n)


def codes_of(coarse: dict[str, Tensor]) -> launches.Codes:
    """A plain coarse plane as `Codes`."""
    return _codes_of(coarse["codes"], coarse["scales"])


def _codes_of(codes: Tensor, scales: Tensor) -> launches.Codes:
    (n, blocks), words = scales.shape, codes.view(torch.int32)
    return launches.Codes(words, "int8", scales, n, -(-blocks // 4), scales, scales, blocks, 32)


def _decode(planes: WeightPlanes, dtype: torch.dtype) -> Tensor:
    decode = _decode_op if torch.compiler.is_compiling() else _decode_codes
    return decode(planes.coarse["codes"], planes.coarse["scales"], planes.shape[1], dtype)


def _decode_codes(codes: Tensor, scales: Tensor, k: int, dtype: torch.dtype) -> Tensor:
    n, blocks = scales.shape
    w_NK = torch.empty(n, k, dtype=dtype, device=codes.device)
    with torch.cuda.device(codes.device):
        _decode_kernels().decode_kernel[(n, -(-blocks // _BLOCKS))](
            codes,
            scales,
            w_NK,
            n,
            k,
            blocks,
            ROWS=1,
            BLOCKS=_BLOCKS,
            num_warps=_DECODE_WARPS,
            **triton_api.fp_fusion(True),
        )
    return w_NK


_linear_op = cuda_op(
    "whole_linear",
    _product,
    "(Tensor x, Tensor codes, Tensor scales, Tensor? bias, str activation) -> Tensor",
    lambda x, codes, scales, bias, activation: x.new_empty(*x.shape[:-1], codes.shape[0]),
)
_decode_op = cuda_op(
    "whole_decode",
    _decode_codes,
    "(Tensor codes, Tensor scales, SymInt k, ScalarType dtype) -> Tensor",
    lambda codes, scales, k, dtype: codes.new_empty(codes.shape[0], k, dtype=dtype),
)
