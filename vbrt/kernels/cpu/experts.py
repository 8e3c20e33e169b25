"""Routed experts on block formats on a CPU: backend "compiled" of the ops "experts_up" and "experts_down".

`experts.c` computes experts with few tokens: codes are decoded in registers and multiplied there, all experts of a call
are balanced over the threads, and the gate is fused as an epilogue. For an expert with more than `most_pairs` pairs the
matrix is decoded once, for torch's matmul. A pair's result depends on how many pairs its expert has, not on the number
of threads.

Unsupported cases (gradients, tensors on other devices) fall back to the reference.

Legend: T tokens, k experts per token, P = T k pairs, E experts, N rows of a matrix.
"""

import ctypes
import functools
import math
from collections import Counter
from collections.abc import Iterable

import torch
import torch.nn.functional as F
from torch import Tensor

from vbrt.config.format_records import FORMATS as RECORDS
from vbrt.errors import KernelError
from vbrt.formats import get_format
from vbrt.formats.affine import Affine
from vbrt.formats.block_formats import BlockFormat
from vbrt.formats.eight_bits import ScaledBytes
from vbrt.formats.format import padded
from vbrt.formats.sixteen_levels import Levels
from vbrt.kernels import experts as reference
from vbrt.kernels.cpu import linear as cpu_linear
from vbrt.kernels.cpu.build import NUMBERS, Bank, Gating, Task, library, offset_type, plane_fields, scale_type
from vbrt.kernels.cpu.thread_counts import team
from vbrt.kernels.cuda.e2m1.tiles import ROWS, TILES
from vbrt.kernels.experts import ExpertPages, Gate, apply_gate, pairs_of_experts, part_planes

__all__ = ["FORMATS", "experts_down", "experts_up", "is_decoded", "most_pairs", "takes_tiles", "weigh_and_sum"]

FORMATS = (*cpu_linear.FORMATS, *cpu_linear.LEVELS, *cpu_linear.AFFINE, *cpu_linear.BYTES, *cpu_linear.EIGHT)
_THREAD_WORK = 1 << 16  # multiply-adds per thread that make threading worth it
_FUNCTIONS = {name: number for number, name in enumerate(("none", "relu", "relu2", "gelu", "gelu_tanh", "silu"))}
_RAW = Gate("none", gated=False)


@functools.cache
def most_pairs() -> int:
    """Maximum pairs per expert for which C beats decoding and a matmul."""
    return library("experts").vbrt_experts_most()


def is_decoded(pairs: float, most: int) -> bool:
    """True if an expert with this many pairs is decoded once, for torch's matmul.

    most: the CPU's `most_pairs`.
    """
    return pairs > most


def takes_tiles(pages: ExpertPages, dtype: torch.dtype, gate: Gate) -> bool:
    """True if `experts_up` and `experts_down` can compute on pages in a GPU's tile order directly: x in 16 bits, on
    CPUs with AVX2 or AVX-512, if the first gate and the first value each begin a row of tiles."""
    if dtype not in NUMBERS or not all(TILES in pages.offsets(part) for part in pages.shapes):
        return False
    parted = not gate.gated or gate.interleaved or pages.shapes["up"][0] // 2 % ROWS == 0
    return parted and bool(library("experts").vbrt_experts_tiles(NUMBERS[dtype]))


def experts_up(
    x_TH: Tensor,
    ids_Tk: Tensor,
    pages: ExpertPages,
    *,
    part: str = "up",
    gate: Gate | None = None,
    bias_EN: Tensor | None = None,
    rounded: bool = False,
) -> Tensor:
    """g(W x + b) for each pair; see `vbrt.kernels.experts`.

    rounded: x may be quantized to int8 (`vbrt.kernels.cpu.int8`) for experts with few pairs.
    x is read by address, so callers must ensure that it is bare (`observers.is_bare`).
    """
    if not _serves((x_TH, bias_EN), pages):
        decode = cpu_linear.decode_weight
        return reference.experts_up(x_TH, ids_Tk, pages, part=part, gate=gate, bias_EN=bias_EN, decode=decode)
    return _Product(x_TH.detach(), ids_Tk, pages, part, bias_EN, rounded).run(_RAW if gate is None else gate)


