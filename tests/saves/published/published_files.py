"""Tiny checkpoints in the layouts that others publish, packed here by their documentation, and what they decode to."""

import json
from dataclasses import dataclass

import torch
from safetensors.torch import save_file

from vbrt.formats import get_format
from vbrt.formats.sixteen_levels import INT4_LEVELS

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
E2M1 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0])


@dataclass(frozen=True)
class Made:
    """A weight in a layout: tensors by suffix of the module's name, and what it decodes to."""

    tensors: dict
    decoded: torch.Tensor


def e2m1(packed):
    """The values of bytes of two codes, the low nibble first."""
    codes = torch.stack((packed & 15, packed >> 4), dim=-1).flatten(-2)
    return E2M1[codes.long()]


def nvfp4_parts(w):
    plane = get_format("nvfp4").encode(w)
    k = w.shape[1]
    scales, scale = plane["scales"].float().repeat_interleave(16, 1), plane["tensor_scale"]
    return plane["codes"][:, : k // 2].contiguous(), plane["scales"], scale, scales


def modelopt(w):
    codes, scales, scale, spread = nvfp4_parts(w)
    decoded = (e2m1(codes) * (spread * scale)).to(w.dtype)
    tensors = {".weight": codes, ".weight_scale": scales, ".weight_scale_2": scale[0], ".input_scale": scale[0]}
    return Made(tensors, decoded)


def compressed_nvfp4(w):
    codes, scales, _, spread = nvfp4_parts(w)
    scale = torch.tensor([384.0])
    decoded = (e2m1(codes) * (spread * scale.reciprocal())).to(w.dtype)
    return Made({".weight_packed": codes, ".weight_scale": scales, ".weight_global_scale": scale}, decoded)


def compressed_mxfp4(w):
    plane = get_format("mxfp4").encode(w)
    spread = torch.exp2(plane["scales"].float() - 127).repeat_interleave(32, 1)
    return Made(
        {".weight_packed": plane["codes"], ".weight_scale": plane["scales"]},
        (e2m1(plane["codes"]) * spread).to(w.dtype),
    )


def torchao(w):
    codes, scales, scale, spread = nvfp4_parts(w)
    n, groups = scales.shape
    tiles = torch.zeros(-(-n // 128) * 128, -(-groups // 4) * 4, dtype=torch.uint8)
    tiles[:n, :groups] = scales.view(torch.uint8)
    tiles = tiles.view(len(tiles) // 128, 4, 32, -1, 4).permute(0, 3, 2, 1, 4).reshape(-1)
    decoded = (e2m1(codes) * (spread * scale)).to(w.dtype)
    blocked = tiles.view(torch.float8_e4m3fn)
    return Made({"._weight_qdata": codes, "._weight_scale": blocked, "._weight_per_tensor_scale": scale[0]}, decoded)


def int_codes(w, group=32):
    """Codes 0 to 15 and scales in w's dtype for groups of a row."""
    n, k = w.shape
    grouped = w.float().view(n, -1, group)
    scale = (grouped.abs().amax(-1) / 7.5).to(w.dtype)
    codes = (grouped / scale.float().unsqueeze(-1)).round().clamp(-8, 7).to(torch.int32) + 8
    return codes.view(n, k), scale


def words(codes, dim, order=range(8)):
    """int32 of eight nibbles, or of four bytes, along a dimension."""
    parts = codes.movedim(dim, -1).unflatten(-1, (-1, len(order))).to(torch.int64)
    packed = sum(parts[..., column] << 32 // len(order) * place for place, column in enumerate(order))
    packed = torch.where(packed >= 1 << 31, packed - (1 << 32), packed)
    return packed.to(torch.int32).movedim(-1, dim).contiguous()


def gptq(w, zero=7):
    codes, scale = int_codes(w)
    zeros = torch.full((scale.shape[1], len(w)), zero, dtype=torch.int32)
    tensors = {".qweight": words(codes.t(), 0), ".scales": scale.t().contiguous(), ".qzeros": words(zeros, 1)}
    tensors[".g_idx"] = torch.arange(w.shape[1], dtype=torch.int32) // 32
    return Made(tensors, (codes - zero - 1) * scale.repeat_interleave(32, 1))


def asymmetric_gptq(w):
    return gptq(w, zero=4)


def act_order_gptq(w):
    """Columns in another order than their groups."""
    made = gptq(w, zero=4)
    order = torch.arange(w.shape[1]).view(2, -1).t().flatten()
    index = made.tensors[".g_idx"][order]
    codes, scale = int_codes(w)
    decoded = (codes - 5) * scale[:, index.long()]
    return Made({**made.tensors, ".g_idx": index}, decoded)


def auto_round(w):
    """GPTQ with zero points as they are, not less one."""
    return Made(gptq(w, zero=8).tensors, gptq(w).decoded)


def awq(w):
    codes, scale = int_codes(w)
    zeros = torch.arange(scale.shape[1] * len(w), dtype=torch.int32).view(-1, len(w)) % 16
    tensors = {
        ".qweight": words(codes.t(), 1, AWQ_ORDER),
        ".scales": scale.t().contiguous(),
        ".qzeros": words(zeros, 1, AWQ_ORDER),
    }
    spread = zeros.t().repeat_interleave(32, 1)
    return Made(tensors, (codes - spread) * scale.repeat_interleave(32, 1))


def compressed_int4(w):
    codes, scale = int_codes(w)
    shape = torch.tensor(w.shape, dtype=torch.int64)
    tensors = {".weight_packed": words(codes, 1), ".weight_scale": scale, ".weight_shape": shape}
    return Made(tensors, (codes - 8) * scale.repeat_interleave(32, 1))


def asymmetric_compressed(w):
    made, (codes, scale) = compressed_int4(w), int_codes(w)
    zeros = torch.arange(scale.numel(), dtype=torch.int32).view_as(scale) % 16
    tensors = {**made.tensors, ".weight_zero_point": words(zeros, 0)}
    return Made(tensors, (codes - zeros.repeat_interleave(32, 1)) * scale.repeat_interleave(32, 1))


def hqq(w, bits=4, axis=1, group=32):
    """Zero points between codes; the difference is rounded to w's dtype before the product."""
    shape = (-1, group) if axis == 1 else (group, -1)
    grouped, last = w.float().view(shape), 2**bits - 1
    low, high = grouped.amin(axis, keepdim=True), grouped.amax(axis, keepdim=True)
    scale = ((high - low) / last).to(w.dtype)
    zero = (-low / scale.float()).to(w.dtype)
    codes = (grouped / scale.float() + zero.float()).round().clamp(0, last).to(torch.uint8)
    parts = codes.view(8 // bits, -1, codes.shape[1])
    packed = sum(part << 8 - bits * (place + 1) for place, part in enumerate(parts))
    facts = {"nbits": bits, "group_size": group, "axis": axis}
    flags = ("view_as_float", "quant_scale", "quant_zero", "offload_meta", "round_zero")
    flags = dict.fromkeys(flags, 0) | dict.fromkeys(("encoded_state_dict", "stores_quant_config", "channel_wise"), 1)
    texts = {"packing": f"{bits}bit_u8", "unpack_view_dtype": "torch.uint8", "compute_dtype": "torch.bfloat16"}
    tensors = {
        ".W_q": packed,
        ".scale": scale,
        ".zero": zero,
        ".shape": torch.tensor(w.shape),
        **{f".{name}": torch.tensor(value, dtype=torch.int32) for name, value in facts.items()},
        **{f".{name}": torch.tensor(value, dtype=torch.uint8) for name, value in flags.items()},
        **{f".{name}": torch.tensor(list(text.encode()), dtype=torch.uint8) for name, text in texts.items()},
    }
    return Made(tensors, ((codes.to(w.dtype) - zero) * scale).view(w.shape))


def hqq8(w):
    return hqq(w, bits=8)


def hqq2(w):
    return hqq(w, bits=2)


def hqq_across_rows(w):
    return hqq(w, axis=0)


def mlx(w):
    grouped = w.float().view(len(w), -1, 32)
    scale = ((grouped.amax(-1) - grouped.amin(-1)) / 15).to(w.dtype)
    bias = grouped.amin(-1).to(w.dtype)
    wide, low = (term.float().repeat_interleave(32, 1) for term in (scale, bias))
    codes = ((w.float() - low) / wide).round().clamp(0, 15)
    tensors = {".weight": words(codes.to(torch.int32), 1).view(torch.uint32), ".scales": scale, ".biases": bias}
    return Made(tensors, (codes * wide + low).to(w.dtype))


def bitsandbytes(w):
    n, k = w.shape
    grouped = w.float().view(-1, 64)
    absmax, table = grouped.abs().amax(-1), torch.tensor(INT4_LEVELS) / 8
    codes = ((grouped / absmax.unsqueeze(-1)).unsqueeze(-1) - table).abs().argmin(-1)
    packed = codes.view(-1, 2)
    state = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [n, k]}
    tensors = {
        ".weight": (packed[:, :1] << 4 | packed[:, 1:]).to(torch.uint8),
        ".weight.absmax": absmax,
        ".weight.quant_map": table,
        ".weight.quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8),
    }
    return Made(tensors, (table[codes] * absmax.unsqueeze(-1)).view(n, k).bfloat16())


def fp8_blocks(w):
    scale = torch.rand(-(-w.shape[0] // 16), -(-w.shape[1] // 16)) + 0.5
    spread = scale.repeat_interleave(16, 0).repeat_interleave(16, 1)[: w.shape[0], : w.shape[1]]
    codes = w.to(torch.float8_e4m3fn)
    return Made({".weight": codes, ".weight_scale_inv": scale}, (codes.float() * spread).to(w.dtype))


def fp8_rows(w):
    scale, codes = torch.rand(len(w), 1).bfloat16(), w.to(torch.float8_e4m3fn)
    return Made({".weight": codes, ".weight_scale": scale}, (codes.float() * scale.float()).to(w.dtype))


FOUR = range(4)


def int8_codes(w, group=32):
    """Codes -128 to 127 and scales in w's dtype for groups of a row."""
    grouped = w.float().view(len(w), -1, group)
    scale = (grouped.abs().amax(-1) / 127.5).to(w.dtype)
    codes = (grouped / scale.float().unsqueeze(-1)).round().clamp(-128, 127).to(torch.int32)
    return codes.view(w.shape), scale


def gptq8(w, zeros=None):
    """Four codes a word, zero points less one."""
    codes, scale = int8_codes(w)
    zeros = torch.full(scale.shape, 128, dtype=torch.int32) if zeros is None else zeros
    tensors = {
        ".qweight": words(codes.t() + 128, 0, FOUR),
        ".scales": scale.t().contiguous(),
        ".qzeros": words(zeros.t() - 1 & 255, 1, FOUR),
    }
    spread = zeros.repeat_interleave(32, 1) - 128
    return Made(tensors, (codes - spread).to(w.dtype) * scale.repeat_interleave(32, 1))


def asymmetric_gptq8(w):
    return gptq8(w, torch.arange(w.numel() // 32, dtype=torch.int32).view(len(w), -1) * 5 % 256)


def mlx8(w):
    grouped = w.float().view(len(w), -1, 32)
    scale = ((grouped.amax(-1) - grouped.amin(-1)) / 255).to(w.dtype)
    bias = grouped.amin(-1).to(w.dtype)
    wide, low = (term.float().repeat_interleave(32, 1) for term in (scale, bias))
    codes = ((w.float() - low) / wide).round().clamp(0, 255)
    tensors = {".weight": words(codes.to(torch.int32), 1, FOUR).view(torch.uint32), ".scales": scale, ".biases": bias}
    return Made(tensors, (codes * wide + low).to(w.dtype))


def compressed_packed8(w, zeros=None):
    codes, scale = int8_codes(w)
    shape = torch.tensor(w.shape, dtype=torch.int64)
    tensors = {".weight_packed": words(codes + 128, 1, FOUR), ".weight_scale": scale, ".weight_shape": shape}
    if zeros is None:
        return Made(tensors, codes * scale.repeat_interleave(32, 1))
    tensors[".weight_zero_point"] = words(zeros + 128, 0, FOUR)
    return Made(tensors, (codes - zeros.repeat_interleave(32, 1)) * scale.repeat_interleave(32, 1))


def asymmetric_packed8(w):
    return compressed_packed8(w, torch.arange(w.numel() // 32, dtype=torch.int32).view(len(w), -1) % 256 - 128)


def compressed_int8(w):
    codes, scale = int8_codes(w, w.shape[1])
    return Made({".weight": codes.to(torch.int8), ".weight_scale": scale}, codes * scale)


def asymmetric_int8(w):
    codes, scale = int8_codes(w)
    zeros = torch.arange(scale.numel(), dtype=torch.int32).view_as(scale) % 256 - 128
    tensors = {".weight": codes.to(torch.int8), ".weight_scale": scale, ".weight_zero_point": zeros.to(torch.int8)}
    return Made(tensors, (codes - zeros.repeat_interleave(32, 1)) * scale.repeat_interleave(32, 1))


def torchao_int8(w):
    codes, scale = int8_codes(w, w.shape[1])
    return Made({"._weight_qdata": codes.to(torch.int8), "._weight_scale": scale}, codes * scale)


def asymmetric_torchao_int8(w):
    codes, scale = int8_codes(w, w.shape[1])
    zeros = torch.arange(len(w), dtype=torch.int32).view_as(scale) * 5 % 256 - 128
    tensors = {
        "._weight_qdata": codes.to(torch.int8),
        "._weight_scale": scale,
        "._weight_zero_point": zeros.to(torch.int8),
    }
    return Made(tensors, (codes - zeros) * scale)


def torchao_int4(w, group=32):
    """Signed nibbles, and zero points that are numbers of weights; some are tiny, but code 0 is exactly that weight."""
    grouped = w.float().view(len(w), -1, group)
    low, high = grouped.amin(-1), grouped.amax(-1)
    scale = (high - low) / 15
    zero = low + 8 * scale
    zero[::3] *= 2.0**-20
    codes = ((grouped - low.unsqueeze(-1)) / scale.unsqueeze(-1)).round().clamp(0, 15).to(torch.int8) - 8
    nibbles = codes.view(len(w), -1, 2)
    scale, zero = scale.to(w.dtype), zero.to(w.dtype)
    tensors = {
        "._weight_qdata": nibbles[..., 0] & 15 | nibbles[..., 1] << 4,
        "._weight_scale": scale.t(),
        "._weight_zero_point": zero.t(),
    }
    decoded = codes.float() * scale.float().unsqueeze(-1) + zero.float().unsqueeze(-1)
    return Made(tensors, decoded.view(w.shape).to(w.dtype))


def torchao_int4_in_eights(w):
    return torchao_int4(w, group=8)


def tinygemm_tiles(codes, inner_tiles=8):
    """int32 [N/8, K/(16 inner_tiles), 32, inner_tiles/2] of codes [N, K] of whole tiles, lane by lane as a warp of
    PyTorch's `matrix_to_m16n8k16_Bint4_layout` writes them from bytes of two columns, the even one in the high nibble.
    """
    packed = (codes[:, ::2] << 4 | codes[:, 1::2]).to(torch.int64)
    tiles, outer = len(codes) // 8, codes.shape[1] // (16 * inner_tiles)
    packed = packed.view(tiles, 8, outer, 8 * inner_tiles)
    out = torch.zeros(tiles, outer, 32, inner_tiles // 2, dtype=torch.int64)
    for lane in range(32):
        for inner in range(0, inner_tiles, 2):
            first = 8 * inner + lane % 4
            v = [packed[:, lane // 4, :, first + ahead] for ahead in (0, 4, 8, 12)]
            high = [(byte & 0xF0) >> 4 << 4 * place for place, byte in enumerate(v)]
            low = [(byte & 0x0F) << 16 + 4 * place for place, byte in enumerate(v)]
            out[:, :, lane, inner // 2] = sum(high + low)
    return torch.where(out >= 1 << 31, out - (1 << 32), out).to(torch.int32)


def torchao_int4_tiles(w):
    """Codes 0 to 15 whose zero points are weights of code 8; rows and columns are padded with other weights."""
    n, k = w.shape
    grouped = w.float().view(n, -1, 32)
    low, high = grouped.amin(-1), grouped.amax(-1)
    scale = ((high - low) / 15).to(torch.bfloat16)
    zero = (low + 8 * scale.float()).to(torch.bfloat16)
    terms = [term.float().unsqueeze(-1) for term in (scale, zero)]
    codes = ((grouped - terms[1]) / terms[0] + 8).round().clamp(0, 15)
    rows, columns = -(-n // 8) * 8, -(-k // 1024) * 1024
    padded = torch.full((rows, columns), 5, dtype=torch.int32)
    padded[:n, :k] = codes.view(n, k)
    numbers = torch.ones(columns // 32, rows, 2, dtype=torch.bfloat16)
    numbers[: k // 32, :n] = torch.stack((scale, zero), dim=-1).transpose(0, 1)
    decoded = ((codes - 8) * terms[0] + terms[1]).view(n, k)
    return Made({"._weight_qdata": tinygemm_tiles(padded), "._weight_scale_and_zero": numbers}, decoded.to(w.dtype))


def torchao_fp8(w):
    scale, codes = torch.rand(len(w), 1), w.to(torch.float8_e4m3fn)
    return Made({"._weight_qdata": codes, "._weight_scale": scale}, (codes.float() * scale).to(w.dtype))


def llm_int8(w):
    stats = w.float().abs().amax(1)
    codes = (w.float() / stats.unsqueeze(1) * 127).round().to(torch.int8)
    tensors = {".weight": codes, ".SCB": stats, ".weight_format": torch.tensor(0, dtype=torch.uint8)}
    return Made(tensors, (codes * stats.view(-1, 1) * 7.874015718698502e-3).to(w.dtype))


GROUPS = {"config_groups": {"group_0": {"weights": {"num_bits": 4, "group_size": 32}}}}
#: layout -> (maker, quantization_config, format of its planes)
LAYOUTS = {
    "modelopt": (modelopt, {"quant_method": "modelopt", "quant_algo": "NVFP4"}, "nvfp4"),
    "compressed nvfp4": (compressed_nvfp4, {"quant_method": "compressed-tensors"}, "nvfp4"),
    "compressed mxfp4": (compressed_mxfp4, {"quant_method": "compressed-tensors"}, "mxfp4"),
    "torchao": (torchao, {"quant_method": "torchao"}, "nvfp4"),
    "bitsandbytes": (bitsandbytes, {"quant_method": "bitsandbytes", "load_in_4bit": True}, "levels64-float32"),
    "gptq": (gptq, {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True}, "symmetric32-bfloat16"),
    "auto-round": (
        auto_round,
        {
            "quant_method": "auto-round",
            "bits": 4,
            "group_size": 32,
            "sym": True,
            "packing_format": "auto_round:gptqmodel",
        },
        "symmetric32-bfloat16",
    ),
    "compressed int4": (compressed_int4, {"quant_method": "compressed-tensors", **GROUPS}, "symmetric32-bfloat16"),
    "asymmetric gptq": (
        asymmetric_gptq,
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False},
        "zeros32-bfloat16",
    ),
    "unnamed gptq": (asymmetric_gptq, {"quant_method": "gptq", "bits": 4, "group_size": 32}, "zeros32-bfloat16"),
    "act-order gptq": (
        act_order_gptq,
        {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "desc_act": True},
        "zeros32-bfloat16-ordered",
    ),
    "asymmetric compressed": (
        asymmetric_compressed,
        {"quant_method": "compressed-tensors", **GROUPS},
        "zeros32-bfloat16",
    ),
    "awq": (awq, {"quant_method": "awq", "bits": 4, "group_size": 32}, "zeros32-bfloat16"),
    "hqq": (hqq, {"quant_method": "hqq"}, "floatzeros32-bfloat16"),
    "hqq 8": (hqq8, {"quant_method": "hqq"}, "floatzerobytes32-bfloat16"),
    "hqq 2": (hqq2, {"quant_method": "hqq"}, ""),
    "hqq across rows": (hqq_across_rows, {"quant_method": "hqq"}, ""),
    "mlx": (mlx, {"bits": 4, "group_size": 32}, "affine32-bfloat16"),
    "gptq 8": (gptq8, {"quant_method": "gptq", "bits": 8, "group_size": 32, "sym": True}, "bytes32-bfloat16"),
    "asymmetric gptq 8": (
        asymmetric_gptq8,
        {"quant_method": "gptq", "bits": 8, "group_size": 32, "sym": False},
        "zerobytes32-bfloat16",
    ),
    "mlx 8": (mlx8, {"bits": 8, "group_size": 32}, "offsetbytes32-bfloat16"),
    "packed int8": (compressed_packed8, {"quant_method": "compressed-tensors", **GROUPS}, "bytes32-bfloat16"),
    "asymmetric packed int8": (
        asymmetric_packed8,
        {"quant_method": "compressed-tensors", **GROUPS},
        "zerobytes32-bfloat16",
    ),
    "compressed int8": (compressed_int8, {"quant_method": "compressed-tensors"}, "bytes128-bfloat16"),
    "asymmetric int8": (asymmetric_int8, {"quant_method": "compressed-tensors", **GROUPS}, "zerobytes32-bfloat16"),
    "torchao int8": (torchao_int8, {"quant_method": "torchao"}, "bytes128-bfloat16"),
    "asymmetric torchao int8": (asymmetric_torchao_int8, {"quant_method": "torchao"}, "zerobytes128-bfloat16"),
    "torchao int4": (torchao_int4, {"quant_method": "torchao"}, "signed32-bfloat16"),
    "torchao int4 in eights": (torchao_int4_in_eights, {"quant_method": "torchao"}, ""),
    "torchao int4 in tiles": (torchao_int4_tiles, {"quant_method": "torchao"}, "signed32-bfloat16"),
    "torchao fp8": (torchao_fp8, {"quant_method": "torchao"}, "floatbytes128-float32"),
    "llm.int8": (llm_int8, {"quant_method": "bitsandbytes", "load_in_8bit": True}, "unitbytes128"),
    "fp8 blocks": (fp8_blocks, {"quant_method": "fp8", "weight_block_size": [16, 16]}, "floatbytes16-float32"),
    "fp8 rows": (fp8_rows, {"quant_method": "compressed-tensors"}, "floatbytes128-bfloat16"),
}


#: layout -> metadata of a weight
TORCHAO = {
    "torchao": {
        "_type": "NVFP4Tensor",
        "_data": {"is_swizzled_scales": True, "orig_dtype": {"_type": "torch.dtype", "_data": "bfloat16"}},
    },
    "torchao int4": {"_type": "Int4Tensor", "_data": {"block_size": [1, 32]}},
    "torchao int4 in eights": {"_type": "Int4Tensor", "_data": {"block_size": [1, 8]}},
    "torchao int4 in tiles": {"_type": "Int4TilePackedTo4dTensor", "_data": {"block_size": [1, 32]}},
}


def described(layout, shape):
    """Metadata of a weight in a layout of `TORCHAO`, as in a file's header."""
    kind = TORCHAO[layout]
    return json.dumps({**kind, "_data": {**kind["_data"], "shape": list(shape)}})


def publish(directory, model, layout, names=lambda name: True):
    """Write a model with its projections packed; return the state dict that the files decode to."""
    make, scheme, _ = LAYOUTS[layout]
    tensors, decoded, metadata = {}, {}, {"format": "pt"}
    for name, value in model.state_dict().items():
        if not name.endswith("_proj.weight") or not names(name):
            tensors[name] = decoded[name] = value
            continue
        made, base = make(value), name.removesuffix(".weight")
        tensors |= {base + suffix: tensor.contiguous().clone() for suffix, tensor in made.tensors.items()}
        decoded[name] = made.decoded.to(value.dtype)
        if layout in TORCHAO:
            metadata[name] = described(layout, value.shape)
    save_file(tensors, directory / "model.safetensors", metadata)
    model.config.save_pretrained(directory)
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16", "quantization_config": scheme}))
    return decoded
