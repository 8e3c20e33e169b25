"""safetensors reader and writer that work tensor by tensor.

The library writes a whole dict at once and reads through mmap. Here tensors are written as they come, one layer in
memory at a time, and read with `preadv` into fresh memory: an I/O error is an exception with a path instead of a
SIGBUS, and read bytes do not stay in the process. (`map` memory-maps large weights that a model keeps, on request.)
Layout, as the library's: header length (8 bytes), header (JSON: name -> dtype, shape, byte range), bytes without gaps.

The library itself parses headers, so that both accept the same files: it gets a memfd with the header's bytes, as long
as the file on disk, with a hole in place of the tensors; on Windows, where no descriptor has a path, the file itself.
"""

import contextlib
import copy
import json
import os
import struct
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from types import TracebackType
from typing import IO, Protocol, Self, TypeVar

import torch
import xxhash
from safetensors import SafetensorError, safe_open

from vbrt.errors import CheckpointError, MissingCheckpointError, describe_os_error
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
#: dtypes that a file can hold, by torch's names
TENSOR_DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in _DTYPES.values()}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_LENGTH = struct.Struct("<Q")
_ALIGN = 64  # aligns the first tensor, so that matmuls on mapped weights take the same path as on weights in memory
_MAX_HEADER_BYTES = 32 << 20  # 250,000 tensors; the library's limit is 100 MB, and it takes ten times that in memory
_MAX_DIMENSIONS = 64
_MAP_BYTES = 1 << 20  # smaller tensors are read: a page fault would cost more than the memory saved


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Tensor entry of a header; `begin` is a byte offset from the first tensor."""

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
        """End offset: where the next tensor begins."""
        return self.begin + self.nbytes


class Sized(Protocol):
    """Item with a size in bytes."""

    @property
    def nbytes(self) -> int:
        """Bytes that it takes in a file."""


_T = TypeVar("_T", bound=Sized)


def in_order(items: Iterable[_T], limit: int) -> list[list[_T]]:
    """Group items into files of up to `limit` bytes, in order; a larger item gets a file to itself."""
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
    """Writer of one safetensors file whose tensors are declared up front; a context manager.

    The file is written under a temporary name and renamed once every byte is synced; an exception removes it.

    Raises:
        CheckpointError: a dtype that safetensors does not support.
        OSError: from the methods and at the end of the block.
    """

    def __init__(self, path: Path, tensors: Iterable[TensorInfo]) -> None:
        self.path = path
        # wide dtypes first, as in the library, so that each tensor is aligned to its dtype
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
            raise CheckpointError(f"{self.path}: no bytes were written for {', '.join(sorted(self._missing)[:3])}")

    def write(self, name: str, tensor: torch.Tensor) -> str:
        """Write one tensor, from any device; return its digest."""
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
    """safetensors file; opened for each read, so that no descriptors stay open.

    Attributes:
        tensors: name -> header entry.
        metadata: the header's other entries, as their writer chose them.
        ahead: the prefetcher to notify of reads, while one runs.

    Raises:
        CheckpointError: missing, unreadable, truncated, or not accepted by the safetensors library; always with the
            path.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._mapping: torch.UntypedStorage | None = None
        self.ahead: ReadAhead | None = None
        try:
            with open(open_regular(path), "rb", buffering=0) as file:
                self._first, self.tensors, self.metadata = _header(path, file.fileno())
        except FileNotFoundError:
            raise MissingCheckpointError(
                f"{path}: no such file, and the checkpoint needs it; it is incomplete"
            ) from None
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be read: {describe_os_error(error)}") from error
        except MemoryError as error:  # the library maps the whole file, which may exceed ulimit -v
            raise CheckpointError(
                f"{path}: cannot be read: a file as long as it is cannot be mapped; expected a "
                "shorter one, or a higher limit of address space (ulimit -v)"
            ) from error
        except (ValueError, EOFError, SafetensorError) as error:
            raise CheckpointError(
                f"{path}: damaged, truncated, or not a safetensors file: {error}; copy it again"
            ) from error

    def read(self, name: str, fill: Fill = fresh) -> torch.Tensor:
        """Read a tensor, into CPU memory unless `fill` says otherwise. Raises CheckpointError: it cannot be read."""
        return self._read(name, self.tensors[name], fill)

    def read_matrix(self, name: str, index: int, fill: Fill = fresh) -> torch.Tensor:
        """Read one index of a tensor's first dimension; see `read`."""
        info = self.tensors[name]
        part = TensorInfo(name, info.dtype, info.shape[1:])
        return self._read(name, replace(part, begin=info.begin + index * part.nbytes), fill)

    def renamed(self, names: Mapping[str, str]) -> Self:
        """Return a view of some tensors under other names: {name here: name in the view}."""
        view = copy.copy(self)
        view.tensors = {new: replace(self.tensors[old], name=new) for old, new in names.items()}
        return view

    def span(self, name: str) -> Span:
        """Return a tensor's span of bytes in the file."""
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
        """Map a tensor privately, as the library does: its memory is the page cache, writes stay in this process. Small
        tensors and misaligned ones are read instead. Truncating the file while it is mapped kills the process (SIGBUS);
        replacing or removing it is safe.

        Raises CheckpointError: the file cannot be mapped.
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
        own = self._mapping[begin : begin + info.nbytes]  # copying it copies the tensor's bytes only
        return torch.empty(0, dtype=torch.uint8, device="cpu").set_(own).view(info.dtype).view(info.shape)


def _mapped(path: Path) -> torch.UntypedStorage:
    fd = open_regular(path)
    try:
        name = str(path) if sys.platform == "win32" else f"/dev/fd/{fd}"
        return torch.UntypedStorage.from_file(name, False, os.fstat(fd).st_size)
    finally:
        os.close(fd)


def _header(path: Path, fd: int) -> tuple[int, dict[str, TensorInfo], dict[str, str]]:
    """Return the offset of the first tensor, the tensor entries and the metadata."""
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
    with _for_library(path, head, size) as name:
        return len(head), *_parsed(name)


@contextlib.contextmanager
def _for_library(path: Path, head: bytearray, size: int) -> Iterator[str]:
    """Yield the name of a file with this header and size, for the library to check."""
    if sys.platform == "win32":
        yield str(path)
        return
    with _unnamed_file() as copy:
        write_at(copy.fileno(), head, 0)
        os.ftruncate(copy.fileno(), size)
        yield f"/dev/fd/{copy.fileno()}"


def _parsed(path: str) -> tuple[dict[str, TensorInfo], dict[str, str]]:
    with safe_open(path, _framework()) as file:
        infos, end = {}, 0
        for name in file.offset_keys():  # the library has checked that they are contiguous
            part = file.get_slice(name)
            infos[name] = _info(name, part.get_dtype(), part.get_shape(), end)
            end = infos[name].end
        return infos, dict(file.metadata() or {})


def _unnamed_file() -> IO[bytes]:
    """Return a file in memory or, without such files (macOS), a temporary one."""
    if hasattr(os, "memfd_create"):
        return open(os.memfd_create("safetensors header"), "w+b", buffering=0)
    return tempfile.TemporaryFile(buffering=0)


def _framework() -> str:
    """Return the framework to request of the library: with numpy it maps a file without reserving as much memory."""
    return "pt" if sys.modules.get("numpy") is None else "numpy"  # torch imports numpy where it is installed


def _info(name: str, dtype: str, shape: list[int], begin: int) -> TensorInfo:
    if dtype not in _DTYPES:
        raise ValueError(f"{name} is of dtype {dtype}, for which torch has no tensor")
    if len(shape) > _MAX_DIMENSIONS or prod(filter(None, shape)) >= 1 << 62:
        raise ValueError(f"{name} has {len(shape)} dimensions of up to {max(shape)}; torch has no such tensor")
    return TensorInfo(name, _DTYPES[dtype], tuple(shape), begin)
