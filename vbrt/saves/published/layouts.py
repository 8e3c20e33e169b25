"""Layout records of published quantized weights: the tensors of a weight, and the planes or values they become.

A weight is a group of tensors: `<name>` plus the suffixes of a record. `LAYOUTS` are tried in order; the first with
matching suffixes and dtypes wins. A layout that matches a vbrt format gives planes, unchanged
(`vbrt.formats.published`); any other is decoded.

To add a layout, add a record.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from vbrt.config.format_records import ORDERED
from vbrt.errors import FormatError
from vbrt.formats import get_format
from vbrt.formats.published import (
    Nested,
    Repacked,
    column_order,
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
from vbrt.saves.files.safetensors_file import TensorInfo
from vbrt.saves.published.decode_layouts import (
    decode_compressed_ints,
    decode_gptq,
    decode_hqq,
    decode_torchao_int4,
    scaled_blocks,
    unswizzled,
)

__all__ = ["LAYOUTS", "UNUSED", "Facts", "Layout", "Outline", "decoded"]

#: suffixes of scales for activations and caches, which stay in the model's dtype here
UNUSED = (
    ".input_scale",
    ".input_global_scale",
    ".input_zero_point",
    ".output_scale",
    ".activation_scale",
    ".k_scale",
    ".v_scale",
    ".q_scale",
    ".k_cache_scale",
    ".v_cache_scale",
    ".act_per_tensor_scale",
    "_act_per_tensor_scale",
)

Fields = Mapping[str, Tensor]


@dataclass(frozen=True)
class Facts:
    """Facts about a weight, known before its values are read.

    Attributes:
        infos: by field.
        scheme: the checkpoint's quantization config.
        dtype: of the model, to which weights are decoded.
        small: reads a field of a few numbers.
        metadata: of the weight, from its file's header.
    """

    infos: Mapping[str, TensorInfo]
    scheme: Mapping[str, Any]
    dtype: torch.dtype
    small: Callable[[str], Tensor]
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a field."""
        return self.infos[name].shape

    def is_of(self, name: str, *dtypes: torch.dtype) -> bool:
        """True if a field has one of these dtypes."""
        return self.infos[name].dtype in dtypes


@dataclass(frozen=True, slots=True)
class Outline:
    """Shape, dtype and format of a weight.

    Attributes:
        shape: (N, K) of each matrix.
        dtype: decoded dtype.
        format: format of its planes; "" if it is decoded.
        matrices: of a stack of experts; 0 for a single matrix.
        transposed: True if the model has each matrix as [K, N].
        why: why it is decoded.
        more: parameters for the layout's own functions.
    """

    shape: tuple[int, int]
    dtype: torch.dtype
    format: str = ""
    matrices: int = 0
    transposed: bool = False
    why: str = ""
    more: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Layout:
    """One library's layout of a quantized weight.

    Attributes:
        name: shown to users.
        fields: field -> suffix of its tensor's name; the first is the weight's own.
        optional: fields that may be missing.
        weight: the model's suffix in place of the first field's.
        fits: True if these facts match the layout.
        outline: makes the weight's outline. Raises FormatError.
        plane: makes the coarse plane of one matrix. Raises FormatError.
        decode: decodes one matrix [N, K], for weights without planes.
        as_it_is: True if the plane has the files' bytes unchanged, so that it can be made on any device.
        becomes: formats of its planes, or kinds of `GROUP_KINDS`.
        rest: weights of the layout that are decoded.
        since: version of vbrt that holds it as it is.
    """

    name: str
    fields: Mapping[str, str]
    fits: Callable[[Facts], bool]
    outline: Callable[[Facts], Outline]
    plane: Callable[[Fields, Outline], dict[str, Tensor]] | None = None
    decode: Callable[[Fields, Outline], Tensor] | None = None
    optional: tuple[str, ...] = ()
    weight: str = ".weight"
    as_it_is: bool = False
    becomes: tuple[str, ...] = ()
    rest: str = ""
    since: str = "0.1.0"


def decoded(layout: Layout, tensors: Fields, outline: Outline) -> Tensor:
    """Return one matrix [N, K] of a weight in its dtype. Raises FormatError."""
    if not outline.format:
        return layout.decode(tensors, outline).to(outline.dtype)
    plane = layout.plane(tensors, outline)
    return get_format(outline.format).decode(plane, outline.shape, outline.dtype)


