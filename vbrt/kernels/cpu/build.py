"""Loader of the C kernels: prebuilt libraries from the wheel, or built on the machine that runs them.

A wheel has `linear.c`, `experts.c` etc. as libraries for each instruction set of `compiler.INSTRUCTION_SETS`; the
fastest that this CPU supports is loaded when one of its ops is first resolved. Without one (a checkout, a wheel built
without a compiler, another CPU architecture) the machine's C compiler builds them with the same flags, in half a second
each, and caches them (`build_cache.py`). torch.compile of the reference would take seconds, and Python's headers.
`refusal` says why neither works.
"""

import contextlib
import ctypes
import functools
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from vbrt.config.format_records import LEVEL_SCALES, FormatRecord
from vbrt.errors import KernelError
from vbrt.host.logger import warn
from vbrt.kernels.cpu import build_cache, compiler

__all__ = [
    "NUMBERS",
    "PLANE",
    "Bank",
    "Fine",
    "Gating",
    "HalvedWeight",
    "Order",
    "Product",
    "Step",
    "Sum",
    "Task",
    "Weight",
    "libraries",
    "library",
    "offset_type",
    "plane_fields",
    "refusal",
    "scale_type",
]

#: OpenMP functions, in the order of threads.c
_OPENMP = (
    "GOMP_parallel",
    "omp_get_num_threads",
    "omp_get_thread_num",
    "GOMP_loop_dynamic_start",
    "GOMP_loop_dynamic_next",
    "GOMP_loop_nonmonotonic_dynamic_start",
    "GOMP_loop_nonmonotonic_dynamic_next",
    "GOMP_loop_end_nowait",
    "GOMP_loop_end",
    "GOMP_barrier",
    "GOMP_atomic_start",
    "GOMP_atomic_end",
)

#: type numbers of dots.h, by dtype
NUMBERS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_BYTE, _SUPER = 3, 4
#: type numbers of dots.h, and the field, by a record's offsets
_OFFSETS = {None: (0, "offsets"), "values": (1, "offsets"), "zeros": (2, "zeros"), "superblock": (3, "mins")}
_OFFSETS |= {"floatzeros": (4, "zeros"), "middles": (1, "middles")}  # middles: offsets of the levels -8 to 7
#: fields of dots.h's `Row`
PLANE = ("codes", "scales", "offsets", "d", "dmin")


def scale_type(record: FormatRecord) -> int:
    """Return dots.h's type number for a format's scales."""
    if record.scales in LEVEL_SCALES:
        return NUMBERS[getattr(torch, record.scales)]
    return _SUPER if record.scales == "superblock" else _BYTE


def offset_type(record: FormatRecord) -> int:
    """Return dots.h's type number for a format's offsets."""
    return _OFFSETS[record.offsets][0]


def plane_fields(record: FormatRecord) -> tuple[str, ...]:
    """Return the names of a coarse plane's tensors in the order of `PLANE`; a plane need not have all."""
    return tuple(_OFFSETS[record.offsets][1] if name == "offsets" else name for name in PLANE)


class Weight(ctypes.Structure):
    """`Weight` of linear.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in (*PLANE, "levels", "values", "unit")),
        *((name, ctypes.c_int64) for name in ("rows", "columns", "block", "scale_type", "offset_type")),
        *((name, ctypes.c_int64) for name in ("bits", "coding")),
    )


class Product(ctypes.Structure):
    """`Product` of linear.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "bias", "y")),
        *((name, ctypes.c_int64) for name in ("tokens", "inputs")),
        *((name, ctypes.c_int32) for name in ("x_type", "bias_type", "y_type", "rounded")),
    )


class FewProducts(ctypes.Structure):
    """`Few` of linear.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("weights", "x", "biases", "ys")),
        *((name, ctypes.c_int64) for name in ("tokens", "inputs")),
        *((name, ctypes.c_int32) for name in ("count", "type", "rounded", "threads")),
    )


class Fine(ctypes.Structure):
    """`Fine` of linear.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("low", "nibbles", "side", "escapes", "starts")),
        *((name, ctypes.c_int64) for name in ("sides", "escaped", "columns")),
        ("wide", ctypes.c_uint32),
        ("width", ctypes.c_int32),
    )


