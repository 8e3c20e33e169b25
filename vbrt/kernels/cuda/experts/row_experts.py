"""Routed experts on rows of codes, as their formats store them: backend "triton" of "experts_up" and "experts_down".

Codes are multiplied where they lie, by the kernels of `linear` with a table of page addresses; the host knows neither
pages nor pairs, so a pass can be captured in a CUDA graph. Gates and weighted sums are launches of their own. By 4-bit
codes fp16 and fp32 are split into bf16 summands, a launch for each, and so are levels, which for bf16 are rounded to
it, as by `linear`; codes, scales and offsets are exact. By bytes pairs on their own are fp32 sums; many pairs, of 16
bits, are multiplied by weights rounded to x's dtype. The most pairs, in bf16, are left to weights that are decoded to
scratch memory, and torch's grouped matmul.

Launches were measured on an H200, with matrices of 1536 x 2048 and 2048 x 768.

Legend: T tokens, k experts per token, P = T k pairs, E experts, N rows of a matrix, K its columns.
"""

import functools
import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from vbrt.errors import KernelError
from vbrt.formats import WeightPlanes
from vbrt.formats.page import PageLayout
from vbrt.kernels import experts
from vbrt.kernels.cuda import devices
from vbrt.kernels.cuda.e2m1.launches import SUMMANDS
from vbrt.kernels.cuda.experts import decoded_experts, trellis_experts
from vbrt.kernels.cuda.experts.few_tokens import summands_of
from vbrt.kernels.cuda.experts.gated_rows import gated_rows
from vbrt.kernels.cuda.experts.pairs import Groups, group_pairs
from vbrt.kernels.cuda.experts.token_sums import weighted_sums
from vbrt.kernels.cuda.launch_table import are_few, pairs_are_alone
from vbrt.kernels.cuda.launcher import Launcher
from vbrt.kernels.cuda.plain import linear as plain_linear
from vbrt.kernels.cuda.table import linear as table_linear
from vbrt.kernels.cuda.trellis import linear as trellis_linear
from vbrt.kernels.cuda.whole import linear as whole_linear
from vbrt.kernels.experts import ExpertPages, Gate, addresses_of

__all__ = ["FORMATS", "decode_pages", "down", "route", "takes_addresses", "up"]

_NIBBLES, _TRELLIS = table_linear.SERVED, trellis_linear.FORMATS
#: formats by the module that decodes a matrix of them
_DECODERS = {
    _NIBBLES: table_linear,
    plain_linear.FORMATS: plain_linear,
    whole_linear.FORMATS: whole_linear,
    _TRELLIS: trellis_linear,
}
FORMATS = tuple(itertools.chain.from_iterable(_DECODERS))

#: field of offsets -> the 4-bit kernel's OFFSETS
_OFFSETS = {"offsets": "values", "middles": "middles", "zeros": "zeros", "mins": "superblock"}
#: fields of pages, by what kernels take: codes, scales, of superblocks d (or a unit), offsets, of those dmin, levels
_FIELDS = (("codes",), ("scales",), ("d", "unit", "tensor_scale"), tuple(_OFFSETS), ("dmin",), ("levels",))
_GROUP = 16  # pairs that the kernel of bytes takes together
_PAIR_STEP = 8, 256  # (rows, columns) of a step of bytes, for pairs on their own
_DECODED_FROM = 48  # pairs per expert from which decoded weights and a grouped matmul are the fastest
_DECODED_COLUMNS = {True: 4096, False: 2048}  # that a program decodes at a time, by: codes of 4 bits


@functools.cache
def _nibbles(dependent: bool) -> Launcher:
    from vbrt.kernels.cuda.table import linear_gluon

    return Launcher(linear_gluon.experts_kernel, dependent=dependent)


class _Decoders(NamedTuple):
    nibbles: Launcher
    bytes: Launcher


@functools.cache
def _decoders() -> _Decoders:
    from vbrt.kernels.cuda.plain import linear_triton
    from vbrt.kernels.cuda.table import decode_triton

    return _Decoders(
        Launcher(decode_triton.decode_experts_kernel, fused=False),
        Launcher(linear_triton.decode_experts_kernel, fused=False),
    )


class _Bytes(NamedTuple):
    pairs: Launcher
    groups: Launcher


