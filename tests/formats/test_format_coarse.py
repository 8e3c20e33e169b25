from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from vbrt.errors import FormatError
from vbrt.formats import FORMATS, block_formats, get_format, new_page, pack, unpack
from vbrt.formats.nf4 import NF4_LEVELS
from vbrt.formats.rounding import E2M1_LEVELS, E2M1Rounding, TableRounding, least_error

SCALE_BITS = {"float16": 16, "bfloat16": 16, "float32": 32}
BLOCK_FORMATS = ("nvfp4", "mxfp4", "nf4", "quantile", "mxint8")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
E2M1_SIXTEEN = [6.0, 4.0, 3.0, 2.0, 1.5, 1.0, 0.5, 0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0, -0.0]
E2M1_BYTES = [0x67, 0x45, 0x23, 0x01, 0xA9, 0xCB, 0xED, 0x8F]


def gaussian(*shape, seed=0, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def sqnr_db(w, decoded):
    w, decoded = w.double(), decoded.double()
    return 10 * torch.log10(w.square().sum() / (w - decoded).square().sum()).item()


def round_trip(w, name):
    fmt = get_format(name)
    return fmt.decode(fmt.encode(w), tuple(w.shape), w.dtype)


def same_bytes(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[k].view(torch.uint8), b[k].view(torch.uint8)) for k in a)


# Bytes


def test_nvfp4_bytes_are_those_computed_by_hand():
    t = get_format("nvfp4").encode(torch.tensor([E2M1_SIXTEEN]))
    assert t["codes"].tolist() == [E2M1_BYTES]
    assert t["tensor_scale"].tolist() == [2.0**-8]  # 6 / 4 / 2^-8 = 384, the power of two that lands in (224, 448]
    assert t["scales"].view(torch.uint8).tolist() == [[0x78]]  # 256 in E4M3: exponent 8 + bias 7 = 15, mantissa 0


def test_mxfp4_bytes_are_those_computed_by_hand():
    w = torch.tensor([E2M1_SIXTEEN * 2, [x / 8 for x in E2M1_SIXTEEN * 2]])
    t = get_format("mxfp4").encode(w)
    assert t["codes"].tolist() == [E2M1_BYTES * 2] * 2
    assert t["scales"].tolist() == [[127], [124]]


def test_mxint8_bytes_are_those_computed_by_hand():
    row = [127.0, -127.0, 1.0, -1.0, 0.5, 1.5, 0.0, 2.5] * 4
    fmt = get_format("mxint8")
    t = fmt.encode(torch.tensor([row, [x / 8 for x in row], [0.0] * 32]))
    assert t["codes"].tolist() == [[127, -127, 1, -1, 0, 2, 0, 2] * 4] * 2 + [[0] * 32]
    assert t["scales"].tolist()[:2] == [[133], [130]]  # 2^6 / 64 = 1, and an eighth
    t["codes"][0, 0] = -128  # which others may write
    assert fmt.decode(t, (3, 32), torch.float32)[0, :4].tolist() == [-128, -127, 1, -1]


def test_nf4_bytes_are_those_computed_by_hand():
    t = get_format("nf4").encode(torch.tensor([NF4_LEVELS * 4]))
    assert t["codes"].tolist() == [[0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE] * 4]
    assert t["tensor_scale"].tolist() == [2.0**-7]
    assert t["scales"].tolist() == [[(7 + 7) << 4]]  # 1 / 2^-7 = 2^7


def test_quantile_decodes_bytes_by_its_own_levels():
    levels = torch.arange(1, 9) / 8
    codes = torch.tensor([[0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE] * 4], dtype=torch.uint8)
    scales = torch.tensor([[7 << 4]], dtype=torch.uint8)
    coarse = {"codes": codes, "scales": scales, "levels": levels, "tensor_scale": torch.ones(1)}
    decoded = get_format("quantile").decode(coarse, (1, 64), torch.float32)
    assert torch.equal(decoded, torch.cat((levels, -levels)).repeat(4)[None])


