"""Linear layers on block formats on a CPU: backend "compiled" of the ops "linear" and "decode_weight".

`linear.c` decodes codes in registers and multiplies there, so a forward reads 4-bit weights and writes none. With a
fine plane it restores the weight for torch's matmul, at about the speed of a memory copy.

Above `fused_tokens` tokens, CPUs with AVX2 or AVX-512 decode tiles into the cache and multiply there
(`panels_avx2.h`, in fp32; `panels_avx512.h`). Others, and CPUs with AMX in bf16, decode the weight to the activations'
dtype for torch's matmul; in fp32 tiles on an x86 CPU without bf16 instructions, whose 16-bit matmuls are four times
slower than fp32. Unsupported cases (tensors on other devices) fall back to the reference.

Legend: M tokens, N outputs, K inputs, R rows of a tile.
"""

import functools
import platform
from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from vbrt.config.format_records import formats_of
from vbrt.errors import FormatError, KernelError
from vbrt.formats import WeightPlanes, get_format
from vbrt.formats.affine import Affine
from vbrt.formats.block_formats import BlockFormat
from vbrt.formats.eight_bits import FloatBytes, ScaledBytes
from vbrt.formats.fine_coding import CODED, coded_fields
from vbrt.formats.fine_plane import SPAN, WIDTH
from vbrt.formats.format import Format, padded
from vbrt.formats.sixteen_levels import Levels
from vbrt.kernels import reference
from vbrt.kernels.cpu import buffer_reuse, compiler
from vbrt.kernels.cpu.build import NUMBERS, Coded, Fine, Product, Weight, library, offset_type, plane_fields, scale_type

__all__ = [
    "AFFINE",
    "BYTES",
    "EIGHT",
    "FORMATS",
    "LEVELS",
    "THREAD_WORK",
    "coding_of",
    "decode_to",
    "decode_turned",
    "decode_weight",
    "fused_tokens",
    "linear",
    "prepared",
    "route",
    "slow_dtypes",
]

#: 4-bit codes of 16 levels, and a scale byte per block
FORMATS = formats_of("e2m1", "table")
#: the same with scales of 16 or 32 bits, without a fine plane
LEVELS = formats_of("levels")
#: codes 0 to 15 with a scale and an offset per block, without a fine plane
AFFINE = formats_of("affine")
#: 8-bit integer codes, without a fine plane
BYTES = formats_of("int8")
#: 8-bit integers or E4M3 with scales of 16 or 32 bits or of superblocks, with or without offsets, and 4-bit codes with
#: zero points between them; without a fine plane
EIGHT = formats_of("bytes", "plain")
_LEVELS, _SIGNED, _UNSIGNED, _E4M3, _DIFFERENCES, _NIBBLES = range(6)
#: multiply-adds per thread that make threading worth it
THREAD_WORK = 1 << 16
_TILE_WEIGHTS = 1 << 22  # 16 MiB of fp32: enough rows for a fast matmul, smaller than the weight in 16 bits
_GROUP = 32  # GROUP of linear.c


@functools.cache
def fused_tokens() -> int:
    """Maximum tokens for decoding in registers; measured at 5632 x 2048 with AVX-512, at 512 x 2048 with
    AVX2, and at 4096 x 4096 without."""
    return library().vbrt_fused_tokens()


def _served(planes: WeightPlanes) -> bool:
    return prepared(planes) is not None


def route(x: Tensor, planes: WeightPlanes) -> str:
    """Return the path that `linear` takes: "fused", "panels", "tiles" (decode a tile, multiply in fp32, repeat),
    "decode+matmul", "merge+matmul" or "reference"."""
    if not (x.is_cpu and x.dim() and x.dtype in NUMBERS and _served(planes) and not torch.compiler.is_compiling()):
        return "reference"
    if planes.fine is not None:
        return "merge+matmul"
    if x.numel() <= fused_tokens() * max(1, x.shape[-1]):
        return "fused"
    if library().vbrt_has_panels() and not (x.dtype is torch.bfloat16 and _has_amx()):
        return "panels"
    return "tiles" if x.dtype in slow_dtypes() else "decode+matmul"


