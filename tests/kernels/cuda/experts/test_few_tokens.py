"""Grouped kernels for few tokens: what they compile to, and on a GPU what they compute."""

from types import SimpleNamespace

import pytest
import torch

from tests.kernels.cuda.gpu_cases import compiled, error, poison
from tests.kernels.expert_cases import expert_pages, routing
from tests.matrix import matrix
from vbrt.kernels.cuda import devices
from vbrt.kernels.cuda.e2m1.tiles import TILES
from vbrt.kernels.cuda.experts import expert_kernels, few_tokens
from vbrt.kernels.cuda.launch_table import Gpu
from vbrt.kernels.experts import Gate, experts_down, experts_up, part_planes

ROWS = {
    "GROUPED": True,
    "MATRICES": 2,
    "ROW_TILES": 1,
    "TOKEN_GROUPS": 1,
    "K_WARPS": 8,
    "SUMMANDS": 1,
    "E8M0_SCALES": False,
    "HAS_BIAS": False,
    "GATING": "halves",
    "FUNCTION": "silu",
    "ALPHA": 1.0,
    "LIMIT": None,
    "SHIFT": 0.0,
}
OTHERS = {
    "two groups": {"TOKEN_GROUPS": 2},
    "gpt-oss": {"MATRICES": 1, "GATING": "interleaved", "ALPHA": 1.702, "LIMIT": 7.0, "HAS_BIAS": True, "ROW_TILES": 2},
    "alone": {"GROUPED": False, "E8M0_SCALES": True},
}
TOKEN = {
    "SIDE_BY_SIDE": 8,
    "ROW_TILES": 1,
    "K_WARPS": 16,
    "AHEAD": 1,
    "SUMMANDS": 1,
    "E8M0_SCALES": False,
    "HAS_BIAS": False,
}


def ptx_of(kernel, constants, capability):
    constants = {**constants, "DEPENDENT": capability >= 90}
    types = {name: "*bf16" if name.endswith("_ptr") else "i32" for name in kernel.arg_names if name not in constants}
    tables = "order_ptr", "offset_ptr", "expert_ptr", "first_ptr"
    types |= {name: "*i32" for name in tables if name in types} | {"id_ptr": "*i64", "address_ptr": "*i64"}
    aligned = [name for name in types if name.endswith("_ptr")]
    return compiled(kernel, types, constants, capability, warps=constants["K_WARPS"], aligned=aligned).asm["ptx"]


@matrix(change=OTHERS, capability=[80, 90, 100, 120], at_most=2)
def test_rows_are_read_in_wide_loads_though_addresses_are_numbers(change, capability):
    pytest.importorskip("triton.experimental.gluon")
    from vbrt.kernels.cuda.experts import few_tokens_gluon

    constants = ROWS | change
    ptx = ptx_of(few_tokens_gluon.rows_kernel, constants, capability)
    tiles, groups = constants["MATRICES"] * constants["ROW_TILES"], constants["TOKEN_GROUPS"]
    assert ptx.count("mma.sync") == 8 * tiles * groups
    assert ptx.count("ld.global.v4") + ptx.count("ld.global.cg.v4") == 2 * 2 * tiles + 4 * groups
    assert ("griddepcontrol.wait" in ptx) is (capability >= 90)


@matrix(first=[False, True], capability=[90, 80, 100, 120], at_most=1)
def test_sums_over_experts_are_read_in_wide_loads(first, capability):
    pytest.importorskip("triton.experimental.gluon")
    from vbrt.kernels.cuda.experts import few_tokens_gluon

    ptx = ptx_of(few_tokens_gluon.token_kernel, {**TOKEN, "WEIGHTS_FIRST": first}, capability)
    assert ptx.count("mma.sync") == 8 and ptx.count("ld.global.v4") + ptx.count("ld.global.cg.v4") == 2 * 2 + 4


@pytest.mark.parametrize("major", [7, 8, 9])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64], ids=str)
def test_few_pairs_of_an_expert_go_through_these_kernels(dtype, major, monkeypatch):
    pages, _ = expert_pages("nvfp4", {"up": (32, 128)}, 4, tiled=True)
    monkeypatch.setattr(devices, "capability", lambda index: (major, 0))
    monkeypatch.setattr(devices, "gpu", lambda index: Gpu(major, 132))
    x = SimpleNamespace(is_cuda=True, device=SimpleNamespace(index=0), dtype=dtype, shape=(8, 128))
    few_pairs, many_pairs = (expert_kernels.route(x, pairs, pages, "up") for pairs in (5, 4000))
    if major < 8 or dtype is torch.float64:
        assert few_pairs == many_pairs == "reference"
    else:
        assert (few_pairs, many_pairs) == ("few", "grouped")


