"""CPU instruction sets, and the C compiler that builds the kernels for one.

Used by `build.py` at run time, and by the build backend (`hatch_build.py`), which loads this file by path: so it
imports neither torch nor the rest of vbrt.
"""

import contextlib
import os
import platform
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

__all__ = [
    "FOLDER",
    "HERE",
    "INSTRUCTION_SETS",
    "CompileError",
    "InstructionSet",
    "compile_library",
    "cpu_features",
    "file_name",
    "find_compiler",
    "forced",
    "options_of",
    "run",
    "served",
    "sources",
    "suitable",
]

HERE = Path(__file__).parent
#: folder of a wheel's libraries
FOLDER = HERE / "prebuilt"
_MACHINES = {"AMD64": "x86_64", "arm64": "aarch64"}
_COMPILERS = ("cc", "gcc", "clang")
_THREADS = HERE / "threads.c"
# --as-needed: link only runtimes in use; threads.c replaces gcc's OpenMP runtime
_OPENMP = ("-fopenmp", "-Wl,--as-needed") if sys.platform == "linux" else ("-fopenmp",)
# bit-exact with torch: no contraction (fmaf is explicit), no errno
_TWO_STEPS = ("-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math")
_FLAGS_OF = {"update": _TWO_STEPS, "encode": _TWO_STEPS, "step": _TWO_STEPS, "linear": _TWO_STEPS[:1]}
_LIMIT_S = 60  # generous, for a busy machine
#: environment variable naming an instruction set below the CPU's best, to measure or test what other CPUs run
_FORCED = "VBRT_INSTRUCTION_SET"


class CompileError(Exception):
    """No compiler, or it failed."""


@dataclass(frozen=True)
class InstructionSet:
    """Target of a library.

    Attributes:
        name: shown to users.
        machine: as in `platform.machine` on Linux; empty for the native one.
        flags: compiler flags.
        features: required CPU features, as named in /proc/cpuinfo.
    """

    name: str
    machine: str
    flags: tuple[str, ...]
    features: frozenset[str] = frozenset()


_OPTIONS = {"bmi1": "bmi", "avx_vnni": "avxvnni"}  # compiler options that are not named like features


def _x86(name: str, *features: str) -> InstructionSet:
    options = (f"-m{_OPTIONS.get(feature, feature.replace('_', ''))}" for feature in features)
    return InstructionSet(name, "x86_64", ("-march=x86-64", *options, *_OPENMP), frozenset(features))


def _arm(name: str, version: str, *features: str) -> InstructionSet:
    return InstructionSet(name, "aarch64", (f"-march={version}", *_OPENMP), frozenset(features))


_AVX2 = ("avx2", "fma", "bmi1", "bmi2", "f16c")
_AVX512 = (*_AVX2, "avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl")
_VNNI = (*_AVX512, "avx512vbmi", "avx512_vbmi2", "avx512_vnni")
#: instruction sets of a wheel's libraries, the fastest of each machine first, a baseline last
INSTRUCTION_SETS = (
    _x86("avx512bf16", *_VNNI, "avx512_bf16"),  # Zen 4, Sapphire Rapids
    _x86("avx512vnni", *_VNNI),  # Ice Lake
    _x86("avx512", *_AVX512),  # Skylake-X
    _x86("avx2-vnni", *_AVX2, "avx_vnni"),  # Alder Lake, Arrow Lake
    _x86("avx2", *_AVX2),  # Haswell, Zen
    _x86("x86-64"),
    _arm("neon-bf16", "armv8.2-a+dotprod+bf16", "asimddp", "bf16"),  # Graviton 3, Grace
    _arm("neon", "armv8-a"),
)
# fallbacks: some compilers do not support the native CPU, or OpenMP
_OTHERS = (
    InstructionSet("this CPU", "", ("-march=native", *_OPENMP)),
    InstructionSet("this CPU", "", ("-mcpu=native", *_OPENMP)),
    InstructionSet("its kind of CPU", "", _OPENMP),
    InstructionSet("its kind of CPU, one thread", "", ()),
)


