"""GGUF reader: metadata, tensor entries and rows' bytes, validated before anything is read.

Layout: a header (magic, version, counts; metadata as keys and values; names, dimensions, types and offsets of tensors),
then the tensors' bytes, each aligned. Against damaged or hostile files, every count is checked against the remaining
bytes before it is followed, vocabulary strings are skipped, and tensors must be contiguous without overlaps or holes,
as llama.cpp demands; the library's own reader checks no counts and makes several views per string. Bytes are read with
`preadv` into fresh memory, as for safetensors.

Type sizes come from the package `gguf`; a type that it does not know is refused by number.
"""

import importlib
import os
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from math import prod
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

from vbrt.errors import CheckpointError, describe_os_error
from vbrt.host.file_prefetch import ReadAhead, Span
from vbrt.host.host_memory import bytes_view
from vbrt.host.safe_files import open_regular, read_into
from vbrt.saves.files.checkpoint_paths import GGUF_PART, shard_paths

__all__ = ["ArrayOf", "GGUFFile", "GGUFTensor", "gguf_library", "open_shards"]

_MAGIC, _VERSIONS = b"GGUF", (2, 3)
_MAX_HEADER_BYTES = 256 << 20
_CHUNK_BYTES = 1 << 20
_MAX_DIMENSIONS = 4
_LEAST_ENTRY, _LEAST_VALUE = 32, 13  # bytes of a tensor entry without its name; of a value with its key
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
#: metadata value types, except strings and arrays
_SCALARS = {
    number: struct.Struct(f"<{code}")
    for number, code in {
        0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
    }.items()
}  # fmt: skip
_STRING, _ARRAY = 8, 9
_ALIGNMENT, _TOKENIZER = "general.alignment", "tokenizer."


def gguf_library() -> ModuleType:
    """Return the package `gguf`. Raises CheckpointError if it is not installed."""
    try:
        return importlib.import_module("gguf")
    except ImportError as error:
        raise CheckpointError(
            f"GGUF files need the package gguf, which knows their types and names ({error}); pip install 'vbrt[gguf]'"
        ) from error


