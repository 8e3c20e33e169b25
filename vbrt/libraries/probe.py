"""Feature probes: parts of another library are looked up by name and signature, never by version.

    DRAFTS = Feature(
        "transformers",
        ("generation.utils:GenerationMixin._prefill(input_ids, generation_config, model_kwargs)",),
        without="generate(speculate=...) decodes without drafts",
    )
    DRAFTS.refusal()    # "" if all parts exist
    DRAFTS.is_there()   # if False, reports it once, as a warning and in `stats().fallbacks`

An ask is `module:attribute.attribute`, relative to the library; names in parentheses are required parameters.
"""

import importlib
import importlib.metadata
import importlib.util
import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from vbrt.errors import LibraryError
from vbrt.host.logger import warn
from vbrt.libraries.versions import TESTED, wanted

__all__ = ["Feature", "announce", "find", "loaded", "losses", "takes", "version_of"]


def version_of(library: str) -> str:
    """Version of an installed library; "of no version" if unknown."""
    module = sys.modules.get(library)
    found = getattr(module, "__version__", None)  # the imported version, even if another one was installed since
    if isinstance(found, str):
        return found
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return "of no version"


def loaded(library: str, module: str = "") -> ModuleType | None:
    """A module of a library, if this process has imported it already; else None."""
    return sys.modules.get(f"{library}.{module}".rstrip("."))


def find(library: str, path: str, default: Any = None) -> Any:
    """Import and return the object at `module:attribute.attribute` of a library; `default` if it is missing."""
    module, _, names = path.partition(":")
    try:
        found: Any = importlib.import_module(f"{library}.{module}".rstrip("."))
        for name in filter(None, names.split(".")):
            found = getattr(found, name)
    except (ImportError, AttributeError):
        return default
    return found


def takes(function: Callable[..., Any], *names: str) -> bool:
    """True if a function has these parameters; `functools.wraps` decorators are looked through."""
    parameters = inspect.signature(function).parameters
    return all(name in parameters for name in names)


_losses: dict[str, None] = {}


def losses() -> list[str]:
    """Messages about disabled features in this process, in order of detection."""
    return list(_losses)


def announce(loss: str) -> None:
    """Warn about a disabled feature once per process, and record it for `stats().fallbacks`."""
    if loss not in _losses:
        _losses[loss] = None
        warn(loss, stacklevel=4)


_ABSENT = object()


@dataclass(frozen=True, slots=True)
class Feature:
    """A vbrt feature and the parts of another library that it needs.

    Attributes:
        library: top-level package.
        asks: the parts; syntax in the module docstring.
        without: what is disabled if one is missing, as a message for users.
    """

    library: str
    asks: tuple[str, ...]
    without: str

    def absent(self) -> str:
        """Return the first missing ask; "" if none is."""
        return next((ask for ask in self.asks if not self._is_answered(ask)), "")

    def refusal(self) -> str:
        """Return which part is missing, with the version; "" if none is."""
        absent = self.absent()
        if absent and importlib.util.find_spec(self.library) is None:
            return f"{self.library} is not installed"
        return absent and _lacks(self.library, absent)

    def part(self, path: str) -> Any:
        """Return the object at `module:name`. Raises LibraryError if missing, ModuleNotFoundError without library."""
        importlib.import_module(self.library)
        found = find(self.library, path, _ABSENT)
        if found is _ABSENT:
            raise LibraryError(f"{_lacks(self.library, path)}: {self.without}")
        return found

    def is_there(self) -> bool:
        """True if no part is missing; else report it once, as a warning and in `stats().fallbacks`."""
        refusal = self.refusal()
        if refusal:
            announce(f"{refusal}: {self.without}")
        return not refusal

    def check(self) -> None:
        """Raise LibraryError if a part is missing."""
        refusal = self.refusal()
        if refusal:
            raise LibraryError(f"{refusal}: {self.without}")

    def _is_answered(self, ask: str) -> bool:
        path, _, parameters = ask.partition("(")
        found = find(self.library, path, _ABSENT)
        if found is _ABSENT or not parameters:
            return found is not _ABSENT
        return takes(found, *(name.strip() for name in parameters.rstrip(")").split(",")))


def _lacks(library: str, ask: str) -> str:
    """Message: the part that a version lacks, and which version has it."""
    version = version_of(library)
    remedy = f" ({wanted(library, version)})" if library in TESTED else ""
    return f"{library} {version} has no {_written(library, ask)}{remedy}"


def _written(library: str, ask: str) -> str:
    module, _, names = ask.partition(":")
    return ".".join(filter(None, (library, module, names)))