@functools.cache
def _bytes() -> _Bytes:
    from vbrt.kernels.cuda.plain import linear_triton

    return _Bytes(Launcher(linear_triton.pairs_kernel), Launcher(linear_triton.groups_kernel))


class _Matrix(NamedTuple):
    """One part of all pages. dtypes and starts, bytes from a page's first on, by `_FIELDS`; codes where one is not.
    levels: how many a page has."""

    n: int
    row_bytes: int
    blocks: int
    offsets: str
    levels: int
    dtypes: tuple[str, ...]
    starts: tuple[int, ...]


def _matrix(pages: ExpertPages, part: str) -> _Matrix:
    head = f"{part}."
    fields = {field.name.removeprefix(head): field for field in pages.layout.fields if field.name.startswith(head)}
    stored = next((stored for name, stored in _OFFSETS.items() if name in fields), "none")
    named = [next((fields[name] for name in names if name in fields), fields["codes"]) for names in _FIELDS]
    (n, row_bytes), (_n, blocks) = fields["codes"].shape, fields["scales"].shape
    levels = fields["levels"].shape[0] if "levels" in fields else 0
    if not levels and stored == "none" and "tensor_scale" not in fields:
        stored = "middle"
    dtypes, starts = tuple(field.dtype for field in named), tuple(field.offset for field in named)
    return _Matrix(n, row_bytes, blocks, stored, levels, dtypes, starts)


def takes_addresses(layout: PageLayout, device: torch.device) -> bool:
    """True if products need only the addresses of pages of this layout."""
    return devices.serves(device.index or 0, table_linear.FUSED_NEEDS)


def route(x_MK: Tensor, pairs: int, pages: ExpertPages, part: str = "up") -> str:
    """Name the route of a product: "fused", "decoded" (to scratch memory) or "reference": expert by expert, which
    syncs with the device."""
    if not x_MK.is_cuda or x_MK.dtype not in SUMMANDS:
        return "reference"
    if not devices.serves(x_MK.device.index, table_linear.FUSED_NEEDS):
        return "reference"
    if decoded_experts.serves(x_MK, pages, part):
        return "fused" if pairs <= _DECODED_FROM * pages.experts else "decoded"
    few = are_few(pairs, pages.experts, devices.gpu(x_MK.device.index))
    return "fused" if few or all(page is None for page in pages.pages) else "reference"


def _decode_weight(planes: WeightPlanes) -> Tensor:
    return next(of for formats, of in _DECODERS.items() if planes.format in formats).decode_weight(planes)


def up(
    x_TH: Tensor,
    ids_Tk: Tensor,
    pages: ExpertPages,
    *,
    part: str = "up",
    gate: Gate | None = None,
    bias_EN: Tensor | None = None,
) -> Tensor:
    """See `kernels.experts.experts_up`."""
    way = route(x_TH, pages.counts_of(ids_Tk)[1], pages, part)
    if way == "reference":
        return experts.experts_up(x_TH, ids_Tk, pages, part=part, gate=gate, bias_EN=bias_EN, decode=_decode_weight)
    if way == "decoded":
        return decoded_experts.products(
            x_TH, ids_Tk, pages, part=part, gate=gate, bias_EN=bias_EN, decode=_decode_pages
        )
    v_PN = _rows(x_TH, ids_Tk, pages, part, bias_EN, ids_Tk.shape[1])
    return v_PN.to(x_TH.dtype) if gate is None else gated_rows(v_PN, gate, x_TH.dtype)


def down(
    h_PI: Tensor,
    ids_Tk: Tensor,
    weights_Tk: Tensor | None,
    pages: ExpertPages,
    *,
    part: str = "down",
    bias_EN: Tensor | None = None,
) -> Tensor:
    """See `kernels.experts.experts_down`."""
    way = route(h_PI, pages.counts_of(ids_Tk)[1], pages, part)
    if way == "reference":
        return experts.experts_down(h_PI, ids_Tk, weights_Tk, pages, part=part, bias_EN=bias_EN, decode=_decode_weight)
    if way == "decoded":
        rows_PH = up(h_PI, ids_Tk.reshape(-1, 1), pages, part=part, bias_EN=bias_EN)
    else:
        rows_PH = _rows(h_PI, ids_Tk, pages, part, bias_EN, 1)
    if weights_Tk is None:
        return rows_PH.to(h_PI.dtype)
    return weighted_sums(rows_PH, ids_Tk, weights_Tk, pages.experts, h_PI.dtype)


