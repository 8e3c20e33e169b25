"""Formats of 4-bit and 8-bit codes with a scale and an offset per block."""

from itertools import product

import pytest
import torch
from safetensors import safe_open

from tests.formats import published_offsets
from vbrt.config import FORMATS, load_config
from vbrt.errors import ConfigError, FormatError
from vbrt.formats import cut_blocks, get_format, join_rows, new_page, pack, repack_awq, repack_compressed_int4, unpack
from vbrt.formats.format import Format
from vbrt.formats.published import Repacked, repack_gptq, repack_mlx
from vbrt.saves.published.decode_layouts import decode_compressed_ints, decode_gptq
from vbrt.saves.published.layouts import Outline

NAMES = [name for name, record in FORMATS.items() if record.offsets and not record.base]
#: formats whose products and sums are exact in fp32 but for the last rounding
EXACT = [name for name in NAMES if not name.endswith("float32") and FORMATS[name].offsets != "floatzeros"]


def any_plane(name, shape, dtype=torch.bfloat16):
    """Any fields of a format, in a page."""
    fmt, generator = get_format(name), torch.Generator().manual_seed(0)
    codes, zeros = {4: (256, 16), 8: (32 if name == "superbytes32" else 256, 256)}[fmt.record.bits]
    layout, bytes_below = fmt.layout(shape, dtype), {"codes": codes, "zeros": zeros, "scales": 64, "mins": 64}
    fields = {}
    for field in layout.fields:
        if field.dtype == "uint8":
            below = bytes_below[field.name]
            fields[field.name] = torch.randint(0, below, field.shape, dtype=torch.uint8, generator=generator)
        else:
            fields[field.name] = torch.randn(field.shape, generator=generator).to(getattr(torch, field.dtype))
    return fmt, unpack(pack(fields, layout, new_page(layout)), layout)


def numbers(record, plane):
    """Codes uint8 [N, Kp]."""
    codes = plane["codes"]
    return codes if record.bits == 8 else torch.stack((codes & 15, codes >> 4), dim=-1).flatten(1)


def defined(record, plane, k):
    """Weights by the definition of a format, fp32."""
    spread = {
        name: field.float().repeat_interleave(256 if name in ("d", "dmin") else record.block, dim=1)
        for name, field in plane.items()
        if name != "codes"
    }
    codes = numbers(record, plane).float()
    spread = {name: field[:, : codes.shape[1]] for name, field in spread.items()}
    formulas = {
        "values": lambda: codes * spread["scales"] + spread["offsets"],
        "middles": lambda: (codes - 8) * spread["scales"] + spread["middles"],
        "zeros": lambda: (codes - spread["zeros"]) * spread["scales"],
        "floatzeros": lambda: (codes - spread["zeros"]).to(plane["scales"].dtype).float() * spread["scales"],
        "superblock": lambda: codes * (spread["d"] * spread["scales"]) - spread["dmin"] * spread["mins"],
    }
    return formulas[record.offsets]()[:, :k]


@pytest.mark.parametrize("name", NAMES)
def test_a_weight_is_code_times_scale_plus_offset(name):
    shape = (3, 300)
    fmt, plane = any_plane(name, shape)
    expected = defined(fmt.record, plane, 300)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert torch.equal(fmt.decode(plane, shape, dtype), expected.to(dtype))


@pytest.mark.parametrize("name", EXACT)
def test_block_terms_give_the_decoded_weights_by_one_fused_operation(name):
    fmt, plane = any_plane(name, (3, 256))
    scale, offset = (term.double().repeat_interleave(fmt.block, dim=1) for term in fmt.block_terms(plane))
    codes = numbers(fmt.record, plane).float() + (fmt.levels[0] if fmt.record.bits == 4 else 0)
    assert torch.equal((codes * scale + offset).float(), fmt.decode(plane, (3, 256), torch.float32))


@pytest.mark.parametrize("name", NAMES)
def test_encoding_rounds_a_gaussian_weight_well(name):
    fmt, w = get_format(name), torch.randn(64, 1000, generator=torch.Generator().manual_seed(0)) * 0.02 + 0.005
    plane = fmt.encode(w)
    layout = fmt.layout((64, 1000), w.dtype)
    decoded = fmt.decode(unpack(pack(plane, layout, new_page(layout)), layout), (64, 1000), torch.float32)
    assert 20 * torch.log10(w.norm() / (decoded - w).norm()) > (18 if fmt.block == 128 else 19)