@functools.cache
def _has_amx() -> bool:
    return compiler.forced() is None and torch.cpu._is_amx_tile_supported()


@functools.cache
def slow_dtypes() -> tuple[torch.dtype, ...]:
    """Return the dtypes whose matmuls are slower than fp32's on this CPU."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return ()
    forced = compiler.forced()
    if forced is None:
        fast = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    else:
        fast = "avx512_bf16" in forced.features
    return () if fast else (torch.bfloat16, torch.float16)


def decode_weight(planes: WeightPlanes) -> Tensor:
    """The weight [N, K] in planes.dtype, bit-exact with the reference; the original weight with a fine plane."""
    if torch.compiler.is_compiling() or not _served(planes):
        return reference.decode_weight(planes)
    return decode_to(planes, planes.dtype) if planes.fine is None else _merge(planes)


def decode_turned(planes: WeightPlanes) -> Tensor:
    """`decode_weight` as [K, N], contiguous."""
    if torch.compiler.is_compiling() or not _served(planes) or planes.fine is None:
        return decode_weight(planes).t().contiguous()
    return _merge(planes, turned=True)


def decode_rows(planes: WeightPlanes, rows: Sequence[int]) -> Tensor:
    """Some rows of a coarse plane, [rows, K] in planes.dtype: those of `decode_weight`. Raises KernelError for planes
    that C does not take."""
    weight, k, dtype = prepared(planes), planes.shape[1], planes.dtype
    if weight is None or dtype not in NUMBERS:
        raise KernelError(f"{planes.format} planes in {dtype}: C decodes no rows of them")
    columns = padded(k, get_format(planes.format).block) if dtype is torch.float32 else k
    w_RK = torch.empty(len(rows), columns, dtype=dtype, device="cpu")
    decode, number, at = library().vbrt_decode, NUMBERS[dtype], w_RK.data_ptr()
    for row in rows:
        decode(weight.weight, row, row + 1, k, at, number, 1)
        at += columns * dtype.itemsize
    return w_RK if columns == k else w_RK[:, :k].contiguous()


def linear(
    x: Tensor, planes: WeightPlanes, bias: Tensor | None = None, activation: str = "none", *, rounded: bool = False
) -> Tensor:
    """activation(x @ w.T + bias): [..., K] to [..., N], in x's dtype; differentiable in x and bias.

    rounded: x of few tokens may be quantized to int8 (`vbrt.kernels.cpu.int8`).
    x is read by address, so callers must ensure that it is bare (`observers.is_bare`).

    Raises KernelError for an unknown activation, or if x's last dimension is not K.
    """
    way = route(x, planes)
    if way == "reference":
        return reference.linear(x, planes, bias, activation)
    if way == "merge+matmul":
        merged = WeightPlanes("dense", planes.shape, planes.dtype, {"weight": _merge(planes)})
        return reference.linear(x, merged, bias, activation)
    reference.check(x, planes, activation)
    if reference.wants_grad(x, bias) or way == "decode+matmul":
        y = F.linear(x, decode_to(planes, x.dtype), bias)
    elif way in ("fused", "panels"):
        multiply = library().vbrt_panels if way == "panels" else library().vbrt_linear
        dtype = x.dtype if activation == "none" else torch.float32
        y = _multiply(x.detach(), planes, bias, dtype, multiply, rounded=rounded and way == "fused")
    else:
        y = _multiply_tiles(x.detach(), planes)
        y = y if bias is None else y.add_(bias.detach())
    return reference.ACTIVATIONS[activation](y).to(x.dtype)


def _multiply(
    x: Tensor,
    planes: WeightPlanes,
    bias: Tensor | None,
    dtype: torch.dtype,
    multiply: Callable[..., int] | None = None,
    *,
    rounded: bool = False,
) -> Tensor:
    """x @ w.T + bias with fp32 accumulation, by a C function (None: the one for few tokens)."""
    n, k = planes.shape
    x_MK = x.reshape(-1, k).contiguous()
    y = torch.empty(*x.shape[:-1], n, dtype=dtype, device="cpu")
    if bias is not None:
        bias = bias.detach().contiguous()
        bias = bias if bias.dtype in NUMBERS else bias.float()
    product = Product(
        x_MK.data_ptr(), None if bias is None else bias.data_ptr(), y.data_ptr(), len(x_MK), k,
        NUMBERS[x.dtype], 0 if bias is None else NUMBERS[bias.dtype], NUMBERS[dtype], rounded,
    )  # fmt: skip
    multiply = multiply or library().vbrt_linear
    if not multiply(_weight(planes), product, _threads(y.numel() * k)):
        raise MemoryError(f"linear: no memory for {len(x_MK)} rows of {k} inputs")
    return y


def _multiply_tiles(x: Tensor, planes: WeightPlanes) -> Tensor:
    """x @ w.T in fp32 by torch, with autocast disabled; never materializes the whole weight."""
    n, k = planes.shape
    x_MK = x.reshape(-1, k).float()
    y_MN = torch.empty(x_MK.shape[0], n, dtype=torch.float32, device="cpu")
    with torch.autocast("cpu", enabled=False):  # x is cast already; autocast would multiply in 16 bits
        for first, last, w_RK in _decoded_rows(planes, min(n, max(1, _TILE_WEIGHTS // k)), torch.float32):
            y_MN[:, first:last] = x_MK @ w_RK.t()
    return y_MN.view(*x.shape[:-1], n)


def decode_to(planes: WeightPlanes, dtype: torch.dtype) -> Tensor:
    """Return a coarse plane's weight [N, K] in a dtype."""
    ((_, _, w_NK),) = _decoded_rows(planes, planes.shape[0], dtype if dtype in NUMBERS else torch.float32)
    return w_NK.to(dtype).contiguous()


