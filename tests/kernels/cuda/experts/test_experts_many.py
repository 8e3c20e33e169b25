"""Routed experts of many tokens: which way a product takes, and on a GPU what it computes."""

import itertools
from types import SimpleNamespace

import pytest
import torch

from tests.kernels.cuda.gpu_cases import error, poison
from tests.kernels.expert_cases import exact_rows, expert_pages, grouped_pairs, routing
from tests.matrix import matrix
from vbrt.kernels import resolve
from vbrt.kernels.cuda import devices, tuned_configs
from vbrt.kernels.cuda.e2m1.linear import decode_weight
from vbrt.kernels.cuda.experts import decoded_experts, expert_kernels, many_tokens
from vbrt.kernels.cuda.experts.pairs import Groups
from vbrt.kernels.cuda.launch_table import (
    Gpu,
    MmaLaunch,
    grouped_for,
    grouped_mma_for,
    grouped_mma_tokens,
    grouped_stages,
)
from vbrt.kernels.experts import Gate, apply_gate, part_planes, weigh_and_sum

GATES = {
    "silu": Gate("silu"),
    "gpt-oss": Gate("silu", interleaved=True, alpha=1.702, limit=0.5, shift=1.0),
    "gelu": Gate("gelu"),
    "relu2": Gate("relu2", gated=False),
    "none": None,
}
BLOCKS = [32, 64, 128]
TOLERANCE = {torch.bfloat16: 5e-3, torch.float16: 1e-3, torch.float32: 1e-5}


def test_more_pairs_of_an_expert_take_larger_blocks():
    blocks = [grouped_for(pairs * 16, 16) for pairs in (1, 30, 100, 1000)]
    assert blocks == sorted(blocks) and set(blocks) == set(BLOCKS)
    for block in BLOCKS:  # a ring of so many columns, and a chunk of fp32 sums for either warpgroup
        assert grouped_stages(block) * block * 256 + 2 * min(64, block) * 64 * 4 + 1024 <= 227 << 10


def test_launches_with_mma_sync_take_as_many_pairs_as_are_sorted_together_and_rows_of_both_halves():
    gpu = Gpu(8, 28, 100 << 10, 99 << 10)
    blocks = [grouped_mma_tokens(gpu, pairs * 16, 16) for pairs in (21, 60, 1000)]
    assert blocks == sorted(blocks) and len(set(blocks)) == 2
    sizes = itertools.product(blocks, (400, 100_000), (128, 28672), (6, 16), (True, False))
    for block, pairs, n, columns, apart in sizes:
        launch = grouped_mma_for(gpu, block, pairs, n, columns, apart)
        assert block != 32 or columns % launch.ring == 0
        assert launch.tokens == block and launch.splits == 1 and (launch.row_tiles % 2 == 0 or not apart)
        assert launch.shared_bytes(288) <= 99 << 10


def test_pairs_are_sorted_once_for_a_layer_and_again_when_ids_have_changed(monkeypatch):
    monkeypatch.setattr(tuned_configs, "tuned", lambda index: {})
    pages, _ = expert_pages("nvfp4", {"up": (32, 32), "down": (32, 32)}, 2, tiled=True)
    sorts = []

    def group_pairs(ids, experts, block):
        sorts.append(ids)
        return Groups(*torch.zeros(4, experts + 2).int(), block)

    monkeypatch.setattr(devices, "gpu", lambda index: Gpu(9, 132))
    monkeypatch.setattr(many_tokens, "group_pairs", group_pairs)
    monkeypatch.setattr(many_tokens, "products", lambda x, groups, *args, **named: x)
    with torch.inference_mode():
        inference, _ = routing(4, 1, 2)
    for ids, change, count in (
        (inference, lambda ids: None, 1),
        (routing(4, 1, 2)[0], lambda ids: None, 1),
        (routing(4, 1, 2)[0], lambda ids: ids.zero_(), 2),
    ):
        sorts.clear()
        h = many_tokens.up(torch.zeros(4, 32), ids, pages, part="up", gate=None, bias_EN=None)
        change(ids)
        many_tokens.down(h, ids, None, pages, part="down", bias_EN=None)
        assert len(sorts) == count
        many_tokens.down(h, ids, None, pages, part="down", bias_EN=None)  # nobody knows what has happened since
        assert len(sorts) == count + 1


def test_pages_without_tiles_and_tensors_of_the_cpu_go_through_the_reference():
    x, (ids, weights) = torch.randn(3, 64).bfloat16(), routing(3, 2, 2)
    for tiled in (True, False):
        pages, matrices = expert_pages("nvfp4", {"up": (32, 64)}, 2, tiled=tiled)
        assert expert_kernels.route(x, 6, pages, "up") == "reference"
        y = expert_kernels.down(x.repeat_interleave(2, 0), ids, weights, pages, part="up")
        want = weigh_and_sum(exact_rows(x, ids, matrices["up"], None), ids, weights, 2)
        assert error(y, want) < 1e-2


