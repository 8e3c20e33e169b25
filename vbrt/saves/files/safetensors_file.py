"""safetensors files, read and written a tensor at a time.

The library writes a whole dict at once and reads through a mapping of the file. Here a file is written while its
tensors come and go, one layer in memory, and read with `preadv` into fresh memory: an I/O error is an exception with a
path in it and not a SIGBUS, and what was read does not stay in the process. (`map` is for large weights that a model
keeps, on request.) The format is the library's own: the
header's length (8 bytes), the header (JSON: name -> dtype, shape, bytes from where to where), the bytes without gaps.

Headers are parsed by the library, so that both take the same files: it gets the header's bytes, read as all others are,
at the beginning of a file in memory that is as long as the one on the disk and has a hole in the place of the rest.
"""

import contextlib
import json
import os
import struct
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Protocol, TypeVar

import torch
import xxhash
from safetensors import SafetensorError, safe_open

from vbrt.errors import CheckpointError, describe_os_error
from vbrt.host.file_prefetch import ReadAhead, Span
from vbrt.host.host_memory import bytes_view
from vbrt.host.safe_files import open_regular, read_into, replacing, write_at
from vbrt.saves.files.read_target import Fill, fresh

__all__ = ["TENSOR_DTYPES", "TensorFile", "TensorInfo", "TensorWriter", "digest", "in_order"]

_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz,
    "F8_E5M2FNUZ": torch.float8_e5m2fnuz,
    "F8_E8M0": torch.float8_e8m0fnu,
}
#: what a file can hold, by torch's names
TENSOR_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in _DTYPES.values()}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_LENGTH = struct.Struct("<Q")
_ALIGN = 64  # of the first tensor: products of weights that are mapped take the path that weights in memory take
_MAX_HEADER_BYTES = 32 << 20  # of 250,000 tensors; the library, whose limit is 100 MB, takes ten times that in memory
_MAX_DIMENSIONS = 64
_MAP_BYTES = 1 << 20  # smaller tensors are read: that a page of them is missing would cost more than they take


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """A tensor's entry in a header; `begin` counts bytes from the first tensor."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int = 0

    @property
    def nbytes(self) -> int:
        """Bytes of the tensor."""
        return prod(self.shape) * self.dtype.itemsize

    @property
    def end(self) -> int:
        """Where the next one begins."""
        return self.begin + self.nbytes


class Sized(Protocol):
    """Something that takes room in a file."""

    @property
    def nbytes(self) -> int:
        """Bytes of it."""


_T = TypeVar("_T", bound=Sized)


def in_order(items: Iterable[_T], limit: int) -> list[list[_T]]:
    """Distribute items over files of up to `limit` bytes, in their order; a larger one has a file of its own."""
    files: list[list[_T]] = []
    room = 0
    for item in items:
        if not files or item.nbytes > room:
            files.append([])
            room = limit
        files[-1].append(item)
        room -= item.nbytes
    return files


def digest(tensor: torch.Tensor) -> str:
    """Return XXH3-64 of a contiguous CPU tensor's bytes, in hex."""
    return xxhash.xxh3_64_hexdigest(_view(tensor))


def _view(tensor: torch.Tensor) -> memoryview:
    return bytes_view(tensor.view(-1).view(torch.uint8)) if tensor.numel() else memoryview(b"")


# -- writing ----------------------------------------------------------------------------------------------------------


