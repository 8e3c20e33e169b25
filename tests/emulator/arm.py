"""The C kernels built for Arm and run by qemu, one call at a time, in place of a library of this machine.

A call goes with a picture of the memory that its arguments point into; bytes that it changes are changed here. So the
functions that models call run as they are, and only what is compiled is another CPU's.
"""

import ctypes
import os
import re
import shutil
import struct
import subprocess
import tempfile
from pathlib import Path

import numpy as np

from vbrt.kernels.cpu import build, compiler

__all__ = ["COMPILER", "SETS", "ArmLibrary", "why_not"]

#: the instruction sets of Arm that a wheel has
SETS = {each.name: each for each in compiler.INSTRUCTION_SETS if each.machine == "aarch64"}
COMPILER, _EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64"
_SEEN = 1 << 18  # bytes behind an address that a call may read or write
_HEADER = struct.Struct("<32s8qqq2f")
#: fields that are tables of addresses, and which field counts them
_TABLES = {(build.Bank, "pages"): "experts", (build.Order, "pages_from"): "pages", (build.Order, "pages_to"): "pages"}


def why_not() -> str | None:
    """Return which program is missing here, or None."""
    missing = [name for name in (COMPILER, _EMULATOR) if shutil.which(name) is None]
    return f"{' and '.join(missing)} not installed" if missing else None


class ArmLibrary:
    """A source of the kernels for an instruction set; has the functions of the library that ctypes would load."""

    def __init__(self, source: str, name: str, folder: Path) -> None:
        functions = " ".join(f"X({function})" for function in _functions(f"{source}.c"))
        self._program = folder / f"{source}-{name}"
        files = [compiler.HERE / f"{source}.c", compiler.HERE / "threads.c", Path(__file__).with_name("arm_call.c")]
        flags = [*SETS[name].flags, *compiler._FLAGS_OF.get(source, ()), f"-DFUNCTIONS(X)={functions}"]
        line = [COMPILER, "-O3", "-w", "-static", *flags, *map(str, files), "-lm", "-o", str(self._program)]
        subprocess.run(line, check=True, capture_output=True)
        self._functions: dict[str, _Function] = {}
        build._DECLARE[source](self)

    def __getattr__(self, name: str) -> "_Function":
        if name.startswith("_"):
            raise AttributeError(name)
        return self._functions.setdefault(name, _Function(self._program, name))


def _functions(file: str) -> list[str]:
    """The functions that a C file, or one that it includes, offers to Python."""
    text = (compiler.HERE / file).read_text()
    included = re.findall(r'^#include "(.*)"', text, re.MULTILINE)
    own = re.findall(r"^\w+ (vbrt_\w+)\(", text, re.MULTILINE)
    return own + [name for other in included for name in _functions(other)]


class _Function:
    """A function of the library; takes what ctypes' would take."""

    def __init__(self, program: Path, name: str) -> None:
        self._program, self._name = program, name
        self.argtypes: tuple[type, ...] = ()
        self.restype: type | None = ctypes.c_int

    def __call__(self, *given: object) -> int | float | None:
        picture, arguments, numbers = _Picture(), [], []  # which Arm counts apart
        for value, kind in zip(given, self.argtypes, strict=True):
            value, place = getattr(value, "_obj", value), len(arguments)  # of ctypes.byref
            if kind is ctypes.c_float:
                numbers.append(float(value))
            elif isinstance(value, ctypes.Structure | ctypes.Array):
                picture.see_structure(value)
                arguments.append(ctypes.addressof(value))
                picture.point_from_argument(place)
            elif kind is ctypes.c_void_p and value:
                picture.see(value)
                arguments.append(value)
                picture.point_from_argument(place)
            else:
                arguments.append(int(value or 0))
        result = picture.run(self._program, self._name, arguments, numbers)
        if self.restype is ctypes.c_float:
            return struct.unpack("<f", result[:4])[0]
        return None if self.restype is None else self.restype.from_buffer_copy(result).value