def experts_down(
    h_PI: Tensor,
    ids_Tk: Tensor,
    weights_Tk: Tensor | None,
    pages: ExpertPages,
    *,
    part: str = "down",
    bias_EN: Tensor | None = None,
    rounded: bool = False,
) -> Tensor:
    """Weighted sums over each token's experts; see `vbrt.kernels.experts`."""
    if not _serves((h_PI, bias_EN, weights_Tk), pages):
        decode = cpu_linear.decode_weight
        return reference.experts_down(h_PI, ids_Tk, weights_Tk, pages, part=part, bias_EN=bias_EN, decode=decode)
    rows_PN = _Product(h_PI.detach(), ids_Tk.reshape(-1, 1), pages, part, bias_EN, rounded).run(_RAW)
    return rows_PN if weights_Tk is None else weigh_and_sum(rows_PN, ids_Tk, weights_Tk.detach(), pages.experts)


def _serves(tensors: tuple[Tensor | None, ...], pages: ExpertPages) -> bool:
    if not pages.formats.issubset(FORMATS) or torch.compiler.is_compiling():
        return False
    given = [t for t in tensors if t is not None]
    wants_grad = torch.is_grad_enabled() and any(t.requires_grad for t in given)
    return not wants_grad and all(t.is_cpu and t.dtype in NUMBERS for t in given)


