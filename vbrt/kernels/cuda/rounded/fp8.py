"""FP8 linear layers for many tokens: the op "linear_fp8", for `[compute] fp8 = true`.

From `fp8_tokens` on, weights in tile order are decoded to E4M3, activations are quantized to E4M3 with one scale per
token (`vbrt::fp8_linear`), and `torch._scaled_mm` multiplies. Below that, and for other weights, dtypes other than
bf16, N not a multiple of 16, and GPUs without E4M3 (older than sm_89), it is the op "linear", just as exact.

Accuracy cost relative to the exact product, on Gaussian data: 2.6 % from the activations (3 mantissa bits, any format),
and for nvfp4 2.0 % from the weights: level times block scale has up to 6 significant bits where E4M3 keeps 4, for the
levels 1.5, 3 and 6; the others and all of mxfp4 stay exact. Together 3.3 % and 2.7 %. Weights need no per-row scale:
without the tensor scale none exceeds 6 * 448, an eighth of which E4M3 can hold. Blocks more than 2^12 below that fade
(E4M3 subnormals). Gradients are straight-through, those of the unrounded product: dX = dY w.

Legend: M tokens, N outputs, K inputs.
"""

import functools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vbrt.formats import WeightPlanes
from vbrt.host.logger import warn
from vbrt.kernels import reference
from vbrt.kernels.cuda import devices, differentiable
from vbrt.kernels.cuda.e2m1 import launches
from vbrt.kernels.cuda.e2m1 import linear as tiled
from vbrt.kernels.cuda.e2m1.tiles import TILES, TiledWeight
from vbrt.kernels.cuda.launcher import cuda_op
from vbrt.libraries import triton_api

__all__ = ["FP8_TOKENS", "fp8_refusal", "fp8_tokens", "linear", "note_refusal", "noted_refusal", "route"]

#: compute capability major -> the fewest tokens for which FP8 beats decode + bf16 matmul; measured by scripts/gpu-check
FP8_TOKENS = {9: 512}
_DEFAULT_TOKENS = 512
_DECODE_WARPS = 4
_REFUSED: dict[tuple[int, int], str] = {}
_ROW = 32768  # activations that the quantizer keeps in registers: a longer row is read twice


@functools.cache
def _kernels() -> Any:
    from vbrt.kernels.cuda.rounded import fp8_gluon

    return fp8_gluon


@functools.cache
def fp8_refusal(device: torch.device) -> str | None:
    """Why a device cannot multiply in FP8, or None if it can."""
    if device.type != "cuda":
        return f"{device.type} has no FP8 matmul"
    return devices.refusal(device, devices.E4M3)


def fp8_tokens(major: int) -> int:
    """Minimum tokens for FP8 on a GPU of compute capability `major`."""
    return FP8_TOKENS.get(major, _DEFAULT_TOKENS)


@functools.cache
def _fewest(index: int) -> int | None:
    """`fp8_tokens` of a GPU, None without FP8."""
    return fp8_tokens(devices.major(index)) if devices.serves(index, devices.E4M3) else None


def _is_long(x: Tensor, planes: WeightPlanes) -> bool:
    """True if the FP8 matmul takes x and the weight, and x has the `_fewest` tokens of the GPU or more."""
    if not tiled.serves(planes) or x.dtype is not torch.bfloat16 or planes.shape[0] % 16:
        return False
    tokens = _fewest(planes.coarse[TILES].device.index)
    return tokens is not None and x.numel() >= tokens * x.shape[-1] > 0


def route(x: Tensor, planes: WeightPlanes) -> str:
    """Name the kernel of a call: "fp8", or as `e2m1.linear.route` names it."""
    return "fp8" if _is_long(x, planes) else tiled.route(x, planes)


def linear(x: Tensor, planes: WeightPlanes, bias: Tensor | None = None, activation: str = "none") -> Tensor:
    """activation(x @ w.T + bias): [..., K] to [..., N], in x's dtype; differentiable in x and bias.

    Raises KernelError for an unknown activation, or if x's last dimension is not K.
    """
    if not _is_long(x, planes):
        return tiled.linear(x, planes, bias, activation)
    reference.check(x, planes, activation)
    if reference.wants_grad(x, bias):
        return differentiable.linear(x, planes, bias, activation, multiply=_multiply, gradient=tiled.gradient)
    return reference.activate(_multiply(x, planes, bias), activation)