@pytest.mark.parametrize(
    ("major", "dtype", "pairs", "way"),
    [
        (9, torch.bfloat16, 32, "few"),
        (8, torch.bfloat16, 20, "few"),
        (8, torch.bfloat16, 32, "grouped"),
        (12, torch.bfloat16, 32, "few"),
        (9, torch.bfloat16, 400, "grouped"),
        (9, torch.float32, 400, "grouped"),
        (8, torch.bfloat16, 400, "grouped"),
        (8, torch.float16, 100_000, "grouped"),
        (12, torch.bfloat16, 100_000, "grouped"),
        (10, torch.bfloat16, 1000, "grouped"),
        (10, torch.bfloat16, 100_000, "decoded"),
        (10, torch.float16, 100_000, "grouped"),
        (9, torch.float64, 400, "reference"),
        (7, torch.bfloat16, 400, "reference"),
    ],
)
def test_the_way_follows_from_what_the_host_knows(major, dtype, pairs, way, monkeypatch):
    pages, _ = expert_pages("nvfp4", {"up": (32, 64)}, 2, tiled=True)
    rates = {10: {"mma": 920, "matmul": 3700}, 12: {"mma": 460, "matmul": 460}}.get(major, {"mma": 920, "matmul": 920})
    monkeypatch.setattr(devices, "capability", lambda index: (major, 0))
    monkeypatch.setattr(devices, "gpu", lambda index: Gpu(major, 132, **rates))
    x = SimpleNamespace(is_cuda=True, dtype=dtype, device=torch.device("cuda", 0))
    assert expert_kernels.route(x, pairs, pages, "up") == way


@pytest.mark.parametrize(("capability", "takes"), [((7, 5), False), ((8, 0), True), ((8, 9), True), ((12, 0), True)])
def test_pages_in_tile_order_are_taken_by_address_from_sm_80_on(capability, takes, monkeypatch):
    monkeypatch.setattr(devices, "capability", lambda index: capability)
    pages, _ = expert_pages("nvfp4", {"up": (32, 64)}, 2, tiled=True)
    untiled, _ = expert_pages("nvfp4", {"up": (32, 64)}, 2, tiled=False)
    assert expert_kernels.takes_addresses(pages.layout, torch.device("cuda", 0)) is takes
    assert not expert_kernels.takes_addresses(untiled.layout, torch.device("cuda", 0))


@pytest.mark.parametrize("experts_at_a_time", [7, 3])
def test_decoded_products_of_experts_in_turns(experts_at_a_time, monkeypatch):
    pages, weights = expert_pages("nvfp4", {"up": (48, 136)}, 7, tiled=True, missing=(3,))

    def decode(pages, part, groups, first, count):
        held = [e for e in range(first, first + count) if pages.pages[e] is not None]
        w = torch.full((count, 48, 136), 1e9, dtype=torch.bfloat16)  # what nobody has pairs of may be anything
        for expert in held:
            w[expert - first] = decode_weight(part_planes(pages, expert, part))
        return w

    monkeypatch.setattr(decoded_experts, "group_pairs", grouped_pairs)
    monkeypatch.setattr(decoded_experts, "gated_rows", lambda v, gate, dtype: apply_gate(v, gate).to(dtype))
    monkeypatch.setattr(decoded_experts, "_SCRATCH_BYTES", 2 * 48 * 136 * experts_at_a_time)
    ids, _ = routing(30, 2, 7, sentinels=9)
    ids[ids == 3] = 4
    x, bias = torch.randn(30, 136).bfloat16(), torch.randn(7, 48).bfloat16()
    for gate in (GATES["silu"], None):
        y = decoded_experts.products(x, ids, pages, part="up", gate=gate, bias_EN=bias, decode=decode)
        assert error(y, exact_rows(x, ids, weights["up"], gate, bias)) < 1e-2


# --- on a GPU ---------------------------------------------------------------------------------------------------------


def on_hopper():
    if devices.major(0) != 9:
        pytest.skip("for sm_90")


@pytest.mark.gpu
@matrix(gate=GATES, format=["nvfp4", "mxfp4"], block=BLOCKS, turns=2)
def test_grouped_products_match_float64(gate, format, block):
    on_hopper()
    for n, k, experts, tokens in ((192, 520, 5, 300), (1536, 384, 40, 900), (160, 200, 3, 40)):
        pages, weights = expert_pages(format, {"up": (n, k)}, experts, tiled=True, device="cuda", missing=(1,))
        ids, _ = routing(tokens, 3, experts, device="cuda", sentinels=11)
        ids[ids == 1] = 2
        x = torch.randn(tokens, k, device="cuda").bfloat16()
        bias = torch.randn(experts, n, device="cuda").bfloat16() if block != 64 else None
        poison()
        groups = many_tokens.group_pairs(ids, experts, block)
        y = many_tokens.products(x, groups, pages, part="up", gate=gate, bias_EN=bias)
        assert error(y, exact_rows(x, ids, weights["up"], gate, bias)) < 5e-3
        assert not y[(ids == experts).view(-1)].any()
        again = many_tokens.products(x, groups, pages, part="up", gate=gate, bias_EN=bias)
        assert torch.equal(y, again)


