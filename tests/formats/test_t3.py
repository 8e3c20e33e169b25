"""The trellis-coded format: its bits and their order, how near it comes, and what holds exactly."""

import pytest
import torch
import torch.nn.functional as F

from vbrt.errors import FormatError
from vbrt.formats import get_format, new_page, pack, t3, unpack
from vbrt.formats.error_feedback import compensated, moments_of
from vbrt.kernels.cpu import build
from vbrt.kernels.cpu.trellis import codec

CPU = torch.device("cpu")
FORMAT = get_format("t3")
#: the encoder that models are wrapped with; the reference where there is no compiler
ENCODER = codec(FORMAT)
#: of the first columns
SIGNS = [-1, 1, -1, -1, -1, 1, 1, -1, -1, 1, 1, -1, 1, -1, -1, 1]
SHAPES = [(16, 64), (40, 100), (33, 192), (16, 256), (1, 1)]


def gaussian(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def random_plane(n, k, seed=0):
    made = torch.Generator().manual_seed(seed)
    fields = {f.name: f.shape for f in FORMAT.layout((n, k), torch.float32).fields}
    codes = torch.randint(-(1 << 31), 1 << 31, fields["codes"], generator=made, dtype=torch.int64).int()
    scales = torch.randint(100, 140, fields["scales"], generator=made, dtype=torch.uint8)
    columns = 2 * torch.randint(40, 70, fields["columns"], generator=made, dtype=torch.uint8)
    return {"codes": codes, "scales": scales, "columns": columns, "tensor_scale": torch.full((1,), 0.5)}


def sqnr_db(w, decoded):
    return 10 * torch.log10(w.double().square().sum() / (w.double() - decoded.double()).square().sum()).item()


def states_by_hand(stream, tile_bits=768):
    """The 14 bits that end with each pair's six, of a closed stream of bits."""
    bits = [int(bit) for bit in stream]
    return [int("".join(str(bits[(6 * pair + i) % tile_bits]) for i in range(-8, 6)), 2) for pair in range(128)]


def value_by_hand(state):
    """From the codebook's definition: the fields of bf16 in both halves of two words, added."""
    hashed = (state * 0x9E3779B1 + 64248484) % 2**32
    pair = [0.0, 0.0]
    for word in (hashed, hashed * 32 % 2**32):
        for half in (0, 1):
            bits = (word >> 16 * half & 0x81F0) ^ 0x3F80
            exponent, mantissa = (bits >> 7 & 0xFF) - 127, 1 + (bits & 0x7F) / 128
            pair[half] += (-1 if bits >> 15 else 1) * mantissa * 2.0**exponent
    return pair


# bits


def test_values_are_those_computed_by_hand_and_whole_numbers_of_64ths():
    table = t3.codebook(CPU)
    for state in (0, 1, 63, 64, 9999, 16383):
        assert table[state].tolist() == value_by_hand(state)
    assert torch.equal(table * 64, (table * 64).round()) and table.abs().max() < 4
    assert torch.equal(table.bfloat16().float(), table)


def test_words_are_in_the_order_of_lanes():
    """Bits set one by one, at the place that the module's description gives."""
    for bit in (0, 7, 8, 23, 24, 24 * 31, 767):
        lane, inside = divmod(bit, 24)
        for tile in range(4):
            codes = torch.zeros(1, 3, 32, dtype=torch.int64)
            value = 1 << (23 - inside)  # of the lane's 24 bits, the first is the highest
            codes[0, 0, lane] |= (value & 0xFF) << 8 * tile
            codes[0, 1 + tile // 2, lane] |= (value >> 8) << 16 * (tile % 2)
            codes = torch.where(codes >= 1 << 31, codes - (1 << 32), codes).int().view(1, 96)
            states = t3._unpack(codes)
            stream = ["0"] * 768
            stream[bit] = "1"
            assert states[tile].tolist() == states_by_hand(stream)
            assert not states[[other for other in range(4) if other != tile]].any()
            assert torch.equal(t3._pack(states.int(), 1), codes)


def test_pairs_of_a_tile_lie_where_a_warp_has_them():
    where = t3._tiles_of(torch.arange(16 * 64).view(16, 64).float())
    for lane in (0, 5, 31):
        g, t = divmod(lane, 4)
        rows = [g, g + 8, g, g + 8]
        columns = [2 * t, 2 * t, 2 * t + 8, 2 * t + 8]
        for tile in (0, 3):
            first = [64 * row + column + 16 * tile for row, column in zip(rows, columns, strict=True)]
            assert where[tile, 4 * lane : 4 * lane + 4].tolist() == [[at, at + 1] for at in first]
    assert torch.equal(t3._rows_of(where, 1), torch.arange(16 * 64).view(16, 64).float())


@pytest.mark.parametrize("k", [64, 100, 128, 192, 256])
def test_a_plane_takes_3_bits_and_a_byte_for_each_block(k):
    layout, kp = FORMAT.layout((40, k), torch.bfloat16), -(-k // 64) * 64
    assert sum(f.nbytes for f in layout.fields) == 48 * kp * 3 // 8 + 40 * kp // t3.block_of(k) + kp + 4
    plane = random_plane(40, k)
    again = unpack(pack(plane, layout, new_page(layout)), layout)
    assert all(torch.equal(again[name], plane[name]) for name in plane)


def test_large_layers_take_3_06_bits_and_others_3_13():
    shapes = {(4096, 4096): 3.0625, (4096, 2880): 3.125, (14336, 4096): 3.0625}
    for (n, k), bits in shapes.items():
        assert FORMAT.layout((n, k), torch.bfloat16).nbytes * 8 / (n * k) == pytest.approx(bits, abs=0.005)


# decoding


@pytest.mark.parametrize("shape", SHAPES)
def test_a_decoded_weight_is_exact_before_it_is_rounded(shape):
    """In fp64, by the matrix of the rotation as a whole, from values found one by one."""
    n, k = shape
    plane, block = random_plane(n, k), t3.block_of(k)
    rotated = FORMAT.rotated_weight(plane, shape).double()
    hadamard = torch.ones(1, 1, dtype=torch.float64)
    for _ in range(block.bit_length() - 1):
        hadamard = torch.kron(torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64), hadamard)
    signs = t3.rotate(torch.eye(block))[:, 0].sign().double()
    exact = ((rotated.view(n, -1, block) @ hadamard) * signs).view(n, -1) * 8 / block
    exact = (exact * t3.column_values(plane["columns"]).double())[:, :k]
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        assert torch.equal(FORMAT.decode(plane, shape, dtype), exact.float().to(dtype))


def test_signs_are_mixed_and_never_change():
    signs = t3.rotate(torch.eye(128))[:, 0].sign().int().tolist()
    assert signs[:16] == SIGNS and 40 < signs.count(1) < 88


@pytest.mark.parametrize("shape", SHAPES)
def test_a_product_with_rotated_inputs_is_the_product(shape):
    plane, x = random_plane(*shape), gaussian(5, shape[1], seed=3)
    expected = F.linear(x.double(), FORMAT.decode(plane, shape, torch.float32).double())
    given = F.linear(t3.rotate_input(x, plane["columns"]).double(), FORMAT.rotated_weight(plane, shape).double())
    torch.testing.assert_close(given, expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item())


def test_weights_near_the_largest_number_stay_finite():
    w = torch.full((16, 64), 65504.0, dtype=torch.float16)
    w[::2, ::3] = -65504
    assert FORMAT.decode(ENCODER.encode(w), (16, 64), torch.float16).isfinite().all()
    tiny = gaussian(16, 64) * 1e-38
    assert FORMAT.decode(ENCODER.encode(tiny), (16, 64), torch.float32).isfinite().all()


# encoding


def test_normal_weights_come_within_16_8_db():
    w = gaussian(256, 512)
    assert sqnr_db(w, FORMAT.decode(ENCODER.encode(w), (256, 512), torch.float32)) > 16.95
    skewed = gaussian(64, 256, seed=1).pow(3)  # heavy tails, which the rotation takes away
    assert sqnr_db(skewed, FORMAT.decode(ENCODER.encode(skewed), (64, 256), torch.float32)) > 16.5


@pytest.mark.parametrize("path", [t3.trellis_path, ENCODER.path], ids=["reference", "C"])
def test_weights_on_a_path_are_found_exactly(path):
    """decode(encode(grid)) = grid: a closed path has no error, and the encoder finds it."""
    states = t3._unpack(random_plane(16, 256)["codes"])
    value = t3.codebook(CPU)[states]
    found = path(value)
    assert torch.equal(t3.codebook(CPU)[found.long()], value)
    assert torch.equal(found[:, 1:] >> 6, found[:, :-1] & 0xFF) and torch.equal(found[:, 0] >> 6, found[:, -1] & 0xFF)


@pytest.mark.skipif(build.refusal(CPU, "trellis") is not None, reason="no C compiler")
def test_paths_in_c_lose_what_the_reference_loses():
    x = gaussian(24, t3.PAIRS, 2, seed=4)
    losses = [(t3.codebook(CPU)[path(x).long()] - x).square().sum((1, 2)) for path in (ENCODER.path, t3.trellis_path)]
    assert losses[0].sum() == pytest.approx(losses[1].sum().item(), rel=1e-3)
    torch.testing.assert_close(*losses, rtol=0.05, atol=0)


def test_the_reference_finds_the_best_of_all_paths_of_a_tile_but_for_its_closing():
    """Against a Viterbi search that is written down again, on states without memory of their order."""
    x, table = gaussian(1, t3.PAIRS, 2, seed=5), t3.codebook(CPU)
    loss = (table[t3.trellis_path(x).long()] - x).square().sum().item()
    cost = torch.zeros(t3.STATES, dtype=torch.float64)  # with a free start and end: a bound
    states = torch.arange(t3.STATES)
    before = (states >> 6).unsqueeze(1) | torch.arange(64) << 8
    for pair in range(t3.PAIRS):
        if pair:
            cost = cost[before].amin(1)
        cost = cost + (table - x[0, pair]).double().square().sum(1)
    assert cost.min() <= loss < 1.05 * cost.min()


def test_small_columns_keep_their_precision_beside_large_ones_and_beside_one_large_weight():
    """Inputs of small columns may be as much larger: of trained models they are."""
    size = 10 ** gaussian(256, seed=8).mul(0.7).clamp(-2, 2)
    w = gaussian(64, 256) * size
    w[5, 40] = 300 * size[40]
    error = w - FORMAT.decode(ENCODER.encode(w), (64, 256), torch.float32)
    error[5] = 0  # whose block the large weight takes
    assert (error.square().mean(0).sqrt() / size).max() < 0.25
    assert (error.square().mean(0).sqrt() / size).mean() < 0.15


def test_zeros_and_empty_blocks_decode_to_zeros():
    w = gaussian(20, 256)
    w[3], w[5, 128:] = 0, 0
    decoded = FORMAT.decode(ENCODER.encode(w), (20, 256), torch.float32)
    assert not decoded[3].any() and not decoded[5, 128:].any() and decoded[5, :128].any()
    assert not FORMAT.decode(ENCODER.encode(torch.zeros(3, 70)), (3, 70), torch.float32).any()


def test_bad_weights_are_refused():
    for w, why in ((torch.full((4, 64), torch.nan), "256 NaN"), (torch.ones(4, 4, dtype=torch.int32), "int32")):
        with pytest.raises(FormatError, match=why):
            FORMAT.encode(w)


def test_feedback_lowers_the_error_of_outputs_on_inputs_that_were_not_seen():
    k, n = 320, 48
    x_TK = gaussian(600, k, seed=6).cumsum(1) / 4
    w = gaussian(n, k, seed=7)
    coarse = ENCODER.encode(w)
    found = compensated(ENCODER, w, coarse, moments_of(x_TK[:400]))
    losses = [
        (x_TK[400:] @ (FORMAT.decode(plane, (n, k), torch.float32) - w).t()).square().sum() for plane in (found, coarse)
    ]
    assert losses[0] < 0.6 * losses[1]
    assert all(found[name] is coarse[name] for name in ("scales", "columns", "tensor_scale"))
