"""The launch configurations that `vbrt.tune` has found on this machine, in a file for each GPU and version of Triton.

The file is named after the GPU, Triton's version and `KERNELS`; one that cannot be read or does not belong here is
announced and ignored.
"""

import functools
import json
import re
import warnings
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from vbrt.errors import VBError, describe_os_error
from vbrt.host.safe_files import cache_folder, read_bounded, write_file
from vbrt.kernels.cuda.launch_table import Launch

__all__ = ["CANDIDATES", "KERNELS", "Launches", "identity", "tuned", "tuning_file", "tuning_path", "write"]

#: raised with each change of a kernel that can change which configuration is the fastest
KERNELS = 2
_READS = ((True, True), (True, False), (False, False))  # prefetch, carry_pointers
#: what a search tries, and a file may name
CANDIDATES = tuple(Launch(rows, warps, *reads) for rows in (1, 2, 4) for warps in (4, 8, 16) for reads in _READS)
_MAX_BYTES = 1 << 20

Launches = dict[tuple[int, int, int], Launch]
"""(groups of 8 tokens, row tiles, columns) -> configuration."""


def tuning_path(gpu: str, triton: str) -> Path:
    """The file of the configurations for a GPU and a version of Triton: below $XDG_CACHE_HOME or ~/.cache."""
    name = re.sub(r"[^a-z0-9.]+", "-", f"{gpu} triton {triton} v{KERNELS}".lower())
    return cache_folder() / "tuning" / f"{name}.json"


def tuning_file(device: int) -> Path:
    """The file of the configurations for a CUDA device; it need not exist."""
    own = identity(device)
    return tuning_path(own["gpu"], own["triton"])


@functools.cache
def tuned(index: int) -> Launches:
    """The configurations found for a CUDA device; empty without a valid file."""
    own = identity(index)
    path = tuning_path(own["gpu"], own["triton"])
    try:
        return _parsed(json.loads(read_bounded(path, _MAX_BYTES).decode()), own)
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, TypeError, KeyError, AttributeError, ArithmeticError, RecursionError) as error:
        what = f"{type(error).__name__}: {error}"
        warnings.warn(f"{path} is ignored ({what}); delete it, or call vbrt.tune again", stacklevel=2)
        return {}


def identity(index: int) -> dict[str, Any]:
    """GPU, Triton and kernels that configurations found on a CUDA device are valid for."""
    import triton

    return {"gpu": torch.cuda.get_device_name(index), "triton": triton.__version__, "kernels": KERNELS}


def _parsed(content: Any, own: dict[str, Any]) -> Launches:
    """Raises ValueError or TypeError for what is not a file of this GPU, Triton and kernels."""
    for name, value in own.items():
        if content.get(name) != value:
            raise ValueError(f"{name} = {content.get(name)!r}; expected {value!r}")
    out = {}
    for groups, rows, columns, *launch in content["launches"]:
        if Launch(*launch) not in CANDIDATES:
            raise ValueError(f"launch {launch}; expected one of {len(CANDIDATES)} that tune() tries")
        out[int(groups), int(rows), int(columns)] = Launch(*launch)
    return out


def write(launches: Launches, own: dict[str, Any]) -> Path:
    """Replace the file of an `identity` in one step. Raises VBError if it cannot be written."""
    path = tuning_path(own["gpu"], own["triton"])
    rows: Iterable[list[Any]] = ([*key, *launch] for key, launch in sorted(launches.items()))
    text = json.dumps({**own, "launches": list(rows)}, indent=1) + "\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, text.encode())
    except OSError as error:
        raise VBError(
            f"{path}: cannot be written: {describe_os_error(error)}; expected a folder that can be, "
            "$XDG_CACHE_HOME names another"
        ) from error
    tuned.cache_clear()
    return path