@pytest.mark.parametrize(("name", "dtype"), list(product(NAMES, (torch.float32, torch.bfloat16, torch.float16))))
def test_extreme_weights_stay_finite(name, dtype):
    fmt = get_format(name)
    largest = 0.99 * min(torch.finfo(dtype).max, fmt._reach())
    for w in (torch.zeros(2, 40), torch.full((2, 40), largest), torch.linspace(-largest, largest, 80).view(2, 40)):
        decoded = fmt.decode(fmt.encode(w.to(dtype)), (2, 40), dtype)
        assert decoded.isfinite().all()
        assert ((decoded.double() - w.double()).abs() <= 0.2 * largest * bool(w.any())).all()


@pytest.mark.parametrize(
    "name", ["affine32-float16", "signed64-float16", "zeros128-float16", "superblock32", "superbytes32"]
)
def test_a_weight_beyond_the_scales_is_refused(name):
    with pytest.raises(FormatError, match=r"largest weight is 1e\+30; its scales and offsets reach"):
        get_format(name).encode(torch.full((2, 32), 1e30))


def test_no_config_asks_for_them():
    with pytest.raises(ConfigError, match=r'weights.format = "superblock32"; expected "nvfp4"'):
        load_config("fp4", weights={"format": "superblock32"})


def words(codes, order=tuple(range(8))):
    """int32 [R, C/8] of codes [R, C], nibbles from the lowest in this order of columns."""
    groups = codes.long().view(len(codes), -1, 8)[..., list(order)]
    return (groups << torch.arange(0, 32, 4)).sum(-1).to(torch.int64).to(torch.int32)