@dataclass(frozen=True, slots=True)
class GGUFTensor:
    """Tensor entry of the header.

    Attributes:
        type: ggml's name of the quantization type, such as "Q4_0".
        shape: of the weights, the contiguous dimension last; never empty.
        row_nbytes: bytes of one row (the last dimension).
        begin: byte offset in the file.
    """

    name: str
    type: str
    shape: tuple[int, ...]
    row_nbytes: int
    begin: int

    @property
    def rows(self) -> int:
        """Number of rows."""
        return prod(self.shape[:-1])

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor in the file."""
        return self.rows * self.row_nbytes


@dataclass(frozen=True, slots=True)
class ArrayOf:
    """Placeholder for a metadata array: its length."""

    count: int


class _Header:
    """Bounded reader of a file's header. Raises ValueError for counts beyond the file's end, and for invalid values."""

    def __init__(self, fd: int) -> None:
        self._fd, self._head = fd, bytearray()
        self.size, self.at = os.fstat(fd).st_size, 0

    def _take(self, nbytes: int) -> int:
        """Advance by `nbytes`, reading ahead in chunks; return their offset in `_head`."""
        begin, end = self.at, self.at + nbytes
        if end > self.size:
            raise ValueError(f"{nbytes} bytes wanted at byte {begin} of {self.size}")
        if end > _MAX_HEADER_BYTES:
            raise ValueError(f"a header of more than {_MAX_HEADER_BYTES} bytes")
        if end > len(self._head):
            more = bytearray(min(max(end - len(self._head), _CHUNK_BYTES), self.size - len(self._head)))
            read_into(self._fd, [memoryview(more)], len(self._head))
            self._head += more
        self.at = end
        return begin

    def number(self, form: struct.Struct) -> Any:
        return form.unpack_from(self._head, self._take(form.size))[0]

    def text(self) -> str:
        nbytes = self.number(_U64)
        begin = self._take(nbytes)
        return self._head[begin : begin + nbytes].decode()

    def value(self) -> Any:
        """Return a metadata value; an array is skipped over and given as its length."""
        kind = self.number(_U32)
        if kind == _ARRAY:
            return self._array()
        return self._scalar(kind)

    def _scalar(self, kind: int) -> Any:
        if kind == _STRING:
            return self.text()
        if kind not in _SCALARS:
            raise ValueError(f"a value of unknown type {kind}")
        return self.number(_SCALARS[kind])

    def _array(self) -> "ArrayOf":
        kind, count = self.number(_U32), self.number(_U64)
        if kind in _SCALARS:
            self._take(count * _SCALARS[kind].size)
        elif kind != _STRING:
            raise ValueError(f"an array of values of type {kind}")
        else:
            self._take(8 * count)  # each string takes at least its 8-byte length
            self.at -= 8 * count
            for _ in range(count):
                self._take(self.number(_U64))
        return ArrayOf(count)

    def bytes_since(self, begin: int) -> bytes:
        return bytes(self._head[begin : self.at])

    def shape(self) -> tuple[int, ...]:
        count = self.number(_U32)
        if not 1 <= count <= _MAX_DIMENSIONS:
            raise ValueError(f"a tensor of {count} dimensions; expected 1 to {_MAX_DIMENSIONS}")
        shape = tuple(self.number(_U64) for _ in range(count))[::-1]
        if not all(shape) or prod(shape) >= 1 << 62:
            raise ValueError(f"a tensor of shape {shape}")
        return shape


class GGUFFile:
    """GGUF file; opened for each read, so that no descriptors stay open.

    Attributes:
        metadata: keys and values, with `ArrayOf` in place of arrays.
        tensors: name -> header entry, in file order.
        ahead: the prefetcher to notify of reads, while one runs.

    Raises:
        CheckpointError: missing, unreadable, truncated, damaged, or of types that the package `gguf` does not know;
            always with the path.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.ahead: ReadAhead | None = None
        library = gguf_library()
        try:
            with open(open_regular(path), "rb", buffering=0) as file:
                header = _Header(file.fileno())
                self.metadata, self._values, entries = _parsed(header)
                self.tensors = dict(_placed(header, entries, self._alignment(), library))
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {describe_os_error(error)}") from error
        except (ValueError, EOFError) as error:
            raise CheckpointError(f"{path}: damaged, truncated, or not a GGUF file: {error}; copy it again") from error

    def _alignment(self) -> int:
        value = self.metadata.get(_ALIGNMENT, 32)
        if isinstance(value, bool) or not isinstance(value, int) or value < 1 or value & (value - 1):
            raise ValueError(f"{_ALIGNMENT} = {value!r}; expected a power of two")
        return value

    def text(self, key: str) -> str:
        """Return a string of the metadata. Raises CheckpointError: missing, or of another type."""
        value = self.metadata.get(key)
        if not isinstance(value, str) or not value:
            raise CheckpointError(f"{self.path}: {key} = {value!r} in its metadata; expected a text")
        return value

    def without_vocabulary(self, names: Iterable[str]) -> bytes:
        """Return a GGUF file of the metadata without tokenizer arrays, and a one-element tensor for each of these
        names."""
        kept = [packed for packed in self._values.values() if packed]
        entries = [
            _packed_text(name) + struct.pack("<IQIQ", 1, 1, 0, self._alignment() * place)
            for place, name in enumerate(names)
        ]
        head = _MAGIC + struct.pack("<IQQ", _VERSIONS[-1], len(entries), len(kept)) + b"".join((*kept, *entries))
        return head + bytes(_aligned(len(head), self._alignment()) - len(head) + self._alignment() * len(entries))

    def span(self, name: str) -> Span:
        """Return a tensor's span of bytes in the file."""
        info = self.tensors[name]
        return Span(name, self.path, info.begin, info.nbytes)

    def rows(self, name: str, first: int, count: int) -> torch.Tensor:
        """Read rows of a tensor as bytes, uint8 [count, row_nbytes]. Raises CheckpointError: they cannot be read."""
        info = self.tensors[name]
        if self.ahead is not None:
            self.ahead.used(name, (first + count) * info.row_nbytes)
        out = torch.empty(count, info.row_nbytes, dtype=torch.uint8, device="cpu")
        try:
            with open(open_regular(self.path), "rb", buffering=0) as file:
                read_into(file.fileno(), [bytes_view(out.view(-1))], info.begin + first * info.row_nbytes)
        except (OSError, EOFError) as error:
            why = describe_os_error(error) if isinstance(error, OSError) else "truncated"
            raise CheckpointError(f"{self.path}: {name} cannot be read: {why}") from error
        return out


_Values = dict[str, bytes]  # raw bytes of keys and values; empty for tokenizer arrays
_Entries = list[tuple[str, tuple[int, ...], int, int]]  # name, shape, type, offset


