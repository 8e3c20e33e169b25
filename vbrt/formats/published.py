"""Published 4-bit checkpoints, repacked into vbrt's coarse planes without decoding them.

Both layouts already hold two codes a byte, low nibble first, as ours do: what changes is shapes and conventions. No
reader of such checkpoints calls this yet; the tests hold it to the published layouts.
"""

import torch
from torch import Tensor

from vbrt.errors import FormatError

__all__ = ["repack_mxfp4", "repack_nvfp4"]


def repack_nvfp4(
    weight_packed: Tensor, weight_scale: Tensor, global_scale: Tensor | float, *, divide: bool
) -> dict[str, Tensor]:
    """The `nvfp4` coarse plane of an NVFP4 checkpoint's tensors; codes and block scales are taken as they are.

    weight_packed uint8 [N, K/2]; weight_scale float8_e4m3fn (or its bytes) [N, K/16], not swizzled; global_scale one
    positive number. divide=False: ModelOpt's `weight_scale_2`, weight = code * scale * global. divide=True:
    compressed-tensors' `weight_global_scale`, weight = code * scale / global; its reciprocal is rounded to fp32.

    Raises FormatError for shapes or dtypes that do not fit together, NaN scales, or a scale that is not positive.
    """
    scales = weight_scale.view(torch.uint8) if weight_scale.dtype == torch.float8_e4m3fn else weight_scale
    _check_bytes("nvfp4", weight_packed, scales, (weight_packed.ndim == 2, scales.ndim == 2))
    n, half = weight_packed.shape
    if half % 8 or scales.shape != (n, half // 8):
        raise FormatError(
            f"nvfp4: packed weight {tuple(weight_packed.shape)} with scales {tuple(scales.shape)}; "
            f"expected [N, K/2] with [N, K/16]"
        )
    if ((scales & 0x7F) == 0x7F).any():
        raise FormatError("nvfp4: block scales hold NaN (byte 0x7F or 0xFF); expected finite E4M3 values")
    scale = torch.as_tensor(global_scale, dtype=torch.float32, device=weight_packed.device).reshape(-1)
    if scale.numel() != 1 or not (torch.isfinite(scale) & (scale > 0)).all():
        raise FormatError(f"nvfp4: global scale {scale.tolist()}; expected one positive finite number")
    tensor_scale = scale.reciprocal() if divide else scale.clone()
    return {
        "codes": weight_packed.detach().contiguous(),
        "scales": scales.detach().contiguous().view(torch.float8_e4m3fn),
        "tensor_scale": tensor_scale,
    }


def repack_mxfp4(blocks: Tensor, scales: Tensor) -> dict[str, Tensor]:
    """The `mxfp4` coarse plane of an MXFP4 checkpoint's tensors (gpt-oss: `*_blocks`, `*_scales`), byte for byte.

    blocks uint8 [..., K/32, 16]; scales uint8 (or float8_e8m0fnu) [..., K/32]. Leading dimensions become rows.

    Raises FormatError for shapes or dtypes that do not fit together, or NaN scales (byte 255).
    """
    scales = scales.view(torch.uint8) if scales.dtype == torch.float8_e8m0fnu else scales
    _check_bytes("mxfp4", blocks, scales, (blocks.ndim >= 2, scales.ndim >= 1))
    if blocks.shape[-1] != 16 or scales.shape != blocks.shape[:-1]:
        raise FormatError(
            f"mxfp4: blocks {tuple(blocks.shape)} with scales {tuple(scales.shape)}; "
            f"expected [..., K/32, 16] with [..., K/32]"
        )
    if (scales == 255).any():
        raise FormatError("mxfp4: scales hold NaN (byte 255); expected 0 to 254")
    groups = scales.shape[-1]
    return {
        "codes": blocks.detach().reshape(-1, groups * 16).contiguous(),
        "scales": scales.detach().reshape(-1, groups).contiguous(),
    }


def _check_bytes(format: str, codes: Tensor, scales: Tensor, ranks: tuple[bool, bool]) -> None:
    if codes.dtype != torch.uint8 or scales.dtype != torch.uint8 or not all(ranks):
        raise FormatError(
            f"{format}: codes are {codes.dtype} {tuple(codes.shape)}, scales {scales.dtype} {tuple(scales.shape)}; "
            "expected torch.uint8 codes and one scale byte a block"
        )