# --- on a GPU ---------------------------------------------------------------------------------------------------------


GATES = {
    "silu": Gate("silu"),
    "gpt-oss": Gate("silu", interleaved=True, alpha=1.702, limit=7.0, shift=1.0),
    "relu2": Gate("relu2", gated=False),
    "raw": None,
}
TOLERANCE = {torch.bfloat16: 4e-3, torch.float16: 1e-3, torch.float32: 1e-5}
LAYERS = {  # experts, hidden, inner, k
    "many small": (64, 256, 96, 8),
    "ragged": (5, 328, 72, 3),
    "halves within a tile": (7, 130, 36, 2),
    "one": (1, 136, 48, 1),
    "short rows": (32, 1024, 256, 4),
    "large": (4, 4096, 1024, 2),
}


def layer(format, shape, gate, dtype):
    """(pages, `decode` for the reference in float64, biases by part) of a layer on the GPU."""
    experts, hidden, inner, _ = shape
    rows = 2 * inner if gate is not None and gate.gated else inner
    pages, weights = expert_pages(
        format, {"up": (rows, hidden), "down": (hidden, inner)}, experts, dtype=dtype, tiled=True, device="cuda"
    )
    known = {
        part_planes(pages, e, part).coarse[TILES].data_ptr(): weights[part][e]
        for part in pages.shapes
        for e in range(experts)
    }
    biases = {part: torch.randn(experts, shape[0], device="cuda", dtype=dtype) for part, shape in pages.shapes.items()}
    return pages, lambda planes: known[planes.coarse[TILES].data_ptr()], biases


@pytest.mark.gpu
@matrix(shape=LAYERS, gate=GATES, dtype=list(TOLERANCE), format=["nvfp4", "mxfp4"], turns=2)
def test_experts_match_float64(shape, gate, dtype, format):
    experts, hidden, _, k = shape
    pages, decode, biases = layer(format, shape, gate, dtype)
    for tokens in (1, 2, 5, 16, 64):
        ids, weights = routing(tokens, k, experts, device="cuda", sentinels=tokens // 2)
        bias = biases if tokens % 2 else {}
        x = torch.randn(tokens, hidden + 3, device="cuda", dtype=dtype)[:, 3:]
        poison()
        h = few_tokens.up(x, ids, pages, gate=gate, bias_EN=bias.get("up"))
        want = experts_up(x.double(), ids, pages, gate=gate, bias_EN=bias.get("up"), decode=decode)
        assert h.shape == want.shape and error(h, want) < TOLERANCE[dtype], tokens
        poison()
        y = few_tokens.down(h, ids.int(), weights.to(dtype), pages, bias_EN=bias.get("down"))
        want = experts_down(h.double(), ids, weights.to(dtype), pages, bias_EN=bias.get("down"), decode=decode)
        assert y.shape == want.shape and error(y, want) < TOLERANCE[dtype], tokens
        rows = few_tokens.down(h, ids, None, pages)
        assert error(rows, experts_down(h.double(), ids, None, pages, decode=decode)) < TOLERANCE[dtype], tokens


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [1, 3, 16])
def test_results_do_not_change_and_graphs_follow_ids_and_addresses(tokens):
    experts, hidden, _, k = shape = LAYERS["many small"]
    pages, decode, _ = layer("nvfp4", shape, GATES["silu"], torch.bfloat16)
    x = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16)
    ids, weights = routing(tokens, k, experts, device="cuda")

    def run():
        return few_tokens.down(few_tokens.up(x, ids, pages, gate=GATES["silu"]), ids, weights, pages)

    first = run()
    assert all(torch.equal(run(), first) for _ in range(20))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = run()
    for _ in range(3):
        ids.copy_(routing(tokens, k, experts, device="cuda", sentinels=1)[0])
        turned = [(e + 1) % experts for e in range(experts)]
        pages.addresses.copy_(pages.addresses[turned].clone())
        pages.pages[:] = [pages.pages[e] for e in turned]
        graph.replay()
        h = experts_up(x.double(), ids, pages, gate=GATES["silu"], decode=decode)
        assert error(got, experts_down(h, ids, weights, pages, decode=decode)) < 6e-3