class _Product:
    """One product with one part of each expert's weight."""

    def __init__(
        self, x: Tensor, ids_Tk: Tensor, pages: ExpertPages, part: str, bias_EN: Tensor | None, rounded: bool
    ) -> None:
        self.pages, self.part, self.rounded = pages, part, rounded
        self.n, self.k = pages.shapes[part]
        # pages in tile order are multiplied directly for any number of pairs
        self.most = ids_Tk.numel() if TILES in pages.offsets(part) else most_pairs()
        if x.dim() != 2 or x.shape != (len(ids_Tk), self.k):
            raise KernelError(f"experts, {part}: x has shape {tuple(x.shape)}; expected {(len(ids_Tk), self.k)}")
        if bias_EN is not None and bias_EN.shape != (pages.experts, self.n):
            raise KernelError(
                f"experts, {part}: the bias has shape {tuple(bias_EN.shape)}; expected {(pages.experts, self.n)}"
            )
        self.x, self.ids_Tk = x.contiguous(), ids_Tk.long().contiguous()
        self.bias_EN = None if bias_EN is None else bias_EN.detach().contiguous()

    def run(self, gate: Gate) -> Tensor:
        """Return gate(W x + b), [P, columns]."""
        out = self.x.new_zeros(self.ids_Tk.numel(), gate.columns(self.n))
        counts = Counter(self.ids_Tk.view(-1).tolist())
        touched = [e for e in counts if 0 <= e < self.pages.experts]
        few = [e for e in touched if not is_decoded(counts[e], self.most)]
        if len(few) < len(touched):
            for expert, pairs_p in pairs_of_experts(self.ids_Tk, self.pages.experts):
                if is_decoded(len(pairs_p), self.most):
                    out[pairs_p] = self._decoded(expert, pairs_p, gate)
        if few:
            self._fused(few, sum(counts[e] for e in few), gate, out)
        return out

    def _decoded(self, expert: int, pairs_p: Tensor, gate: Gate) -> Tensor:
        """Rows of one expert's pairs by decode and torch's matmul, with autocast disabled."""
        dtype = torch.float32 if self.x.dtype in cpu_linear.slow_dtypes() else self.x.dtype
        w_NK = cpu_linear.decode_to(part_planes(self.pages, expert, self.part), dtype)
        bias = None if self.bias_EN is None else self.bias_EN[expert].to(dtype)
        with torch.autocast("cpu", enabled=False):  # x is cast already; autocast would multiply in 16 bits
            v_pN = F.linear(self.x[pairs_p // self.ids_Tk.shape[1]].to(dtype), w_NK, bias)
        return apply_gate(v_pN, gate).to(self.x.dtype)

    def _fused(self, experts: list[int], pairs: int, gate: Gate, out: Tensor) -> None:
        """Compute the rows of experts with few pairs in C."""
        bank, held = bank_of(self.pages, self.part, experts)
        bias = self.bias_EN
        task = Task(
            self.ids_Tk.data_ptr(), self.ids_Tk.numel(), self.ids_Tk.shape[1], self.most,
            self.x.data_ptr(), None if bias is None else bias.data_ptr(), out.data_ptr(),
            self.k, NUMBERS[self.x.dtype], 0 if bias is None else NUMBERS[bias.dtype], NUMBERS[out.dtype],
            self.rounded,
        )  # fmt: skip
        threads = threads_for(pairs * self.n * self.k)
        if not library("experts").vbrt_experts_product(bank, gating_of(gate), task, threads):
            raise MemoryError(f"experts, {self.part}: no memory to sort {self.ids_Tk.numel()} pairs")
        del held  # keeps it alive until here


def bank_of(pages: ExpertPages, part: str, experts: Iterable[int]) -> tuple[Bank, tuple]:
    """C structure of a part of some experts, and its pointees. Raises KernelError: a page is missing."""
    experts = list(experts)
    levels, values = _tables(pages, part, experts)
    addresses = _addresses(pages, experts)
    return _bank(pages, part, (ctypes.addressof(addresses), levels, values)), (pages, levels, values, addresses)


def _addresses(pages: ExpertPages, experts: Iterable[int]) -> ctypes.Array[ctypes.c_void_p]:
    """Page addresses by expert. Raises KernelError for an expert without a page."""
    table = (ctypes.c_void_p * pages.experts)()
    for expert in experts:
        page = pages.pages[expert]
        if page is None:
            raise KernelError(f"expert {expert}: its page is not here; lease the pages of all routed experts")
        table[expert] = page.data_ptr()
    return table


def _tables(pages: ExpertPages, part: str, experts: Iterable[int]) -> tuple[Tensor, Tensor]:
    """fp32 levels by code, [1, 16], or [E, 16] if experts have their own, and values by scale byte, [256]."""
    format = pages.format_of(part)
    if "levels" not in pages.offsets(part):
        return _constant_tables(format)
    levels_E16, fmt = torch.zeros(pages.experts, 16, dtype=torch.float32, device="cpu"), _block_format(format)
    for expert in experts:
        levels_E16[expert], values, _ = fmt.tables(dict(part_planes(pages, expert, part).coarse))
    return levels_E16, values


@functools.cache
def _constant_tables(format: str) -> tuple[Tensor, Tensor]:
    levels, values, unit = _block_format(format).tables({"codes": torch.empty(0, dtype=torch.uint8, device="cpu")})
    return levels.view(1, -1), values * unit  # unit is 1, except for formats without a tensor scale


def _block_format(format: str) -> BlockFormat | Levels | Affine | ScaledBytes:
    fmt = get_format(format)
    assert isinstance(fmt, BlockFormat | Levels | Affine | ScaledBytes)  # FORMATS are; for the type checker
    return fmt


def _bank(pages: ExpertPages, part: str, tables: tuple[int, Tensor, Tensor]) -> Bank:
    addresses, levels, values = tables
    offsets, format = pages.offsets(part), pages.format_of(part)
    record = RECORDS[format]
    tiled, (n, k) = TILES in offsets, pages.shapes[part]
    return Bank(
        addresses, levels.data_ptr(), values.data_ptr(), 16 if len(levels) > 1 else 0,
        *(offsets.get(TILES if tiled and name == "codes" else name, -1) for name in plane_fields(record)),
        offsets.get("tensor_scale", offsets.get("unit", -1)), pages.experts, n, padded(k, record.block), record.block,
        scale_type(record), offset_type(record), record.bits, cpu_linear.coding_of(get_format(format)), tiled,
    )  # fmt: skip


@functools.lru_cache(maxsize=64)
def gating_of(gate: Gate) -> Gating:
    """C structure of a gate."""
    limit = math.inf if gate.limit is None else gate.limit
    by_sigmoid = gate.alpha != 1.0
    number = _FUNCTIONS[gate.function]
    return Gating(number, gate.gated, gate.interleaved, by_sigmoid, gate.alpha, limit, gate.shift)


def weigh_and_sum(rows_PN: Tensor, ids_Tk: Tensor, weights_Tk: Tensor, experts: int) -> Tensor:
    """Weighted sum over each token's experts, in fp32, in the order of the ids; see `vbrt.kernels.experts`."""
    if not (rows_PN.is_cpu and rows_PN.dtype in NUMBERS):
        return reference.weigh_and_sum(rows_PN, ids_Tk, weights_Tk, experts)
    (tokens, k), n = ids_Tk.shape, rows_PN.shape[1]
    rows_PN, out = rows_PN.contiguous(), rows_PN.new_empty(tokens, n)
    ids, weights = ids_Tk.long().contiguous(), weights_Tk.float().contiguous()
    shape, threads = (ctypes.c_int64 * 3)(tokens, k, n), threads_for(rows_PN.numel())
    pointers = (rows_PN.data_ptr(), ids.data_ptr(), weights.data_ptr())
    library("experts").vbrt_experts_sum(*pointers, experts, shape, out.data_ptr(), NUMBERS[out.dtype], threads)
    return out


def threads_for(work: int) -> int:
    """Number of threads for this many multiply-adds."""
    return team(work // _THREAD_WORK)
