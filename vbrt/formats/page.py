"""Pages: one plane of one layer as a contiguous, aligned block of bytes with a versioned layout.

A page is a flat uint8 tensor; a `PageLayout` gives each field's offset. Fields start at multiples of 256 bytes (one GPU
cache-line burst, and any dtype's alignment), and the page size is a multiple of 4096 (required by O_DIRECT), so a page
moves between tiers in one copy and its fields are views into it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from typing import Any, Protocol

import torch
from torch import Tensor

from vbrt.errors import FormatError

__all__ = [
    "FIELD_ALIGN",
    "LAYOUT_VERSION",
    "PAGE_ALIGN",
    "Field",
    "PageLayout",
    "build_layout",
    "new_page",
    "pack",
    "unpack",
]

FIELD_ALIGN = 256
PAGE_ALIGN = 4096
LAYOUT_VERSION = 1
_SHOWN = 80  # characters of invalid input shown in an error

_NAMES = "uint8 int8 int16 int32 int64 float8_e4m3fn float16 bfloat16 float32 float64"
DTYPES = {name: getattr(torch, name) for name in _NAMES.split()}


@dataclass(frozen=True, slots=True)
class Field:
    """A tensor within a page: `offset` in bytes from the page's start, `dtype` by torch name."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        """Bytes without padding."""
        return prod(self.shape) * DTYPES[self.dtype].itemsize


