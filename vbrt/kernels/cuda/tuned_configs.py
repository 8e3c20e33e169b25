"""Tuned configurations: launch configurations from `vbrt.tune` on this machine, one file per GPU and Triton version.

    launch = tuned_configs.found(device, "linear", tokens, row_tiles, columns) or launch_for(...)

A result stands for a family of kernels, a shape, and the numbers of tokens up to a power of two (`most_tokens`). The
file name contains the GPU, Triton's version and `KERNELS`; a file that is unreadable or does not match is ignored with
a warning.
"""

import contextlib
import functools
import json
import re
from collections.abc import Container, Iterator
from pathlib import Path
from typing import Any

import torch

from vbrt.errors import VBError, describe_os_error
from vbrt.host.logger import warn
from vbrt.host.safe_files import cache_folder, read_bounded, write_file
from vbrt.kernels.cuda import devices
from vbrt.kernels.cuda.launch_table import (
    GroupedLaunch,
    Launch,
    Matmul,
    MmaLaunch,
    PersistentLaunch,
    RowsLaunch,
    TokenLaunch,
    WideLaunch,
    has_rules,
)

__all__ = [
    "HOW_TO_MEASURE",
    "KERNELS",
    "Key",
    "Tuned",
    "found",
    "has_device",
    "identity",
    "most_tokens",
    "stored",
    "trying",
    "tuned",
    "tuning_file",
    "tuning_folder",
    "tuning_path",
    "unmeasured",
    "write",
]

#: incremented with kernel changes that may change the fastest configuration
KERNELS = 4
_FLAG = (False, True)
#: kinds of launches that a file may contain, with the values of each field
_KINDS: dict[str, tuple[Any, tuple[Container[int], ...]]] = {
    "narrow": (Launch, ((1, 2, 4), (4, 8, 16), _FLAG, _FLAG)),
    "wide": (WideLaunch, ((16, 32, 64, 128), (4, 8, 16), (1, 2, 4, 8), range(3, 9))),
    "mma": (MmaLaunch, ((32, 64, 128), (4, 8), (1, 2, 4), (1, 2, 4, 8), range(2, 9))),
    "persistent": (PersistentLaunch, ((0,), range(32, 257, 32), (0,), _FLAG)),  # a cut fits one number of tokens
    "matmul": (Matmul, ()),
    "rows": (RowsLaunch, ((1, 2), (1, 2, 4), (2, 4, 8))),
    "token": (TokenLaunch, ((1, 2, 4, 8, 16), (1, 2), (16,), (1, 2))),
    "grouped": (GroupedLaunch, ((32, 64, 128),)),
}
_NAMES = {kind: name for name, (kind, _) in _KINDS.items()}
_MAX_BYTES = 1 << 20
#: errors of reading a damaged file
_INVALID = (OSError, ValueError, TypeError, KeyError, AttributeError, ArithmeticError, RecursionError)
#: ends the note of `unmeasured`
HOW_TO_MEASURE = "`vbrt tune` measures them here"

Key = tuple[Any, ...]
"""(family, `most_tokens`, then what else the family's launches depend on)."""
Tuned = dict[Key, Any]
"""Key -> configuration."""


def most_tokens(tokens: int) -> int:
    """Largest of the numbers of tokens that share a result: a power of two, 8 or more."""
    return max(8, 1 << (tokens - 1).bit_length())


def found(device: int, family: str, tokens: int, *shape: int) -> Any:
    """Tuned configuration for this many tokens and a shape on a CUDA device, or None."""
    known = tuned(device)
    return known.get((family, most_tokens(tokens), *shape)) if known else None


@contextlib.contextmanager
def trying(device: int, key: Key, launch: Any) -> Iterator[None]:
    """Launch with a configuration in the block, as if it had been found."""
    known = tuned(device)
    before = known.get(key)
    known[key] = launch
    try:
        yield
    finally:
        if before is None:
            del known[key]
        else:
            known[key] = before


