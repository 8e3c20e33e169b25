"""Number formats and pages: pure tensor functions, no device effects.

`get_format("nvfp4")` gives an encoder/decoder pair; `split_fine` and `merge_fine` add the exact fine plane;
`pack` and `unpack` turn a plane into a page and back.
"""

from vbrt.errors import FormatError
from vbrt.formats.base import Format, WeightPlanes
from vbrt.formats.dense import Dense
from vbrt.formats.fine import estimate_fine_bytes, fine_layout, merge_fine, split_fine
from vbrt.formats.mxfp4 import MXFP4
from vbrt.formats.nf4 import NF4
from vbrt.formats.nvfp4 import NVFP4
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
from vbrt.formats.published import repack_mxfp4, repack_nvfp4
from vbrt.formats.quantile import Quantile
from vbrt.formats.separation import Separation, SeparationCounters, TrainedSeparation

__all__ = [
    "FIELD_ALIGN",
    "FORMATS",
    "LAYOUT_VERSION",
    "PAGE_ALIGN",
    "Field",
    "Format",
    "PageLayout",
    "Separation",
    "SeparationCounters",
    "TrainedSeparation",
    "WeightPlanes",
    "build_layout",
    "estimate_fine_bytes",
    "fine_layout",
    "get_format",
    "merge_fine",
    "new_page",
    "pack",
    "repack_mxfp4",
    "repack_nvfp4",
    "split_fine",
    "unpack",
]

_FORMATS: dict[str, Format] = {f.name: f for f in (NVFP4(), MXFP4(), NF4(), Quantile(), Dense())}

#: the names that `get_format` knows
FORMATS = tuple(_FORMATS)


def get_format(name: str) -> Format:
    """The shared instance of a format. Raises FormatError for an unknown name."""
    try:
        return _FORMATS[name]
    except KeyError:
        raise FormatError(f"format {name!r}; expected one of {', '.join(FORMATS)}") from None
