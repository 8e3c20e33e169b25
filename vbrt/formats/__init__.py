"""Number formats and page layouts: pure tensor functions without side effects on devices.

`get_format("nvfp4")` gives an encoder/decoder pair; `split_fine` and `merge_fine` add the exact fine plane; `pack` and
`unpack` turn a plane into a page and back. What others must know of a format is its record in `vbrt.config.FORMATS`.
`register_format` adds a format of another package. Plain torch here is the specification: kernels give these bits.

| format | block along K | scales | bits a weight |
| --- | --- | --- | --- |
| `nvfp4` | 16 | E4M3 a block, one FP32 power of two a tensor | 4.5 |
| `mxfp4` | 32 | E8M0 a block | 4.25 |
| `nf4` | 64 | one byte a block (4 exponent, 4 mantissa bits), one FP32 power of two a tensor | 4.125 |
| `quantile` | 64 | as nf4, and 8 fitted magnitudes a layer | 4.125 |
| `mxint8` | 32 | E8M0 a block | 8.25 |
| `levels16-float16` ... | 16 to 128 | FP16, BF16 or FP32 a block; 16 FP32 levels a tensor | 4.125 to 6 |
| `affine16-float16` ... | 16 to 128 | FP16, BF16 or FP32 a block, and an offset in the same | 4.25 to 8 |
| `signed16-float16` ... | 16 to 128 | FP16, BF16 or FP32 a block, and the weight of code 8 in the same | 4.25 to 8 |
| `zeros16-float16` ... | 16 to 128 | FP16, BF16 or FP32 a block, and a zero point of a byte | 4.19 to 6.5 |
| `floatzeros16-float16` ... | 16 to 128 | FP16, BF16 or FP32 a block, and a zero point in the same | 4.25 to 8 |
| `superblock32` | 32 | 6 bits in a byte a block, twice; two FP16 per 256 | 4.625 |
| `bytes16-float16` ... | 16 to 128 | FP16, BF16 or FP32 a block | 8.125 to 10 |
| `floatbytes16-float16` ... | 16 to 128 | FP16, BF16 or FP32 a block | 8.125 to 10 |
| `offsetbytes16-float16` ... | 16 to 128 | FP16, BF16 or FP32 a block, and an offset in the same | 8.25 to 12 |
| `zerobytes16-float16` ... | 16 to 128 | FP16, BF16 or FP32 a block, and a zero point of a byte | 8.19 to 10.5 |
| `floatzerobytes16-float16` ... | 16 to 128 | FP16, BF16 or FP32 a block, and a zero point in the same | 8.25 to 12 |
| `unitbytes128` | 128 | FP32 a block, one FP32 a tensor | 8.25 |
| `superbytes32` | 32 | 6 bits in a byte a block, twice; two FP16 per 256 | 8.625 |
| `superbytes16` | 16 | one byte a block; one FP16 per 256 | 8.5625 |
| `t3` | 128, or 64 if 128 does not divide K | as nf4 | 3.06, or 3.13 |
| `dense` | none | none | 16 or 32 |
| fine plane | | | 6.7 to 7.2 more for bf16, coded; 8.6 to 9.1 plain; 12.4 to 12.8 for fp16 |

Scales are searched for least squared error, not set by absmax; those of `t3` follow from a block's mean square. K is
padded to the block with zeros inside the page. NaN and Inf are refused by layer name. The order in which a block's
errors are summed (halves, then halves of the sums) is part of the format, so that all devices agree.

**Fine plane** (`fine_plane.py`; coded, `fine_coding.py`): for bf16 and fp16. Under `exact`, fp32 layers are held dense,
which is exact too, and the plan says so. `mxint8` has none: a matrix is 8 bits a weight or 4.

**Coded fine planes.** An entropy coder (ANS, Huffman) would come to 6.4 to 6.6 bits where this one takes 6.7
(scripts/fine_rates.py), but decodes its symbols one behind the other: parallel ones cut the stream into hundreds of
pieces a page. Here cell and symbol say how long a weight is, and a prefix sum where it begins, on every device. In
fp16, where 3 bits more of the mantissa are noise, planes stay plain.

**8 bits.** MXFP8 has the size and the scales of `mxint8`, and on the trained model nine times the KL: .00096 with all
linear layers in it, where `mxint8` has .00010 and `nvfp4` .0093 (docs/accuracy.md). E4M3 spends four bits on an
exponent, for a range that the 32 weights of a block do not have. Scales of 16 bits, for 64 weights to be as large, lose
less still, .00006, but then a decoded weight is not exact in bf16, and a second encode is not the first one. A GPU that
multiplies MXFP8 is no reason against: inputs here stay in 16 bits, so weights are converted in any case.

**3 bits** (`t3.py`): of bit-shift trellises with random Gaussian codebooks, closed, N(0,1) at 3 bits, one weight a step
has 17.05 dB with 12 state bits and 17.35 with 14; two weights a step, for which a decoder needs half as many steps,
16.7, 17.2 and 17.5 with 12, 14 and 16; four, 16.9 with 16. An open path costs .5 dB with runs of 128 weights, a closed
one .05 less with 128 than with 256. Computed codebooks of two weights a step: one word of masked hash bits, whose
values are spread evenly over four octaves, stops at 16.6, whatever the states; polynomials of it gain .05; the sum of
two words has 17.1 with 14 bits, as near as 1MAD's and 3INST's at one weight a step. More state bits than 14 would gain
.25 dB, take four times the encoder's time, and a lane's states of a tile would not fit in 32 bits. A run along a row
could not take error feedback, which a tile of 16 columns can.

**Published weights** (`published.py`, `ggml.py`, `sixteen_levels.py`, `affine.py`, `eight_bits.py`): bitsandbytes' NF4
and FP4, symmetric int4 of GPTQ, AutoRound and compressed-tensors, and GGUF's Q4_0 and IQ4_NL go into `levels...`
without decoding, AWQ and asymmetric int4 into `zeros...`, HQQ into `floatzeros...`, torchao's int4 into `signed...`,
Q4_1 into `affine32-float16`, Q4_K into `superblock32`: nibbles are reordered, codes of 5 and 6 bits take a byte each
(Q8_0 and Q5_0 in `bytes32-float16`, Q6_K in `superbytes16`, Q5_1 in `offsetbytes32-float16`, Q5_K in `superbytes32`),
groups are cut into the largest block up to 128 that divides them, and a group's numbers are repeated for its blocks.
Scales may have either sign. bitsandbytes counts blocks through the flattened weight: where rows are no multiple of its
block, the common divisor is the block.
GGUF scales: fp16 as they are, superblocks' scales (d times a scale of 6 bits) exactly in fp32. With act-order a group's
columns lie anywhere: the plane has them side by side, and their places (`ordered.py`, formats `...-ordered`). Groups
not made of 16 columns are refused by name, for readers to decode. A weight that is assigned to such a layer later is
encoded anew, into levels with the published table that loses least.

**Calibrated codes** (`error_feedback.py`): GPTQ's error feedback in groups of 256 columns, so that the moments of all
layers fit in memory and a weight takes 256 steps, not K. Damping is large (.3 of the mean): with .01 and 2,048 tokens
feedback lost a third of its gain. A row of a group keeps its nearest codes if they lose less on the moments.

**Frames** (`Frame` in `block_formats.py`) serve training: block scales, one byte a block, and the codebook of a weight,
kept so that a changed weight is rounded under them without a search and without making codes: E2M1 by one addition and
subtraction of a power of two, tables by a lookup that is exact at the boundaries between levels. `decode` of a plane
encoded under a frame is what the frame's rounding gives, bit for bit.

**Joint planes** (`joint_planes.py`): the matrices of one routed expert lie side by side in one page, because they are
always used together.
"""

from importlib import import_module
from inspect import isabstract

import torch

from vbrt.config.format_records import FORMATS, FormatRecord, check_record, known_formats
from vbrt.errors import FormatError
from vbrt.formats.fine_coding import code_fine
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
    repack_awq,
    repack_bitsandbytes,
    repack_compressed_int4,
    repack_compressed_int8,
    repack_fp8,
    repack_gptq,
    repack_hqq,
    repack_int8,
    repack_llm_int8,
    repack_mlx,
    repack_mxfp4,
    repack_nvfp4,
    repack_tinygemm,
    repack_torchao_int4,
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
    "code_fine",
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
    "repack_awq",
    "repack_bitsandbytes",
    "repack_compressed_int4",
    "repack_compressed_int8",
    "repack_fp8",
    "repack_gguf",
    "repack_gptq",
    "repack_hqq",
    "repack_int8",
    "repack_llm_int8",
    "repack_mlx",
    "repack_mxfp4",
    "repack_nvfp4",
    "repack_tinygemm",
    "repack_torchao_int4",
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