def test_layouts_hold_the_advertised_bits_a_weight():
    shape, size = (4096, 4096), 4096 * 4096
    bits = {name: get_format(name).layout(shape, torch.bfloat16).nbytes * 8 / size for name in FORMATS}
    groups = list(product((16, 32, 64, 128), SCALE_BITS.items()))
    levels = {f"levels{b}-{s}": 4 + size / b for b, (s, size) in groups}
    levels |= {f"symmetric{b}-{s}": 4 + size / b for b, (s, size) in groups}
    affine = {f"{kind}{b}-{s}": 4 + 2 * size / b for kind in ("affine", "signed") for b, (s, size) in groups}
    zeros = {f"zeros{b}-{s}": 4 + (size + 8) / b for b, (s, size) in groups}
    zeros |= {f"floatzeros{b}-{s}": 4 + 2 * size / b for b, (s, size) in groups}
    own = {"nvfp4": 4.5, "mxfp4": 4.25, "nf4": 4.125, "quantile": 4.125, "mxint8": 8.25, "t3": 3.0625, "dense": 16}
    own |= {"superblock32": 4.625, "superbytes32": 8.625, "superbytes16": 8.5625, "unitbytes128": 8.25}
    eight = {f"{kind}{b}-{s}": 8 + size / b for kind in ("bytes", "floatbytes") for b, (s, size) in groups}
    eight |= {f"offsetbytes{b}-{s}": 8 + 2 * size / b for b, (s, size) in groups}
    eight |= {f"floatzerobytes{b}-{s}": 8 + 2 * size / b for b, (s, size) in groups}
    eight |= {f"zerobytes{b}-{s}": 8 + (size + 8) / b for b, (s, size) in groups}
    expected = own | levels | affine | zeros | eight
    ordered = {name: expected[record.base] + 32 / 4096 for name, record in FORMATS.items() if record.base}
    assert bits == pytest.approx(expected | ordered, abs=0.005)


def test_ue4m4_bytes_are_a_logarithmic_ladder_with_a_zero():
    values = block_formats.ue4m4_values(torch.device("cpu"))
    assert values[0] == 0 and values[7 << 4] == 1 and values[(8 << 4) + 8] == 3 and values[255] == 496
    fmt = get_format("nf4")
    between = torch.lerp(values[1:-1], values[2:], 0.6)  # nearer to the upper one
    assert torch.equal(fmt._near_byte(values[1:]), torch.arange(1, 256, dtype=torch.int32))
    assert torch.equal(fmt._near_byte(between), torch.arange(2, 256, dtype=torch.int32))


# Rounding and the scale search


def test_e2m1_ties_go_to_the_even_code_and_large_values_saturate():
    x = torch.tensor([[0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 7.0, 100.0, -0.25, -5.0, -0.0]]).T
    codes = E2M1Rounding(x).codes(torch.ones(1)).squeeze(1)
    assert codes.tolist() == [0, 2, 2, 4, 4, 6, 6, 7, 7, 8, 14, 8]


def test_e2m1_error_by_splitting_is_the_error_by_exhaustive_search():
    x = torch.cat((gaussian(16, 500) * 3, torch.tensor(E2M1_LEVELS)[:, None]), dim=1)
    scale = torch.rand(501, generator=torch.Generator().manual_seed(1)) + 0.5
    scale[-1] = 1.0
    error = torch.empty(501)
    E2M1Rounding(x).squared_error(scale, error)
    distance = (x / scale)[..., None] - torch.tensor(E2M1_LEVELS)
    torch.testing.assert_close(error, distance.square().amin(-1).sum(0), rtol=1e-4, atol=1e-9)
    assert error[-1] == 0


def test_table_error_orders_scales_like_the_exhaustive_one():
    level = torch.tensor(NF4_LEVELS)
    x = gaussian(64, 300) / 3
    scale, error = torch.full((300,), 0.9), torch.empty(300)
    rounding = TableRounding(x, level, TableRounding.cells(level))
    rounding.squared_error(scale, error)
    distance = (x / scale)[..., None] - level
    torch.testing.assert_close(error / 2048**2, distance.square().amin(-1).sum(0), rtol=1e-3, atol=1e-5)
    assert torch.equal(rounding.codes(scale), distance.abs().argmin(-1).float())