def _rows(x_MK: Tensor, ids_Tk: Tensor, pages: ExpertPages, part: str, bias_EN: Tensor | None, per_row: int) -> Tensor:
    """W x + b of each pair, fp32 [P, N]; per_row: pairs per row of x. Raises KernelError for an x of another width."""
    width, k = x_MK.shape[1], pages.shapes[part][1]
    if width != k:
        raise KernelError(f"experts, part {part!r}: x has shape {tuple(x_MK.shape)}; expected (..., {k})")
    y_PN, format = x_MK.new_empty(ids_Tk.numel(), pages.shapes[part][0], dtype=torch.float32), pages.format_of(part)
    if not y_PN.numel():
        return y_PN
    ids, bias = ids_Tk.contiguous(), None if bias_EN is None else bias_EN.contiguous()
    if format in _TRELLIS:
        trellis_experts.multiply(x_MK, ids, pages, part, bias, per_row, y_PN)
    else:
        multiply = _multiply_nibbles if format in _NIBBLES else _multiply_bytes
        multiply(x_MK, ids, pages, part, _matrix(pages, part), bias, per_row, y_PN)
    return y_PN


def _terms(x_SMK: Tensor, matrix: _Matrix) -> Iterator[tuple[Tensor, int]]:
    """Summands of x and, for each, which ones of levels; products below the precision of x's dtype are left out."""
    for number, x in enumerate(x_SMK):
        for summand in range(len(x_SMK) - number if matrix.offsets == "none" else 1):
            yield x, summand