class Coded(ctypes.Structure):
    """`Coded` of coded.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("fours", "pairs", "extra", "escapes", "starts", "cells")),
        *((name, ctypes.c_int64) for name in ("stream", "escaped", "columns", "mantissas")),
    )


class Bank(ctypes.Structure):
    """`Bank` of banks.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("pages", "levels", "values")),
        *((name, ctypes.c_int64) for name in ("level_step", *PLANE, "unit")),
        *((name, ctypes.c_int64) for name in ("experts", "rows", "columns", "block", "scale_type", "offset_type")),
        *((name, ctypes.c_int64) for name in ("bits", "coding", "tiled")),
    )


class Gating(ctypes.Structure):
    """`Gate` of banks.h."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("function", "gated", "interleaved", "sigmoid")),
        *((name, ctypes.c_float) for name in ("alpha", "limit", "shift")),
    )


class Task(ctypes.Structure):
    """`Task` of banks.h."""

    _fields_ = (
        ("ids", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("pairs", "pairs_per_row", "most")),
        *((name, ctypes.c_void_p) for name in ("x", "bias", "out")),
        ("inputs", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("x_type", "bias_type", "out_type", "rounded")),
    )


class Order(ctypes.Structure):
    """`Order` of tiles.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("pages_from", "pages_to")),
        *((name, ctypes.c_int64) for name in ("pages", "tiles", "unit")),
        *((name, ctypes.c_int64) for name in ("codes", "scales", "unit_to", "rows", "columns", "block")),
    )


class HalvedWeight(ctypes.Structure):
    """`Weight` of update.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("high", "low", "ties", "tied", "first", "second")),
        *((name, ctypes.c_void_p) for name in ("first_scales", "second_scales", "peak", "gradient")),
    )


class Step(ctypes.Structure):
    """`Step` of update.c."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("rule", "gradient_type", "eight_bit", "decoupled")),
        *((name, ctypes.c_int32) for name in ("maximize", "nesterov", "begins", "pad")),
        *((name, ctypes.c_float) for name in ("divisor", "factor", "decay", "lerp", "beta1", "beta2")),
        *((name, ctypes.c_float) for name in ("rest1", "rest2", "root", "epsilon", "rate")),
    )


class Sum(ctypes.Structure):
    """`Sum` of update.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("held", "more", "out")),
        *((name, ctypes.c_int32) for name in ("held_type", "more_type", "out_type")),
        ("factor", ctypes.c_float),
    )


@dataclass(frozen=True)
class _Loaded:
    """A loaded library, its origin and its purpose as text."""

    library: ctypes.CDLL
    origin: str


def refusal(device: torch.device, source: str = "linear") -> str | None:
    """Return why the compiled kernels cannot serve a device, or None. The first call for a CPU loads or builds them."""
    if device.type != "cpu":
        return f"made for CPUs, not for {device}"
    built = _build(source)
    return built if isinstance(built, str) else None


@functools.cache
def _build(source: str) -> _Loaded | str:
    """Return the library of `source`.c, or the reason why there is none."""
    try:
        instructions = compiler.suitable()
    except compiler.CompileError as error:
        return str(error)
    paths = {each.name: compiler.FOLDER / compiler.file_name(source, each.name) for each in instructions}
    name = next((name for name, path in paths.items() if path.exists()), None)
    broken = ""
    if name is not None:
        try:
            return _kept(source, _Loaded(_load(paths[name], source), f"prebuilt ({name})"))
        except KernelError as error:
            broken = str(error)
    try:
        built = _kept(source, _built_here(source, instructions))
    except (compiler.CompileError, KernelError, OSError) as error:
        return f"{broken}; {error}" if broken else f"{_no_library()}{error}"
    if broken:
        warn(f"kernels for CPUs: {broken}; {source} was built here instead", stacklevel=2)
    return built


def _no_library() -> str:
    """Say that a wheel's libraries are for other CPUs, if it has any."""
    if not compiler.FOLDER.is_dir():
        return ""
    return f"the package's libraries are for other CPUs than this one ({compiler.machine()}), and "


def _built_here(source: str, instructions: tuple[compiler.InstructionSet, ...]) -> _Loaded:
    command = compiler.find_compiler()
    with tempfile.TemporaryDirectory(prefix="vbrt-", ignore_cleanup_errors=True) as folder:
        path = Path(folder) / f"{source}.so"
        best = instructions[0]
        known = build_cache.identity(command, source, best)
        before = None if known is None else _built_before(known, source, best, path)
        if before is not None:
            return before
        name = compiler.compile_library(command, source, instructions, path)
        loaded = _Loaded(_load(path, source), f"built here ({name})")
        if known is not None and name == best.name:
            build_cache.keep(known, source, best, path.read_bytes())
        return loaded