def test_the_search_takes_the_scale_with_the_least_error_in_weight_units():
    x = gaussian(16, 400)
    scales = torch.linspace(0.2, 0.8, 13)[:, None].expand(-1, 400).contiguous()
    pick = least_error(E2M1Rounding(x), scales)
    q = torch.tensor(E2M1_LEVELS)[((x / scales[:, None])[..., None] - torch.tensor(E2M1_LEVELS)).abs().argmin(-1)]
    error = (x - q * scales[:, None]).square().sum(1)
    assert pick.dtype == torch.int32
    torch.testing.assert_close(error.gather(0, pick.long()[None])[0], error.amin(0), rtol=1e-4, atol=0)


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_every_code_is_the_level_nearest_to_its_weight(name):
    w = gaussian(8, 256)
    fmt = get_format(name)
    coarse = fmt.encode(w)
    decoded = fmt.decode(coarse, (8, 256), torch.float32)
    every = [code * 17 for code in range(16)] if fmt.record.bits == 4 else range(-127, 128)
    uniform = [coarse | {"codes": torch.full_like(coarse["codes"], code)} for code in every]
    every = torch.stack([fmt.decode(planes, (8, 256), torch.float32) for planes in uniform])
    assert torch.equal((w - decoded).abs(), (w - every).abs().amin(0))