def codes_and_scales(n, k, group, dtype):
    generator = torch.Generator().manual_seed(n + k)
    codes_NK = torch.randint(0, 16, (n, k), generator=generator)
    zeros_NG = torch.randint(0, 16, (n, k // group), generator=generator)
    scales_NG = torch.randn(n, k // group, generator=generator).mul(0.01).to(dtype)
    return codes_NK, scales_NG, zeros_NG


CASES = [
    (192, 64, torch.float16, "zeros64-float16"),
    (256, 128, torch.bfloat16, "zeros128-bfloat16"),
    (512, 256, torch.float16, "zeros128-float16"),
    (200, 200, torch.float32, "zeros128-float32"),
    (96, 48, torch.float16, "zeros16-float16"),
]


def check(made, format, codes_NK, scales_NG, zeros_NG, decoded=None):
    """A plane decodes to the definition and to what a layout's decoder gives, in the scales' dtype."""
    k, dtype = codes_NK.shape[1], scales_NG.dtype
    each = k // scales_NG.shape[1]
    zeros, scales = (term.repeat_interleave(each, 1) for term in (zeros_NG, scales_NG))
    expected = (codes_NK - zeros).to(dtype) * scales
    assert (made.format, made.shape) == (format, tuple(codes_NK.shape))
    ours = get_format(format).decode(made.coarse, made.shape, dtype)
    assert torch.equal(ours, expected) and (decoded is None or torch.equal(ours, decoded))
    layout = get_format(format).layout(made.shape, dtype)
    pack(made.coarse, layout, new_page(layout))


@pytest.mark.parametrize(("k", "group", "dtype", "format"), CASES)
def test_awq_decodes_to_its_own_product(k, group, dtype, format):
    codes, scales, zeros = codes_and_scales(24, k, group, dtype)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    files = {"weight": words(codes.t(), order), "scales": scales.t(), "qzeros": words(zeros.t(), order)}
    check(repack_awq(files["weight"], files["scales"], files["qzeros"]), format, codes, scales, zeros)


@pytest.mark.parametrize(("k", "group", "dtype", "format"), CASES)
@pytest.mark.parametrize("stored", ["gptq", "gptq_v2"])
def test_asymmetric_gptq_decodes_to_its_own_product(k, group, dtype, format, stored):
    codes, scales, zeros = codes_and_scales(24, k, group, dtype)
    in_file = zeros - 1 & 15 if stored == "gptq" else zeros
    files = {"weight": words(codes).view(24, -1).t(), "scales": scales.t(), "qzeros": words(in_file.t())}
    made = repack_gptq(
        files["weight"], files["scales"], files["qzeros"], group=group, checkpoint_format=stored, symmetric=False
    )
    more = {"bits": 4, "group": group, "checkpoint_format": stored}
    check(made, format, codes, scales, zeros, decode_gptq(files, Outline((24, k), dtype, more=more)))


@pytest.mark.parametrize(("k", "group", "dtype", "format"), CASES)
@pytest.mark.parametrize("packed", [True, False])
def test_asymmetric_compressed_ints_decode_to_their_own_product(k, group, dtype, format, packed):
    codes, scales, zeros = codes_and_scales(24, k, group, dtype)
    stored = words(zeros.t()).t().contiguous() if packed else (zeros - 8).to(torch.int8)
    files = {"weight": words(codes), "scale": scales, "zero_point": stored}
    made = repack_compressed_int4(files["weight"], scales, (24, k), group=group, weight_zero_point=stored)
    more = {"bits": 4, "group": group}
    check(made, format, codes, scales, zeros, decode_compressed_ints(files, Outline((24, k), dtype, more=more)))


def repacked(library, name, files):
    """The plane of a weight as its library stores it."""
    if library == "autoawq":
        return repack_awq(files["qweight"], files["scales"], files["qzeros"])
    if library == "mlx":
        return repack_mlx(files["weight"], files["scales"], files["biases"])
    if library == "auto_round":
        how = {"group": published_offsets.GROUP, "checkpoint_format": name, "symmetric": False}
        return repack_gptq(files["qweight"], files["scales"], files["qzeros"], **how)
    group = published_offsets.COMPRESSED[name][1] or -1
    zeros, shape = files["weight_zero_point"], tuple(files["weight_shape"].tolist())
    return repack_compressed_int4(
        files["weight_packed"], files["weight_scale"], shape, group=group, weight_zero_point=zeros
    )


@pytest.mark.parametrize(("library", "name"), published_offsets.MAKERS)
def test_a_weight_of_a_library_decodes_to_that_librarys_bits(library, name):
    with safe_open(published_offsets.FILE, "pt") as file:
        head = f"{library}/{name}/"
        files = {key.removeprefix(head): file.get_tensor(key) for key in file.keys() if key.startswith(head)}
    made, expected = repacked(library, name, files), files["decoded"]
    kind, field = ("affine", "offsets") if library == "mlx" else ("zeros", "zeros")
    assert made.format.startswith(kind) and len(made.coarse[field].unique()) > 4
    assert torch.equal(get_format(made.format).decode(made.coarse, made.shape, expected.dtype), expected)


def test_gptq_without_zero_points_has_eights():
    codes, scales, _ = codes_and_scales(16, 64, 32, torch.float16)
    made = repack_gptq(words(codes).t(), scales.t(), group=32, symmetric=False)
    assert made.format == "zeros32-float16" and (made.coarse["zeros"] == 8).all()


WORDS = torch.zeros(64, 2, dtype=torch.int32)


@pytest.mark.parametrize(
    ("repack", "message"),
    [
        (lambda: repack_awq(WORDS, torch.ones(2, 16), WORDS[:1]), "expected int32 .K, N/8."),
        (lambda: repack_awq(WORDS, torch.ones(3, 16), WORDS[:3]), "expected int32"),
        (lambda: repack_awq(WORDS.long(), torch.ones(2, 16), WORDS[:2]), "expected int32"),
        (lambda: repack_awq(WORDS, torch.ones(2, 16) * float("inf"), WORDS[:2]), "block scales hold NaN or Inf"),
        (lambda: repack_awq(WORDS, torch.ones(8, 16), WORDS[:8]), "groups of 8"),
        (
            lambda: repack_compressed_int4(
                WORDS.view(16, 8), torch.ones(16, 2), (16, 64), group=32, weight_zero_point=torch.ones(16, 2)
            ),
            "weight_zero_point torch.float32",
        ),
        (
            lambda: repack_compressed_int4(
                WORDS.view(16, 8),
                torch.ones(16, 2),
                (16, 64),
                group=32,
                weight_zero_point=torch.full((16, 2), 8, dtype=torch.int8),
            ),
            "int8 from -8 to 7",
        ),
    ],
)
def test_tensors_that_do_not_fit_are_refused(repack, message):
    with pytest.raises(FormatError, match=message):
        repack()


@pytest.mark.parametrize("name", ["affine128-bfloat16", "signed128-float32", "zeros64-float16", "superblock32"])
def test_parts_of_other_blocks_are_joined_with_their_bits(name):
    shape = (4, 200)
    fmt, plane = any_plane(name, shape)
    whole = Repacked(name, shape, plane)
    small = whole if name == "superblock32" else cut_blocks(whole, 32)
    joined = join_rows([whole, small])
    decoded = get_format(joined.format).decode(joined.coarse, joined.shape, torch.float32)
    assert get_format(joined.format).block == 32 and joined.shape == (8, 200)
    assert torch.equal(decoded, fmt.decode(plane, shape, torch.float32).repeat(2, 1))


def test_formats_are_records_of_one_interface():
    assert len(NAMES) == 86 and all(isinstance(get_format(name), Format) for name in NAMES)
