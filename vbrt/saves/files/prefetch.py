"""Files of a checkpoint, read ahead of their use: what is no layer's, and layer after layer."""

import contextlib
from collections.abc import Callable, Iterable, Iterator

from vbrt.host.file_prefetch import ReadAhead
from vbrt.saves.files.gguf_file import GGUFFile
from vbrt.saves.files.safetensors_file import TensorFile

__all__ = ["layers_first", "layers_last", "natural_key", "read_ahead", "reading_ahead"]


def natural_key(name: str) -> list[tuple[int, int | str]]:
    """Return what sorts names so that layer 2 comes before layer 10."""
    return [(0, int(part)) if part.isdecimal() else (1, part) for part in name.split(".")]


def _is_in_layer(name: str) -> bool:
    return any(part.isdecimal() for part in name.split("."))


def layers_first(name: str) -> tuple[bool, list[tuple[int, int | str]]]:
    """Return what sorts names as transformers uses them, about: embeddings and heads stay mapped until the end."""
    return not _is_in_layer(name), natural_key(name)


def layers_last(name: str) -> tuple[bool, list[tuple[int, int | str]]]:
    """Return what sorts names as `vbrt.load` reads them, about."""
    return _is_in_layer(name), natural_key(name)


def read_ahead(
    files: Iterable[TensorFile | GGUFFile], key: Callable[[str], object] = layers_first, share: tuple[int, int] = (0, 1)
) -> ReadAhead:
    """Begin to read the tensors of files, in the order of a key of their names; close it when they are loaded. share:
    see `ReadAhead`."""
    found = sorted(((name, file) for file in files for name in file.tensors), key=lambda item: key(item[0]))
    return ReadAhead((file.span(name) for name, file in found), share)


@contextlib.contextmanager
def reading_ahead(files: Iterable[TensorFile | GGUFFile]) -> Iterator[None]:
    """Read ahead of what is read from these files in the block."""
    files = list(files)
    with read_ahead(files, layers_last) as ahead:
        for file in files:
            file.ahead = ahead
        try:
            yield
        finally:
            for file in files:
                file.ahead = None
