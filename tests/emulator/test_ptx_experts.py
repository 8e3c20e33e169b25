"""The kernels of routed experts as they are compiled, behind their own launches, run on the CPU: see `ptx`."""

from dataclasses import replace

import pytest
import torch

from tests.emulator.machine import Machine
from tests.emulator.test_ptx import copies, gpu, on_hopper  # noqa: F401  # fixtures
from tests.kernels.cuda.gpu_cases import error
from tests.kernels.expert_cases import exact_rows, expert_pages, grouped_pairs, routing
from tests.matrix import matrix
from vbrt.kernels.cuda.e2m1.launches import SUMMANDS
from vbrt.kernels.cuda.e2m1.linear import decode_weight
from vbrt.kernels.cuda.experts import decoded_experts, many_tokens
from vbrt.kernels.cuda.experts.token_sums import weighted_sums
from vbrt.kernels.cuda.launch_table import MmaLaunch
from vbrt.kernels.experts import Gate, addresses_of, part_planes, weigh_and_sum

pytest.importorskip("triton.experimental.gluon")

E = 3
GATES = {
    "silu": Gate("silu"),
    "gpt-oss": Gate("silu", interleaved=True, alpha=1.702, limit=0.5, shift=1.0),
    "relu2": Gate("relu2", gated=False),
    "none": None,
}


@pytest.fixture(autouse=True)
def pairs(monkeypatch):
    """Groups in plain torch: the machine has no atomics in shared memory."""

    monkeypatch.setattr(many_tokens, "group_pairs", grouped_pairs)


CASES = {  # rows, columns, pairs of an expert at a time: several items a program, whole and odd columns of tiles
    "short": (192, 136, 32),
    "odd": (288, 328, 64),
    "even": (160, 512, 64),
}


@on_hopper
@matrix(gate=GATES, format=["nvfp4", "mxfp4"], case=CASES, at_most=1)
def test_many_tokens(gate, format, case, gpu, monkeypatch):  # noqa: F811
    n, k, block = case
    pages, weights = expert_pages(format, {"up": (n, k), "down": (40, 48)}, E, tiled=True, missing=(1,))
    monkeypatch.setattr(Machine, "pages", [page for page in pages.pages if page is not None])
    ids, _ = routing(36, 2, E, sentinels=6)
    ids[ids == 1] = 2
    x, bias = torch.randn(36, k).bfloat16(), torch.randn(E, n).bfloat16()
    groups = many_tokens.group_pairs(ids, E, block)
    y = many_tokens.products(x, groups, pages, part="up", gate=gate, bias_EN=bias)
    assert error(y, exact_rows(x, ids, weights["up"], gate, bias)) < 4e-3
    assert gpu == ["gather_kernel", "grouped_kernel"]


@on_hopper
def test_a_gate_whose_halves_do_not_begin_at_tiles_is_applied_behind_and_nothing_hides_what_is_no_number(
    gpu,  # noqa: F811
    monkeypatch,
):
    pages, weights = expert_pages("nvfp4", {"up": (24, 72)}, 2, tiled=True)
    monkeypatch.setattr(Machine, "pages", pages.pages)
    ids, _ = routing(4, 1, 2)
    x = torch.randn(4, 72).bfloat16()
    x[2, 3] = float("nan")
    groups = many_tokens.group_pairs(ids, 2, 32)
    for gate in (Gate("silu"), Gate("silu", interleaved=True, limit=7.0), Gate("relu", gated=False)):
        y = many_tokens.products(x, groups, pages, part="up", gate=gate, bias_EN=None)
        assert y[2].isnan().all()
        assert error(y[[0, 1, 3]], exact_rows(x, ids, weights["up"], gate)[[0, 1, 3]]) < 1e-2


@on_hopper
def test_fp16_is_a_sum_of_bf16_and_rows_are_added_in_fp32(gpu, monkeypatch):  # noqa: F811
    pages, weights = expert_pages("nvfp4", {"down": (40, 72)}, E, tiled=True)
    monkeypatch.setattr(Machine, "pages", pages.pages)
    ids, shares = routing(5, 2, E, sentinels=3)
    h = torch.randn(10, 72, dtype=torch.float16)
    rows = many_tokens.down(h, ids, None, pages, part="down", bias_EN=None)
    assert error(rows, exact_rows(h, ids.view(-1, 1), weights["down"], None)) < 1e-3
    rows[(ids == E).view(-1)] = float("nan")
    y = weighted_sums(rows, ids, shares, E)
    torch.testing.assert_close(y, weigh_and_sum(rows.nan_to_num(), ids, shares, E))
    assert gpu == ["gather_kernel", "grouped_kernel", "grouped_kernel", "sum_kernel"]


