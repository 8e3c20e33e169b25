"""Linear layers on block formats on a CPU: the backend "compiled" of the ops "linear" and "decode_weight".

`cpu_linear.c` decodes a row to fp32 in cache and multiplies it there, so that a forward reads 4-bit weights and writes
none. With a fine plane it restores the weight for torch's matmul, about as fast as memory copies it. The machine's C
compiler builds it for this very CPU when an op is first resolved: half a second, anew in each process, since a library
kept on disk would have to be trusted, and built again for each CPU that shares the disk. torch.compile of the reference
takes seconds and Python headers for it. Where it cannot be built `refusal` says why.

Above `fused_tokens` the weight is decoded to the activations' dtype and torch's matmul takes over; in tiles of fp32 on
an x86 CPU without bf16 instructions, whose 16-bit matmuls take four times as long as those in fp32. What the C code
does not serve (tensors elsewhere) goes through the reference.

Legend: M tokens, N outputs, K inputs, R rows of a tile.
"""

import contextlib
import ctypes
import functools
import os
import platform
import shlex
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from vbrt.config.formats import formats_of
from vbrt.errors import FormatError, KernelError
from vbrt.formats import WeightPlanes, get_format
from vbrt.formats.base import padded
from vbrt.formats.blocks import BlockFormat, decode_tile
from vbrt.formats.fine import SPAN, WIDTH
from vbrt.kernels import reference
from vbrt.kernels.cpu import recycle

__all__ = ["FORMATS", "decode_turned", "decode_weight", "fused_tokens", "linear", "refusal", "route"]

#: 4-bit codes of 16 levels, and a byte of scale for a block
FORMATS = formats_of("e2m1", "table")
_SOURCE = Path(__file__).with_name("linear.c")
_COMPILERS = ("cc", "gcc", "clang")
# in order of speed; not every compiler has OpenMP, whose threads are torch's own, or knows the CPU it runs on
_FLAGS = (("-march=native", "-fopenmp"), ("-mcpu=native", "-fopenmp"), ("-fopenmp",), ())
_BUILD_LIMIT_S = 20
_THREAD_WORK = 1 << 16  # products that are worth a thread
_TILE_WEIGHTS = 1 << 22  # 16 MiB of fp32: enough rows for a matmul at full speed, less than the weight in 16 bits
_GROUP = 32  # GROUP of cpu_linear.c
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class _Weight(ctypes.Structure):
    """`Weight` of cpu_linear.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("codes", "scales", "levels", "values", "unit")),
        *((name, ctypes.c_int64) for name in ("rows", "columns", "block")),
    )


class _Fine(ctypes.Structure):
    """`Fine` of cpu_linear.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("low", "nibbles", "side", "escapes", "starts")),
        *((name, ctypes.c_int64) for name in ("sides", "escaped", "columns")),
        ("wide", ctypes.c_uint32),
        ("width", ctypes.c_int32),
    )


# -- building ---------------------------------------------------------------------------------------------------------


def refusal(device: torch.device) -> str | None:
    """Why the compiled kernels cannot serve a device, or None. The first call for a CPU builds them."""
    if device.type != "cpu":
        return f"made for CPUs, not for {device}"
    built = _build()
    return built if isinstance(built, str) else None


@functools.cache
def _build() -> ctypes.CDLL | str:
    """The library, or why there is none."""
    try:
        command = _compiler()
        with tempfile.TemporaryDirectory(prefix="vbrt-", ignore_cleanup_errors=True) as folder:
            return _load(_compiled(command, Path(folder) / "cpu_linear.so"))
    except (KernelError, OSError) as error:
        return str(error)


def _compiler() -> list[str]:
    named = os.environ.get("CC", "")
    try:
        command = shlex.split(named)
    except ValueError as error:
        raise KernelError(f"CC is {named!r}, which is no command ({error})") from None
    names = command[:1] or _COMPILERS
    found = next(filter(shutil.which, names), None)
    if found is None:
        raise KernelError(f"no C compiler was found ({', '.join(names)}{', which CC names' if command else ''})")
    return command or [found]


def _compiled(command: list[str], library: Path) -> Path:
    for flags in _FLAGS:
        done = _run([*command, "-O3", "-w", "-shared", "-fPIC", *flags, str(_SOURCE), "-o", str(library)])
        if done.returncode == 0 and library.exists():
            return library
    said = done.stderr.strip().splitlines() or [f"it made nothing, and ended with {done.returncode}"]
    raise KernelError(f"the C compiler {shlex.join(command)!r} failed: {said[-1]}")


def _run(line: list[str]) -> subprocess.CompletedProcess[str]:
    """Without input, which a command that is no compiler may wait for. What takes too long goes, its children too."""
    options = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": subprocess.PIPE}
    with subprocess.Popen(line, text=True, errors="replace", start_new_session=True, **options) as process:
        try:
            _, said = process.communicate(timeout=_BUILD_LIMIT_S)
        except BaseException as error:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            raise KernelError(f"the C compiler {shlex.join(line[:1])!r} took more than {_BUILD_LIMIT_S} s") from None
    return subprocess.CompletedProcess(line, process.returncode, stderr=said)