def _warps_for(row_bytes: int) -> int:
    """Warps that share a row of codes of 4 bits: about four steps of 64 bytes each."""
    return max(2, min(8, 1 << max(1, row_bytes // 256).bit_length() - 1))


def _multiply_nibbles(
    x_MK: Tensor, ids: Tensor, pages: ExpertPages, part: str, matrix: _Matrix, bias: Tensor | None, per_row: int,
    y_PN: Tensor,
) -> None:  # fmt: skip
    pairs, device = ids.numel(), x_MK.device.index
    tokens, whole = pages.counts_of(ids)
    mean = whole / pages.experts
    token_groups = 1 if mean <= 8 else 2 if mean <= 16 else 4
    x_SMK, addresses = summands_of(x_MK), addresses_of(pages, x_MK.device)
    grouped = not pairs_are_alone(tokens, whole, pages.experts)
    block = 2 * matrix.row_bytes // matrix.blocks
    ends = table_linear.row_constants(x_SMK.shape[2], matrix.row_bytes, block, 8 if grouped else 1)
    warps, dependent = _warps_for(matrix.row_bytes), devices.launches_dependents(device)
    groups = group_pairs(ids, pages.experts, 8 * token_groups) if grouped else Groups(ids, ids, ids, ids, 1)
    blocks = len(groups.experts) if grouped else pairs
    numbers = pages.experts, matrix.n, x_SMK.shape[2], matrix.blocks, per_row, x_SMK.stride(1), *matrix.starts
    table = addresses if matrix.levels or matrix.offsets != "none" else table_linear.nf4_levels(device)
    for number, (x, summand) in enumerate(_terms(x_SMK, matrix)):
        out = y_PN if number == 0 else torch.empty_like(y_PN)
        bias_or_x = x if bias is None or number else bias
        _nibbles(dependent)(
            device,
            (-(-matrix.n // 16), blocks),
            (x, ids, *groups[:4], addresses, table, bias_or_x, out),
            numbers,
            warps=warps,
            specialized=(ids.dtype, table.dtype, bias_or_x.dtype),
            GROUPED=grouped,
            TOKEN_GROUPS=token_groups if grouped else 1,
            ROW_TILES=1,
            K_WARPS=warps,
            BLOCK=block,
            LEVELS=matrix.levels,
            SUMMAND=summand,
            OFFSETS=matrix.offsets,
            SCALES=matrix.dtypes[1],
            HAS_BIAS=bias is not None and number == 0,
            DEPENDENT=dependent,
            **ends,
        )
        if number:
            y_PN += out


def _multiply_bytes(
    x_MK: Tensor, ids: Tensor, pages: ExpertPages, part: str, matrix: _Matrix, bias: Tensor | None, per_row: int,
    y_PN: Tensor,
) -> None:  # fmt: skip
    pairs, device, k = ids.numel(), x_MK.device.index, x_MK.shape[1]
    x_MK = x_MK if x_MK.stride(1) == 1 else x_MK.contiguous()
    format = pages.format_of(part)
    constants, launch = plain_linear.constants_on(x_MK.device, format), plain_linear.launch_of(format)
    alone = x_MK.dtype is torch.float32 or pairs_are_alone(*pages.counts_of(ids), pages.experts)
    addresses, bias_or_x = addresses_of(pages, x_MK.device), x_MK if bias is None else bias
    numbers = pages.experts, matrix.n, k, matrix.blocks, per_row, *matrix.starts[:5], x_MK.stride(0)
    _codes, scales, large, zeros, *_ = matrix.dtypes
    shared: dict[str, Any] = {"HAS_BIAS": bias is not None, "SCALES": scales, "ZEROS": zeros, "LARGE": large}
    specialized = x_MK.dtype, ids.dtype, bias_or_x.dtype, x_MK.stride(0), k
    if alone:
        rows, columns = _PAIR_STEP
        _bytes().pairs(
            device,
            (-(-matrix.n // rows), pairs),
            (x_MK, ids, addresses, bias_or_x, y_PN),
            numbers,
            warps=plain_linear.WARPS,
            specialized=specialized,
            ROWS=rows,
            BLOCKS=columns // constants["BLOCK"],
            **shared,
            **constants,
        )
        return
    groups, (rows, columns, warps) = group_pairs(ids, pages.experts, _GROUP), launch.dots
    _bytes().groups(
        device,
        (-(-matrix.n // rows), len(groups.experts)),
        (x_MK, *groups[:4], addresses, bias_or_x, y_PN),
        numbers,
        warps=warps,
        specialized=specialized,
        TOKENS=_GROUP,
        ROWS=rows,
        BLOCKS=max(1, columns // constants["BLOCK"]),
        **shared,
        **constants,
    )


def decode_pages(pages: ExpertPages, part: str) -> Tensor:
    """See `Kernel.decode_pages`: pages in the order of rows."""
    offsets_E = decoded_experts.all_experts(pages.experts, pages.addresses.device)
    return _decode_pages(pages, part, offsets_E, 0, pages.experts)


def _decode_pages(pages: ExpertPages, part: str, offsets_E: Tensor, first: int, count: int) -> Tensor:
    """Return matrices in the order of rows, see `decoded_experts.Decode`."""
    if pages.format_of(part) in _TRELLIS:
        return trellis_experts.decode(pages, part, offsets_E, first, count)
    matrix, (n, k), format = _matrix(pages, part), pages.shapes[part], pages.format_of(part)
    device, nibbles = offsets_E.device, format in _NIBBLES
    w_GNK = torch.empty(count, n, k, dtype=torch.bfloat16, device=device)
    addresses, (_codes, scales, large, zeros, *_) = addresses_of(pages, device), matrix.dtypes
    shared: dict[str, Any] = {"warps": plain_linear.WARPS, "specialized": (k,), "SCALES": scales}
    if nibbles:
        block = 2 * matrix.row_bytes // matrix.blocks
        constants = {"BLOCK": block, "LEVELS": matrix.levels, "OFFSETS": matrix.offsets}
        table = addresses if matrix.levels or matrix.offsets != "none" else table_linear.nf4_levels(device.index)
        decode, tensors, starts = _decoders().nibbles, (addresses, offsets_E, table, w_GNK), matrix.starts
    else:
        constants = plain_linear.constants_on(device, format) | {"ZEROS": zeros, "LARGE": large}
        decode, tensors, starts = _decoders().bytes, (addresses, offsets_E, w_GNK), matrix.starts[:5]
    most = _DECODED_COLUMNS[nibbles] // constants["BLOCK"]
    blocks = min(most, 1 << (matrix.blocks - 1).bit_length())
    grid, numbers = (-(-n // (most // blocks)), count), (first, n, k, matrix.blocks, *starts)
    decode(device.index, grid, tensors, numbers, ROWS=most // blocks, BLOCKS=blocks, **shared, **constants)
    return w_GNK
