"""The C kernels for CPUs, built on the machine that runs them.

The machine's C compiler builds `linear.c`, `experts.c` or `update.c` for this very CPU when an op of its is first
resolved, once a process, in half a second: a library kept on disk would have to be trusted, and built again for each
CPU that shares the disk. torch.compile of the reference takes seconds, and Python's headers. `refusal` says why it
cannot be built.
"""

import contextlib
import ctypes
import functools
import os
import shlex
import shutil
import signal
import subprocess
import tempfile
from pathlib import Path

import torch

from vbrt.config.formats import LEVEL_SCALES, FormatRecord
from vbrt.errors import KernelError

__all__ = [
    "NUMBERS",
    "Bank",
    "Fine",
    "Gating",
    "HalvedWeight",
    "Product",
    "Step",
    "Task",
    "Weight",
    "library",
    "refusal",
    "scale_type",
]

_HERE = Path(__file__).parent
_COMPILERS = ("cc", "gcc", "clang")
# in order of speed; not every compiler has OpenMP, whose threads are torch's own, or knows the CPU it runs on
_FLAGS = (("-march=native", "-fopenmp"), ("-mcpu=native", "-fopenmp"), ("-fopenmp",), ())
# updates have torch's bits, which says itself where a product and a sum are rounded once; they ask for no errno
_TWO_STEPS = ("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")
_FLAGS_OF = {"update": _TWO_STEPS, "encode": _TWO_STEPS}
_BUILD_LIMIT_S = 20

#: dots.h's names of types by dtype
NUMBERS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
_BYTE = 3


def scale_type(record: FormatRecord) -> int:
    """Return dots.h's name for the type of a format's scales."""
    return NUMBERS[getattr(torch, record.scales)] if record.scales in LEVEL_SCALES else _BYTE


class Weight(ctypes.Structure):
    """`Weight` of linear.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("codes", "scales", "levels", "values", "unit")),
        *((name, ctypes.c_int64) for name in ("rows", "columns", "block", "scale_type")),
    )


class Product(ctypes.Structure):
    """`Product` of linear.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("x", "bias", "y")),
        *((name, ctypes.c_int64) for name in ("tokens", "inputs")),
        *((name, ctypes.c_int32) for name in ("x_type", "bias_type", "y_type")),
    )


class Fine(ctypes.Structure):
    """`Fine` of linear.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("low", "nibbles", "side", "escapes", "starts")),
        *((name, ctypes.c_int64) for name in ("sides", "escaped", "columns")),
        ("wide", ctypes.c_uint32),
        ("width", ctypes.c_int32),
    )


class Bank(ctypes.Structure):
    """`Bank` of experts.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("pages", "levels", "values")),
        *((name, ctypes.c_int64) for name in ("level_step", "codes", "scales", "unit")),
        *((name, ctypes.c_int64) for name in ("experts", "rows", "columns", "block", "scale_type")),
    )


class Gating(ctypes.Structure):
    """`Gate` of experts.c."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("function", "gated", "interleaved", "sigmoid")),
        *((name, ctypes.c_float) for name in ("alpha", "limit", "shift")),
    )


class Task(ctypes.Structure):
    """`Task` of experts.c."""

    _fields_ = (
        ("ids", ctypes.c_void_p),
        *((name, ctypes.c_int64) for name in ("pairs", "pairs_per_row", "most")),
        *((name, ctypes.c_void_p) for name in ("x", "bias", "out")),
        ("inputs", ctypes.c_int64),
        *((name, ctypes.c_int32) for name in ("x_type", "bias_type", "out_type")),
    )


class HalvedWeight(ctypes.Structure):
    """`Weight` of update.c."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("high", "low", "first", "second", "first_scales", "second_scales")),
        *((name, ctypes.c_void_p) for name in ("peak", "gradient")),
    )


class Step(ctypes.Structure):
    """`Step` of update.c."""

    _fields_ = (
        *((name, ctypes.c_int32) for name in ("rule", "gradient_type", "eight_bit", "decoupled")),
        *((name, ctypes.c_int32) for name in ("maximize", "nesterov", "begins", "pad")),
        *((name, ctypes.c_float) for name in ("divisor", "factor", "decay", "lerp", "beta1", "beta2")),
        *((name, ctypes.c_float) for name in ("rest1", "rest2", "root", "epsilon", "rate")),
    )