def _decoded_rows(planes: WeightPlanes, rows: int, dtype: torch.dtype) -> Iterator[tuple[int, int, Tensor]]:
    """Yield (first row, end row, [R, K]) of decoded tiles; each overwrites the previous one."""
    n, k = planes.shape
    columns = padded(k, get_format(planes.format).block) if dtype is torch.float32 else k
    w_RK = buffer_reuse.empty((rows, columns), dtype)
    weight = _weight(planes)
    for first in range(0, n, rows):
        last = min(n, first + rows)
        threads = _threads((last - first) * columns)
        library().vbrt_decode(weight, first, last, k, w_RK.data_ptr(), NUMBERS[dtype], threads)
        yield first, last, w_RK[: last - first, :k]


def _merge(planes: WeightPlanes, *, turned: bool = False) -> Tensor:
    """The weight [N, K], bit-exact with `formats.merge_fine`; [K, N] if `turned`."""
    n, k = planes.shape
    w = buffer_reuse.empty((k, n) if turned else (n, k), planes.dtype)
    threads, pitch = _threads(w.numel()), k + _GROUP if turned else k  # no power of two: rows share cache sets
    rows = torch.empty(threads, _GROUP, pitch, dtype=planes.dtype, device="cpu") if turned else None
    fine = (None, _coded(planes)) if CODED in (planes.fine or {}) else (_fine(planes), None)
    memory = None if rows is None else rows.data_ptr()
    whole = library().vbrt_merge(_weight(planes), *fine, w.data_ptr(), memory, pitch, threads)
    if not whole:
        raise FormatError("fine plane: its lists do not fit the codes of the coarse plane; the pages are damaged")
    return w


