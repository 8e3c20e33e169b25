"""Triton's private parts: launches without its work on every call, its caches, names that differ by version.

| what | without it |
| --- | --- |
| calling a compiled kernel again, `direct_launch` (tested versions only) | Triton's own launch each time, announced |
| C code that launches a kernel, `make_launcher` (Triton 3.6) | compiled by the first launch |
| a kernel's cache of compiled code, `open_cache` | what threads compile first may be compiled again |
| names of a kernel's constants, `constant_names` | KernelError |
| names in Gluon that differ by version, `renamed` | KernelError |
| a launch's option `fp_fusion` | Triton's own default, announced |

`vbrt.libraries.versions` says with which versions all of it has been run. Imports Triton only when asked for its parts.
"""

import functools
import hashlib
import inspect
import os
import pathlib
import sysconfig
import tempfile
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from vbrt.errors import KernelError
from vbrt.libraries.probe import announce
from vbrt.libraries.versions import is_tested, tested_range

__all__ = ["Launch", "constant_names", "direct_launch", "fp_fusion", "make_launcher", "open_cache", "renamed"]

Launch = Callable[[int, int, int, Sequence[int], Sequence[Any], Sequence[Any]], object]
"""Launch a compiled kernel: (programs along x, along y, stream, addresses, numbers, constants)."""


def direct_launch(compiled: Any) -> Launch | None:
    """A launch of what `kernel[grid](...)` has returned, without Triton's work on every call; None if it cannot be had.

    Triton binds arguments, specializes them and looks up its cache each time. This hands pointers straight to the
    compiled kernel; Triton's launch hooks (profilers) do not see it. Announces why there is none, once.
    """
    import triton

    parts = [getattr(compiled, name, None) for name in ("run", "function", "packed_metadata")]
    if not is_tested("triton", triton.__version__) or None in parts:
        announce(
            f"Triton {triton.__version__}: vbrt's direct launches are tested with {tested_range('triton')}; kernels "
            "are launched by Triton itself, which takes the host longer"
        )
        return None
    run, function, metadata = parts

    def launch(x, y, stream, addresses, numbers, constants):  # type: ignore[no-untyped-def]  # as of Launch
        # three Nones: no launch metadata, no hook before and none after
        run(x, y, 1, stream, function, metadata, None, None, None, *addresses, *numbers, *constants)

    return launch


def open_cache(kernel: Any) -> None:
    """Have Triton make a jitted kernel's cache of compiled code for the current device, before threads fill it: two
    that come first at once make one each, and what one of them compiles is lost."""
    from triton.runtime import driver

    caches = getattr(kernel, "device_caches", None)
    if caches is not None:
        caches[driver.active.get_current_device()]


def make_launcher(compiled: Any) -> None:
    """Have the C code compiled that launches a compiled kernel, where no launch of its signature was: Triton 3.6 does
    that when a kernel is launched first, for .3 s. Does not touch the device; does nothing with another Triton.

    What is made lies on disk, where the launch looks for it, and is not imported here. All of these modules have one
    name, so that Python gives one module object for all that it imports again: while one thread imports a launcher and
    takes its function, others must not.
    """
    import triton

    if not triton.__version__.startswith("3.6."):
        return
    from triton.backends.nvidia import driver
    from triton.runtime import build, cache

    name, described = "__triton_launcher", getattr(compiled.metadata, "tensordesc_meta", None)
    source = driver.make_launcher({}, dict(compiled.src.signature), described)
    kept = cache.get_cache_manager(hashlib.sha256((source + build.platform_key()).encode()).hexdigest())
    file = f"{name}{sysconfig.get_config_var('EXT_SUFFIX')}"
    if kept.get_file(file) is not None:
        return
    with tempfile.TemporaryDirectory() as folder:
        path = pathlib.Path(folder, f"{name}.c")
        path.write_text(source)
        libraries = driver.library_dirs(), driver.include_dirs, driver.libraries
        made = build._build(name, os.fspath(path), folder, *libraries, [])
        kept.put(pathlib.Path(made).read_bytes(), file, binary=True)


@functools.cache
def fp_fusion(fused: bool, /) -> Mapping[str, bool]:
    """The option of a launch by which Triton fuses multiplications with additions, or does not: bits depend on it, and
    Triton 3.10 changes what it does by default. Empty, and announced, where there is no such option."""
    import triton
    from triton.backends.nvidia.compiler import CUDAOptions

    name = "enable_fp_fusion"
    if name in inspect.signature(CUDAOptions).parameters:
        return {name: fused}
    announce(
        f"Triton {triton.__version__} has no option {name}; tested with {tested_range('triton')}. Kernels that "
        "multiply and add may round otherwise than they are documented to"
    )
    return {}


def constant_names(kernel: Any) -> tuple[str, ...]:
    """The names of a jitted kernel's constants (`constexpr` parameters), in the order of its signature."""
    try:
        return tuple(parameter.name for parameter in kernel.params if parameter.is_constexpr)
    except AttributeError as error:
        raise KernelError(f"{kernel}: {error}; expected a jitted kernel of Triton {tested_range('triton')}") from error


def renamed(module: Any, *names: str) -> Any:
    """The first of `names` that a module of Triton has. Raises KernelError if it has none."""
    for name in names:
        if hasattr(module, name):
            return getattr(module, name)
    raise KernelError(f"{module.__name__} has no {' or '.join(names)}; expected Triton {tested_range('triton')}")
