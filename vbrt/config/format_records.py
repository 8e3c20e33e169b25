"""Records of weight formats, one per format, for the config's choices, the planner and the kernels.

A new format needs a `vbrt.formats.Format` and a record here. It then runs everywhere, through the reference in plain
torch; `kernels` names a kernel family that decodes its codes. Pure Python.

Other packages add formats by `vbrt.formats.register_format`.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from vbrt.config.plugins import load_plugins
from vbrt.errors import FormatError

__all__ = [
    "BYTE_KINDS",
    "FORMATS",
    "GROUP_KINDS",
    "LEVEL_BLOCKS",
    "LEVEL_SCALES",
    "ORDERED",
    "FormatRecord",
    "check_record",
    "chosen_formats",
    "formats_of",
    "known_formats",
]

#: block sizes and scale dtypes of published formats with 16 levels, with offsets and with zero points
LEVEL_BLOCKS = (16, 32, 64, 128)
LEVEL_SCALES = ("float16", "bfloat16", "float32")
#: published formats of each such block size and scale dtype -> (codec, kernel family, storage of a block's offset)
GROUP_KINDS = {
    "levels": ("vbrt.formats.sixteen_levels:Levels", "levels", None),
    "symmetric": ("vbrt.formats.sixteen_levels:Symmetric", "levels", None),
    "affine": ("vbrt.formats.affine:Affine", "affine", "values"),
    "signed": ("vbrt.formats.affine:Signed", "affine", "middles"),
    "zeros": ("vbrt.formats.affine:ZeroPoint", "affine", "zeros"),
    "floatzeros": ("vbrt.formats.affine:FloatZeroPoint", "plain", "floatzeros"),
}
#: the same with 8-bit codes; int8 or, in "floatbytes", E4M3 where there is no offset
BYTE_KINDS = {
    "bytes": ("vbrt.formats.eight_bits:ScaledBytes", "bytes", None),
    "floatbytes": ("vbrt.formats.eight_bits:FloatBytes", "bytes", None),
    "offsetbytes": ("vbrt.formats.affine:Affine", "bytes", "values"),
    "zerobytes": ("vbrt.formats.affine:ZeroPoint", "bytes", "zeros"),
    "floatzerobytes": ("vbrt.formats.affine:FloatZeroPoint", "bytes", "floatzeros"),
}
#: kinds of which there are weights with columns in another order: GPTQ with act-order
_ORDERED_KINDS = ("levels", "symmetric", "zeros", "bytes", "zerobytes")
#: reserved values of `weights.format` and `weights.formats`
_RESERVED = ("auto", "exact")
#: fields that select code of this package, with their value in formats of other packages
_OWN_CODE = {
    "kernels": None,
    "offsets": None,
    "fitted": False,
    "lossless": False,
    "published": False,
    "base": "",
    "rows": 1,
}


@dataclass(frozen=True, slots=True)
class FormatRecord:
    """Properties of a format, for all code but its encoder.

    Attributes:
        name: its name in `weights.format`.
        codec: encoder and decoder: a subclass of `vbrt.formats.Format`, or its "module:Class".
        block: weights along K that share a scale.
        scales: encoding of a block's scale: "e4m3", "ue4m4", "e8m0" (a byte), a dtype of `LEVEL_SCALES`, or
            "superblock" (6 or 8 bits, times an fp16 number per 256 weights); None: no scales.
        offsets: storage of a block's offset: "values" (the weight of code 0, of the scales' dtype), "middles" (the
            weight of code 8, of the scales' dtype), "zeros" (a code that stands for 0), "floatzeros" (between codes, of
            the scales' dtype) or "superblock" (like the scale); None: no offset.
        bits: bits per code.
        kernels: kernel family for its codes ("e2m1", "table", "levels", "affine", "int8", "bytes", "plain", "trellis");
            None: decoded by the reference.
        fitted: True if its codebook is fitted to each weight; the fit is costly, so it is kept.
        lossless: True if it stores the weight's own bytes, so that a fine plane could add nothing.
        published: True if weights in it are read from published checkpoints only: a config cannot name it.
        base: the format of its columns as they are stored, in another order; "": they are in the weight's.
        rows: rows that share codes: more than one cannot be decoded row by row, nor cut between ranks.
        noise: relative RMS error on normally distributed weights; 0 for published formats: nothing is rounded.
    """

    name: str
    codec: str | type[Any]
    block: int
    scales: str | None = None
    offsets: str | None = None
    bits: int = 4
    kernels: str | None = None
    fitted: bool = False
    lossless: bool = False
    published: bool = False
    base: str = ""
    rows: int = 1
    noise: float = 0.0


FORMATS: dict[str, FormatRecord] = {
    record.name: record
    for record in (
        FormatRecord("nvfp4", "vbrt.formats.nvfp4:NVFP4", block=16, scales="e4m3", kernels="e2m1", noise=0.081),
        FormatRecord("mxfp4", "vbrt.formats.mxfp4:MXFP4", block=32, scales="e8m0", kernels="e2m1", noise=0.111),
        FormatRecord("nf4", "vbrt.formats.nf4:NF4", block=64, scales="ue4m4", kernels="table", noise=0.086),
        FormatRecord(
            "quantile",
            "vbrt.formats.quantile:Quantile",
            block=64,
            scales="ue4m4",
            kernels="table",
            fitted=True,
            noise=0.084,
        ),
        FormatRecord(
            "mxint8", "vbrt.formats.mxint8:MXINT8", block=32, scales="e8m0", bits=8, kernels="int8", noise=0.008
        ),
        FormatRecord(
            "t3", "vbrt.formats.t3:T3", block=64, scales="ue4m4", bits=3, kernels="trellis", rows=16, noise=0.139
        ),
        FormatRecord("dense", "vbrt.formats.dense:Dense", block=1, lossless=True),
        *(
            FormatRecord(
                f"{kind}{block}-{scales}",
                codec,
                block=block,
                scales=scales,
                offsets=offsets,
                bits=bits,
                kernels=kernels,
                published=True,
            )
            for bits, kinds in ((4, GROUP_KINDS), (8, BYTE_KINDS))
            for kind, (codec, kernels, offsets) in kinds.items()
            for block in LEVEL_BLOCKS
            for scales in LEVEL_SCALES
        ),
        FormatRecord(
            "superblock32",
            "vbrt.formats.affine:Superblock",
            block=32,
            scales="superblock",
            offsets="superblock",
            kernels="affine",
            published=True,
        ),
        FormatRecord(
            "unitbytes128",
            "vbrt.formats.eight_bits:UnitBytes",
            block=128,
            scales="float32",
            bits=8,
            kernels="bytes",
            published=True,
        ),
        FormatRecord(
            "superbytes32",
            "vbrt.formats.affine:Superblock",
            block=32,
            scales="superblock",
            offsets="superblock",
            bits=8,
            kernels="bytes",
            published=True,
        ),
        FormatRecord(
            "superbytes16",
            "vbrt.formats.eight_bits:SuperBytes",
            block=16,
            scales="superblock",
            bits=8,
            kernels="bytes",
            published=True,
        ),
    )
}

#: format -> the same with columns in another order
ORDERED = {
    name: f"{name}-ordered"
    for kind in _ORDERED_KINDS
    for block in LEVEL_BLOCKS
    for scales in LEVEL_SCALES
    for name in [f"{kind}{block}-{scales}"]
}
FORMATS |= {
    name: replace(FORMATS[base], name=name, codec="vbrt.formats.ordered:Ordered", kernels=None, base=base)
    for base, name in ORDERED.items()
}


def known_formats() -> Mapping[str, FormatRecord]:
    """Return all formats, those of installed plug-ins included."""
    load_plugins()
    return FORMATS


def chosen_formats() -> tuple[str, ...]:
    """Return the names of formats that a config may name."""
    return tuple(name for name, record in known_formats().items() if not record.published)


def formats_of(*families: str) -> tuple[str, ...]:
    """Return the names of formats with kernels of these families."""
    return tuple(name for name, record in FORMATS.items() if record.kernels in families)


def check_record(record: FormatRecord) -> None:
    """Validate the record of another package's format. Raises FormatError that names the field."""
    if not isinstance(record, FormatRecord):
        raise FormatError(f"format {record!r}; expected a FormatRecord")
    if not isinstance(record.name, str) or not re.fullmatch("[a-z][a-z0-9_-]*", record.name):
        raise FormatError(f"format {record.name!r}: name; expected a plain word of a-z, 0-9, _ and -, e.g. 'int4'")
    if record.name in (*FORMATS, *_RESERVED):
        raise FormatError(f"format {record.name!r}: the name is taken; expected none of {', '.join(FORMATS)}")
    for field in ("block", "bits"):
        value = getattr(record, field)
        if type(value) is not int or value < 1:
            raise FormatError(f"format {record.name!r}: {field} = {value!r}; expected a whole number from 1 on")
    for field, of_others in _OWN_CODE.items():
        value = getattr(record, field)
        if value != of_others:
            hint = "; kernels of your own come by vbrt.kernels.register_kernel" if field == "kernels" else ""
            raise FormatError(
                f"format {record.name!r}: {field} = {value!r}, which only formats of vbrt itself can have; "
                f"expected {of_others!r}{hint}"
            )
