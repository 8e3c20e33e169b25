"""Routed experts on rows of 4-bit codes: backend "triton" of the ops "experts_up" and "experts_down".

Codes with offsets are multiplied where they lie, by the kernel of `linear` with a table of page addresses; the host
knows neither pages nor pairs, so a pass can be captured in a CUDA graph. Gates and weighted sums are launches of their
own. fp16 and fp32 are split into bf16 summands, a launch for each; codes, scales and offsets are exact. Where the host
has the pages, many pairs are left to decoded matrices and the vendor's matmul, expert by expert, and so are tables of
levels, which the kernel would round to bf16.

Launches follow `linear`'s on an H200; none was measured.

Legend: T tokens, k experts per token, P = T k pairs, E experts, N rows of a matrix, K its columns.
"""

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from vbrt.errors import KernelError
from vbrt.formats.page import PageLayout
from vbrt.kernels import experts
from vbrt.kernels.cuda import devices
from vbrt.kernels.cuda.e2m1.launches import SUMMANDS
from vbrt.kernels.cuda.experts.few_tokens import summands_of
from vbrt.kernels.cuda.experts.pairs import Groups, group_pairs
from vbrt.kernels.cuda.experts.token_sums import weighted_sums
from vbrt.kernels.cuda.launch_table import are_few, pairs_are_alone
from vbrt.kernels.cuda.launcher import Launcher
from vbrt.kernels.cuda.table.linear import AFFINE, FIELDS, FUSED_NEEDS, decode_weight, row_constants
from vbrt.kernels.experts import ExpertPages, Gate, addresses_of, apply_gate

__all__ = ["down", "route", "takes_addresses", "up"]

_OFFSETS = {"offsets": "values", "zeros": "zeros", "mins": "superblock"}  # field -> the kernel's OFFSETS


@functools.cache
def _kernel(dependent: bool) -> Launcher:
    from vbrt.kernels.cuda.table import linear_gluon

    return Launcher(linear_gluon.experts_kernel, dependent=dependent)


class _Matrix(NamedTuple):
    """One part of all pages. starts: bytes from a page's first on to each field of `FIELDS` but levels."""

    n: int
    row_bytes: int
    blocks: int
    scales: str
    offsets: str
    starts: tuple[int, ...]


def _matrix(pages: ExpertPages, part: str) -> _Matrix:
    head = f"{part}."
    fields = {field.name.removeprefix(head): field for field in pages.layout.fields if field.name.startswith(head)}
    stored = next(stored for name, stored in _OFFSETS.items() if name in fields)
    named = (next((fields[name] for name in names if name in fields), fields["codes"]) for names in FIELDS)
    starts = tuple(field.offset for field, names in zip(named, FIELDS, strict=True) if names != ("levels",))
    (n, row_bytes), scales = fields["codes"].shape, fields["scales"]
    return _Matrix(n, row_bytes, scales.shape[1], scales.dtype, stored, starts)


def takes_addresses(layout: PageLayout, device: torch.device) -> bool:
    """True if products need only the addresses of pages of this layout."""
    offsets = any(field.name.endswith(tuple(f".{name}" for name in _OFFSETS)) for field in layout.fields)
    return offsets and devices.serves(device.index or 0, FUSED_NEEDS)


def route(x_MK: Tensor, pairs: int, pages: ExpertPages, part: str = "up") -> str:
    """Name the route of a product: "fused", or "decoded": expert by expert, which syncs with the device."""
    if not x_MK.is_cuda or x_MK.dtype not in SUMMANDS or pages.format_of(part) not in AFFINE:
        return "decoded"
    if not devices.serves(x_MK.device.index, FUSED_NEEDS):
        return "decoded"
    if are_few(pairs, pages.experts, devices.gpu(x_MK.device.index)):
        return "fused"
    return "decoded" if any(page is not None for page in pages.pages) else "fused"


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
    if route(x_TH, ids_Tk.numel(), pages, part) == "decoded":
        return experts.experts_up(x_TH, ids_Tk, pages, part=part, gate=gate, bias_EN=bias_EN, decode=decode_weight)
    v_PN = _rows(x_TH, ids_Tk, pages, part, bias_EN, ids_Tk.shape[1])
    return (v_PN if gate is None else apply_gate(v_PN, gate)).to(x_TH.dtype)


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
    if route(h_PI, ids_Tk.numel(), pages, part) == "decoded":
        return experts.experts_down(h_PI, ids_Tk, weights_Tk, pages, part=part, bias_EN=bias_EN, decode=decode_weight)
    rows_PH = _rows(h_PI, ids_Tk, pages, part, bias_EN, 1)
    if weights_Tk is None:
        return rows_PH.to(h_PI.dtype)
    return weighted_sums(rows_PH, ids_Tk, weights_Tk, pages.experts, h_PI.dtype)


def _rows(x_MK: Tensor, ids_Tk: Tensor, pages: ExpertPages, part: str, bias_EN: Tensor | None, per_row: int) -> Tensor:
    """W x + b of each pair, fp32 [P, N]; per_row: pairs per row of x. Raises KernelError for an x of another width."""
    width, k = x_MK.shape[1], pages.shapes[part][1]
    if width != k:
        raise KernelError(f"experts, part {part!r}: x has shape {tuple(x_MK.shape)}; expected (..., {k})")
    matrix, pairs, device = _matrix(pages, part), ids_Tk.numel(), x_MK.device.index
    y_PN = x_MK.new_empty(pairs, matrix.n, dtype=torch.float32)
    if y_PN.numel() == 0:
        return y_PN
    mean = pairs / pages.experts
    token_groups = 1 if mean <= 8 else 2 if mean <= 16 else 4
    ids, x_SMK, addresses = ids_Tk.contiguous(), summands_of(x_MK), addresses_of(pages, x_MK.device)
    grouped = not pairs_are_alone(ids_Tk.shape[0], pairs, pages.experts)
    block = 2 * matrix.row_bytes // matrix.blocks
    ends = row_constants(x_SMK.shape[2], matrix.row_bytes, block, 8 if grouped else 1)
    warps, dependent = 8 if matrix.row_bytes >= 8 * 64 else 4, devices.launches_dependents(device)
    groups = group_pairs(ids, pages.experts, 8 * token_groups) if grouped else Groups(ids, ids, ids, ids, 1)
    blocks = len(groups.experts) if grouped else pairs
    bias = None if bias_EN is None else bias_EN.contiguous()
    numbers = pages.experts, matrix.n, x_SMK.shape[2], matrix.blocks, per_row, x_SMK.stride(1), *matrix.starts
    for number, x in enumerate(x_SMK):
        out = y_PN if number == 0 else torch.empty_like(y_PN)
        bias_or_x = x if bias is None or number else bias
        _kernel(dependent)(
            device,
            (-(-matrix.n // 16), blocks),
            (x, ids, *groups[:4], addresses, bias_or_x, out),
            numbers,
            warps=warps,
            specialized=(ids.dtype, bias_or_x.dtype),
            GROUPED=grouped,
            TOKEN_GROUPS=token_groups if grouped else 1,
            ROW_TILES=1,
            K_WARPS=warps,
            BLOCK=block,
            OFFSETS=matrix.offsets,
            SCALES=matrix.scales,
            HAS_BIAS=bias is not None and number == 0,
            DEPENDENT=dependent,
            **ends,
        )
        if number:
            y_PN += out
    return y_PN
