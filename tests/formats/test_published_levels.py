"""Published weights of 16 levels decode to the bits that the libraries that made them decode."""

import json
from functools import cache

import pytest
import torch
from safetensors.torch import load_file

from tests.formats.published_weights import BITSANDBYTES, COMPRESSED, FILE, MAKERS
from tests.saves.published.published_files import words
from vbrt.errors import FormatError
from vbrt.formats import (
    Nested,
    cut_blocks,
    get_format,
    join_rows,
    levels_format,
    new_page,
    pack,
    repack_bitsandbytes,
    repack_compressed_int4,
    repack_gguf,
    repack_gptq,
    unpack,
)


@cache
def committed():
    return load_file(FILE)


def repacked(library, name, files):
    """The plane of a weight as its library stores it."""
    if library == "auto_round":
        return repack_gptq(files["qweight"], files["scales"], files["qzeros"], group=32, checkpoint_format=name)
    if library == "gguf":
        return repack_gguf(files["blocks"], tuple(files["decoded"].shape), name)
    if library == "compressed_tensors":
        shape = tuple(files["weight_shape"].tolist())
        return repack_compressed_int4(
            files["weight_packed"], files["weight_scale"], shape, group=COMPRESSED[name][1] or -1
        )
    state = json.loads(bytes(files[f"quant_state.bitsandbytes__{BITSANDBYTES[name][0]}"].tolist()))
    nested = None
    if "nested_offset" in state:
        nested = Nested(
            files["nested_absmax"], files["nested_quant_map"], state["nested_blocksize"], state["nested_offset"]
        )
    return repack_bitsandbytes(
        files["weight"],
        files["absmax"],
        files["quant_map"],
        tuple(state["shape"]),
        blocksize=state["blocksize"],
        nested=nested,
    )


def check(library, name, files):
    made, expected = repacked(library, name, files), files["decoded"]
    fmt = get_format(made.format)
    layout = fmt.layout(made.shape, expected.dtype)
    pack(made.coarse, layout, new_page(layout))  # the very tensors of the format's page
    assert torch.equal(fmt.decode(made.coarse, made.shape, expected.dtype), expected)
    return made


@pytest.mark.parametrize(("library", "name"), MAKERS)
def test_a_committed_weight_decodes_to_its_librarys_bits(library, name):
    head = f"{library}/{name}/"
    files = {key.removeprefix(head): tensor for key, tensor in committed().items() if key.startswith(head)}
    made = check(library, name, files)
    scales = made.coarse["scales"].dtype
    flat = {"flat": True} if library == "bitsandbytes" else {}
    kind = "levels" if library == "bitsandbytes" or name == "IQ4_NL" else "symmetric"
    group = (
        {"gguf": 32, "auto_round": 32, "bitsandbytes": BITSANDBYTES.get(name, (0, 0))[1]}.get(library)
        or COMPRESSED[name][1]
        or -1
    )
    assert made.format == levels_format(made.shape[1], group, scales, **flat, kind=kind)


@pytest.mark.parametrize(("library", "name"), MAKERS)
def test_a_weight_of_the_installed_library_decodes_to_its_bits(library, name):
    pytest.importorskip(library)
    check(library, name, MAKERS[library, name](name))