def _load(path: Path) -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(str(path))
        _declare(library)
    except (OSError, AttributeError) as error:
        raise KernelError(
            f"what the C compiler made cannot be loaded: {error}; TMPDIR can name a directory "
            "whose files may be executed"
        ) from None
    return library


def _declare(library: ctypes.CDLL) -> None:
    weight, pointer, number = ctypes.POINTER(_Weight), ctypes.c_void_p, ctypes.c_int64
    library.vbrt_linear.argtypes = (weight, pointer, number, pointer, ctypes.c_int)
    library.vbrt_decode.argtypes = (weight, number, number, pointer, ctypes.c_int)
    library.vbrt_merge.argtypes = (weight, ctypes.POINTER(_Fine), pointer, pointer, number, ctypes.c_int)
    library.vbrt_linear.restype = library.vbrt_decode.restype = None


def _library() -> ctypes.CDLL:
    built = _build()
    if isinstance(built, str):
        raise KernelError(f"cpu_linear: {built}")
    return built


# -- ops --------------------------------------------------------------------------------------------------------------


@functools.cache
def fused_tokens() -> int:
    """The most tokens that the C code multiplies itself; measured with and without AVX-512 at 4096 x 4096."""
    return _library().vbrt_fused_tokens()


def _served(planes: WeightPlanes) -> bool:
    if planes.format not in FORMATS or "codes" not in planes.coarse:
        return False
    return _are_plain(planes.coarse) and (planes.fine is None or (planes.dtype in WIDTH and _are_plain(planes.fine)))


def _are_plain(plane: dict[str, Tensor]) -> bool:
    return all(type(t) is Tensor and t.is_cpu and t.is_contiguous() for t in plane.values())


def route(x: Tensor, planes: WeightPlanes) -> str:
    """The way `linear` takes: "fused", "tiles" (decode and fp32 matmul by turns), "decode+matmul", "merge+matmul" or
    "reference"."""
    if not (x.is_cpu and x.dim() and x.dtype in _DTYPES and _served(planes) and not torch.compiler.is_compiling()):
        return "reference"
    if planes.fine is not None:
        return "merge+matmul"
    if x.numel() <= fused_tokens() * max(1, x.shape[-1]):
        return "fused"
    return "tiles" if x.dtype in _slow_dtypes() else "decode+matmul"


