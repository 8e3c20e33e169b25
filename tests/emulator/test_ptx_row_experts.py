"""Routed experts on published codes: kernels as they are compiled, behind their launches, run on the CPU: see `ptx`."""

import pytest
import torch

from tests.emulator.machine import Machine
from tests.emulator.test_ptx import gpu  # noqa: F401  # a fixture
from tests.kernels.cuda.gpu_cases import error
from tests.kernels.expert_cases import exact_rows, expert_pages, grouped_pairs
from tests.matrix import matrix
from vbrt.formats import get_format
from vbrt.formats.nf4 import NF4_LEVELS
from vbrt.kernels.cuda.experts import gated_rows, row_experts, trellis_experts
from vbrt.kernels.cuda.table import linear as table_linear
from vbrt.kernels.experts import Gate, apply_gate, part_planes, weigh_and_sum

pytest.importorskip("triton.experimental.gluon")

FORMATS = [
    "superblock32",
    "affine32-float16",
    "affine16-bfloat16",
    "affine64-float32",
    "signed32-bfloat16",
    "zeros128-float16",
    "symmetric32-float16",
]
CLOSE = {torch.bfloat16: 4e-3, torch.float16: 1e-3, torch.float32: 1e-5}
LEVELS = ["levels32-float16", "nf4", "levels16-float32", "quantile", "levels128-bfloat16"]
LEVEL_CASES = [  # tokens, columns, dtype
    (1, 136, torch.float32),
    (2, 328, torch.bfloat16),
    (2, 136, torch.float16),
    (15, 352, torch.bfloat16),
    (15, 136, torch.float16),
]
BYTES = [
    "mxint8",
    "bytes32-float16",
    "superbytes16",
    "floatbytes128-float32",
    "unitbytes128",
    "offsetbytes32-float16",
    "superbytes32",
    "floatzeros64-bfloat16",
    "zerobytes128-float16",
]
TRELLIS_CASES = [(1, 136, torch.bfloat16), (2, 256, torch.float16), (15, 328, torch.bfloat16), (15, 136, torch.float32)]
BYTE_CASES = [(1, 264, torch.bfloat16), (2, 136, torch.float32), (15, 264, torch.bfloat16)]  # 264: two superblocks
IDS = torch.tensor([[0, 2], [2, 3], [0, 2], [-1, 2], [2, 0]] * 3)  # of 3 experts: both kinds of sentinels


def check_rows_and_sums(name, tokens, k, dtype, monkeypatch):
    """Rows of pairs and their weighted sums, of three experts of which one has no page."""
    shapes = {"up": (48, k), "down": (k, 24)}
    pages, weights = expert_pages(name, shapes, 3, dtype=dtype, missing=(1,))
    monkeypatch.setattr(Machine, "pages", [page for page in pages.pages if page is not None])
    monkeypatch.setattr(row_experts, "route", lambda *_: "fused")
    for module in (row_experts, trellis_experts):
        monkeypatch.setattr(module, "group_pairs", grouped_pairs)
    monkeypatch.setattr(table_linear, "nf4_levels", lambda index: torch.tensor(NF4_LEVELS))
    x, ids, bias, gate = torch.randn(tokens, k).to(dtype), IDS[:tokens], torch.randn(3, 48), Gate("silu")
    h = row_experts.up(x, ids, pages, gate=gate, bias_EN=bias)
    want = exact_rows(x, ids, weights["up"], gate, bias)
    assert h.shape == want.shape and h.dtype is dtype and error(h, want) < CLOSE[dtype]
    assert not h[(ids < 0).flatten() | (ids > 2).flatten()].any()
    shares = torch.rand(ids.shape)
    y = row_experts.down(h, ids, shares, pages)
    assert error(y, weigh_and_sum(exact_rows(h, ids, weights["down"], None), ids, shares, 3)) < CLOSE[dtype]


@pytest.mark.sample(2)
@matrix(name=FORMATS, tokens=[1, 2, 15], k=[136, 328, 512, 352], dtype=list(CLOSE), at_most=8)
def test_rows_and_sums_of_pairs(name, tokens, k, dtype, gpu, monkeypatch):  # noqa: F811
    check_rows_and_sums(name, tokens, k, dtype, monkeypatch)
    assert gpu.count("experts_kernel") == 2 * {torch.bfloat16: 1, torch.float16: 2, torch.float32: 3}[dtype]


@pytest.mark.sample(3)
@matrix(name=LEVELS, case=LEVEL_CASES, at_most=8)
def test_rows_and_sums_of_pairs_by_levels(name, case, gpu, monkeypatch):  # noqa: F811
    tokens, k, dtype = case
    check_rows_and_sums(name, tokens, k, dtype, monkeypatch)
    assert gpu.count("experts_kernel") == 2 * {torch.bfloat16: 1, torch.float16: 3, torch.float32: 6}[dtype]


@pytest.mark.sample(3)
@matrix(name=BYTES, case=BYTE_CASES, at_most=10)
def test_rows_and_sums_of_pairs_by_bytes(name, case, gpu, monkeypatch):  # noqa: F811
    tokens, k, dtype = case
    check_rows_and_sums(name, tokens, k, dtype, monkeypatch)
    assert gpu.count("groups_kernel" if tokens == 15 else "pairs_kernel") == 2


@pytest.mark.sample(2)
@matrix(case=TRELLIS_CASES, at_most=2)
def test_rows_and_sums_of_pairs_by_trellis_codes(case, gpu, monkeypatch):  # noqa: F811
    check_rows_and_sums("t3", *case, monkeypatch)
    assert gpu.count("rotate_pairs_kernel") == gpu.count("experts_kernel") == 2


@pytest.mark.sample(3)
@matrix(name=[*FORMATS, *LEVELS, *BYTES, "t3"], at_most=4)
def test_matrices_of_experts_that_have_pairs_are_decoded_to_the_bits_of_their_format(name, gpu, monkeypatch):  # noqa: F811
    pages, _ = expert_pages(name, {"up": (16, 128), "down": (24, 264)}, 3, missing=(1,))
    monkeypatch.setattr(Machine, "pages", [page for page in pages.pages if page is not None])
    monkeypatch.setattr(table_linear, "nf4_levels", lambda index: torch.tensor(NF4_LEVELS))
    offsets = grouped_pairs(torch.tensor([[0], [2]]), 3, 32).offsets
    decoded_GNK = row_experts._decode_pages(pages, "down", offsets, 1, 2)
    coarse = dict(part_planes(pages, 2, "down").coarse)
    assert torch.equal(decoded_GNK[1], get_format(name).decode(coarse, (24, 264), torch.bfloat16))
    assert gpu == ["decode_experts_kernel"]


GATES = [
    Gate("silu"),
    Gate("gelu_tanh", interleaved=True),
    Gate("silu", interleaved=True, alpha=1.702, limit=1.0, shift=1.0),
    Gate("relu2", gated=False),
]


@matrix(gate=GATES, dtype=list(CLOSE), at_most=6)
def test_gates_are_one_launch(gate, dtype, gpu):  # noqa: F811
    v = torch.randn(3, 1040 if gate.gated else 520)
    y = gated_rows.gated_rows(v, gate, dtype)
    assert y.dtype is dtype and y.shape == (3, 520) and error(y, apply_gate(v.double(), gate)) < CLOSE[dtype]
    assert gpu == ["gate_kernel"]