def gptq(n, k, group, stored_zero=7):
    """(qweight, scales, qzeros, codes [K, N]) by GPTQ's documented layout."""
    generator = torch.Generator().manual_seed(0)
    codes_KN = torch.randint(0, 16, (k, n), generator=generator)
    groups = -(-k // group)
    word = (codes_KN.view(k // 8, 8, n) << torch.arange(0, 32, 4).view(1, 8, 1)).sum(1)
    qweight = torch.where(word >= 1 << 31, word - (1 << 32), word).to(torch.int32)
    zero = sum(stored_zero << 4 * place for place in range(8))
    qzeros = torch.full((groups, n // 8), zero - (1 << 32) if zero >= 1 << 31 else zero, dtype=torch.int32)
    return qweight, (torch.rand(groups, n, generator=generator) * 0.01).half(), qzeros, codes_KN


@pytest.mark.parametrize(
    ("k", "group", "stored", "format"),
    [
        (192, 64, ("gptq", 7), "symmetric64-float16"),
        (200, 128, ("gptq_v2", 8), "symmetric128-float16"),
        (512, 256, ("gptq", 7), "symmetric128-float16"),
        (200, -1, ("gptq", 7), "symmetric128-float16"),
        (96, 48, ("gptq", 7), "symmetric16-float16"),
    ],
)
def test_symmetric_gptq_decodes_to_its_own_product_in_fp16(k, group, stored, format):
    qweight, scales, qzeros, codes_KN = gptq(16, k, k if group == -1 else group, stored[1])
    g_idx = torch.arange(k, dtype=torch.int32) // (k if group == -1 else group)
    made = repack_gptq(qweight, scales, qzeros, g_idx, group=group, checkpoint_format=stored[0])
    expected = (scales[g_idx] * (codes_KN - 8).half()).t()  # as AutoGPTQ and GPTQModel dequantize
    assert made.format == format and made.shape == (16, k)
    assert torch.equal(get_format(format).decode(made.coarse, made.shape, torch.float16), expected)


@pytest.mark.parametrize(("k", "group", "block"), [(192, 64, 64), (512, 256, 128), (200, 64, 64), (200, 128, 128)])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("symmetric", [True, False])
def test_act_order_gives_each_column_the_scale_and_zero_point_of_its_group(k, group, block, bits, symmetric):
    zero = (1 << bits - 1) if symmetric else 3
    generator = torch.Generator().manual_seed(1)
    codes_KN = torch.randint(0, 1 << bits, (k, 16), generator=generator)
    g_idx = (torch.arange(k, dtype=torch.int32) // group)[torch.randperm(k, generator=generator)]
    scales = (torch.rand(-(-k // group), 16, generator=generator) * 0.01).half()
    each = tuple(range(32 // bits))
    qzeros = words(torch.full((len(scales), 16), zero - 1), 1, each)
    made = repack_gptq(words(codes_KN, 0, each), scales, qzeros, g_idx, group=group, symmetric=symmetric, bits=bits)
    kind = {4: ("zeros", "symmetric"), 8: ("zerobytes", "bytes")}[bits][symmetric]
    assert made.format == f"{kind}{block}-float16-ordered"
    expected = (scales[g_idx] * (codes_KN - zero).half()).t()
    fmt = get_format(made.format)
    page = pack(made.coarse, fmt.layout(made.shape, torch.float16), new_page(fmt.layout(made.shape, torch.float16)))
    fields = unpack(page, fmt.layout(made.shape, torch.float16))
    assert torch.equal(fmt.decode(fields, made.shape, torch.float16), expected)
    plain = repack_gptq(
        words(codes_KN, 0, each), scales, qzeros, g_idx.sort().values, group=group, symmetric=symmetric, bits=bits
    )
    assert plain.format == f"{kind}{block}-float16"


def change(at, value):
    tensors = list(gptq(16, 64, 32))[:3]
    tensors[at] = value(tensors[at])
    return tensors


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (change(2, lambda zeros: zeros + 1), r"zero points are not all 8.*'gptq' files"),
        (change(2, lambda zeros: zeros[:1]), "qzeros .*expected int32"),
        (change(1, lambda scales: scales[:1]), "qzeros"),
        ([*gptq(16, 64, 32)[:1], torch.ones(1, 16).half(), None], "scales of .16, 1. .*expected .16, 2."),
        (change(1, lambda scales: scales * float("nan")), "hold NaN"),
        (change(0, lambda words: words.long()), "expected int32"),
        ([*gptq(16, 64, 32)[:3], torch.arange(64) // 40], r"groups of other sizes than 32.*act-order"),
        ([*gptq(16, 64, 32)[:3], torch.arange(60).flip(0) // 32], r"g_idx \(60,\)"),
    ],
)
def test_gptq_tensors_that_do_not_fit_are_refused(tensors, message):
    with pytest.raises(FormatError, match=message):
        repack_gptq(*tensors, group=32)


BYTES = torch.zeros(64, dtype=torch.uint8)
LEVELS = torch.linspace(-1, 1, 16)


@pytest.mark.parametrize(
    ("repack", "message"),
    [
        (lambda: repack_bitsandbytes(BYTES, torch.ones(3), LEVELS, (2, 64)), "3 scales; expected one for each 64"),
        (lambda: repack_bitsandbytes(BYTES, torch.ones(2), LEVELS, (2, 63)), "bytes of codes"),
        (lambda: repack_bitsandbytes(BYTES, torch.ones(2), LEVELS[:8], (2, 64)), "8 levels"),
        (lambda: repack_bitsandbytes(BYTES, torch.ones(2), LEVELS, (16, 8)), "blocks of 16 weights"),
        (lambda: repack_bitsandbytes(BYTES, BYTES, LEVELS, (2, 64), nested=Nested(LEVELS, LEVELS, 256, 0.0)), "256"),
        (lambda: repack_bitsandbytes(BYTES, torch.ones(2), LEVELS, (2, 8, 8)), "expected .N, K."),
        (lambda: repack_gguf(BYTES, (0, 64), "Q4_0"), "at least one weight"),
        (lambda: repack_gguf(BYTES, (2, 64), "Q8_1"), "'Q8_1'; expected one of Q4_0, Q4_1, Q4_K, IQ4_NL"),
        (lambda: repack_gguf(BYTES, (2, 64), "Q4_0"), "18 bytes"),
        (lambda: repack_compressed_int4(BYTES, LEVELS, (2, 64), group=32), "expected int32 .2, 8."),
        (lambda: repack_compressed_int4(BYTES.view(2, 32).view(torch.int32), LEVELS, (2, 64), group=32), "expected"),
        (lambda: levels_format(64, 8, torch.float16), "groups of 8"),
        (lambda: levels_format(64, 32, torch.float64), "float64"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(repack, message):
    with pytest.raises(FormatError, match=message):
        repack()


def test_parts_of_other_blocks_are_joined_with_their_bits():
    parts = [repack_gptq(*gptq(16, 200, group)[:2], group=group) for group in (128, 32)]
    joined = join_rows(parts)
    assert (joined.format, joined.shape) == ("symmetric32-float16", (32, 200))
    one, two = (get_format(part.format).decode(part.coarse, part.shape, torch.float16) for part in parts)
    decoded = get_format(joined.format).decode(joined.coarse, joined.shape, torch.float16)
    assert torch.equal(decoded, torch.cat((one, two)))
    with pytest.raises(FormatError, match="one dtype of scales"):
        join_rows([parts[0], repack_gguf(torch.zeros(4 * 8 * 18, dtype=torch.uint8), (4, 256), "IQ4_NL")])
    with pytest.raises(FormatError, match=r"blocks of 64; expected .*, at most 32"):
        cut_blocks(parts[1], 64)
