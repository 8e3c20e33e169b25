"""Feature probes: a part of another library is looked up by name and signature, never by version.

    DRAFTS = Feature(
        "transformers",
        ("generation.utils:GenerationMixin._prefill(input_ids, generation_config, model_kwargs)",),
        without="generate(speculate=...) decodes without drafts",
    )
    DRAFTS.refusal()    # "" where all of it is there
    DRAFTS.is_there()   # False: says so once, in a warning and in `stats().fallbacks`

An ask is `module:attribute.attribute`, relative to the library; names in parentheses are parameters that a function
must take by that name.
"""

import importlib
import importlib.metadata
import importlib.util
import inspect
import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any

from vbrt.errors import LibraryError
from vbrt.libraries.versions import TESTED, wanted

__all__ = ["Feature", "announce", "find", "loaded", "losses", "takes", "version_of"]


def version_of(library: str) -> str:
    """Version of an installed library; "of no version" where nothing says it."""
    module = sys.modules.get(library)
    found = getattr(module, "__version__", None)  # what runs, whatever was installed since
    if isinstance(found, str):
        return found
    try:
        return importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        return "of no version"


def loaded(library: str, module: str = "") -> ModuleType | None:
    """A module of a library that this process has imported already; None for any other."""
    return sys.modules.get(f"{library}.{module}".rstrip("."))


def find(library: str, path: str, default: Any = None) -> Any:
    """The object at `module:attribute.attribute` of a library, imported if need be; `default` where there is none."""
    module, _, names = path.partition(":")
    try:
        found: Any = importlib.import_module(f"{library}.{module}".rstrip("."))
        for name in filter(None, names.split(".")):
            found = getattr(found, name)
    except (ImportError, AttributeError):
        return default
    return found


def takes(function: Callable[..., Any], *names: str) -> bool:
    """True if a function has parameters of these names; decorators that name what they wrap are looked through."""
    parameters = inspect.signature(function).parameters
    return all(name in parameters for name in names)


_losses: dict[str, None] = {}


def losses() -> list[str]:
    """What is off in this process because a library lacks a part, in the order in which it was noticed."""
    return list(_losses)


def announce(loss: str) -> None:
    """Warn of what is off, once in a process, and keep it for `stats().fallbacks`."""
    if loss not in _losses:
        _losses[loss] = None
        warnings.warn(loss, stacklevel=4)


_ABSENT = object()


@dataclass(frozen=True, slots=True)
class Feature:
    """Something that vbrt does with parts of another library.

    Attributes:
        library: its top-level package.
        asks: the parts; see the head of this file.
        without: what is off where one is missing, as a sentence for users.
    """

    library: str
    asks: tuple[str, ...]
    without: str

    def absent(self) -> str:
        """The first ask that the installed version does not answer; "" if it has them all."""
        return next((ask for ask in self.asks if not self._is_answered(ask)), "")

    def refusal(self) -> str:
        """Which part is missing, with the version; "" if none is."""
        absent = self.absent()
        if absent and importlib.util.find_spec(self.library) is None:
            return f"{self.library} is not installed"
        return absent and _lacks(self.library, absent)

    def part(self, path: str) -> Any:
        """The object at `module:name`. Raises LibraryError where there is none, ModuleNotFoundError without the
        library."""
        importlib.import_module(self.library)
        found = find(self.library, path, _ABSENT)
        if found is _ABSENT:
            raise LibraryError(f"{_lacks(self.library, path)}: {self.without}")
        return found

    def is_there(self) -> bool:
        """False where a part is missing, which is then said once in a warning and kept for `stats().fallbacks`."""
        refusal = self.refusal()
        if refusal:
            announce(f"{refusal}: {self.without}")
        return not refusal

    def check(self) -> None:
        """Raise LibraryError where a part is missing."""
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
    """Which part a version lacks, and which version has it."""
    version = version_of(library)
    remedy = f" ({wanted(library, version)})" if library in TESTED else ""
    return f"{library} {version} has no {_written(library, ask)}{remedy}"


def _written(library: str, ask: str) -> str:
    module, _, names = ask.partition(":")
    return ".".join(filter(None, (library, module, names)))