def note_refusal(n: int, k: int, dtype: torch.dtype) -> None:
    """The vendor's library has no FP8 kernel for some shapes (K = 33008 to N = 64 on sm_90)."""
    _REFUSED[n, k] = f"compute.fp8: no FP8 matmul for {k} -> {n}; multiplied in {dtype}"
    warn(_REFUSED[n, k], stacklevel=3)


def noted_refusal(n: int, k: int) -> str | None:
    """The message of `note_refusal` about a weight [N, K] in this process, or None."""
    return _REFUSED.get((n, k))


def _multiply(x: Tensor, planes: WeightPlanes, bias: Tensor | None = None) -> Tensor:
    """x @ w.T + bias; torch.compile gets the op."""
    run = _multiply_op if torch.compiler.is_compiling() else _scaled_linear
    n, k = planes.shape
    return run(x, planes.coarse[TILES], planes.coarse["tensor_scale"], bias, planes.format, n, k)


def _scaled_linear(x: Tensor, tiles: Tensor, scale: Tensor, bias: Tensor | None, format: str, n: int, k: int) -> Tensor:
    weight = TiledWeight(tiles, scale, format, n, k)
    with torch.cuda.device(tiles.device):
        w_NK, scale_N = decode8(weight)
        x_MK, scale_M = quantize(x.reshape(-1, k))
        bias = None if bias is None else bias.to(x.dtype)
        try:
            # fast accumulation: partial sums of FP8 products keep 14 bits, far finer than the operands
            y = torch._scaled_mm(
                x_MK, w_NK.t(), scale_M.unsqueeze(1), scale_N.unsqueeze(0), bias, out_dtype=x.dtype, use_fast_accum=True
            )
        except RuntimeError as error:
            if "NOT_SUPPORTED" not in str(error):
                raise
            note_refusal(n, k, x.dtype)
            return F.linear(x, launches.decode(weight, x.dtype), bias)
    return y.view(*x.shape[:-1], n)


def decode8(weight: TiledWeight) -> tuple[Tensor, Tensor]:
    """Decode to (w as E4M3 [N, K rounded up to 16], scale fp32 [N]); w * scale is the weight."""
    tiles, scale, _, n, k = weight
    quads = -(-k // 16)
    w_NK = torch.empty(n, quads * 16, dtype=torch.float8_e4m3fn, device=tiles.device)
    scale_N = torch.empty(n, dtype=torch.float32, device=tiles.device)
    rows, columns, _ = tiles.shape
    _kernels().decode8_kernel[(rows * -(-columns // _DECODE_WARPS),)](
        tiles,
        scale,
        w_NK.view(torch.int32),
        scale_N,
        n,
        quads,
        columns,
        E8M0_SCALES=weight.e8m0_scales,
        WARPS=_DECODE_WARPS,
        num_warps=_DECODE_WARPS,
        **triton_api.fp_fusion(True),
    )
    return w_NK, scale_N


def quantize(x_MK: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize to (x as E4M3 [M, K rounded up to 16], scale fp32 [M]): each row's largest magnitude maps to 448."""
    tokens, k = x_MK.shape
    x_MK = x_MK if x_MK.stride(1) == 1 else x_MK.contiguous()
    wide = -(-k // 16) * 16
    q_MK = torch.empty(tokens, wide, dtype=torch.float8_e4m3fn, device=x_MK.device)
    scale_M = torch.empty(tokens, dtype=torch.float32, device=x_MK.device)
    block = min(_ROW, max(512, 1 << (wide - 1).bit_length()))
    _kernels().quantize_kernel[(tokens,)](
        x_MK,
        q_MK,
        scale_M,
        k,
        x_MK.stride(0),
        wide,
        BLOCK=block,
        WHOLE_ROW=wide <= block,
        num_warps=min(16, max(1, block // 1024)),
        **triton_api.fp_fusion(True),
    )
    return q_MK, scale_M


_multiply_op = cuda_op(
    "fp8_linear",
    _scaled_linear,
    "(Tensor x, Tensor tiles, Tensor scale, Tensor? bias, str format, SymInt n, SymInt k) -> Tensor",
    lambda x, tiles, scale, bias, format, n, k: x.new_empty(*x.shape[:-1], n),
)