def _built_before(known: str, source: str, best: compiler.InstructionSet, path: Path) -> _Loaded | None:
    """Load a cached library from a private copy: the cached file was verified, but another process may replace it."""
    library = build_cache.fetch(known, source, best)
    if library is None:
        return None
    path.write_bytes(library)
    try:
        return _Loaded(_load(path, source), f"built here ({best.name})")
    except KernelError:  # linked against libraries that this machine no longer has
        path.unlink()
        return None


_ORIGINS: dict[str, str] = {}


def _kept(source: str, loaded: _Loaded) -> _Loaded:
    _ORIGINS[source] = loaded.origin
    return loaded


def libraries() -> dict[str, str]:
    """Return the libraries loaded so far: name -> "prebuilt (avx2)" or "built here (avx2)"."""
    return dict(sorted(_ORIGINS.items()))


def _load(path: Path, source: str) -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(str(path))
        _DECLARE[source](library)
        library.vbrt_openmp(_openmp())
    except (OSError, AttributeError) as error:
        if path.is_relative_to(compiler.FOLDER):
            raise KernelError(f"the package's library {path.name} cannot be loaded: {error}") from None
        raise KernelError(
            f"what the C compiler made cannot be loaded: {error}; TMPDIR can name a directory "
            "whose files may be executed"
        ) from None
    return library


@functools.cache
def _openmp() -> ctypes.Array[ctypes.c_void_p]:
    """Addresses of `_OPENMP` in torch's OpenMP runtime; zeros if it has none."""
    table = (ctypes.c_void_p * len(_OPENMP))()
    torch_library = ctypes.CDLL(torch._C.__file__)  # dlsym also searches its dependencies
    with contextlib.suppress(AttributeError):
        for place, name in enumerate(_OPENMP):
            table[place] = ctypes.cast(torch_library[name], ctypes.c_void_p)
        return table
    return (ctypes.c_void_p * len(_OPENMP))()


def _declare_linear(library: ctypes.CDLL) -> None:
    weight, pointer, number = ctypes.POINTER(Weight), ctypes.c_void_p, ctypes.c_int64
    library.vbrt_linear.argtypes = (weight, ctypes.POINTER(Product), ctypes.c_int)
    library.vbrt_linears.argtypes = (pointer, ctypes.POINTER(Product), ctypes.c_int, ctypes.c_int)
    library.vbrt_few.argtypes = (pointer,)
    library.vbrt_decode.argtypes = (weight, *[number] * 3, pointer, ctypes.c_int, ctypes.c_int)
    library.vbrt_panels.argtypes = (weight, ctypes.POINTER(Product), ctypes.c_int)
    fine = ctypes.POINTER(Fine), ctypes.POINTER(Coded)
    library.vbrt_merge.argtypes = (weight, *fine, pointer, pointer, number, ctypes.c_int)
    library.vbrt_decode.restype = None


def _declare_experts(library: ctypes.CDLL) -> None:
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    structures = (ctypes.POINTER(of) for of in (Bank, Gating, Task))
    library.vbrt_experts_product.argtypes = (*structures, ctypes.c_int)
    library.vbrt_experts_sum.argtypes = (*[pointer] * 3, number, pointer, pointer, ctypes.c_int, ctypes.c_int)
    library.vbrt_experts_sum.restype = None
    library.vbrt_experts_tiles.argtypes = (ctypes.c_int,)
    bank, gating, task = map(ctypes.POINTER, (Bank, Gating, Task))
    library.vbrt_team_experts.argtypes = (pointer, bank, bank, gating, task, task)
    library.vbrt_team_experts.restype = number
    _declare_team(library)


def _declare_hosted(library: ctypes.CDLL) -> None:
    pointer, number, small = ctypes.c_void_p, ctypes.c_int64, ctypes.c_int
    library.vbrt_hosted_job.argtypes = (pointer, pointer, number, small, pointer)
    library.vbrt_hosted_job.restype = number
    bank, gating, task = map(ctypes.POINTER, (Bank, Gating, Task))
    library.vbrt_hosted_experts.argtypes = (bank, bank, gating, task, task, pointer, small, pointer)
    library.vbrt_hosted_experts.restype = number
    library.vbrt_hosted_attach.argtypes = (pointer, pointer)
    library.vbrt_hosted_set.argtypes = (pointer, small, number, pointer)
    library.vbrt_hosted_expect.argtypes = (pointer, small, number)
    library.vbrt_hosted_detach.argtypes = (pointer, small)
    library.vbrt_hosted_counts.argtypes = (pointer, small, pointer)
    library.vbrt_hosted_detach.restype = library.vbrt_hosted_counts.restype = None
    _declare_team(library)


