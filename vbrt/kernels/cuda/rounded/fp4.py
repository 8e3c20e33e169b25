"""Linear layers in FP4 for many tokens: the op "linear_fp4", which `[compute] fp4 = true` asks for.

From `FP4_TOKENS` on, on GPUs that multiply FP4 (sm_100 and newer), weights in tile order are put in the order that
torch's scaled matmul takes, activations are rounded to FP4, and the matmul multiplies codes and block scales as they
are (`vbrt::fp4_scaled_linear`). Below that, for other weights, other dtypes than bf16, N that is no multiple of 16, and
other GPUs it is the op "linear" and just as exact.

There was no such GPU: the vendor's matmul itself has never been run, only emulated on the operands that it would be
handed, and `FP4_TOKENS` is a guess.

What it costs in accuracy, relative to the exact product, emulated on Gaussian data: 9.5 % from the activations (one bit
of mantissa), more than the rounding of the weights to nvfp4 had cost (8.1 %) and three times FP8's noise. Outliers cost
their neighbours more: with one column in 64 thirty times as large, the others come out 30 % off. Weights are not
rounded again. Gradients are the unrounded product's: dX = dY w.

Both formats are multiplied as NVFP4, the only FP4 that cuBLAS has: E2M1, an E4M3 scale for 16 columns, an fp32 scale a
tensor. mxfp4 weights are given every scale twice; blocks more than 2^17 below the largest fade (E4M3 subnormals).
torch's own MXFP4 matmul calls a second library, and leaves out the bias. Activations take a power of two for their fp32
scale, so that a token's result does not depend on the other tokens but for blocks 2^13 and more below the largest; one
Inf or NaN among them spreads to all results.

Legend: M tokens, N outputs, K inputs.
"""

import functools
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from vbrt.formats import WeightPlanes
from vbrt.kernels.cuda import devices
from vbrt.kernels.cuda.e2m1 import launches
from vbrt.kernels.cuda.e2m1 import linear as tiled
from vbrt.kernels.cuda.e2m1.tiles import TiledWeight
from vbrt.kernels.cuda.launcher import cuda_op
from vbrt.kernels.cuda.rounded import fp8
from vbrt.libraries import triton_api

__all__ = ["FP4_TOKENS", "Operand", "fp4_refusal", "linear", "pack", "quantize", "route"]

#: the fewest tokens that are multiplied in FP4: borrowed from FP8, unmeasured; scripts/gpu-check would measure it
FP4_TOKENS = 512
_MIN_MAJOR = 10  # the first compute capability with an FP4 matmul
_MIN_CUDA = (12, 8)  # the first cuBLAS with one
_PACK_COLUMNS, _PACK_WARPS, _QUANTIZE_WARPS = 4, 4, 8


class Operand(NamedTuple):
    """A matrix [R, K] in NVFP4: codes float4_e2m1fn_x2 [R, K rounded up to 32, / 2], the even column in the low half;
    block scales float8_e4m3fn, R padded to 128 rows and to 4 scales, in the vendor's order (`fp4_triton`), flat;
    unit fp32 [1]. It stands for level * block scale * unit."""

    codes: Tensor
    scales: Tensor
    unit: Tensor


@functools.cache
def _kernels() -> Any:
    from vbrt.kernels.cuda.rounded import fp4_triton

    return fp4_triton


@functools.cache
def fp4_refusal(device: torch.device) -> str | None:
    """Why a device cannot multiply in FP4, or None if it can."""
    why = fp8.matmul_refusal(device, "FP4", (_MIN_MAJOR, 0))
    if why is not None:
        return why
    if tuple(map(int, torch.version.cuda.split(".")[:2])) < _MIN_CUDA:
        return f"torch is built for CUDA {torch.version.cuda}, whose cuBLAS has no FP4 matmul; it takes 12.8"
    return None


def _fewest(index: int) -> int | None:
    """The fewest tokens of a GPU that is served otherwise, None without FP4."""
    return FP4_TOKENS if devices.major(index) >= _MIN_MAJOR else None


def route(x: Tensor, planes: WeightPlanes) -> str:
    """Name the kernel of a call: "fp4", or as `e2m1.linear.route` names it."""
    return "fp4" if fp8.is_long(x, planes, _fewest) else tiled.route(x, planes)


def linear(x: Tensor, planes: WeightPlanes, bias: Tensor | None = None, activation: str = "none") -> Tensor:
    """activation(x @ w.T + bias): [..., K] to [..., N], in x's dtype; differentiable in x and bias.

    Raises KernelError for an activation that the reference does not know, or an x whose last dimension is not K.
    """
    if not fp8.is_long(x, planes, _fewest):
        return tiled.linear(x, planes, bias, activation)
    return fp8.rounded(x, planes, bias, activation, _multiply)