@pytest.mark.sample(5)
@pytest.mark.parametrize(
    ("name", "floor_db"), [("nvfp4", 21.6), ("mxfp4", 18.9), ("nf4", 21.2), ("quantile", 21.4), ("mxint8", 41.3)]
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_gaussian_weights_keep_their_signal_to_noise_ratio(name, floor_db, dtype):
    w = gaussian(512, 1024, dtype=dtype)
    assert sqnr_db(w, round_trip(w, name)) >= floor_db


@pytest.mark.parametrize("name", BLOCK_FORMATS)
@pytest.mark.parametrize("scale", [1e-30, 1e-4, 1.0, 1e30])
def test_quality_does_not_depend_on_the_magnitude(name, scale):
    w = gaussian(64, 256)
    reference = sqnr_db(w, round_trip(w, name))
    octave = 1.2 if name == "mxint8" else 0.15  # where in an octave weights end counts for it
    assert sqnr_db(w * scale, round_trip(w * scale, name)) == pytest.approx(reference, abs=octave)


# The identity on values


@settings(deadline=None, max_examples=60)
@given(
    st.integers(0, 10_000), st.integers(1, 5), st.integers(1, 70), st.floats(-30, 30), st.floats(0, 8), st.booleans(),
    st.sampled_from(["nvfp4", "mxfp4", "mxint8"]), st.sampled_from(DTYPES[:2]),
)  # fmt: skip
def test_a_second_encode_changes_no_value(seed, n, k, exponent, spread, sparse, name, dtype):
    g = torch.Generator().manual_seed(seed)
    w = torch.randn(n, k, generator=g) * 2 ** (exponent + spread * torch.randn(n, k, generator=g))
    if sparse:
        w *= torch.rand(n, k, generator=g) < 0.2
    fmt = get_format(name)
    coarse = fmt.encode(w.to(dtype))
    once = fmt.decode(coarse, (n, k), dtype)
    changed = round_trip(once, name) != once
    # E4M3's lowest scales have few steps: the search around a block's largest weight may not come back to the first one
    lowest = (coarse["scales"].view(torch.uint8) < 16) & (name == "nvfp4")
    assert not changed[~lowest.repeat_interleave(fmt.block, 1)[:, :k]].any()


@pytest.mark.parametrize("name", ["nvfp4", "mxfp4", "mxint8"])
def test_decoded_weights_are_exact_in_bf16(name):
    fmt = get_format(name)
    w = gaussian(64, 512)
    coarse = fmt.encode(w)
    exact = fmt.decode(coarse, (64, 512), torch.float32)
    assert torch.equal(fmt.decode(coarse, (64, 512), torch.bfloat16).float(), exact)


def test_nvfp4_decodes_any_fp32_tensor_scale():
    fmt = get_format("nvfp4")
    coarse = fmt.encode(gaussian(4, 64)) | {"tensor_scale": torch.tensor([0.0123456])}
    code = torch.stack((coarse["codes"] & 15, coarse["codes"] >> 4), -1).flatten(1).long()
    scale = (coarse["scales"].float() * coarse["tensor_scale"]).repeat_interleave(16, 1)
    assert torch.equal(fmt.decode(coarse, (4, 64), torch.float32), torch.tensor(E2M1_LEVELS)[code] * scale)


# Shapes and extremes


@pytest.mark.parametrize("name", BLOCK_FORMATS)
@pytest.mark.parametrize("shape", [(1, 1), (1, 16), (3, 17), (7, 1), (5, 64), (2, 100), (1, 5000), (300, 33)])
def test_any_shape_is_padded_packed_and_cut_back(name, shape):
    fmt = get_format(name)
    w = gaussian(*shape)
    layout = fmt.layout(shape, w.dtype)
    coarse = unpack(pack(fmt.encode(w), layout, new_page(layout)), layout)
    decoded = fmt.decode(coarse, shape, torch.float32)
    assert decoded.shape == shape and decoded.is_contiguous()
    assert ((decoded - w).abs() <= 0.26 * w.abs().amax()).all()


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_tiles_leave_no_trace(name, monkeypatch):
    fmt = get_format(name)
    w = gaussian(37, 333, dtype=torch.bfloat16)
    levels = {"levels": fmt.fit(w)} if name == "quantile" else {}
    whole = fmt.encode(w, **levels)
    decoded = fmt.decode(whole, (37, 333), torch.bfloat16)
    monkeypatch.setattr(block_formats, "encode_tile", lambda device: 130)
    monkeypatch.setattr(block_formats, "decode_tile", lambda device: 130)
    assert same_bytes(fmt.encode(w, **levels), whole)
    assert torch.equal(fmt.decode(whole, (37, 333), torch.bfloat16), decoded)


@pytest.mark.parametrize("threads", [1, 2])
def test_any_number_of_threads_gives_the_same_bytes(threads):
    fmt = get_format("nvfp4")
    w = gaussian(70, 1024)
    whole, before = fmt.encode(w), torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with torch.inference_mode():
            assert same_bytes(fmt.encode(w), whole)
    finally:
        torch.set_num_threads(before)


def test_an_error_in_a_tile_is_raised(monkeypatch):
    def fail(*args, **kwargs):
        raise MemoryError("tile")

    fmt = get_format("nvfp4")
    monkeypatch.setattr(type(fmt), "_search", fail)
    with pytest.raises(MemoryError, match="tile"):
        fmt.encode(gaussian(70, 1024))


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_a_transposed_weight_encodes_like_its_copy(name):
    w = gaussian(96, 40).T
    assert same_bytes(get_format(name).encode(w), get_format(name).encode(w.contiguous()))


@pytest.mark.parametrize("name", BLOCK_FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_zero_weights_and_zero_rows_stay_zero(name, dtype):
    assert not round_trip(torch.zeros(3, 100, dtype=dtype), name).any()
    w = gaussian(4, 128, dtype=dtype)
    w[1] = 0
    w[2, 64:] = 0
    decoded = round_trip(w, name)
    assert not decoded[1].any() and not decoded[2, 64:].any() and decoded[0].any()


@pytest.mark.parametrize("name", BLOCK_FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_largest_magnitudes_stay_finite_and_close(name, dtype):
    limit = torch.finfo(dtype).max
    w = (torch.rand(16, 128, generator=torch.Generator().manual_seed(0)) * 2 - 1).mul_(limit).to(dtype)
    w[:, 0] = limit
    w[:, 64] = -limit
    decoded = round_trip(w, name)
    assert torch.isfinite(decoded).all()
    assert sqnr_db(w.double() / limit, decoded.double() / limit) > 14


@pytest.mark.parametrize("name", BLOCK_FORMATS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_the_smallest_magnitudes_round_without_blowing_up(name, dtype):
    tiny = torch.finfo(dtype).smallest_normal
    w = gaussian(8, 128).mul_(tiny).to(dtype)
    decoded = round_trip(w, name)
    assert torch.isfinite(decoded).all() and decoded.abs().amax() <= 1.3 * w.abs().amax()
    assert sqnr_db(w.double() / tiny, decoded.double() / tiny) > 14
    subnormal = (w.double() / 64).to(dtype)
    assert round_trip(subnormal, name).abs().amax() <= 2 * subnormal.abs().amax()


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_a_block_far_below_the_largest_fades_to_zero_not_to_noise(name):
    w = gaussian(2, 64)
    w[1] *= 2.0**-90
    decoded = round_trip(w, name)
    assert not decoded[1].any()


# Refusals


@pytest.mark.parametrize("name", BLOCK_FORMATS)
def test_nan_and_inf_are_refused_and_counted(name):
    w = gaussian(4, 40, dtype=torch.bfloat16)
    w[0, :3] = float("nan")
    w[1, :2] = float("-inf")
    with pytest.raises(FormatError, match=r"\(4, 40\) holds 3 NaN and 2 Inf"):
        get_format(name).encode(w)
    w[0, :3] = 0
    with pytest.raises(FormatError, match="0 NaN and 2 Inf"):
        get_format(name).encode(w)


@pytest.mark.parametrize("name", BLOCK_FORMATS)
@pytest.mark.parametrize(
    ("weight", "message"),
    [
        (torch.zeros(2, 2, dtype=torch.float64), "float64"),
        (torch.zeros(2, 2, dtype=torch.int8), "int8"),
        (torch.zeros(4), r"\(4,\)"),
        (torch.zeros(2, 2, 2), r"\(2, 2, 2\)"),
        (torch.zeros(0, 4), r"\(0, 4\)"),
    ],
)
def test_other_dtypes_and_ranks_are_refused(name, weight, message):
    with pytest.raises(FormatError, match=message):
        get_format(name).encode(weight)


def test_an_unknown_format_is_refused_with_the_known_ones():
    with pytest.raises(FormatError, match="'fp5'; expected one of nvfp4, mxfp4, nf4, quantile, mxint8, t3, dense"):
        get_format("fp5")


def test_dense_is_the_very_weight():
    fmt = get_format("dense")
    w = gaussian(3, 5, dtype=torch.bfloat16).requires_grad_()
    coarse = fmt.encode(w)
    assert coarse["weight"].data_ptr() == w.data_ptr() and not coarse["weight"].requires_grad
    assert fmt.decode(coarse, (3, 5), torch.bfloat16) is coarse["weight"]
    assert fmt.layout((3, 5), torch.bfloat16).fields[0].dtype == "bfloat16"
    assert fmt.layout((3, 5), torch.bfloat16).plane == "dense"


def test_encoding_a_parameter_records_no_graph():
    w = torch.nn.Parameter(gaussian(4, 64))
    for name in BLOCK_FORMATS:
        assert not any(t.requires_grad for t in get_format(name).encode(w).values())


@pytest.mark.parametrize("name", [record.name for record in FORMATS.values() if record.noise])
def test_a_record_says_what_rounding_leaves_in_normal_weights(name):
    w = torch.randn(256, 1024) * 0.02 * 2 ** (torch.arange(256) % 8 / 8).unsqueeze(1)  # all places in an octave
    fmt = get_format(name)
    error = (fmt.decode(fmt.encode(w), w.shape, torch.float32) - w).norm() / w.norm()
    assert error.item() == pytest.approx(FORMATS[name].noise, rel=0.03)