@dataclass(frozen=True, slots=True)
class PageLayout:
    """Offsets of a plane's fields in its page. `nbytes`: page size, a multiple of 4096.

    Raises FormatError for an unknown version or dtype and for fields that overlap, are misaligned or exceed the page.
    """

    format: str
    plane: str
    fields: tuple[Field, ...]
    nbytes: int
    version: int = LAYOUT_VERSION
    # (name, dtype, shape, strides, element offset) per field, precomputed: `unpack` runs in each forward
    _plan: tuple[tuple[Any, ...], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.version != LAYOUT_VERSION:
            raise FormatError(
                f"page layout version {self.version!r}; this vbrt reads version {LAYOUT_VERSION}: re-create the page"
            )
        end = 0
        for f in self.fields:
            if f.dtype not in DTYPES:
                raise FormatError(f"page field {f.name!r}: dtype {f.dtype!r}; expected one of {', '.join(DTYPES)}")
            if f.offset < end or f.offset % FIELD_ALIGN or min(f.shape, default=0) < 0:
                raise FormatError(
                    f"page field {f.name!r}: shape {f.shape} at offset {f.offset}; "
                    f"expected a multiple of {FIELD_ALIGN} not below {end}"
                )
            end = f.offset + f.nbytes
        if self.nbytes < end or self.nbytes % PAGE_ALIGN:
            raise FormatError(f"page of {self.nbytes} bytes; expected a multiple of {PAGE_ALIGN} not below {end}")
        object.__setattr__(self, "_plan", tuple(map(_view_plan, self.fields)))

    def to_dict(self) -> dict[str, Any]:
        """Plain lists, strings and ints, for a JSON header."""
        return {
            "version": self.version,
            "format": self.format,
            "plane": self.plane,
            "nbytes": self.nbytes,
            "fields": [[f.name, f.dtype, list(f.shape), f.offset] for f in self.fields],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> "PageLayout":
        """Inverse of `to_dict`. Raises FormatError for another version and for malformed data, naming the field."""
        version = data.get("version") if isinstance(data, Mapping) else None
        if version != LAYOUT_VERSION:
            raise FormatError(f"page layout version {version!r}; this vbrt reads version {LAYOUT_VERSION}")
        reading = "fields"
        try:
            fields = []
            for at, entry in enumerate(data["fields"]):
                reading = f"fields[{at}] = {str(entry)[:_SHOWN]}"
                name, dtype, shape, offset = entry
                fields.append(Field(str(name), str(dtype), tuple(map(int, shape)), int(offset)))
            reading = f"nbytes = {str(data.get('nbytes'))[:_SHOWN]}"
            nbytes, reading = int(data["nbytes"]), "format and plane"
            return cls(str(data["format"]), str(data["plane"]), tuple(fields), nbytes)
        except FormatError:
            raise
        except (KeyError, TypeError, ValueError, OverflowError) as error:
            message = f"page layout, {reading}: {error!r}; expected what PageLayout.to_dict returns"
            raise FormatError(message) from error


def _view_plan(f: Field) -> tuple[Any, ...]:
    strides = tuple(prod(f.shape[i + 1 :]) for i in range(len(f.shape)))
    dtype = DTYPES[f.dtype]
    return f.name, dtype, f.shape, strides, f.offset // dtype.itemsize


def _align(nbytes: int, to: int) -> int:
    return -(-nbytes // to) * to


def build_layout(format: str, plane: str, fields: Iterable[tuple[str, str, tuple[int, ...]]]) -> PageLayout:
    """Lay out (name, dtype, shape) fields in this order. Equal arguments give the same layout."""
    return _built(format, plane, tuple((name, dtype, tuple(shape)) for name, dtype, shape in fields))


@lru_cache(maxsize=1024)  # thousands of expert pages share one layout
def _built(format: str, plane: str, fields: tuple[tuple[str, str, tuple[int, ...]], ...]) -> PageLayout:
    placed: list[Field] = []
    end = 0
    for name, dtype, shape in fields:
        if dtype not in DTYPES:
            raise FormatError(f"page field {name!r}: dtype {dtype!r}; expected one of {', '.join(DTYPES)}")
        placed.append(Field(name, dtype, shape, _align(end, FIELD_ALIGN)))
        end = placed[-1].offset + placed[-1].nbytes
    return PageLayout(format, plane, tuple(placed), _align(end, PAGE_ALIGN))


def new_page(layout: PageLayout, device: torch.device | str = "cpu") -> Tensor:
    """Allocate a zeroed uint8 tensor [layout.nbytes]; on the CPU aligned to 4096 bytes."""
    device = torch.device(device)
    if device.type != "cpu":
        return torch.zeros(layout.nbytes, dtype=torch.uint8, device=device)
    room = torch.zeros(layout.nbytes + PAGE_ALIGN, dtype=torch.uint8, device="cpu")
    skip = -room.data_ptr() % PAGE_ALIGN
    return room[skip : skip + layout.nbytes]


def _check_page(page: Tensor, layout: PageLayout) -> None:
    if page.dtype != torch.uint8 or page.shape != (layout.nbytes,) or not page.is_contiguous():
        raise FormatError(
            f"{layout.format} {layout.plane} page: got {page.dtype} {tuple(page.shape)}; "
            f"expected contiguous torch.uint8 ({layout.nbytes},)"
        )


class Incoming(Protocol):
    """A tensor in a file, not in memory yet."""

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    def read(self) -> Tensor:
        """Read it into new memory."""

    def read_into(self, out: Tensor) -> None:
        """Read it into a contiguous tensor of its dtype and shape, on any device."""


def pack(tensors: Mapping[str, Tensor | Incoming], layout: PageLayout, out: Tensor) -> Tensor:
    """Copy a plane's tensors into `out` (uint8 [layout.nbytes]) and zero the padding; returns `out`.

    Equal tensors give equal bytes, so pages can be checksummed. Raises FormatError for missing or extra tensors, a
    wrong shape or dtype, or a page of another size.
    """
    _check_page(out, layout)
    if set(tensors) != {f.name for f in layout.fields}:
        raise FormatError(
            f"{layout.format} {layout.plane} page: got tensors {sorted(tensors)}; "
            f"expected {sorted(f.name for f in layout.fields)}"
        )
    end = 0
    for f, view in zip(layout.fields, unpack(out, layout).values(), strict=True):
        source = tensors[f.name]
        if source.dtype != view.dtype or source.shape != view.shape:
            raise FormatError(
                f"{layout.format} {layout.plane} page, field {f.name!r}: got {source.dtype} {tuple(source.shape)}; "
                f"expected {view.dtype} {f.shape}"
            )
        if isinstance(source, Tensor):
            view.copy_(source.detach())
        else:
            source.read_into(view)
        if f.offset > end:
            out[end : f.offset].zero_()
        end = f.offset + f.nbytes
    if layout.nbytes > end:
        out[end:].zero_()
    return out


def unpack(page: Tensor, layout: PageLayout) -> dict[str, Tensor]:
    """Return zero-copy views of the fields, on the page's device.

    Raises FormatError if the page is not a contiguous uint8 tensor of `layout.nbytes`.
    """
    if page.shape != (layout.nbytes,) or page.dtype is not torch.uint8 or not page.is_contiguous():
        _check_page(page, layout)
    views = {}
    for name, dtype, shape, strides, first in layout._plan:
        typed = page if dtype is torch.uint8 else page.view(dtype)
        # as_strided counts from the storage's start, so a sliced page adds its own offset
        views[name] = typed.as_strided(shape, strides, typed.storage_offset() + first)
    return views