def _scaled_linear(x: Tensor, tiles: Tensor, scale: Tensor, bias: Tensor | None, format: str, n: int, k: int) -> Tensor:
    weight = TiledWeight(tiles, scale, format, n, k)
    with torch.cuda.device(tiles.device):
        w_NK = pack(weight)
        x_MK = quantize(x.reshape(-1, k))
        try:
            y_MN = _scaled_matmul(x_MK, w_NK, x.dtype)
        except RuntimeError as error:
            if "NOT_SUPPORTED" not in str(error) and not isinstance(error, NotImplementedError):
                raise
            fp8.note_refusal("fp4", n, k, x.dtype)
            y_MN = F.linear(x.reshape(-1, k), launches.decode(weight, x.dtype))
    if bias is not None:
        y_MN += bias.to(x.dtype)  # on its own, because cuBLAS is reported to refuse NVFP4 with one
    return y_MN.view(*x.shape[:-1], n)


def _scaled_matmul(x_MK: Operand, w_NK: Operand, dtype: torch.dtype) -> Tensor:
    """x @ w.T [M, N] by the vendor's library; the one call here that takes sm_100."""
    recipe = [F.ScalingType.BlockWise1x16, F.ScalingType.TensorWise]
    swizzle = [F.SwizzleType.SWIZZLE_32_4_4, F.SwizzleType.NO_SWIZZLE]  # one for each scale
    return F.scaled_mm(
        x_MK.codes,
        w_NK.codes.t(),
        [x_MK.scales, x_MK.unit],
        recipe,
        [w_NK.scales, w_NK.unit],
        recipe,
        swizzle_a=swizzle,
        swizzle_b=swizzle,
        output_dtype=dtype,
    )


def _empty(rows: int, chunks: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """(codes uint8 [rows, 16 * chunks], scales int32 [row blocks, scale blocks, 128]) to be filled."""
    codes = torch.empty(rows, 16 * chunks, dtype=torch.uint8, device=device)
    return codes, torch.empty(-(-rows // 128), -(-chunks // 2), 128, dtype=torch.int32, device=device)


def _operand(codes: Tensor, scales: Tensor, unit: Tensor) -> Operand:
    return Operand(codes.view(torch.float4_e2m1fn_x2), scales.view(torch.float8_e4m3fn).view(-1), unit)


def pack(weight: TiledWeight) -> Operand:
    """A weight [N, K] as an operand, without rounding (but for mxfp4 blocks that fade)."""
    tiles, scale, _, n, k = weight
    chunks = -(-k // 32)
    codes, scales = _empty(n, chunks, tiles.device)
    unit = torch.empty_like(scale) if weight.e8m0_scales else scale
    columns = tiles.shape[1]
    _kernels().pack_kernel[(8 * scales.shape[0] * -(-columns // _PACK_COLUMNS),)](
        tiles,
        scale,
        codes.view(torch.int32),
        scales,
        unit,
        n,
        chunks,
        columns,
        E8M0_SCALES=weight.e8m0_scales,
        COLUMNS=_PACK_COLUMNS,
        num_warps=_PACK_WARPS,
        **triton_api.fp_fusion(True),
    )
    return _operand(codes, scales, unit)


def quantize(x_MK: Tensor) -> Operand:
    """Activations [M, K] as an operand: each block's largest magnitude becomes 6, as near as E4M3 scales allow."""
    tokens, k = x_MK.shape
    x_MK = x_MK if x_MK.stride(1) == 1 else x_MK.contiguous()
    chunks = -(-k // 32)
    codes, scales = _empty(tokens, chunks, x_MK.device)
    unit = torch.empty(1, dtype=torch.float32, device=x_MK.device)
    largest = torch.linalg.vector_norm(x_MK, float("inf"), dtype=torch.float32)
    # without fused multiply-adds: ties then fall as in the reference
    _kernels().quantize_kernel[(scales.shape[0] * scales.shape[1],)](
        x_MK,
        largest,
        codes,
        scales,
        unit,
        tokens,
        k,
        x_MK.stride(0),
        chunks,
        num_warps=_QUANTIZE_WARPS,
        **triton_api.fp_fusion(False),
    )
    return _operand(codes, scales, unit)


_multiply_op = cuda_op(
    "fp4_scaled_linear",
    _scaled_linear,
    "(Tensor x, Tensor tiles, Tensor scale, Tensor? bias, str format, SymInt n, SymInt k) -> Tensor",
    lambda x, tiles, scale, bias, format, n, k: x.new_empty(*x.shape[:-1], n),
)
_multiply = fp8.on_tiles(_scaled_linear, _multiply_op)
