"""Number formats and page layouts: pure tensor functions without side effects on devices.

`get_format("nvfp4")` returns an encoder/decoder; `split_fine` and `merge_fine` add the exact fine plane; `pack` and
`unpack` turn a plane into a page and back. Properties of formats are in their records, `vbrt.config.FORMATS`.
`register_format` adds a format of another package.
"""

from importlib import import_module
from inspect import isabstract

import torch

from vbrt.config.format_records import FORMATS, FormatRecord, check_record, known_formats
from vbrt.errors import FormatError
from vbrt.formats.fine_plane import estimate_fine_bytes, fine_layout, merge_fine, split_fine
from vbrt.formats.fitted_codebook import Separation, SeparationCounters
from vbrt.formats.format import Format, WeightPlanes
from vbrt.formats.ggml import repack_gguf
from vbrt.formats.page import (
    FIELD_ALIGN,
    LAYOUT_VERSION,
    PAGE_ALIGN,
    Field,
    PageLayout,
    build_layout,
    new_page,
    pack,
    unpack,
)
from vbrt.formats.published import (
    Nested,
    Repacked,
    cut_blocks,
    join_rows,
    levels_format,
    repack_bitsandbytes,
    repack_compressed_int4,
    repack_gptq,
    repack_mxfp4,
    repack_nvfp4,
)

__all__ = [
    "FIELD_ALIGN",
    "FORMATS",
    "LAYOUT_VERSION",
    "PAGE_ALIGN",
    "Field",
    "Format",
    "FormatRecord",
    "Nested",
    "PageLayout",
    "Repacked",
    "Separation",
    "SeparationCounters",
    "WeightPlanes",
    "build_layout",
    "cut_blocks",
    "estimate_fine_bytes",
    "fine_layout",
    "get_format",
    "join_rows",
    "levels_format",
    "merge_fine",
    "new_page",
    "pack",
    "register_format",
    "repack_bitsandbytes",
    "repack_compressed_int4",
    "repack_gguf",
    "repack_gptq",
    "repack_mxfp4",
    "repack_nvfp4",
    "split_fine",
    "unpack",
]

_INSTANCES: dict[str, Format] = {}


def get_format(name: str) -> Format:
    """Return the shared instance of a format. Raises FormatError for an unknown name."""
    known = _INSTANCES.get(name)
    return known if known is not None else _made(name)


def _made(name: str) -> Format:
    if name not in FORMATS and name not in known_formats():  # plug-ins import this module, and come after it
        raise FormatError(f"format {name!r}; expected one of {', '.join(FORMATS)}")
    return _INSTANCES.setdefault(name, _codec(FORMATS[name])(FORMATS[name]))


def _codec(record: FormatRecord) -> type[Format]:
    if isinstance(record.codec, type):
        return record.codec
    module, _, codec = record.codec.partition(":")
    return getattr(import_module(module), codec)


def register_format(record: FormatRecord) -> None:
    """Add a format, from then on a value of `weights.format` in every config of this process.

        register_format(FormatRecord("int4", Int4, block=32, noise=0.1))

    A small weight is encoded and decoded to try it. The reference computes with the format, by decoding in plain torch,
    until `vbrt.kernels.register_kernel` adds something faster.

    Raises:
        FormatError: the name is taken or no plain word, the codec is no `Format` or lacks a method, or its plane is not
            the one of its layout.
    """
    check_record(record)
    FORMATS[record.name], _INSTANCES[record.name] = record, _tried(record)


def _tried(record: FormatRecord) -> Format:
    """The format of a record, tried on a weight whose rows are padded to whole blocks."""
    try:
        codec = _codec(record)
    except (AttributeError, ImportError, ValueError) as error:
        raise FormatError(
            f'format {record.name!r}: codec {record.codec!r}: {error}; expected a class, or "module:Class"'
        ) from error
    if not (isinstance(codec, type) and issubclass(codec, Format)):
        raise FormatError(f"format {record.name!r}: codec {codec!r}; expected a subclass of vbrt.formats.Format")
    if isabstract(codec):
        missing = ", ".join(sorted(codec.__abstractmethods__))
        raise FormatError(f"format {record.name!r}: {codec.__name__} lacks {missing}; expected all methods of Format")
    format, shape = codec(record), (3, record.block + 1)
    w_NK = torch.linspace(-1, 1, shape[0] * shape[1], dtype=torch.float32, device="cpu").view(shape)
    layout = format.layout(shape, w_NK.dtype)
    if (layout.format, layout.plane) != (record.name, "coarse"):
        raise FormatError(
            f"format {record.name!r}: a layout of plane {layout.plane!r} of format {layout.format!r}; "
            f"expected plane 'coarse' of format {record.name!r}"
        )
    plane = unpack(pack(format.encode(w_NK, None), layout, new_page(layout)), layout)
    decoded = format.decode(plane, shape, torch.bfloat16)
    if (decoded.shape, decoded.dtype) != (shape, torch.bfloat16):
        raise FormatError(
            f"format {record.name!r}: decode gave {decoded.dtype} {tuple(decoded.shape)}; "
            f"expected torch.bfloat16 {shape}"
        )
    return format


for _name in FORMATS:  # eagerly, not while someone compiles or traces
    get_format(_name)