@functools.cache
def _slow_dtypes() -> tuple[torch.dtype, ...]:
    """What this CPU multiplies more slowly than fp32."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return ()
    if torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported():
        return ()
    return torch.bfloat16, torch.float16


def decode_weight(planes: WeightPlanes) -> Tensor:
    """The weight [N, K] in planes.dtype, the same bits as the reference; exact when the fine plane is there."""
    if torch.compiler.is_compiling() or not _served(planes):
        return reference.decode_weight(planes)
    return _decode(planes, planes.dtype) if planes.fine is None else _merge(planes)


def decode_turned(planes: WeightPlanes) -> Tensor:
    """`decode_weight` as [K, N], contiguous."""
    if torch.compiler.is_compiling() or not _served(planes) or planes.fine is None:
        return decode_weight(planes).t().contiguous()
    return _merge(planes, turned=True)


def linear(x: Tensor, planes: WeightPlanes, bias: Tensor | None = None, activation: str = "none") -> Tensor:
    """activation(x @ w.T + bias): [..., K] to [..., N], in x's dtype; differentiable in x and bias.

    x is read by its address: it is to be bare (`watched.is_bare`), as callers see to.

    Raises KernelError for an activation that the reference does not know, or an x whose last dimension is not K.
    """
    way = route(x, planes)
    if way == "reference":
        return reference.linear(x, planes, bias, activation)
    if way == "merge+matmul":
        merged = WeightPlanes("dense", planes.shape, planes.dtype, {"weight": _merge(planes)})
        return reference.linear(x, merged, bias, activation)
    reference.check(x, planes, activation)
    if reference.wants_grad(x, bias) or way == "decode+matmul":
        y = F.linear(x, _decode(planes, x.dtype), bias)
    else:
        y = (_multiply if way == "fused" else _multiply_tiles)(x.detach(), planes)
        y = y if bias is None else y.add_(bias.detach())
    return reference.ACTIVATIONS[activation](y).to(x.dtype)


def _multiply(x: Tensor, planes: WeightPlanes) -> Tensor:
    """x @ w.T in fp32."""
    n, k = planes.shape
    kp = padded(k, get_format(planes.format).block)
    x_MK = x.reshape(-1, k).float()
    x_MK = x_MK.contiguous() if kp == k else F.pad(x_MK, (0, kp - k))
    tokens = x_MK.shape[0]
    y = x_MK.new_empty(*x.shape[:-1], n)
    with _Borrowed(planes) as weight:
        _library().vbrt_linear(weight, x_MK.data_ptr(), tokens, y.data_ptr(), _threads(tokens * n * kp))
    return y


def _multiply_tiles(x: Tensor, planes: WeightPlanes) -> Tensor:
    """x @ w.T in fp32, by torch; the weight is never there as a whole."""
    n, k = planes.shape
    x_MK = x.reshape(-1, k).float()
    y_MN = torch.empty(x_MK.shape[0], n, dtype=torch.float32, device="cpu")
    for first, last, w_RK in _decoded_rows(planes, _TILE_WEIGHTS):
        y_MN[:, first:last] = x_MK @ w_RK.t()
    return y_MN.view(*x.shape[:-1], n)


def _decode(planes: WeightPlanes, dtype: torch.dtype) -> Tensor:
    n, k = planes.shape
    if dtype is torch.float32:
        ((_, _, w_NK),) = _decoded_rows(planes, n * k)
        return w_NK.contiguous()
    w_NK = recycle.empty((n, k), dtype)
    for first, last, w_RK in _decoded_rows(planes, decode_tile(w_NK.device)):
        w_NK[first:last] = w_RK
    return w_NK


def _decoded_rows(planes: WeightPlanes, weights: int) -> Iterator[tuple[int, int, Tensor]]:
    """(first row, row past the last, fp32 [R, K]) of tiles of about so many weights; each overwrites the one before."""
    n, k = planes.shape
    kp = padded(k, get_format(planes.format).block)
    rows = min(n, max(1, weights // k))
    w_RK = recycle.empty((rows, kp), torch.float32)
    with _Borrowed(planes) as weight:
        for first in range(0, n, rows):
            last = min(n, first + rows)
            _library().vbrt_decode(weight, first, last, w_RK.data_ptr(), _threads((last - first) * kp))
            yield first, last, w_RK[: last - first, :k]


def _merge(planes: WeightPlanes, *, turned: bool = False) -> Tensor:
    """The weight [N, K], bit for bit what `formats.merge_fine` gives; [K, N] if `turned`."""
    n, k = planes.shape
    w = recycle.empty((k, n) if turned else (n, k), planes.dtype)
    threads, pitch = _threads(w.numel()), k + _GROUP if turned else k  # at a power of two, rows share a few cache sets
    rows = torch.empty(threads, _GROUP, pitch, dtype=planes.dtype, device="cpu") if turned else None
    fine = _fine(planes)
    with _Borrowed(planes) as weight:
        memory = None if rows is None else rows.data_ptr()
        whole = _library().vbrt_merge(weight, fine, w.data_ptr(), memory, pitch, threads)
    if not whole:
        raise FormatError("fine plane: its lists do not fit the codes of the coarse plane; the pages are damaged")
    return w


def _fine(planes: WeightPlanes) -> _Fine:
    """A fine plane as the C code sees it. Raises FormatError for tensors of other sizes than the weight asks for."""
    (n, k), fine, fmt = planes.shape, planes.fine or {}, get_format(planes.format)
    width, low, starts = WIDTH[planes.dtype], fine["low"], fine["starts"]
    nibbles = fine["nibbles"] if width == 12 else low
    sizes = [(n, k), (n, (k + 1) // 2 if width == 12 else k), (-(-n * k // SPAN), 2), (n, padded(k, fmt.block) // 2)]
    if [tuple(t.shape) for t in (low, nibbles, starts, planes.coarse["codes"])] != sizes:
        raise FormatError(f"fine plane: its tensors are not those of a weight [{n}, {k}]; the pages are damaged")
    tensors = (low, nibbles, fine["side"], fine["escapes"], starts)
    counts = len(fine["side"]), len(fine["escapes"])
    return _Fine(*(t.data_ptr() for t in tensors), *counts, k, sum(1 << code for code in fmt.wide_codes), width)


def _threads(work: int) -> int:
    return max(1, min(torch.get_num_threads(), work // _THREAD_WORK))


class _Borrowed:
    """A weight as the C code sees it, whose tables live as long as the block."""

    def __init__(self, planes: WeightPlanes) -> None:
        fmt = get_format(planes.format)
        assert isinstance(fmt, BlockFormat)  # FORMATS are; for the type checker
        codes, scales = planes.coarse["codes"], planes.coarse["scales"]
        self._tensors = (codes, scales, *fmt.tables(planes.coarse))
        pointers = (tensor.data_ptr() for tensor in self._tensors)
        self._weight = _Weight(*pointers, planes.shape[0], 2 * codes.shape[1], fmt.block)

    def __enter__(self) -> _Weight:
        return self._weight

    def __exit__(self, *error: object) -> None:
        del self._tensors, self._weight
