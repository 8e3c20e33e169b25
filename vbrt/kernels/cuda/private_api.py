"""Private parts of Triton and of torch's compiler that vbrt uses, and what it does if they are missing.

| what | private to | without it |
| --- | --- | --- |
| calling a compiled kernel again, `direct_launch` | Triton 3.6 to 3.9 | Triton's own launch each time, announced |
| C code that launches a kernel, `make_launcher` | Triton 3.6 | compiled by the first launch |
| a kernel's cache of compiled code, `open_cache` | Triton | what threads compile first may be compiled again |
| names of a kernel's constants, `constant_names` | Triton | KernelError |
| names in Gluon that differ by version, `renamed` | Triton | KernelError |
| the current device and stream | torch._C | torch.cuda's, which take longer |
| `never_lower` | torch._inductor.lowering | slow compilation, announced |
| passes over graphs, their options | torch._inductor | KernelError from `vbrt.compile_options` |
| names of dynamo's guards, `guards_attribute` | torch._dynamo | KernelError |
| `skip_frames_of`, and the marks of `kernels/uncompiled.py` | torch._C, torch._dynamo | dynamo's import, announced |
| a launch's option `fp_fusion` | Triton | Triton's own default, announced |

`vbrt.libraries.versions` says with which versions all of it has been run. Imports Triton and inductor only when asked
for their parts.
"""

import functools
import hashlib
import importlib
import inspect
import os
import pathlib
import sys
import sysconfig
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from vbrt.config.arguments import check_one_of
from vbrt.errors import KernelError
from vbrt.libraries.versions import is_tested, tested_range

__all__ = [
    "GUARD_OPTION",
    "PASS_OPTION",
    "constant_names",
    "current_device",
    "decompositions",
    "direct_launch",
    "fp_fusion",
    "graph_pass_base",
    "guards_attribute",
    "hash_of_files",
    "make_launcher",
    "never_lower",
    "open_cache",
    "options_of_mode",
    "raw_stream",
    "renamed",
    "skip_frames_of",
]

#: options of torch.compile: a pass over graphs after autograd, and which of dynamo's guards to keep
PASS_OPTION, GUARD_OPTION = "post_grad_custom_pre_pass", "guard_filter_fn"

Launch = Callable[[int, int, int, Sequence[int], Sequence[Any], Sequence[Any]], object]
"""Launch a compiled kernel: (programs along x, along y, stream, addresses, numbers, constants)."""


@functools.cache
def _announce(message: str) -> None:
    """Warn once in a process."""
    warnings.warn(message, stacklevel=3)


# -- Triton -----------------------------------------------------------------------------------------------------------


def direct_launch(compiled: Any) -> Launch | None:
    """A launch of what `kernel[grid](...)` has returned, without Triton's work on every call; None if it cannot be had.

    Triton binds arguments, specializes them and looks up its cache each time. This hands pointers straight to the
    compiled kernel; Triton's launch hooks (profilers) do not see it. Announces why there is none, once.
    """
    import triton

    parts = [getattr(compiled, name, None) for name in ("run", "function", "packed_metadata")]
    if not is_tested("triton", triton.__version__) or None in parts:
        _announce(
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
    _announce(
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


# -- torch ------------------------------------------------------------------------------------------------------------

current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", torch.cuda.current_device)
raw_stream: Callable[[int], int] = getattr(
    torch._C, "_cuda_getCurrentRawStream", lambda device: torch.cuda.current_stream(device).cuda_stream
)


def never_lower(op: torch._ops.OpOverload) -> None:
    """Tell inductor, if it is loaded, to call an operator that it has no code for.

    Left to find that out itself, torch 2.11 formats the expression of the operator's inputs, for a log that is off;
    the text doubles with each norm before it: a model whose first such operator was behind 8 layers took minutes.
    """
    lowering = sys.modules.get("torch._inductor.lowering")
    if lowering is None:
        return
    try:
        if op not in lowering.lowerings:
            tag = torch._library.utils.get_layout_constraint_tag(op, with_default=True)
            lowering.make_fallback(op, lowering.tag_to_layout_constraint(tag))
    except AttributeError as error:
        _announce(
            f"torch {torch.__version__}: {error}; tested with {tested_range('torch')}. torch.compile may take minutes "
            "on models with 4-bit layers"
        )


def graph_pass_base() -> type:
    """The class of inductor's passes over graphs."""
    return _of_inductor("custom_graph_pass", "CustomGraphPass")


def hash_of_files(paths: tuple[str, ...]) -> Any:
    """A hash of files, by which inductor identifies a pass in its cache."""
    return _of_inductor("custom_graph_pass", "get_hash_for_files")(paths)


def decompositions() -> dict[Any, Any]:
    """Inductor's decompositions of operators. Takes seconds, which compiling takes anyway."""
    return _of_inductor("decomposition", "select_decomp_table")()


def options_of_mode(mode: str) -> dict[str, Any]:
    """The options of torch.compile that a mode stands for."""
    _of_inductor("config", PASS_OPTION)
    modes = _of_inductor("", "list_mode_options")()
    check_one_of(mode, modes, "compile_options(): mode")
    return modes[mode]


def _of_inductor(module: str, name: str) -> Any:
    """Raises KernelError if inductor has no such name."""
    try:
        return getattr(importlib.import_module(f"torch._inductor.{module}".rstrip(".")), name)
    except (ImportError, AttributeError) as error:
        raise KernelError(
            f"vbrt.compile_options: torch {torch.__version__}: {error}; expected torch {tested_range('torch')}. "
            "torch.compile(model) without these options works, in more launches"
        ) from error


def guards_attribute(guard: Any, attribute: str) -> bool:
    """True if one of dynamo's guards is on the attribute of some module."""
    try:
        return guard.name.endswith(f".{attribute}")
    except AttributeError as error:
        raise KernelError(f"torch {torch.__version__}: {error}; expected torch {tested_range('torch')}") from error


def skip_frames_of(function: Any) -> bool:
    """Tell dynamo, which need not be imported, to leave a function's own frames as they are, not those it calls.

    False: this torch has no such thing, which is announced.
    """
    try:
        frames = torch._C._dynamo.eval_frame
        own, called = frames._FrameAction.SKIP, frames._FrameAction.DEFAULT
        frames.set_code_exec_strategy(function.__code__, frames._FrameExecStrategy(own, called))
    except (AttributeError, TypeError) as error:  # a name, or the arguments of one
        _announce(
            f"torch {torch.__version__}: {error}; tested with {tested_range('torch')}. Importing vbrt imports torch's "
            "compiler, which takes two seconds"
        )
        return False
    return True