def unmeasured(family: str, kernels: str, device: torch.device) -> str | None:
    """Return a note where no launch was measured on a device's kind of GPU and none of a family tuned on this one.

    family: the first word of one or several families. kernels: how users know them.
    """
    index = device.index or 0
    capability = devices.capability(index)
    if has_rules(capability) or any(key[0].split()[0] == family for key in tuned(index)):
        return None
    return (
        f"sm_{capability[0]}{capability[1]}: launches of {kernels} follow measurements of sm_90, in proportion to this "
        f"GPU's multiprocessors, memory and clock; {HOW_TO_MEASURE}"
    )


def tuning_path(gpu: str, triton: str) -> Path:
    """File for a GPU and Triton version, below $XDG_CACHE_HOME or ~/.cache."""
    name = re.sub(r"[^a-z0-9.]+", "-", f"{gpu} triton {triton} v{KERNELS}".lower())
    return tuning_folder() / f"{name}.json"


def has_device() -> bool:
    """True if there is a CUDA device to have a file for."""
    return torch.cuda.is_available()


def tuning_folder() -> Path:
    """Folder of all files."""
    return cache_folder() / "tuning"


def stored() -> list[tuple[Path, dict[str, Any], Tuned]]:
    """Return the path, the identity and the configurations of each valid file for these kernels, of any GPU."""
    found = []
    for path in sorted(tuning_folder().glob("*.json")):
        with contextlib.suppress(*_INVALID):  # `tuned` warns of it where its GPU is
            content = json.loads(read_bounded(path, _MAX_BYTES).decode())
            own = {"gpu": str(content["gpu"]), "triton": str(content["triton"]), "kernels": KERNELS}
            found.append((path, own, _parsed(content, own)))
    return found


def tuning_file(device: int) -> Path:
    """File for a CUDA device; it may not exist."""
    own = identity(device)
    return tuning_path(own["gpu"], own["triton"])


@functools.cache
def tuned(index: int) -> Tuned:
    """Tuned configurations for a CUDA device; empty without a valid file."""
    own = identity(index)
    path = tuning_path(own["gpu"], own["triton"])
    try:
        return _parsed(json.loads(read_bounded(path, _MAX_BYTES).decode()), own)
    except FileNotFoundError:
        return {}
    except _INVALID as error:
        what = f"{type(error).__name__}: {error}"
        warn(f"{path} is ignored ({what}); delete it, or call vbrt.tune again", stacklevel=2)
        return {}


def identity(index: int) -> dict[str, Any]:
    """Validity key of tuned configurations: GPU, Triton and kernel versions."""
    import triton

    return {"gpu": torch.cuda.get_device_name(index), "triton": triton.__version__, "kernels": KERNELS}


def _parsed(content: Any, own: dict[str, Any]) -> Tuned:
    """Parse a file. Raises ValueError or TypeError if it is invalid or for another GPU, Triton or kernel version."""
    for name, value in own.items():
        if content.get(name) != value:
            raise ValueError(f"{name} = {content.get(name)!r}; expected {value!r}")
    out = {}
    for (family, *numbers), kind, fields in content["launches"]:
        out[str(family), *map(int, numbers)] = _launch(kind, fields)
    return out


def _launch(name: str, fields: list[int]) -> Any:
    kind, allowed = _KINDS[name]
    if len(fields) != len(allowed) or not all(field in of for field, of in zip(fields, allowed, strict=True)):
        raise ValueError(f"launch {name} {fields}; expected one that tune() tries")
    return kind(*fields)


def write(launches: Tuned, own: dict[str, Any]) -> Path:
    """Atomically replace the file of an `identity`. Raises VBError if it cannot be written."""
    path = tuning_path(own["gpu"], own["triton"])
    rows = [[list(key), _NAMES[type(launch)], list(launch)] for key, launch in sorted(launches.items(), key=_order)]
    text = json.dumps({**own, "launches": rows}, indent=1) + "\n"
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


def _order(item: tuple[Key, Any]) -> Key:
    return item[0]
