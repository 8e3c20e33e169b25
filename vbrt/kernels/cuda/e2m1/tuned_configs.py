"""Tuned configurations: launch configurations from `vbrt.tune` on this machine, one file per GPU and Triton version.

The file name contains the GPU, Triton's version and `KERNELS`; a file that is unreadable or does not match is ignored
with a warning.
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

#: incremented with kernel changes that may change the fastest configuration
KERNELS = 2
_READS = ((True, True), (True, False), (False, False))  # prefetch, carry_pointers
#: configurations that a search tries, and that a file may contain
CANDIDATES = tuple(Launch(rows, warps, *reads) for rows in (1, 2, 4) for warps in (4, 8, 16) for reads in _READS)
_MAX_BYTES = 1 << 20

Launches = dict[tuple[int, int, int], Launch]
"""(groups of 8 tokens, row tiles, columns) -> configuration."""


def tuning_path(gpu: str, triton: str) -> Path:
    """File for a GPU and Triton version, below $XDG_CACHE_HOME or ~/.cache."""
    name = re.sub(r"[^a-z0-9.]+", "-", f"{gpu} triton {triton} v{KERNELS}".lower())
    return cache_folder() / "tuning" / f"{name}.json"


def tuning_file(device: int) -> Path:
    """File for a CUDA device; it may not exist."""
    own = identity(device)
    return tuning_path(own["gpu"], own["triton"])


@functools.cache
def tuned(index: int) -> Launches:
    """Tuned configurations for a CUDA device; empty without a valid file."""
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
    """Validity key of tuned configurations: GPU, Triton and kernel versions."""
    import triton

    return {"gpu": torch.cuda.get_device_name(index), "triton": triton.__version__, "kernels": KERNELS}


def _parsed(content: Any, own: dict[str, Any]) -> Launches:
    """Parse a file. Raises ValueError or TypeError if it is invalid or for another GPU, Triton or kernel version."""
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
    """Atomically replace the file of an `identity`. Raises VBError if it cannot be written."""
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
