"""Classes of other libraries whose objects hold models; apart, so that registering them imports next to nothing."""

from typing import Any

__all__ = ["HOLDERS", "register_holder"]

#: (library, name of a base class) -> `HolderKind`, or what imports it when it is asked for an attribute
HOLDERS: dict[tuple[str, str], Any] = {}


def register_holder(library: str, class_name: str, kind: Any) -> None:
    """Have `vbrt.wrap` take objects of this class of a library, and of classes derived from it."""
    HOLDERS[library, class_name] = kind