MMA = [MmaLaunch(32, 4, 2, 1, 4), MmaLaunch(32, 4, 2, 1, 3), MmaLaunch(64, 4, 2, 1, 3), MmaLaunch(16, 8, 2, 1, 3)]


@pytest.mark.gpu
@matrix(gate=GATES, format=["nvfp4", "mxfp4"], launch=MMA, capability=[(8, 0)], turns=2, indirect=("capability",))
def test_grouped_products_with_mma_sync_match_float64(gate, format, launch, capability, monkeypatch):
    monkeypatch.setattr(many_tokens, "grouped_mma_for", lambda *_: launch)
    for n, k, experts, tokens in ((192, 520, 5, 300), (1536, 384, 40, 900), (160, 204, 3, 40), (24, 2730, 3, 70)):
        pages, weights = expert_pages(format, {"up": (n, k)}, experts, tiled=True, device="cuda", missing=(1,))
        ids, _ = routing(tokens, 3, experts, device="cuda", sentinels=11)
        ids[ids == 1] = 2
        x = torch.randn(tokens, k, device="cuda").bfloat16()
        bias = torch.randn(experts, n, device="cuda").bfloat16() if launch.tokens != 64 else None
        poison()
        groups = many_tokens.group_pairs(ids, experts, launch.tokens)
        y = many_tokens.products(x, groups, pages, part="up", gate=gate, bias_EN=bias)
        assert error(y, exact_rows(x, ids, weights["up"], gate, bias)) < (5e-3 if n != 24 else 1e-2)
        assert not y[(ids == experts).view(-1)].any()
        again = many_tokens.products(x, groups, pages, part="up", gate=gate, bias_EN=bias)
        assert torch.equal(y, again)


@pytest.mark.gpu
@matrix(dtype=list(TOLERANCE), format=["nvfp4", "mxfp4"], capability=[None, (8, 0), (12, 0)], indirect=("capability",))
def test_a_layer_matches_float64_in_any_dtype(dtype, format, capability):
    shapes = {"up": (512, 400), "down": (400, 256)}
    pages, matrices = expert_pages(format, shapes, 6, dtype=dtype, tiled=True, device="cuda")
    ids, weights = routing(200, 3, 6, device="cuda", sentinels=20)
    x = torch.randn(200, 400, device="cuda", dtype=dtype)
    up, down = (resolve(f"experts_{op}", "triton", x.device, format) for op in ("up", "down"))
    assert (up.run, down.run) == (expert_kernels.up, expert_kernels.down)
    poison()
    h = up(x, ids, pages, gate=GATES["silu"])
    y = down(h, ids, weights, pages)
    want_h = exact_rows(x, ids, matrices["up"], GATES["silu"])
    want = weigh_and_sum(exact_rows(h, ids.view(-1, 1), matrices["down"], None), ids, weights, 6).double()
    assert h.dtype is dtype and y.dtype is dtype
    assert error(h, want_h) < TOLERANCE[dtype] and error(y, want) < TOLERANCE[dtype]
    rows = down(h, ids, None, pages)
    assert not rows[(ids == 6).view(-1)].any()


@pytest.mark.gpu
@pytest.mark.parametrize("scratch", [1 << 30, 300 << 10])
def test_decoded_products_match_float64(scratch, monkeypatch):
    monkeypatch.setattr(decoded_experts, "_SCRATCH_BYTES", scratch)
    pages, weights = expert_pages("nvfp4", {"up": (192, 520)}, 7, tiled=True, device="cuda", missing=(3,))
    ids, _ = routing(100, 2, 7, device="cuda", sentinels=9)
    ids[ids == 3] = 4
    x, bias = torch.randn(100, 520, device="cuda").bfloat16(), torch.randn(7, 192, device="cuda").bfloat16()
    y = decoded_experts.products(x, ids, pages, part="up", gate=GATES["silu"], bias_EN=bias)
    assert error(y, exact_rows(x, ids, weights["up"], GATES["silu"], bias)) < 1e-2


@pytest.mark.gpu
@pytest.mark.parametrize("capability", [None, (8, 0)], indirect=True)
def test_a_graph_follows_the_routing_and_the_addresses(capability):
    shapes = {"up": (256, 256), "down": (256, 128)}
    pages, matrices = expert_pages("nvfp4", shapes, 4, tiled=True, device="cuda")
    ids, weights = routing(300, 2, 4, device="cuda")
    x = torch.randn(300, 256, device="cuda").bfloat16()

    def layer():
        return expert_kernels.down(expert_kernels.up(x, ids, pages, gate=GATES["silu"]), ids, weights, pages)

    layer()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = layer()
    order = torch.tensor([2, 0, 3, 1], device="cuda")
    pages.addresses.copy_(pages.addresses[order])
    ids.copy_(routing(300, 2, 4, device="cuda", sentinels=50)[0])
    graph.replay()
    h = exact_rows(x, ids, matrices["up"][order], GATES["silu"])
    rows = exact_rows(h, ids.view(-1, 1), matrices["down"][order], None)
    assert error(y, weigh_and_sum(rows, ids, weights, 4)) < 1e-2