def _fine(planes: WeightPlanes) -> Fine:
    """C structure of a fine plane. Raises FormatError for tensors whose sizes do not match the weight."""
    (n, k), fine, fmt = planes.shape, planes.fine or {}, get_format(planes.format)
    width, low, starts = WIDTH[planes.dtype], fine["low"], fine["starts"]
    nibbles = fine["nibbles"] if width == 12 else low
    sizes = [(n, k), (n, (k + 1) // 2 if width == 12 else k), (-(-n * k // SPAN), 2), (n, padded(k, fmt.block) // 2)]
    if [tuple(t.shape) for t in (low, nibbles, starts, planes.coarse["codes"])] != sizes:
        raise FormatError(f"fine plane: its tensors are not those of a weight [{n}, {k}]; the pages are damaged")
    tensors = (low, nibbles, fine["side"], fine["escapes"], starts)
    counts = len(fine["side"]), len(fine["escapes"])
    return Fine(*(t.data_ptr() for t in tensors), *counts, k, sum(1 << code for code in fmt.wide_codes), width)


def _coded(planes: WeightPlanes) -> Coded:
    """C structure of a coded fine plane. Raises FormatError for tensors whose sizes do not match the weight."""
    (n, k), fine, fmt = planes.shape, planes.fine or {}, get_format(planes.format)
    wanted = {name: shape for name, (_, shape) in coded_fields((n, k), fmt).items() if None not in shape}
    sizes = {name: tuple(fine[name].shape) for name in wanted}
    if sizes != wanted or tuple(planes.coarse["codes"].shape) != (n, padded(k, fmt.block) // 2):
        raise FormatError(f"fine plane: its tensors are not those of a weight [{n}, {k}]; the pages are damaged")
    tensors = (fine[name] for name in ("fours", "pairs", "extra", "escapes", "starts", CODED))
    counts = len(fine["extra"]), len(fine["escapes"])
    return Coded(*(t.data_ptr() for t in tensors), *counts, k, fmt.scale_mantissas)


def _threads(work: int) -> int:
    return max(1, min(torch.get_num_threads(), work // THREAD_WORK))


class _Prepared:
    """C structure of resident planes, built once. Copies of the planes build their own."""

    def __init__(self, planes: WeightPlanes) -> None:
        fmt = get_format(planes.format)
        assert isinstance(fmt, BlockFormat | Levels | Affine | ScaledBytes)  # for the type checker
        self.codes, record = planes.coarse["codes"], fmt.record
        fields, tables = [planes.coarse.get(name) for name in plane_fields(record)], fmt.tables(planes.coarse)
        pointers = (None if tensor is None else tensor.data_ptr() for tensor in (*fields, *tables))
        columns = self.codes.shape[1] * 8 // record.bits
        types = scale_type(record), offset_type(record)
        self.weight = Weight(*pointers, planes.shape[0], columns, fmt.block, *types, record.bits, coding_of(fmt))
        # keeps pointees alive: another thread may replace this object during a call
        self.weight.tensors = (*planes.coarse.values(), *tables)

    def __reduce__(self) -> tuple[type, tuple[()]]:
        return type(None), ()


def prepared(planes: WeightPlanes) -> _Prepared | None:
    """Return the C structure of planes, cached in them; None for planes that C does not support."""
    kept = planes.prepared
    if isinstance(kept, _Prepared) and kept.codes is planes.coarse.get("codes"):
        return kept
    known = planes.format in FORMATS or (planes.format in (*LEVELS, *AFFINE, *BYTES, *EIGHT) and planes.fine is None)
    if not known or "codes" not in planes.coarse or not _are_plain(planes.coarse):
        return None
    if planes.fine is not None and (planes.dtype not in WIDTH or not _are_plain(planes.fine)):
        return None
    kept = _Prepared(planes)
    object.__setattr__(planes, "prepared", kept)
    return kept


def coding_of(fmt: Format) -> int:
    """Return dots.h's number for the kind of a format's codes."""
    record = fmt.record
    if record.offsets == "floatzeros":
        return _DIFFERENCES if record.bits == 8 else _NIBBLES
    if record.bits == 4:
        return _LEVELS
    return _E4M3 if isinstance(fmt, FloatBytes) else _UNSIGNED if record.offsets else _SIGNED


def _weight(planes: WeightPlanes) -> Weight:
    """C structure of supported planes; valid as long as the planes live."""
    kept = prepared(planes)
    assert kept is not None  # `route` has checked
    return kept.weight


def _are_plain(plane: dict[str, Tensor]) -> bool:
    return all(type(t) is Tensor and t.is_cpu and t.is_contiguous() for t in plane.values())
