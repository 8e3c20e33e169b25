"""Triton: private parts for launches with less host overhead, caches, and names that differ by version.

| part | without it |
| --- | --- |
| relaunch of a compiled kernel, `direct_launch` (tested versions only) | Triton's own launch, with a warning |
| C launcher of a kernel, `make_launcher` (Triton 3.6) | compiled at the first launch |
| a kernel's cache of compiled code, `open_cache` | the first threads may compile twice |
| names of a kernel's constants, `constant_names` | KernelError |
| names in Gluon that differ by version, `renamed` | KernelError |
| launch option `fp_fusion` | Triton's default, with a warning |

Tested versions: `vbrt.libraries.versions`. Triton is imported only when its parts are used.
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
    """Return a direct launch of a kernel that `kernel[grid](...)` has compiled; None, with one warning, if unavailable.

    Triton binds and specializes arguments and looks up its cache at each launch. This passes pointers straight to the
    compiled kernel; Triton's launch hooks (profilers) do not see it.
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
    """Create a jitted kernel's cache for the current device, before threads fill it: otherwise two first threads create
    one each, and what one of them compiles is lost."""
    from triton.runtime import driver

    caches = getattr(kernel, "device_caches", None)
    if caches is not None:
        caches[driver.active.get_current_device()]


def make_launcher(compiled: Any) -> None:
    """Compile the C launcher of a compiled kernel ahead of its first launch, which takes Triton 3.6 0.3 s. Does not
    touch the device; a no-op with another Triton.

    The launcher is written to Triton's disk cache, not imported. All launchers share one module name, so Python may
    return one module object for several: while a thread imports a launcher and takes its function, others must not.
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
    """Launch option that makes Triton fuse multiply and add, or not: bits depend on it, and Triton 3.10 changes the
    default. Empty, with a warning, if there is no such option."""
    import triton
    from triton.backends.nvidia.compiler import CUDAOptions

    name = "enable_fp_fusion"
    if name in inspect.signature(CUDAOptions).parameters:
        return {name: fused}
    announce(
        f"Triton {triton.__version__} has no option {name}; tested with {tested_range('triton')}. Kernels that "
        "multiply and add may round differently than documented"
    )
    return {}


def constant_names(kernel: Any) -> tuple[str, ...]:
    """Names of a jitted kernel's constants (`constexpr` parameters), in order of its signature."""
    try:
        return tuple(parameter.name for parameter in kernel.params if parameter.is_constexpr)
    except AttributeError as error:
        raise KernelError(f"{kernel}: {error}; expected a jitted kernel of Triton {tested_range('triton')}") from error


def renamed(module: Any, *names: str) -> Any:
    """The first of `names` that a Triton module has. Raises KernelError if it has none."""
    for name in names:
        if hasattr(module, name):
            return getattr(module, name)
    raise KernelError(f"{module.__name__} has no {' or '.join(names)}; expected Triton {tested_range('triton')}")