MMA = [MmaLaunch(16, 2, 2, ring=2), MmaLaunch(32, 1, 2, ring=3), MmaLaunch(64, 2, 2, ring=2)]


@pytest.mark.sample(1)
@matrix(gate=GATES, format=["nvfp4", "mxfp4"], gpu=[80, 89], launch=MMA, indirect=("gpu",), at_most=4)
def test_many_tokens_without_wgmma(gate, format, launch, gpu, monkeypatch):  # noqa: F811
    n, k = (160, 328) if gate is GATES["silu"] else (104, 136)
    pages, weights = expert_pages(format, {"up": (n, k), "down": (40, 48)}, E, tiled=True, missing=(1,))
    monkeypatch.setattr(Machine, "pages", [page for page in pages.pages if page is not None])
    monkeypatch.setattr(many_tokens, "grouped_mma_for", lambda *_: launch)
    ids, _ = routing(36, 2, E, sentinels=6)
    ids[ids == 1] = 2
    x, bias = torch.randn(36, k + 8).bfloat16()[:, :k], torch.randn(E, n).bfloat16()
    groups = many_tokens.group_pairs(ids, E, launch.tokens)
    y = many_tokens.products(x, groups, pages, part="up", gate=gate, bias_EN=bias)
    assert error(y, exact_rows(x, ids, weights["up"], gate, bias)) < 4e-3
    assert not y[(ids == E).view(-1)].any()
    assert gpu == ["grouped_mma_kernel"]


@matrix(dtype=[torch.float16, torch.float32], gpu=[80], indirect=("gpu",), at_most=1)
def test_other_dtypes_are_sums_of_bf16_without_wgmma(dtype, gpu, monkeypatch):  # noqa: F811
    pages, weights = expert_pages("nvfp4", {"down": (40, 132)}, E, tiled=True)
    monkeypatch.setattr(Machine, "pages", pages.pages)
    ids, _ = routing(5, 2, E, sentinels=3)
    h = torch.randn(10, 132, dtype=dtype)
    rows = many_tokens.down(h, ids, None, pages, part="down", bias_EN=None)
    want = exact_rows(h, ids.view(-1, 1), weights["down"], None)
    assert error(rows, want) < (1e-3 if dtype is torch.float16 else 1e-5)
    assert gpu == ["pad_kernel"] + ["grouped_mma_kernel"] * SUMMANDS[dtype]


@pytest.mark.sample(1)
@matrix(format=["nvfp4", "mxfp4"], gpu=[80, 89, 90], indirect=("gpu",))
def test_matrices_of_experts_that_have_pairs_are_decoded_to_the_reference_s_bits(format, gpu, monkeypatch):  # noqa: F811
    pages, _ = expert_pages(format, {"up": (16, 128), "down": (40, 264)}, E, tiled=True, missing=(1,))
    monkeypatch.setattr(Machine, "pages", [page for page in pages.pages if page is not None])
    groups = many_tokens.group_pairs(torch.tensor([[0], [2]]), E, 32)
    decoded_GNK = decoded_experts._decode(pages, "down", groups.offsets, 1, 2)
    assert torch.equal(decoded_GNK[1], decode_weight(part_planes(pages, 2, "down")))
    assert gpu == ["decode_kernel"]


@matrix(format=["nvfp4", "mxfp4"], gpu=[80, 89, 90], indirect=("gpu",), at_most=2)
def test_matrices_of_all_experts_are_decoded_to_the_reference_s_bits(format, gpu, monkeypatch):  # noqa: F811
    pages, _ = expert_pages(format, {"up": (16, 128), "down": (40, 264)}, E, tiled=True)
    monkeypatch.setattr(Machine, "pages", pages.pages)
    decoded_ENK = decoded_experts.decode_pages(
        replace(pages, addresses=addresses_of(pages, torch.device("cpu"))), "down"
    )
    assert torch.equal(decoded_ENK, torch.stack([decode_weight(part_planes(pages, e, "down")) for e in range(E)]))
    assert gpu == ["decode_kernel"]
