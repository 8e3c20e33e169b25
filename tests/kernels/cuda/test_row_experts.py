"""Routed experts on published codes: which way is taken, what it compiles to, and on a GPU what it computes."""

from types import SimpleNamespace

import pytest
import torch

from tests.kernels.cuda.gpu_cases import compiled, error, poison
from tests.kernels.expert_cases import exact_rows, expert_pages, routing
from tests.matrix import matrix
from vbrt.host import accelerator
from vbrt.kernels.cuda import devices
from vbrt.kernels.cuda.experts import row_experts
from vbrt.kernels.cuda.launch_table import Gpu
from vbrt.kernels.cuda.plain import linear as plain_linear
from vbrt.kernels.entries import KERNELS
from vbrt.kernels.experts import ExpertPages, Gate, weigh_and_sum

NIBBLES = [
    "superblock32",
    "affine32-float16",
    "affine16-bfloat16",
    "affine64-float32",
    "signed32-bfloat16",
    "zeros128-float16",
]
BYTES = ["bytes32-float16", "superbytes16", "superbytes32", "floatbytes128-float32", "unitbytes128"]
BYTES += ["offsetbytes32-float16", "zerobytes128-float16", "floatzeros64-bfloat16"]
BYTES += ["mxint8"]
TRELLIS = ["t3"]
LEVELS = ["nf4", "quantile", "symmetric32-float16", "levels32-float16", "levels128-bfloat16"]
FORMATS = NIBBLES + BYTES + LEVELS + TRELLIS
CLOSE = {torch.bfloat16: 4e-3, torch.float16: 1e-3, torch.float32: 1e-5}
GPU = torch.device("cuda", 0)


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (9, 0)])
def test_pages_of_rows_are_taken_by_address_from_sm_80_on(capability, monkeypatch):
    monkeypatch.setattr(devices, "capability", lambda index: capability)
    for name in FORMATS:
        pages, _ = expert_pages(name, {"up": (32, 128)}, 2)
        assert row_experts.takes_addresses(pages.layout, GPU) is (capability >= (8, 0))
        records = {k.op: k for k in KERNELS if k.backend == "triton" and name in (k.formats or ())}
        up, down = records["experts_up"], records["experts_down"]
        assert up.by_address is row_experts.takes_addresses
        assert (up.run, down.run) == (row_experts.up, row_experts.down)


def test_the_most_pairs_are_decoded_and_others_where_the_host_has_pages(monkeypatch):
    monkeypatch.setattr(devices, "capability", lambda index: (9, 0))
    monkeypatch.setattr(devices, "gpu", lambda index: Gpu(9, 132))
    pages, _ = expert_pages(FORMATS[0], {"up": (32, 128)}, 4)
    by_address = ExpertPages(pages.format, pages.dtype, pages.shapes, pages.layout, [None] * 4, pages.addresses)
    x, y = (SimpleNamespace(is_cuda=True, device=GPU, dtype=dtype) for dtype in (torch.bfloat16, torch.float16))
    for of, of_fp16 in ((pages, "reference"), (by_address, "fused")):
        assert [row_experts.route(x, pairs, of) for pairs in (5, 150, 4000)] == ["fused", "fused", "decoded"]
        assert [row_experts.route(y, pairs, of) for pairs in (5, 4000)] == ["fused", of_fp16]
    monkeypatch.setattr(accelerator, "is_current_stream_capturing", lambda: True)
    assert row_experts.route(x, 4000, by_address) == "decoded"
    monkeypatch.setattr(devices, "capability", lambda index: (8, 6))  # torch's grouped matmul waits there
    assert row_experts.route(x, 4000, by_address) == "fused"


@matrix(capability=[80, 90, 100, 120], at_most=1)
def test_codes_are_read_in_wide_loads_though_addresses_are_numbers(capability):
    pytest.importorskip("triton.experimental.gluon")
    from vbrt.kernels.cuda.table.linear_gluon import experts_kernel

    constants = {
        "GROUPED": True, "TOKEN_GROUPS": 1, "ROW_TILES": 1, "K_WARPS": 8, "BLOCK": 128, "LEVELS": 0, "SUMMAND": 0,
        "OFFSETS": "zeros", "SCALES": "float16", "RAGGED": False, "K_TAIL": False, "SPREAD": False,
        "HAS_BIAS": False, "DEPENDENT": False,
    }  # fmt: skip
    types = {name: "i32" for name in experts_kernel.arg_names if name not in constants}
    types |= {name: "*i32" for name in types if name.endswith("_ptr")}
    types |= {"x_ptr": "*bf16", "bias_ptr": "*bf16", "y_ptr": "*fp32", "id_ptr": "*i64", "address_ptr": "*i64"}
    aligned = [name for name in types if name.endswith("_ptr")]
    ptx = compiled(experts_kernel, types, constants, capability, warps=8, aligned=aligned).asm["ptx"]
    assert ptx.count("mma.sync") == 2 * (4 + 4)  # products and sums of x, of two groups of columns
    # before the loop and in it, codes of two rows; activations of two groups
    assert ptx.count("ld.global.cg.v4") == 2 * 2 and ptx.count("ld.global.v4") == 2 * 2


