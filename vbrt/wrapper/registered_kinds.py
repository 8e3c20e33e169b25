"""Registry of other libraries' classes whose objects hold models; a file without heavy imports."""

from typing import Any

__all__ = ["HOLDERS", "register_holder"]

#: (library, base-class name) -> `HolderKind`, or a `Deferred` that imports it on first use
HOLDERS: dict[tuple[str, str], Any] = {}


def register_holder(library: str, class_name: str, kind: Any) -> None:
    """Make `vbrt.wrap` accept objects of this class of a library, and of derived classes."""
    HOLDERS[library, class_name] = kind