def _parsed(header: _Header) -> tuple[dict[str, Any], _Values, _Entries]:
    """Return the metadata, parsed and raw, and the tensor entries."""
    magic = bytes(header.number(struct.Struct("<B")) for _ in _MAGIC)
    version = header.number(_U32)
    if magic != _MAGIC:
        raise ValueError(f"it begins with {magic!r}, not with {_MAGIC!r}")
    if version not in _VERSIONS:
        big = " (of a machine with another byte order)" if version & 0xFFFF == 0 else ""
        raise ValueError(f"version {version}{big}; expected one of {_VERSIONS}")
    tensors, values = header.number(_U64), header.number(_U64)
    if tensors * _LEAST_ENTRY + values * _LEAST_VALUE > header.size:
        raise ValueError(f"{tensors} tensors and {values} values of metadata in {header.size} bytes")
    metadata: dict[str, Any] = {}
    packed: _Values = {}
    for _ in range(values):
        begin, key = header.at, header.text()
        if key in metadata:
            raise ValueError(f"{key} appears twice")
        metadata[key] = header.value()
        is_long = key.startswith(_TOKENIZER) and isinstance(metadata[key], ArrayOf)
        packed[key] = b"" if is_long else header.bytes_since(begin)
    return metadata, packed, [_entry(header) for _ in range(tensors)]


def _packed_text(text: str) -> bytes:
    packed = text.encode()
    return _U64.pack(len(packed)) + packed


def _entry(header: _Header) -> tuple[str, tuple[int, ...], int, int]:
    name, shape = header.text(), header.shape()
    return name, shape, header.number(_U32), header.number(_U64)


def _placed(
    header: _Header, entries: _Entries, alignment: int, library: ModuleType
) -> Iterator[tuple[str, GGUFTensor]]:
    """Yield the tensors in file order, checking that they are contiguous from the first aligned byte on."""
    begin, seen = _aligned(header.at, alignment), set()
    data = begin
    for name, shape, number, offset in sorted(entries, key=lambda entry: entry[3]):
        if name in seen:
            raise ValueError(f"{name} appears twice")
        seen.add(name)
        tensor = GGUFTensor(name, *_type_of(name, shape, number, library), begin=begin)
        if data + offset != begin:
            raise ValueError(f"{name} begins at byte {data + offset}; expected {begin}, after the previous one")
        if begin + tensor.nbytes > header.size:
            raise ValueError(f"{name} ends at byte {begin + tensor.nbytes} of {header.size}")
        yield name, tensor
        begin = _aligned(begin + tensor.nbytes, alignment)


def _aligned(at: int, alignment: int) -> int:
    return -(-at // alignment) * alignment


def _type_of(name: str, shape: tuple[int, ...], number: int, library: ModuleType) -> tuple[str, tuple[int, ...], int]:
    """Return ggml's name of the type, the shape, and the bytes per row."""
    try:
        kind = library.GGMLQuantizationType(number)
    except ValueError:
        raise ValueError(f"{name} is of type {number}, which gguf {version('gguf')} does not know") from None
    weights, nbytes = library.GGML_QUANT_SIZES[kind]
    if shape[-1] % weights:
        raise ValueError(f"{name} has rows of {shape[-1]}, and {kind.name} blocks of {weights}")
    return kind.name, shape, shape[-1] // weights * nbytes


def open_shards(path: Path) -> list[GGUFFile]:
    """Open a GGUF file; if it is split (`-00001-of-00003.gguf`), all parts, in order.

    Raises CheckpointError: as `GGUFFile`, a part is missing, or the parts do not belong together.
    """
    named = GGUF_PART.search(path.name)
    files = [GGUFFile(each) for each in shard_paths(path)]
    counts = {file.metadata.get("split.count", 1) for file in files}
    if counts != {len(files)}:
        said = ", ".join(map(str, sorted(counts, key=str)))
        expected = "a name that ends with -00001-of-00002.gguf or the like" if named is None else f"{len(files)}"
        raise CheckpointError(f"{path}: split.count = {said} in its metadata; expected {expected}: part of a file")
    wanted = files[0].metadata.get("split.tensors.count")
    have = sum(len(file.tensors) for file in files)
    if len({name for file in files for name in file.tensors}) < have:
        raise CheckpointError(f"{path}: a tensor is in several of its {len(files)} parts; copy them again")
    if wanted not in (None, have):
        raise CheckpointError(f"{path}: {have} tensors in its {len(files)} parts; expected {wanted}; copy them again")
    return files
