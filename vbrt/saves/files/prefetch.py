"""Prefetch order of a checkpoint's files: non-layer tensors first or last, layers in numeric order."""

import contextlib
from collections.abc import Callable, Iterable, Iterator

from vbrt.host.file_prefetch import ReadAhead
from vbrt.saves.files.gguf_file import GGUFFile
from vbrt.saves.files.safetensors_file import TensorFile

__all__ = ["layers_first", "layers_last", "natural_key", "read_ahead", "reading_ahead"]


def natural_key(name: str) -> list[tuple[int, int | str]]:
    """Return a sort key by which layer 2 comes before layer 10."""
    return [(0, int(part)) if part.isdecimal() else (1, part) for part in name.split(".")]


def _is_in_layer(name: str) -> bool:
    return any(part.isdecimal() for part in name.split("."))


def layers_first(name: str) -> tuple[bool, list[tuple[int, int | str]]]:
    """Sort key for roughly the order in which transformers uses tensors: layers, then embeddings and heads."""
    return not _is_in_layer(name), natural_key(name)


def layers_last(name: str) -> tuple[bool, list[tuple[int, int | str]]]:
    """Sort key for roughly the order in which `vbrt.load` reads: embeddings and heads, then layers."""
    return _is_in_layer(name), natural_key(name)


def read_ahead(
    files: Iterable[TensorFile | GGUFFile], key: Callable[[str], object] = layers_first, share: tuple[int, int] = (0, 1)
) -> ReadAhead:
    """Prefetch tensors in the order of `key`; close the result once they are loaded. share: see `ReadAhead`."""
    found = sorted(((name, file) for file in files for name in file.tensors), key=lambda item: key(item[0]))
    return ReadAhead((file.span(name) for name, file in found), share)


@contextlib.contextmanager
def reading_ahead(files: Iterable[TensorFile | GGUFFile]) -> Iterator[None]:
    """Prefetch tensors of these files while the block reads them."""
    files = list(files)
    with read_ahead(files, layers_last) as ahead:
        for file in files:
            file.ahead = ahead
        try:
            yield
        finally:
            for file in files:
                file.ahead = None
