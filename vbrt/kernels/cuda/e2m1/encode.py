"""E2M1 encoder on a GPU: one kernel searches block scales and rounds, another packs codes into tiles."""

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from vbrt.formats.block_formats import BlockFormat, Range
from vbrt.formats.format import EncodedGroup, Format
from vbrt.libraries import triton_api

__all__ = ["encode_many", "launch_encode", "launch_pack"]

_ROWS = 128  # blocks per program


def encode_many(
    format: Format, w_ENK: Tensor, amax_E: Sequence[float] | None = None, squares: Tensor | None = None
) -> Iterator[EncodedGroup]:
    """See `Format.encode_many`: bit-exact, in one launch for all matrices of equal range."""
    return format.encode_many(w_ENK, amax_E, squares, step=_on_its_device)


def _on_its_device(format: BlockFormat, w_NK: Tensor, known: Range, squares: Tensor | None) -> dict[str, Tensor]:
    with torch.cuda.device(w_NK.device):
        return launch_encode(format, w_NK, known, squares)


def launch_encode(format: BlockFormat, w_NK: Tensor, known: Range, squares: Tensor | None = None) -> dict[str, Tensor]:
    """Encode a weight of known range to a coarse plane, on any device that Triton supports; squares as in `Step`."""
    from vbrt.kernels.cuda.e2m1.encode_triton import encode_kernel

    w_NK = w_NK.contiguous()
    (n, k), block = w_NK.shape, format.block
    blocks = -(-k // block)
    codes = torch.empty(n, blocks * block // 2, dtype=torch.uint8, device=w_NK.device)
    scales = torch.empty(n, blocks, dtype=torch.uint8, device=w_NK.device)
    low, high = format.byte_bounds(known)
    shift, least = format.stored(known)
    squares = None if squares is None else squares.float().contiguous()
    encode_kernel[(-(-n * blocks // _ROWS),)](
        w_NK,
        format.byte_values(w_NK.device),
        codes,
        scales,
        k,
        blocks,
        n * blocks,
        1 / known.unit,
        low,
        high,
        shift,
        least,
        w_NK if squares is None else squares,
        n if squares is None else n // len(squares),
        ROWS=_ROWS,
        BLOCK=block,
        LEVELS=block.bit_length() - 1,
        FIRST=format.offsets.start,
        CANDIDATES=len(format.offsets),
        E4M3=format.scale_dtype == "float8_e4m3fn",
        WEIGHED=squares is not None,
        **triton_api.fp_fusion(False),  # the specification multiplies and adds separately
    )
    scales = scales.view(getattr(torch, format.scale_dtype))
    return {"codes": codes, "scales": scales, **format.range_fields(known, w_NK.device)}


def launch_pack(codes: Tensor, scales: Tensor, tiles: Tensor, top: Tensor | None, raised: int) -> None:
    """Fill tiles int32 [I, U, words] from codes uint8 [N, Kp / 2] and scale bytes uint8 [N, B].

    top: the largest scale byte [1]; bytes are stored relative to it, plus `raised`; None: unchanged.
    """
    from vbrt.kernels.cuda.e2m1.encode_triton import pack_kernel

    rows, columns, words = tiles.shape
    pack_kernel[(rows, columns)](
        codes,
        scales,
        scales if top is None else top,
        tiles,
        len(codes),
        codes.shape[1],
        scales.shape[1],
        columns,
        WORDS=words,
        PER_TILE=(words - 256) // 4,
        RAISED=0 if top is None else raised,
        **triton_api.fp_fusion(True),
    )