def refusal(device: torch.device, source: str = "linear") -> str | None:
    """Why the compiled kernels cannot serve a device, or None. The first call for a CPU builds them."""
    if device.type != "cpu":
        return f"made for CPUs, not for {device}"
    built = _build(source)
    return built if isinstance(built, str) else None


@functools.cache
def _build(source: str) -> ctypes.CDLL | str:
    """Return the library of `source`.c, or the reason that there is none."""
    try:
        command = _compiler()
        with tempfile.TemporaryDirectory(prefix="vbrt-", ignore_cleanup_errors=True) as folder:
            return _load(_compiled(command, source, Path(folder) / f"{source}.so"), source)
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


def _compiled(command: list[str], source: str, library: Path) -> Path:
    for flags in _FLAGS:
        file = str(_HERE / f"{source}.c")
        options = ["-O3", "-w", "-shared", "-fPIC", *flags, *_FLAGS_OF.get(source, ())]
        done = _run([*command, *options, file, "-lm", "-o", str(library)])
        if done.returncode == 0 and library.exists():
            return library
    said = done.stderr.strip().splitlines() or [f"it made nothing, and ended with {done.returncode}"]
    raise KernelError(f"the C compiler {shlex.join(command)!r} failed: {said[-1]}")


def _run(line: list[str]) -> subprocess.CompletedProcess[str]:
    """Run a command without input, which one that is no compiler may wait for; kill it and its children if it takes too
    long."""
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


def _load(path: Path, source: str) -> ctypes.CDLL:
    try:
        library = ctypes.CDLL(str(path))
        _DECLARE[source](library)
    except (OSError, AttributeError) as error:
        raise KernelError(
            f"what the C compiler made cannot be loaded: {error}; TMPDIR can name a directory "
            "whose files may be executed"
        ) from None
    return library


def _declare_linear(library: ctypes.CDLL) -> None:
    weight, pointer, number = ctypes.POINTER(Weight), ctypes.c_void_p, ctypes.c_int64
    library.vbrt_linear.argtypes = (weight, ctypes.POINTER(Product), ctypes.c_int)
    library.vbrt_decode.argtypes = (weight, number, number, pointer, ctypes.c_int)
    library.vbrt_merge.argtypes = (weight, ctypes.POINTER(Fine), pointer, pointer, number, ctypes.c_int)
    library.vbrt_decode.restype = None


def _declare_experts(library: ctypes.CDLL) -> None:
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    structures = (ctypes.POINTER(of) for of in (Bank, Gating, Task))
    library.vbrt_experts_product.argtypes = (*structures, ctypes.c_int)
    library.vbrt_experts_sum.argtypes = (*[pointer] * 3, number, pointer, pointer, ctypes.c_int, ctypes.c_int)
    library.vbrt_experts_sum.restype = None


def _declare_update(library: ctypes.CDLL) -> None:
    pointer, number = ctypes.c_void_p, ctypes.c_int64
    library.vbrt_update.argtypes = (ctypes.POINTER(HalvedWeight), ctypes.POINTER(Step), number, number)
    library.vbrt_join.argtypes = (pointer, pointer, number, pointer)
    library.vbrt_split.argtypes = (pointer, number, pointer, pointer)
    library.vbrt_norm.argtypes = (pointer, ctypes.c_int32, number, ctypes.c_float)
    library.vbrt_update.restype = library.vbrt_join.restype = library.vbrt_split.restype = None
    library.vbrt_norm.restype = ctypes.c_float


def _declare_encode(library: ctypes.CDLL) -> None:
    library.vbrt_encode.argtypes = (ctypes.c_void_p, ctypes.c_int)
    library.vbrt_encode.restype = None


_DECLARE = {
    "encode": _declare_encode,
    "linear": _declare_linear,
    "experts": _declare_experts,
    "update": _declare_update,
}


def library(source: str = "linear") -> ctypes.CDLL:
    """The compiled kernels. Raises KernelError, with the reason, where they cannot be built."""
    built = _build(source)
    if isinstance(built, str):
        raise KernelError(f"kernels for CPUs: {built}")
    return built
