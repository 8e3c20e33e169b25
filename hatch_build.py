"""The build backend's hook: C kernels for every instruction set of one kind of CPU go into the wheel.

The kind is this machine's, or VBRT_WHEEL_MACHINE: x86_64, aarch64 (with the compiler aarch64-linux-gnu-gcc, or CC), or
none for a wheel without libraries, for Windows and macOS (`scripts/wheels` builds all three).

They lie in vbrt/kernels/cpu/prebuilt, so who installs the wheel needs no compiler. A machine without one makes a wheel
without them, and says so; its kernels are built where they run (`vbrt/kernels/cpu/build.py`), as are those of an
editable install, whose sources change.
"""

import importlib.util
import os
import re
import shutil
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

_PLACE = "vbrt/kernels/cpu"
_RUNTIMES = (b"libgomp", b"libomp", b"libiomp")
_OLDEST_GLIBC = 17  # 2.17: no older one is asked about


class PrebuiltKernels(BuildHookInterface):
    """Adds the libraries to a wheel, and the platform to its name."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Build the libraries; called by hatchling before it writes a wheel or an sdist."""
        if self.target_name != "wheel" or version == "editable":
            return
        compiler = _load_compiler(Path(self.root) / _PLACE / "compiler.py")
        asked = os.environ.get("VBRT_WHEEL_MACHINE", "")
        if asked == "none":
            return
        machine = asked or compiler.machine()
        self._folder = tempfile.TemporaryDirectory(prefix="vbrt-wheel-")
        try:
            libraries, notes = prebuild(compiler, Path(self._folder.name), machine)
        except compiler.CompileError as error:
            if asked:
                raise
            self.app.display_warning(f"vbrt: no kernels in this wheel, they are built where it runs: {error}")
            return
        for note in notes:
            self.app.display_warning(f"vbrt: {note}")
        self.app.display_info(f"vbrt: {len(libraries)} libraries of kernels for {machine}")
        build_data["force_include"] |= {str(path): f"{_PLACE}/{compiler.FOLDER.name}/{path.name}" for path in libraries}
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-{platform_tag(machine, libraries)}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove the libraries; called once they are in the wheel."""
        if hasattr(self, "_folder"):
            self._folder.cleanup()


def prebuild(compiler: ModuleType, folder: Path, machine: str) -> tuple[list[Path], list[str]]:
    """Build each source for each instruction set of a kind of CPU; return the libraries, and what the compiler could
    not do.

    Raises CompileError where there is no compiler, or it cannot build for every CPU of the kind.
    """
    sets = [each for each in compiler.INSTRUCTION_SETS if each.machine == machine]
    if sys.platform != "linux" or not sets:
        raise compiler.CompileError(f"there are none for {machine} with {sys.platform}")
    command = find_compiler(compiler, machine)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        jobs = {
            each: [pool.submit(_build, compiler, command, s, each, folder) for s in compiler.sources()] for each in sets
        }
    libraries, notes = [], []
    for each, parts in jobs.items():
        failed = next((error for error in (part.exception() for part in parts) if error), None)
        if failed is None:
            libraries += [part.result() for part in parts]
        elif isinstance(failed, compiler.CompileError) and each.features:
            notes.append(f"no kernels for {each.name}: {failed}")
        else:
            raise failed
    return libraries, notes


def find_compiler(compiler: ModuleType, machine: str) -> list[str]:
    """Return the command of a compiler for a kind of CPU. Raises CompileError."""
    if machine == compiler.machine() or os.environ.get("CC"):
        return compiler.find_compiler()
    name = f"{machine}-linux-gnu-gcc"
    if shutil.which(name) is None:
        package = f"gcc-{machine.replace('_', '-')}-linux-gnu"
        raise compiler.CompileError(f"{name} was not found; on Debian and Ubuntu: apt install {package}, or set CC")
    return [name]


def _build(compiler: ModuleType, command: list[str], source: str, instructions: Any, folder: Path) -> Path:
    library = folder / compiler.file_name(source, instructions.name)
    compiler.compile_library(command, source, (instructions,), library)
    content = library.read_bytes()
    runtime = next((name.decode() for name in _RUNTIMES if name in content), None)
    if runtime:
        raise compiler.CompileError(f"{command[0]!r} makes it need {runtime}; gcc does not: set CC=gcc")
    return library


def platform_tag(machine: str, libraries: list[Path]) -> str:
    """Return the platform of a wheel: the oldest glibc that has every function of the libraries (PEP 600)."""
    needed = [int(minor) for path in libraries for minor in re.findall(rb"GLIBC_2\.(\d+)", path.read_bytes())]
    return f"manylinux_2_{max(_OLDEST_GLIBC, *needed)}_{machine}" if needed else f"linux_{machine}"


def _load_compiler(path: Path) -> ModuleType:
    """Import compiler.py by its path: the rest of the package needs torch, which is not there."""
    spec = importlib.util.spec_from_file_location("vbrt_compiler", path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)  # dataclasses look it up
    spec.loader.exec_module(module)
    return module