@pytest.mark.parametrize("format", ["bytes32-float16", "superbytes16", "floatbytes128-float32"])
def test_bytes_and_their_activations_are_read_in_wide_loads(format):
    pytest.importorskip("triton")
    from vbrt.kernels.cuda.plain.linear_triton import pairs_kernel

    scales = {"superbytes16": "uint8", "floatbytes128-float32": "float32"}.get(format, "float16")
    constants = dict(plain_linear._constants(format, True))
    constants |= {"ROWS": 8, "BLOCKS": 256 // constants["BLOCK"], "HAS_BIAS": False, "SCALES": scales}
    constants |= {"ZEROS": "float16", "LARGE": "float16"}
    types = {name: "i32" for name in pairs_kernel.arg_names if name not in constants}
    types |= {"x_ptr": "*bf16", "bias_ptr": "*bf16", "y_ptr": "*fp32", "id_ptr": "*i64", "address_ptr": "*i64"}
    known = [param.name for param in pairs_kernel.params if param.name in types and not param.do_not_specialize]
    ptx = compiled(pairs_kernel, types, constants, 90, aligned=known, gluon=False).asm["ptx"]
    assert "K" in known and ptx.count("ld.global.v4") >= 3 and ptx.count("ld.global.b16") <= 1  # a scale


def test_few_warps_share_the_short_rows_of_small_experts():
    assert [row_experts._warps_for(columns // 2) for columns in (768, 2048, 2880, 4096, 14336)] == [2, 4, 4, 8, 8]


# --- on a GPU ---------------------------------------------------------------------------------------------------------

LAYERS = {"many small": (64, 256, 96, 8), "ragged": (5, 328, 72, 3), "large": (4, 4096, 1024, 2)}  # E, hidden, inner, k


@pytest.mark.gpu
@matrix(name=FORMATS, shape=LAYERS, dtype=list(CLOSE), turns=2)
def test_experts_match_float64(name, shape, dtype):
    experts, hidden, inner, k = shape
    shapes, gate = {"up": (2 * inner, hidden), "down": (hidden, inner)}, Gate("silu")
    held, weights = expert_pages(name, shapes, experts, dtype=dtype, device="cuda")
    pages = ExpertPages(name, dtype, shapes, held.layout, [None] * experts, held.addresses)
    bias = torch.randn(experts, 2 * inner, device="cuda", dtype=dtype)
    for tokens in (1, 2, 5, 64, 300):
        ids, shares = routing(tokens, k, experts, device="cuda", sentinels=tokens // 2)
        x = torch.randn(tokens, hidden + 3, device="cuda", dtype=dtype)[:, 3:]
        poison()
        decoded = row_experts.route(x, ids.numel(), pages) == "decoded"
        close = 5e-3 if decoded else CLOSE[dtype]  # weights, sums, sums with biases and gates, each rounded to bf16
        h = row_experts.up(x, ids, pages, gate=gate, bias_EN=bias)
        assert error(h, exact_rows(x, ids, weights["up"], gate, bias)) < close, tokens
        y = row_experts.down(h, ids.int(), shares, pages)
        want = weigh_and_sum(exact_rows(h, ids, weights["down"], None), ids, shares, experts)
        assert error(y, want) < close, tokens


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["superblock32", "bytes32-float16", "t3"])
@pytest.mark.parametrize("tokens", [1, 64])
def test_graphs_follow_ids_and_addresses(tokens, name):
    shapes = {"up": (192, 256), "down": (256, 96)}
    pages, _ = expert_pages(name, shapes, 8, device="cuda")
    ids, shares = routing(tokens, 2, 8, device="cuda")
    x = torch.randn(tokens, 256, device="cuda", dtype=torch.bfloat16)

    def run():
        return row_experts.down(row_experts.up(x, ids, pages, gate=Gate("silu")), ids, shares, pages)

    before = run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = run()
    graph.replay()
    assert torch.equal(y, before)
    ids.copy_((ids + 1) % 8)
    pages.addresses.copy_(pages.addresses.roll(2, 0))  # so each id names another expert than before
    graph.replay()
    assert torch.equal(y, run()) and not torch.equal(y, before)