def machine() -> str:
    """Return this machine's CPU architecture, as Linux names it."""
    return _MACHINES.get(platform.machine(), platform.machine())


def cpu_features() -> frozenset[str]:
    """Return the CPU's features, as named in /proc/cpuinfo; empty without that file."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return frozenset()
    lines = (line.partition(":") for line in text.splitlines())
    found = (words for key, _, words in lines if key.strip().lower() in ("flags", "features"))
    return frozenset(next(found, "").split())


def served(machine: str, features: frozenset[str]) -> tuple[InstructionSet, ...]:
    """Return the instruction sets that a CPU supports, the fastest first."""
    return tuple(each for each in INSTRUCTION_SETS if each.machine == machine and each.features <= features)


def forced() -> InstructionSet | None:
    """Return the instruction set that VBRT_INSTRUCTION_SET names, or None. Raises CompileError if the CPU lacks it."""
    name = os.environ.get(_FORCED, "")
    if not name:
        return None
    known = {each.name: each for each in served(machine(), cpu_features())}
    if name not in known:
        raise CompileError(f"{_FORCED} is {name!r}; expected one that this CPU has: {', '.join(known) or 'none'}")
    return known[name]


def suitable() -> tuple[InstructionSet, ...]:
    """Return the possible targets on this machine: its instruction sets, the fastest first, then native builds for CPUs
    without one; only the `forced` one if there is one. Raises CompileError for one that the CPU lacks."""
    only = forced()
    return (*served(machine(), cpu_features()), *_OTHERS) if only is None else (only,)


def sources() -> list[str]:
    """Return the names of the libraries, one per C file."""
    return sorted(path.stem for path in HERE.glob("*.c") if path != _THREADS)


def file_name(source: str, name: str) -> str:
    """Return the file name of a source's library for an instruction set."""
    return f"{source}.{name}.so"


def find_compiler() -> list[str]:
    """Return the C compiler's command. Raises CompileError."""
    if sys.platform == "win32":
        raise CompileError("on Windows vbrt builds no C kernels, with cl, clang or gcc; in WSL2 it does")
    named = os.environ.get("CC", "")
    try:
        command = shlex.split(named)
    except ValueError as error:
        raise CompileError(f"CC is {named!r}, which is no command ({error})") from None
    names = command[:1] or _COMPILERS
    found = next(filter(shutil.which, names), None)
    if found is None:
        raise CompileError(f"no C compiler was found ({', '.join(names)}{', which CC names' if command else ''})")
    return command or [found]


def options_of(source: str, instructions: InstructionSet) -> list[str]:
    """Return compiler options for a source and an instruction set."""
    return ["-O3", "-w", "-shared", "-fPIC", *instructions.flags, *_FLAGS_OF.get(source, ())]


def compile_library(command: list[str], source: str, wanted: Iterable[InstructionSet], library: Path) -> str:
    """Build a source's library for the first instruction set that the compiler supports; return its name.

    Raises CompileError with the compiler's last message.
    """
    for each in wanted:
        files = [str(HERE / f"{source}.c"), str(_THREADS)]
        done = run([*command, *options_of(source, each), *files, "-lm", "-o", str(library)])
        if done.returncode == 0 and library.exists():
            return each.name
    said = done.stderr.strip().splitlines() or [f"it made nothing, and ended with {done.returncode}"]
    raise CompileError(f"the C compiler {shlex.join(command)!r} failed: {said[-1]}")


def run(line: list[str], *, output: int = subprocess.DEVNULL) -> subprocess.CompletedProcess[str]:
    """Run a command without stdin; kill it with its children after the time limit, with CompileError (a wrong command
    might wait for input)."""
    options = {"stdin": subprocess.DEVNULL, "stdout": output, "stderr": subprocess.PIPE}
    with subprocess.Popen(line, text=True, errors="replace", start_new_session=True, **options) as process:
        try:
            made, said = process.communicate(timeout=_LIMIT_S)
        except BaseException as error:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
            raise CompileError(f"the C compiler {shlex.join(line[:1])!r} took more than {_LIMIT_S} s") from None
    return subprocess.CompletedProcess(line, process.returncode, made, said)