class TensorWriter:
    """One safetensors file, its tensors known before their bytes; use as a context manager.

    The file has a temporary name until every byte is there and synced; leaving by an exception removes it.

    Raises:
        CheckpointError: a dtype that safetensors has no name for.
        OSError: from the methods and at the end of the block.
    """

    def __init__(self, path: Path, tensors: Iterable[TensorInfo]) -> None:
        self.path = path
        # wide types first, as the library has it: then each tensor is aligned to its type
        self._infos, header, end = {}, {"__metadata__": {"format": "pt"}}, 0
        for info in sorted(tensors, key=lambda info: -info.dtype.itemsize):
            if info.dtype not in _NAMES:
                raise CheckpointError(f"{info.name}: safetensors has no name for {info.dtype}; cast it first")
            placed = self._infos[info.name] = TensorInfo(info.name, info.dtype, info.shape, end)
            header[info.name] = {
                "dtype": _NAMES[info.dtype],
                "shape": list(info.shape),
                "data_offsets": [end, placed.end],
            }
            end = placed.end
        text = json.dumps(header).encode()
        text += b" " * (-(len(text) + _LENGTH.size) % _ALIGN)
        self._head, self._missing = _LENGTH.pack(len(text)) + text, set(self._infos)

    def __enter__(self) -> "TensorWriter":
        with contextlib.ExitStack() as stack:
            self._fd = stack.enter_context(replacing(self.path))
            stack.push(self._check_complete)
            write_at(self._fd, self._head, 0)
            self._leave = stack.pop_all().__exit__
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._leave(kind, error, trace)

    def _check_complete(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is None and self._missing:
            raise CheckpointError(f"{self.path}: no bytes came for {', '.join(sorted(self._missing)[:3])}")

    def write(self, name: str, tensor: torch.Tensor) -> str:
        """Write the bytes of one tensor, from any device; returns their digest."""
        info = self._infos[name]
        tensor = tensor.detach().cpu().contiguous()
        if (tensor.dtype, tuple(tensor.shape)) != (info.dtype, info.shape):
            raise CheckpointError(
                f"{name}: {tensor.dtype} {tuple(tensor.shape)} came, {info.dtype} {info.shape} was "
                "announced: the model changed while it was saved"
            )
        write_at(self._fd, _view(tensor), len(self._head) + info.begin)
        self._missing.discard(name)
        return digest(tensor)


# -- reading ----------------------------------------------------------------------------------------------------------


class TensorFile:
    """A safetensors file; opened for each read, so that any number of them takes no descriptors.

    Attributes:
        tensors: name -> what the header says.
        metadata: the header's other entries, as their writer chose them.
        ahead: is told of what is read, while something reads ahead.

    Raises:
        CheckpointError: missing, unreadable, truncated, or nothing that the safetensors library takes; always with the
            path.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._mapping: torch.UntypedStorage | None = None
        self.ahead: ReadAhead | None = None
        try:
            with open(open_regular(path), "rb", buffering=0) as file:
                self._first, self.tensors, self.metadata = _header(file.fileno())
        except FileNotFoundError:
            raise CheckpointError(f"{path}: no such file, and the checkpoint needs it; it is incomplete") from None
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {describe_os_error(error)}") from error
        except MemoryError as error:  # the library maps as many bytes as the file has, and they may be limited
            raise CheckpointError(
                f"{path}: cannot be read: a file as long as it is cannot be mapped; expected a "
                "shorter one, or a higher limit of address space (ulimit -v)"
            ) from error
        except (ValueError, EOFError, SafetensorError) as error:
            raise CheckpointError(
                f"{path}: damaged, truncated, or not a safetensors file: {error}; copy it again"
            ) from error

    def read(self, name: str, fill: Fill = fresh) -> torch.Tensor:
        """Return the tensor, in CPU memory unless `fill` says otherwise. Raises CheckpointError when the file cannot be
        read."""
        return self._read(name, self.tensors[name], fill)

    def read_matrix(self, name: str, index: int, fill: Fill = fresh) -> torch.Tensor:
        """Return one part of the tensor along its first dimension; see `read`."""
        info = self.tensors[name]
        part = TensorInfo(name, info.dtype, info.shape[1:])
        return self._read(name, replace(part, begin=info.begin + index * part.nbytes), fill)

    def span(self, name: str) -> Span:
        """Return where in the file a tensor is."""
        info = self.tensors[name]
        return Span(name, self.path, self._first + info.begin, info.nbytes)

    def _used(self, name: str, end: int) -> None:
        if self.ahead is not None:
            self.ahead.used(name, end - self.tensors[name].begin)

    def _read(self, name: str, info: TensorInfo, fill: Fill) -> torch.Tensor:
        self._used(name, info.end)
        begin = self._first + info.begin
        try:
            with open(open_regular(self.path), "rb", buffering=0) as file:
                fd = file.fileno()
                out = fill(info.nbytes, lambda part, at: read_into(fd, [_view(part)], begin + at))
        except (OSError, EOFError) as error:
            why = describe_os_error(error) if isinstance(error, OSError) else "truncated"
            raise CheckpointError(f"{self.path}: {name} cannot be read: {why}") from error
        return out.view(info.dtype).view(info.shape)

    def map(self, name: str) -> torch.Tensor:
        """Return the tensor in a private mapping of the file, as the library does: its memory is the page cache's,
        writes stay in this process. Small tensors, and those at an odd offset, are read. Cutting the file short while
        it is mapped ends the process (SIGBUS); replacing or removing it does no harm.

        Raises CheckpointError when the file cannot be mapped.
        """
        info, begin = self.tensors[name], self._first + self.tensors[name].begin
        if info.nbytes < _MAP_BYTES or begin % info.dtype.itemsize:
            return self.read(name)
        self._used(name, info.end)
        try:
            if self._mapping is None:
                self._mapping = _mapped(self.path)
        except (OSError, RuntimeError) as error:  # the latter from torch
            why = describe_os_error(error) if isinstance(error, OSError) else error
            raise CheckpointError(f"{self.path}: {name} cannot be mapped: {why}") from error
        if self._mapping.nbytes() < begin + info.nbytes:
            raise CheckpointError(f"{self.path}: {name} cannot be mapped: truncated")
        own = self._mapping[begin : begin + info.nbytes]  # a storage of its own: copies take no more than the tensor
        return torch.empty(0, dtype=torch.uint8, device="cpu").set_(own).view(info.dtype).view(info.shape)


def _mapped(path: Path) -> torch.UntypedStorage:
    fd = open_regular(path)
    try:
        return torch.UntypedStorage.from_file(f"/proc/self/fd/{fd}", False, os.fstat(fd).st_size)
    finally:
        os.close(fd)


def _header(fd: int) -> tuple[int, dict[str, TensorInfo], dict[str, str]]:
    """Return the offset of the first tensor, the header's entries and its metadata."""
    size = os.fstat(fd).st_size
    head = bytearray(_LENGTH.size)
    read_into(fd, [memoryview(head)], 0)
    (nbytes,) = _LENGTH.unpack(head)
    if nbytes > size - _LENGTH.size:
        raise ValueError(f"a header of {nbytes} bytes in a file of {size}")
    if nbytes > _MAX_HEADER_BYTES:
        raise ValueError(f"a header of {nbytes} bytes; vbrt reads up to {_MAX_HEADER_BYTES}: save it in several files")
    head += bytes(nbytes)
    read_into(fd, [memoryview(head)[_LENGTH.size :]], _LENGTH.size)
    return len(head), *_parsed(head, size)


def _parsed(head: bytearray, size: int) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    fd = os.memfd_create("safetensors header")
    try:
        write_at(fd, head, 0)
        os.ftruncate(fd, size)
        with safe_open(f"/proc/self/fd/{fd}", _framework()) as file:
            infos, end = {}, 0
            for name in file.offset_keys():  # the library has seen that they lie side by side
                part = file.get_slice(name)
                infos[name] = _info(name, part.get_dtype(), part.get_shape(), end)
                end = infos[name].end
            return infos, dict(file.metadata() or {})
    finally:
        os.close(fd)


def _framework() -> str:
    """Return the framework to name to the library: for numpy it maps a file without reserving as much memory."""
    return "pt" if sys.modules.get("numpy") is None else "numpy"  # torch has imported it where it is installed


def _info(name: str, dtype: str, shape: list[int], begin: int) -> TensorInfo:
    if dtype not in _DTYPES:
        raise ValueError(f"{name} is of dtype {dtype}, for which torch has no tensor")
    if len(shape) > _MAX_DIMENSIONS or prod(filter(None, shape)) >= 1 << 62:
        raise ValueError(f"{name} has {len(shape)} dimensions of up to {max(shape)}; torch has no such tensor")
    return TensorInfo(name, _DTYPES[dtype], tuple(shape), begin)
