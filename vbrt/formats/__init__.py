"""Number formats and page layouts: pure tensor functions without side effects on devices.

`get_format("nvfp4")` returns an encoder/decoder; `split_fine` and `merge_fine` add the exact fine plane; `pack` and
`unpack` turn a plane into a page and back. Properties of formats are in their records, `vbrt.config.FORMATS`.
"""

from importlib import import_module

from vbrt.config.format_records import FORMATS, FormatRecord
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
    if name not in FORMATS:
        raise FormatError(f"format {name!r}; expected one of {', '.join(FORMATS)}")
    module, _, codec = FORMATS[name].codec.partition(":")
    return _INSTANCES.setdefault(name, getattr(import_module(module), codec)(FORMATS[name]))


for _name in FORMATS:  # eagerly, not while someone compiles or traces
    get_format(_name)
