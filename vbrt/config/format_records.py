"""The formats that weights can be kept in, one record each: read by the config's choices, the planner and the kernels.

A new format is a file with a `vbrt.formats.Format` and its record here. It then computes correctly everywhere, through
the reference in plain torch; `kernels` names a family of kernels that knows its codes. Pure Python.
"""

from dataclasses import dataclass

__all__ = ["FORMATS", "LEVEL_BLOCKS", "LEVEL_SCALES", "FormatRecord", "chosen_formats", "formats_of"]

#: block sizes and dtypes of block scales that weights of 16 levels are held with
LEVEL_BLOCKS = (16, 32, 64, 128)
LEVEL_SCALES = ("float16", "bfloat16", "float32")


@dataclass(frozen=True, slots=True)
class FormatRecord:
    """What everybody but the encoder itself must know of a format.

    Attributes:
        name: as users write it in `weights.format`.
        codec: "module:Class" of its encoder and decoder, a `vbrt.formats.Format`.
        block: weights along K that share a scale.
        scales: how a block's scale is stored: "e4m3", "ue4m4", "e8m0" in a byte, or a dtype of `LEVEL_SCALES`; None
            without scales.
        bits: of a code.
        kernels: the family of kernels that computes from its codes ("e2m1", "table", "levels", "int8"); None: the
            reference decodes them.
        fitted: True if its codebook is fitted to each weight, which is costly enough to keep the fit.
        lossless: True if it stores the weight's own bytes, so that a fine plane could add nothing.
        published: True if weights come to be in it by being read from published checkpoints: no config asks for it.
        noise: the relative error (root mean square) that it leaves in normally distributed weights; 0 of published
            formats, into which nothing is rounded.
    """

    name: str
    codec: str
    block: int
    scales: str | None = None
    bits: int = 4
    kernels: str | None = None
    fitted: bool = False
    lossless: bool = False
    published: bool = False
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
        FormatRecord("dense", "vbrt.formats.dense:Dense", block=1, lossless=True),
        *(
            FormatRecord(
                f"levels{block}-{scales}",
                "vbrt.formats.sixteen_levels:Levels",
                block=block,
                scales=scales,
                kernels="levels",
                published=True,
            )
            for block in LEVEL_BLOCKS
            for scales in LEVEL_SCALES
        ),
    )
}


def chosen_formats() -> tuple[str, ...]:
    """Return the formats that a config may name."""
    return tuple(name for name, record in FORMATS.items() if not record.published)


def formats_of(*families: str) -> tuple[str, ...]:
    """The formats that these families of kernels compute."""
    return tuple(name for name, record in FORMATS.items() if record.kernels in families)
