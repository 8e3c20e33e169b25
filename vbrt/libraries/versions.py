"""Tested versions of other libraries: the only place in the package that lists them.

    newer_than_tested()              # ("transformers 5.25.0 is newer than the newest tested (5.24)",), of all installed
    newer_than_tested(loaded=True)   # of those that this process has imported: `stats().untested`
    wanted("transformers", "5.0.0")  # "vbrt needs transformers 5.17 or newer"

Lower bounds of pyproject.toml, constraints/tested.txt and docs/index.md are checked against it. Imports no library.
"""

import functools
import importlib.metadata
import re
import sys

__all__ = ["TESTED", "is_tested", "newer_than_tested", "tested_range", "wanted"]

#: library -> lowest and newest minor version: the short suite ran with both, the whole suite with the newest
TESTED = {
    "torch": ("2.11", "2.14"),
    "triton": ("3.6", "3.9"),
    "transformers": ("5.17", "5.24"),
    "accelerate": ("1.3", "1.15"),
    "peft": ("0.18", "0.21"),
    "gguf": ("0.17", "0.19"),
    "safetensors": ("0.6", "0.8"),
}


def _minor(version: str) -> tuple[int, int] | None:
    """(major, minor) of a version; None if it does not parse."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return None if found is None else (int(found[1]), int(found[2]))


def is_tested(library: str, version: str) -> bool:
    """True for a version in the tested range; patch releases are ignored."""
    minor = _minor(version)
    first, last = map(_minor, TESTED[library])
    return minor is not None and first <= minor <= last


def tested_range(library: str) -> str:
    """The tested range as text: "3.6 to 3.9"."""
    return " to ".join(TESTED[library])


def wanted(library: str, version: str) -> str:
    """Advice on the version to install: the lowest, if that is newer; else the tested range."""
    minor, lowest = _minor(version), TESTED[library][0]
    if minor is not None and minor < _minor(lowest):
        return f"vbrt needs {library} {lowest} or newer"
    return f"vbrt was tested with {library} {tested_range(library)}"


def newer_than_tested(*, loaded: bool = False) -> tuple[str, ...]:
    """Return a message for each library newer than its newest tested version.

    Args:
        loaded: only libraries that this process has imported.
    """
    found = (_newer(library) for library in TESTED if not loaded or library in sys.modules)
    return tuple(filter(None, found))


@functools.cache
def _newer(library: str) -> str:
    try:
        version = importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return ""
    minor, newest = _minor(version), TESTED[library][1]
    is_newer = minor is not None and minor > _minor(newest)
    return f"{library} {version} is newer than the newest tested ({newest})" if is_newer else ""