def _declare_team(library: ctypes.CDLL) -> None:
    pointer = ctypes.c_void_p
    library.vbrt_team_new.argtypes, library.vbrt_team_new.restype = (ctypes.c_int,), pointer
    library.vbrt_team_finish.argtypes = (pointer, ctypes.c_int64)
    library.vbrt_team_serve.argtypes, library.vbrt_team_times.argtypes = (pointer, ctypes.c_int), (pointer, pointer)
    library.vbrt_team_stop.argtypes = library.vbrt_team_free.argtypes = (pointer,)
    for name in ("finish", "stop", "free", "times"):
        getattr(library, f"vbrt_team_{name}").restype = None


def _declare_update(library: ctypes.CDLL) -> None:
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    halved, total = ctypes.POINTER(HalvedWeight), ctypes.POINTER(Sum)
    weight = (halved, halved, ctypes.POINTER(Step))
    library.vbrt_update.argtypes = (*weight, number, number)
    library.vbrt_add.argtypes = (total, number, number)
    library.vbrt_team_update.argtypes = (pointer, *weight, number)
    library.vbrt_team_add.argtypes = (pointer, total, number)
    library.vbrt_norm.argtypes = (pointer, ctypes.c_int32, number, ctypes.c_float)
    for name in ("update", "add", "team_update", "team_add"):
        getattr(library, f"vbrt_{name}").restype = None
    library.vbrt_norm.restype = ctypes.c_float
    _declare_team(library)


def _declare_encode(library: ctypes.CDLL) -> None:
    pointer, number, single = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float
    library.vbrt_encode.argtypes = library.vbrt_encode_levels.argtypes = (pointer, ctypes.c_int)
    library.vbrt_count_patterns.argtypes = (pointer, number, pointer, ctypes.c_int)
    library.vbrt_count_beyond.argtypes = (pointer, pointer, single, single, ctypes.c_int)
    library.vbrt_split_fine.argtypes = (pointer, number, number, pointer, ctypes.c_int)
    library.vbrt_code_fine.argtypes = (pointer, number, number, pointer, ctypes.c_int)
    library.vbrt_append_bits.argtypes = (pointer, number, pointer, number)
    library.vbrt_code_fine.restype = library.vbrt_append_bits.restype = None
    library.vbrt_encode.restype = library.vbrt_encode_levels.restype = None
    library.vbrt_count_patterns.restype = library.vbrt_split_fine.restype = None
    library.vbrt_count_beyond.restype = number


def _declare_reading(library: ctypes.CDLL) -> None:
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    library.vbrt_read.argtypes = (ctypes.c_int, pointer, *[number] * 3, pointer, ctypes.c_int)


def _declare_step(library: ctypes.CDLL) -> None:
    for name in ("norm", "rotate", "gate", "attend", "project", "route"):
        getattr(library, f"vbrt_step_{name}").argtypes = (ctypes.c_void_p,)
    library.vbrt_step_run.argtypes = (ctypes.c_void_p, ctypes.c_int64)
    library.vbrt_step_run.restype = ctypes.c_int64


def _declare_tiles(library: ctypes.CDLL) -> None:
    library.vbrt_rows_of_tiles.argtypes = (ctypes.POINTER(Order), ctypes.c_int)
    library.vbrt_rows_of_tiles.restype = None


def _declare_trellis(library: ctypes.CDLL) -> None:
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    library.vbrt_trellis.argtypes = (pointer, number, pointer, ctypes.c_int, pointer, pointer, ctypes.c_int)
    library.vbrt_trellis.restype = None
    library.vbrt_trellis_scratch.restype = number


_DECLARE = {
    "encode": _declare_encode,
    "linear": _declare_linear,
    "experts": _declare_experts,
    "hosted": _declare_hosted,
    "reading": _declare_reading,
    "step": _declare_step,
    "tiles": _declare_tiles,
    "trellis": _declare_trellis,
    "update": _declare_update,
}


def library(source: str = "linear") -> ctypes.CDLL:
    """Return the loaded library. Raises KernelError, with the reason, if it cannot be built."""
    built = _build(source)
    if isinstance(built, str):
        raise KernelError(f"kernels for CPUs: {built}")
    return built.library