# -- 4-bit floats -----------------------------------------------------------------------------------------------------

_BYTES, _E4M3 = (torch.uint8,), (torch.float8_e4m3fn,)
_NUMBERS = (torch.float32, torch.bfloat16, torch.float16)


def _two(shape: tuple[int, ...], what: str) -> tuple[int, int]:
    if len(shape) != 2:
        raise FormatError(f"{what} has shape {shape}; expected two dimensions")
    return shape


def _outline_nvfp4(facts: Facts) -> Outline:
    n, half = _two(facts.shape("weight"), "its packed weight")
    return Outline((n, 2 * half), facts.dtype, "nvfp4")


def _outline_mxfp4(facts: Facts) -> Outline:
    n, half = _two(facts.shape("weight"), "its packed weight")
    return Outline((n, 2 * half), facts.dtype, "mxfp4")


def _outline_gpt_oss(facts: Facts) -> Outline:
    shape = facts.shape("blocks")
    if len(shape) != 4 or shape[3] != 16:
        raise FormatError(f"its blocks have shape {shape}; expected [E, N, K/32, 16]")
    return Outline((shape[1], 32 * shape[2]), facts.dtype, "mxfp4", matrices=shape[0], transposed=True)


def _compressed_mxfp4(t: Fields, outline: Outline) -> dict[str, Tensor]:
    n, k = outline.shape
    return repack_mxfp4(t["weight"].reshape(n, k // 32, 16), t["scale"])


def _outline_torchao(facts: Facts) -> Outline:
    n, half = _two(facts.shape("weight"), "its packed weight")
    attributes = facts.metadata.get("_data", {})
    swizzled = bool(attributes.get("is_swizzled_scales", False))
    return Outline((n, 2 * half), facts.dtype, "nvfp4", more={"swizzled": swizzled})


def _torchao(t: Fields, outline: Outline) -> dict[str, Tensor]:
    n, k = outline.shape
    scale = t["scale"].view(torch.uint8)
    scale = unswizzled(scale, n, k // 16) if outline.more["swizzled"] else scale.reshape(n, k // 16)
    return repack_nvfp4(t["weight"], scale, t.get("global", 1.0), divide=False)


# -- 4-bit codebooks and integers -------------------------------------------------------------------------------------


def _levels(k: int, group: int, scales: torch.dtype, *, flat: bool = False, kind: str = "levels") -> tuple[str, str]:
    """Return the matching format for rows of K weights in groups, or "" and why there is none."""
    try:
        return levels_format(k, group, scales, flat=flat, kind=kind), ""
    except FormatError as error:
        return "", str(error).partition(";")[0]


def _outline_bitsandbytes(facts: Facts) -> Outline:
    state = _bitsandbytes_state(facts.small("state"))
    shape = _two(tuple(state["shape"]), "its weight")
    format, why = _levels(shape[1], state["blocksize"], torch.float32, flat=True)
    return Outline(shape, facts.dtype, format, why=why, more=state)


def _bitsandbytes_state(packed: Tensor) -> dict[str, Any]:
    try:
        state = json.loads(bytes(packed.tolist()).decode())
        return {**state, "shape": [int(size) for size in state["shape"]], "blocksize": int(state["blocksize"])}
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise FormatError(f"its quant_state is damaged: {error}") from error


def _bitsandbytes(t: Fields, outline: Outline) -> dict[str, Tensor]:
    return _repacked_bitsandbytes(t, outline, outline.shape).coarse


def _decode_bitsandbytes(t: Fields, outline: Outline) -> Tensor:
    """Decode blocks that wrap across rows, as a matrix with one block per row."""
    (n, k), block = outline.shape, outline.more["blocksize"]
    if n * k % block:
        raise FormatError(f"{n} x {k} weights in blocks of {block}; expected whole blocks")
    made = _repacked_bitsandbytes(t, outline, (n * k // block, block))
    return get_format(made.format).decode(made.coarse, made.shape, outline.dtype).view(n, k)


def _repacked_bitsandbytes(t: Fields, outline: Outline, shape: tuple[int, int]) -> Repacked:
    state, nested = outline.more, None
    if "nested_absmax" in t:
        offset = float(state.get("nested_offset", 0.0))
        nested = Nested(t["nested_absmax"], t["nested_quant_map"], int(state.get("nested_blocksize", 256)), offset)
    return repack_bitsandbytes(
        t["weight"], t["absmax"], t["quant_map"], shape, blocksize=state["blocksize"], nested=nested
    )


#: kinds of planes of integer codes, by bits and what a group has besides a scale
_KIND_OF_BITS = {
    4: {"": "symmetric", "zeros": "zeros", "offsets": "affine"},
    8: {"": "bytes", "zeros": "zerobytes", "offsets": "offsetbytes"},
}

#: AutoRound packings with zero points stored unmodified, per `auto_round.inference.backend`
_AUTO_ROUND_V2 = ("auto_round", "auto_round:gptqmodel")


def _outline_gptq(facts: Facts) -> Outline:
    words, n = _two(facts.shape("weight"), "its qweight")
    bits = int(facts.scheme.get("bits", 4))
    if bits not in (2, 4, 8):
        raise FormatError(f"GPTQ in {bits} bits; vbrt reads 2, 4 and 8: load it with its own library")
    k, scales = words * 32 // bits, facts.infos["scales"].dtype
    group = int(facts.scheme.get("group_size", -1))
    symmetric = "qzeros" not in facts.infos or bool(facts.scheme.get("sym", False))
    stored = _zeros_of_gptq(facts.scheme)
    kind = _KIND_OF_BITS.get(bits, {}).get("zeros" if not symmetric else "")
    more = {"bits": bits, "group": group, "checkpoint_format": stored, "symmetric": symmetric}
    why = "GPTQ in 2 bits" if bits == 2 else ""
    format, why = ("", why) if why else _ordered(facts, k, group, scales, kind)
    return Outline((n, k), facts.dtype, format, why=why, more=more)


def _ordered(facts: Facts, k: int, group: int, scales: torch.dtype, kind: str) -> tuple[str, str]:
    """Return the format as `_levels` does, with columns in the order of their groups if they are in another one."""
    format, why = _levels(k, group, scales, kind=kind)
    if not format or "g_idx" not in facts.infos:
        return format, why
    try:
        return (format if column_order(facts.small("g_idx"), k, group) is None else ORDERED[format]), ""
    except FormatError as error:
        return "", str(error).partition(";")[0]


def _zeros_of_gptq(scheme: Mapping[str, Any]) -> str:
    """Return how zero points are stored: minus one ("gptq") or unmodified ("gptq_v2"), whatever AutoRound calls it."""
    as_they_are = scheme.get("checkpoint_format") == "gptq_v2"
    return "gptq_v2" if as_they_are or scheme.get("packing_format") in _AUTO_ROUND_V2 else "gptq"


def _gptq(t: Fields, outline: Outline) -> dict[str, Tensor]:
    more = outline.more
    made = repack_gptq(
        t["weight"],
        t["scales"],
        t.get("qzeros"),
        t.get("g_idx"),
        group=more["group"],
        checkpoint_format=more["checkpoint_format"],
        symmetric=more["symmetric"],
        bits=more["bits"],
    )
    return made.coarse


def _outline_compressed_ints(facts: Facts) -> Outline:
    n, k = (int(size) for size in facts.small("shape").tolist())
    words, groups = facts.shape("weight")[-1], (*facts.shape("scale"), 1)[1]
    bits = next((bits for bits in (4, 8) if words == -(-k * bits // 32)), 0)
    if not bits or facts.shape("weight") != (n, words):
        raise FormatError(f"weight_packed {facts.shape('weight')} of a weight {(n, k)}; expected 4 or 8 bits a weight")
    group = -1 if groups == 1 else _group_of(facts.scheme, k, groups)
    kind = _KIND_OF_BITS[bits]["zeros" if "zero_point" in facts.infos else ""]
    format, why = _ordered(facts, k, group, facts.infos["scale"].dtype, kind)
    return Outline((n, k), facts.dtype, format, why=why, more={"bits": bits, "group": group})


def _group_of(scheme: Mapping[str, Any], k: int, groups: int) -> int:
    """Return the group size, from the checkpoint's config, for rows of K weights in so many groups."""
    named = scheme.get("config_groups")
    weights = [group.get("weights") or {} for group in (named.values() if isinstance(named, Mapping) else ())]
    sizes = {int(each["group_size"]) for each in weights if each.get("group_size")}
    fitting = sorted(size for size in sizes if size > 0 and -(-k // size) == groups)
    if not fitting and k % groups:
        raise FormatError(f"{groups} groups in rows of {k}; its config has groups of {sorted(sizes)}")
    return fitting[0] if fitting else k // groups


def _compressed_ints(t: Fields, outline: Outline) -> dict[str, Tensor]:
    group, zeros = outline.more["group"], t.get("zero_point")
    repack = repack_compressed_int4 if outline.more["bits"] == 4 else repack_compressed_int8
    more = {"group": group, "weight_zero_point": zeros, "weight_g_idx": t.get("g_idx")}
    return repack(t["weight"], t["scale"], outline.shape, **more).coarse


def _outline_awq(facts: Facts) -> Outline:
    k, words = _two(facts.shape("weight"), "its qweight")
    if int(facts.scheme.get("bits", facts.scheme.get("w_bit", 4))) != 4:
        raise FormatError("AWQ in other than 4 bits; load it with its own library")
    group = k // max(1, facts.shape("scales")[0])
    return Outline((8 * words, k), facts.dtype, levels_format(k, group, facts.infos["scales"].dtype, kind="zeros"))


def _outline_mlx(facts: Facts) -> Outline:
    n, words = _two(facts.shape("weight"), "its packed weight")
    groups = _two(facts.shape("scales"), "its scales")[1]
    named = _bits_of_mlx(facts.scheme)
    fitting = [each for each in named if each[0] in _KIND_OF_BITS and groups * each[0] * each[1] == 32 * words]
    if len(fitting) != 1:
        raise FormatError(
            f"MLX weight of {words} words and {groups} groups a row; vbrt reads 4 and 8 bits, and the config has "
            f"{', '.join(f'{bits} bits in groups of {group}' for bits, group in named)}: load it with MLX"
        )
    ((bits, group),) = fitting
    k, scales = groups * group, facts.infos["scales"].dtype
    format = levels_format(k, group, scales, kind=_KIND_OF_BITS[bits]["offsets"])
    return Outline((n, k), facts.dtype, format, more={"bits": bits})


def _bits_of_mlx(scheme: Mapping[str, Any]) -> list[tuple[int, int]]:
    """(bits, group) of a checkpoint, and of single layers by name."""
    bits, group = int(scheme.get("bits", 4)), int(scheme.get("group_size", 64))
    layers = (each for each in scheme.values() if isinstance(each, Mapping))
    named = ((int(each.get("bits", bits)), int(each.get("group_size", group))) for each in layers)
    return list(dict.fromkeys(((bits, group), *named)))


def _outline_torchao_int4(facts: Facts) -> Outline:
    n, half = _two(facts.shape("weight"), "its packed weight")
    groups = _two(facts.shape("scale"), "its scale")[0]
    if not groups or 2 * half % groups:
        raise FormatError(f"scales of {groups} groups in rows of {2 * half}; expected whole groups")
    terms = torch.promote_types(facts.infos["scale"].dtype, facts.infos["zero_point"].dtype)
    format, why = _levels(2 * half, 2 * half // groups, terms, kind="signed")
    return Outline((n, 2 * half), facts.dtype, format, why=why)


def _outline_tinygemm(facts: Facts) -> Outline:
    attributes, tiles = facts.metadata.get("_data", {}), facts.shape("weight")
    shape, block = attributes.get("shape"), attributes.get("block_size")
    pairs = [pair for pair in (shape, block) if isinstance(pair, list) and len(pair) == 2]
    sizes = [size for pair in pairs for size in pair if type(size) is int and size > 0]
    fits = len(tiles) == 4 and len(sizes) == 4 and sizes[0] <= 8 * tiles[0] and sizes[1] <= 32 * tiles[1] * tiles[3]
    if not fits or sizes[2] != 1:
        raise FormatError(
            f"shape {shape} and block_size {block} in its metadata, tiles {tiles}; expected those of one matrix"
        )
    n, k, _, group = sizes
    format = levels_format(k, group, facts.infos["scale_and_zero"].dtype, kind="signed")
    return Outline((n, k), facts.dtype, format, more={"group": group})


_HQQ = ("4bit_u8", "8bit_u8")
#: of HQQ's settings of a weight, which follow from the others
_UNUSED_OF_HQQ = (
    "nbits",
    "unpack_view_dtype",
    "view_as_float",
    "quant_scale",
    "quant_zero",
    "compute_dtype",
    "offload_meta",
    "encoded_state_dict",
    "stores_quant_config",
    "channel_wise",
    "optimize",
    "round_zero",
)


def _outline_hqq(facts: Facts) -> Outline:
    shape = _two(tuple(facts.small("shape").tolist()), "its weight")
    packing, axis = bytes(facts.small("packing").tolist()).decode(), int(facts.small("axis"))
    if axis not in (0, 1) or min(shape) < 1:
        raise FormatError(f"axis {axis} of a weight {shape}; expected axis 0 or 1 of a matrix")
    grouped = "group" in facts.infos and facts.shape("scale")
    group = int(facts.small("group")) if grouped else shape[axis]
    if group < 1 or shape[0] * shape[1] % group:
        raise FormatError(f"group_size {group} of a weight {shape}; expected whole groups")
    kind = "floatzeros" if packing == "4bit_u8" else "floatzerobytes"
    format, why = _levels(shape[1], group, facts.dtype, flat=True, kind=kind)
    why = _why_not_hqq(facts, packing, axis) or why
    more = {"group": group, "axis": axis, "packing": packing}
    return Outline(shape, facts.dtype, "" if why else format, why=why, more=more)


def _why_not_hqq(facts: Facts, packing: str, axis: int) -> str:
    if axis == 0:
        return "HQQ with groups across rows (axis = 0)"
    if packing not in _HQQ:
        return f"HQQ packed as {packing}"
    return "" if facts.shape("scale") else "HQQ with one scale (channel_wise = False)"


def _hqq(t: Fields, outline: Outline) -> dict[str, Tensor]:
    more = outline.more
    scale, zero = (t[name].to(outline.dtype) for name in ("scale", "zero"))
    made = repack_hqq(t["weight"], scale, zero, outline.shape, group=more["group"], packing=more["packing"])
    return made.coarse


# -- 8 bits -----------------------------------------------------------------------------------------------------------


def _outline_int8(facts: Facts) -> Outline:
    shape = _two(facts.shape("weight"), "its weight")
    groups = (*facts.shape("scale"), 1)[1]
    group = -1 if groups == 1 else _group_of(facts.scheme, shape[1], groups)
    kind = _KIND_OF_BITS[8]["zeros" if "zero_point" in facts.infos else ""]
    format = levels_format(shape[1], group, facts.infos["scale"].dtype, kind=kind)
    return Outline(shape, facts.dtype, format, more={"group": group})


def _is_int8(facts: Facts) -> bool:
    integers = "zero_point" not in facts.infos or facts.is_of("zero_point", torch.int8)
    return facts.is_of("weight", torch.int8) and facts.is_of("scale", *_NUMBERS) and integers


def _int8(t: Fields, outline: Outline) -> dict[str, Tensor]:
    return repack_int8(t["weight"], t["scale"], t.get("zero_point"), group=outline.more["group"]).coarse


def _outline_llm_int8(facts: Facts) -> Outline:
    kept = int(facts.small("weight_format")) if "weight_format" in facts.infos else 0
    if kept:
        raise FormatError(
            f"weight_format {kept}, of a tiled order; expected 0 (row): save it with a newer bitsandbytes"
        )
    return Outline(_two(facts.shape("weight"), "its weight"), facts.dtype, "unitbytes128")


def _outline_fp8(facts: Facts) -> Outline:
    block = facts.scheme.get("weight_block_size") or (128, 128)
    if len(block) != 2 or not all(isinstance(size, int) and size > 0 for size in block):
        raise FormatError(f"weight_block_size = {block}; expected two sizes")
    shape = _two(facts.shape("weight"), "its weight")
    columns = (*facts.shape("scale"), 1)[1]
    format, why = _levels(shape[1], -1 if columns == 1 else block[1], facts.infos["scale"].dtype, kind="floatbytes")
    return Outline(shape, facts.dtype, format, why=why, more={"block": tuple(block)})


def _fp8(t: Fields, outline: Outline) -> dict[str, Tensor]:
    return repack_fp8(t["weight"], t["scale"], block=outline.more["block"]).coarse


def _is_awq(scheme: Mapping[str, Any]) -> bool:
    return "awq" in f"{scheme.get('quant_method', '')} {scheme.get('packing_format', '')}"


LAYOUTS = (
    Layout(
        "ModelOpt NVFP4",
        {"weight": ".weight", "scale": ".weight_scale", "global": ".weight_scale_2"},
        lambda f: f.is_of("weight", *_BYTES) and f.is_of("scale", *_E4M3),
        _outline_nvfp4,
        lambda t, o: repack_nvfp4(t["weight"], t["scale"], t["global"], divide=False),
        as_it_is=True,
        becomes=("nvfp4",),
    ),
    Layout(
        "compressed-tensors nvfp4-pack-quantized",
        {"weight": ".weight_packed", "scale": ".weight_scale", "global": ".weight_global_scale"},
        lambda f: f.is_of("weight", *_BYTES) and f.is_of("scale", *_E4M3),
        _outline_nvfp4,
        lambda t, o: repack_nvfp4(t["weight"], t["scale"], t["global"], divide=True),
        as_it_is=True,
        becomes=("nvfp4",),
    ),
    Layout(
        "compressed-tensors mxfp4-pack-quantized",
        {"weight": ".weight_packed", "scale": ".weight_scale"},
        lambda f: f.is_of("weight", *_BYTES) and f.is_of("scale", torch.uint8, torch.float8_e8m0fnu),
        _outline_mxfp4,
        _compressed_mxfp4,
        as_it_is=True,
        becomes=("mxfp4",),
    ),
    Layout(
        "gpt-oss MXFP4",
        {"blocks": "_blocks", "scales": "_scales"},
        lambda f: f.is_of("blocks", *_BYTES) and f.is_of("scales", *_BYTES),
        _outline_gpt_oss,
        lambda t, o: repack_mxfp4(t["blocks"], t["scales"]),
        weight="",
        as_it_is=True,
        becomes=("mxfp4",),
    ),
    Layout(
        "torchao NVFP4",
        {"weight": "._weight_qdata", "scale": "._weight_scale", "global": "._weight_per_tensor_scale"},
        lambda f: f.is_of("weight", *_BYTES) and f.is_of("scale", *_E4M3),
        _outline_torchao,
        _torchao,
        optional=("global",),
        as_it_is=True,
        becomes=("nvfp4",),
    ),
    *(
        Layout(
            f"bitsandbytes {kind.upper()}",
            {
                "weight": ".weight",
                "absmax": ".weight.absmax",
                "quant_map": ".weight.quant_map",
                "state": f".weight.quant_state.bitsandbytes__{kind}",
                "nested_absmax": ".weight.nested_absmax",
                "nested_quant_map": ".weight.nested_quant_map",
            },
            lambda f: True,
            _outline_bitsandbytes,
            _bitsandbytes,
            _decode_bitsandbytes,
            optional=("nested_absmax", "nested_quant_map"),
            becomes=("levels64-float32",),
            rest="blocks across rows",
        )
        for kind in ("nf4", "fp4")
    ),
    Layout(
        "AWQ",
        {"weight": ".qweight", "scales": ".scales", "qzeros": ".qzeros"},
        lambda f: _is_awq(f.scheme) and f.is_of("weight", torch.int32),
        _outline_awq,
        lambda t, o: repack_awq(t["weight"], t["scales"], t["qzeros"]).coarse,
        becomes=("zeros",),
        since="0.2.0",
    ),
    Layout(
        "GPTQ",
        {"weight": ".qweight", "scales": ".scales", "qzeros": ".qzeros", "g_idx": ".g_idx"},
        lambda f: f.is_of("weight", torch.int32),
        _outline_gptq,
        _gptq,
        decode_gptq,
        optional=("qzeros", "g_idx"),
        becomes=("symmetric", "zeros", "bytes", "zerobytes"),
        rest="2 bits",
    ),
    Layout(
        "compressed-tensors pack-quantized",
        {
            "weight": ".weight_packed",
            "scale": ".weight_scale",
            "shape": ".weight_shape",
            "zero_point": ".weight_zero_point",
            "g_idx": ".weight_g_idx",
        },
        lambda f: f.is_of("weight", torch.int32),
        _outline_compressed_ints,
        _compressed_ints,
        decode_compressed_ints,
        optional=("zero_point", "g_idx"),
        becomes=("symmetric", "zeros", "bytes", "zerobytes"),
    ),
    Layout(
        "MLX",
        {"weight": ".weight", "scales": ".scales", "biases": ".biases"},
        lambda f: f.is_of("weight", torch.uint32),
        _outline_mlx,
        lambda t, o: repack_mlx(t["weight"], t["scales"], t["biases"], bits=o.more["bits"]).coarse,
        becomes=("affine", "offsetbytes"),
        since="0.2.0",
    ),
    Layout(
        "HQQ",
        {
            "weight": ".W_q",
            "scale": ".scale",
            "zero": ".zero",
            "shape": ".shape",
            "packing": ".packing",
            "axis": ".axis",
            "group": ".group_size",
            **{name: f".{name}" for name in _UNUSED_OF_HQQ},
        },
        lambda f: f.is_of("scale", *_NUMBERS) and f.is_of("zero", *_NUMBERS),
        _outline_hqq,
        _hqq,
        decode_hqq,
        optional=("group", *_UNUSED_OF_HQQ),
        becomes=("floatzeros", "floatzerobytes"),
        rest="groups across rows (axis = 0); 1 to 3 bits",
        since="0.2.0",
    ),
    *(
        Layout(
            name,
            {"weight": ".weight", "scale": suffix},
            lambda f: f.is_of("weight", *_E4M3),
            _outline_fp8,
            _fp8,
            scaled_blocks,
            becomes=("floatbytes",),
            rest="blocks not made of 16 columns",
            since="0.2.0",
        )
        for name, suffix in (("FP8 in blocks", ".weight_scale_inv"), ("FP8", ".weight_scale"))
    ),
    Layout(
        "torchao FP8",
        {"weight": "._weight_qdata", "scale": "._weight_scale"},
        lambda f: f.is_of("weight", *_E4M3) and f.is_of("scale", *_NUMBERS),
        _outline_fp8,
        _fp8,
        scaled_blocks,
        becomes=("floatbytes",),
        rest="blocks not made of 16 columns",
        since="0.2.0",
    ),
    Layout(
        "torchao int4",
        {"weight": "._weight_qdata", "scale": "._weight_scale", "zero_point": "._weight_zero_point"},
        lambda f: f.metadata.get("_type") == "Int4Tensor" and f.is_of("weight", torch.int8, torch.uint8),
        _outline_torchao_int4,
        lambda t, o: repack_torchao_int4(t["weight"], t["scale"], t["zero_point"]).coarse,
        decode_torchao_int4,
        becomes=("signed",),
        rest="groups not made of 16 columns",
        since="0.2.0",
    ),
    Layout(
        "torchao int4 in tiles",
        {"weight": "._weight_qdata", "scale_and_zero": "._weight_scale_and_zero"},
        lambda f: f.metadata.get("_type") == "Int4TilePackedTo4dTensor" and f.is_of("weight", torch.int32),
        _outline_tinygemm,
        lambda t, o: repack_tinygemm(t["weight"], t["scale_and_zero"], o.shape, group=o.more["group"]).coarse,
        becomes=("signed",),
        since="0.2.0",
    ),
    Layout(
        "torchao int8",
        {"weight": "._weight_qdata", "scale": "._weight_scale", "zero_point": "._weight_zero_point"},
        lambda f: f.metadata.get("_type") != "Int4Tensor" and _is_int8(f),
        _outline_int8,
        _int8,
        optional=("zero_point",),
        becomes=("bytes", "zerobytes"),
        since="0.2.0",
    ),
    Layout(
        "compressed-tensors int-quantized",
        {"weight": ".weight", "scale": ".weight_scale", "zero_point": ".weight_zero_point"},
        lambda f: f.is_of("weight", torch.int8) and f.is_of("scale", *_NUMBERS),
        _outline_int8,
        _int8,
        optional=("zero_point",),
        becomes=("bytes", "zerobytes"),
        since="0.2.0",
    ),
    Layout(
        "bitsandbytes LLM.int8",
        {"weight": ".weight", "stats": ".SCB", "weight_format": ".weight_format"},
        lambda f: f.is_of("weight", torch.int8) and f.is_of("stats", torch.float32),
        _outline_llm_int8,
        lambda t, o: repack_llm_int8(t["weight"], t["stats"]).coarse,
        optional=("weight_format",),
        becomes=("unitbytes128",),
        since="0.2.0",
    ),
)