class _Picture:
    """Parts of this process's memory, and where addresses lie in them."""

    def __init__(self) -> None:
        self._seen: list[tuple[int, int]] = []  # first byte, byte past the last
        self._pointers: list[int] = []  # where addresses lie
        self._arguments: list[int] = []

    def see(self, address: int, size: int = _SEEN) -> None:
        self._seen.append((address, address + size))

    def see_structure(self, of: ctypes.Structure | ctypes.Array) -> None:
        """Take a structure and what its addresses point to."""
        base = ctypes.addressof(of)
        self.see(base, ctypes.sizeof(of))
        if isinstance(of, ctypes.Array):
            return
        for name, kind in of._fields_:
            if kind is ctypes.c_void_p and (address := getattr(of, name)):
                self._pointers.append(base + getattr(type(of), name).offset)
                self.see(address)
                if count := _TABLES.get((type(of), name)):
                    self._see_pages(address, getattr(of, count))

    def _see_pages(self, table: int, count: int) -> None:
        for place in range(table, table + 8 * count, 8):
            if address := ctypes.c_int64.from_address(place).value:
                self._pointers.append(place)
                self.see(address)

    def point_from_argument(self, place: int) -> None:
        self._arguments.append(place)

    def run(self, program: Path, name: str, arguments: list[int], numbers: list[float]) -> bytes:
        """Call the function there; change what it changed. Returns the result's bytes."""
        parts = self._read()
        starts, at = {}, 0
        for first, content in parts:
            starts[first] = at
            at += len(content)

        def filled(values: list, count: int) -> list:
            return values + [0] * (count - len(values))

        def moved(address: int) -> int:
            first = max(start for start, content in parts if start <= address)
            return address - first + starts[first]

        memory = np.frombuffer(b"".join(content for _, content in parts), np.uint8).copy()
        for pointer in self._pointers:
            view = memory[moved(pointer) :][:8].view(np.int64)
            view[0] = moved(int(view[0]))
        arguments = [moved(value) if i in self._arguments else value for i, value in enumerate(arguments)]
        places = [-1 - i for i in self._arguments] + [moved(pointer) for pointer in self._pointers]
        head = _HEADER.pack(name.encode(), *filled(arguments, 8), len(places), len(memory), *filled(numbers, 2))
        with tempfile.NamedTemporaryFile(prefix="vbrt-arm-") as file:
            file.write(head + struct.pack(f"<{len(places)}q", *places) + memory.tobytes())
            file.flush()
            subprocess.run([_EMULATOR, str(program), file.name], check=True)
            result = Path(file.name).read_bytes()
        left = np.frombuffer(result, np.uint8, len(memory), 8)
        self._write(memory, left, parts, starts, {moved(pointer) for pointer in self._pointers})
        return result[:8]

    def _read(self) -> list[tuple[int, bytes]]:
        """The memory that is seen, without overlaps, as far as it is there."""
        joined: list[list[int]] = []
        for first, end in sorted(self._seen):
            if joined and first <= joined[-1][1]:
                joined[-1][1] = max(joined[-1][1], end)
            else:
                joined.append([first, end])
        with open("/proc/self/mem", "rb", buffering=0) as file:
            return [(first, _padded(os.pread(file.fileno(), end - first, first))) for first, end in joined]

    def _write(
        self,
        before: np.ndarray,
        left: np.ndarray,
        parts: list[tuple[int, bytes]],
        starts: dict[int, int],
        kept: set[int],
    ) -> None:
        changed = before != left
        for place in kept:
            changed[place : place + 8] = False  # addresses, which are others there
        for first, content in parts:
            here = slice(starts[first], starts[first] + len(content))
            where = np.flatnonzero(changed[here])
            for run in np.split(where, np.flatnonzero(np.diff(where) > 1) + 1) if len(where) else ():
                ctypes.memmove(first + int(run[0]), left[here][run[0] : run[-1] + 1].tobytes(), len(run))


def _padded(content: bytes) -> bytes:
    """A multiple of 64 bytes, so that addresses keep their alignment as far as parts begin with one."""
    return content + bytes(-len(content) % 64)
