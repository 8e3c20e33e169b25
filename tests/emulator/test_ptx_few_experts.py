"""The kernels of routed experts for few tokens as they are compiled, run on the CPU: see `ptx`."""

import pytest
import torch

from tests.emulator.machine import Machine
from tests.emulator.test_ptx import gpu  # noqa: F401  # a fixture
from tests.kernels.cuda.gpu_cases import error
from tests.kernels.expert_cases import expert_pages, routing
from tests.matrix import matrix
from vbrt.errors import KernelError
from vbrt.kernels.cuda.e2m1.tiles import TILES
from vbrt.kernels.cuda.experts import few_tokens
from vbrt.kernels.cuda.experts.pairs import Groups, most_blocks
from vbrt.kernels.cuda.launch_table import RowsLaunch
from vbrt.kernels.experts import Gate, experts_down, experts_up, part_planes

pytest.importorskip("triton.experimental.gluon")

GATES = {
    "silu": Gate("silu"),
    "gpt_oss": Gate("silu", interleaved=True, alpha=1.702, limit=0.5, shift=1.0),
    "halves": Gate("gelu_tanh", alpha=1.5, limit=0.7, shift=0.5),
    "relu2": Gate("relu2", gated=False),
    "raw": None,
}
GPUS = [90, 80, 89]
CLOSE = {torch.bfloat16: 4e-3, torch.float16: 1e-3, torch.float32: 1e-5}


@pytest.fixture(autouse=True)
def sorted_by_torch(monkeypatch):
    """The machine has no atomics in shared memory; `test_pairs` has the kernel that sorts."""

    def group_pairs(ids_Tk, experts, block):
        flat = ids_Tk.flatten()
        group = torch.where((flat >= 0) & (flat < experts), flat, experts)
        offsets = [int((group < e).sum()) for e in range(experts + 2)]
        blocks = [(e, at) for e in range(experts + 1) for at in range(offsets[e], offsets[e + 1], block)]
        blocks += [(-1, 0)] * (most_blocks(len(flat), experts, block) - len(blocks))
        parts = group.argsort(stable=True), torch.tensor(offsets), *torch.tensor(blocks).T
        return Groups(*(part.int().contiguous() for part in parts), block)

    monkeypatch.setattr(few_tokens, "group_pairs", group_pairs)


def exact(pages, weights):
    """`decode` for the reference: the float64 weight of planes, found by its tiles."""
    known = {}
    for part in pages.shapes:
        for e, page in enumerate(pages.pages):
            if page is not None:
                known[part_planes(pages, e, part).coarse[TILES].data_ptr()] = weights[part][e]
    return lambda planes: known[planes.coarse[TILES].data_ptr()]


def made(monkeypatch, format, shapes, number, **given):
    pages, weights = expert_pages(format, shapes, number, tiled=True, **given)
    monkeypatch.setattr(Machine, "pages", [page for page in pages.pages if page is not None])
    return pages, exact(pages, weights)


CONFIGS = [RowsLaunch(1, 1, 4), RowsLaunch(2, 2, 8), RowsLaunch(2, 1, 4), RowsLaunch(4, 1, 2), RowsLaunch(1, 2, 1)]


@pytest.mark.sample(2)
@matrix(
    gate=GATES, name=["nvfp4", "mxfp4"], tokens=[5, 1], bias=[True, False], config=CONFIGS, gpu=GPUS, indirect=("gpu",)
)
def test_rows_of_pairs(gate, name, tokens, bias, config, gpu, monkeypatch):  # noqa: F811
    pages, decode = made(monkeypatch, name, {"up": (64, 392)}, 3, missing=(1,))
    monkeypatch.setattr(few_tokens, "rows_for", lambda *_: config)
    ids = torch.tensor([[0, 2], [2, 3], [0, 2], [-1, 2], [2, 0]])[:tokens]
    x, b = torch.randn(tokens, 400).bfloat16()[:, :392], torch.randn(3, 64).bfloat16() if bias else None
    y = few_tokens.up(x, ids, pages, gate=gate, bias_EN=b)
    want = experts_up(x.double(), ids, pages, gate=gate, bias_EN=b, decode=decode)
    assert y.shape == want.shape and error(y, want) < 4e-3
    assert gpu == ["rows_kernel"] and not y[(ids < 0).flatten() | (ids > 2).flatten()].any()


@pytest.mark.sample(1)
@matrix(
    name=["nvfp4", "mxfp4"], tokens=[1, 3], k=[3, 1, 18], bias=[True, False], gpu=GPUS, indirect=("gpu",), at_most=4
)
def test_weighted_sums(name, tokens, k, bias, gpu, monkeypatch):  # noqa: F811
    pages, decode = made(monkeypatch, name, {"down": (40, 264)}, 4)
    ids, weights = torch.randint(-1, 5, (tokens, k)), torch.rand(tokens, k)
    ids[0] = torch.tensor([0, -1, 4] * 6)[:k]  # one that is there, and both kinds of sentinels
    h, b = torch.randn(tokens * k, 264).bfloat16(), torch.randn(4, 40) if bias else None
    y = few_tokens.down(h, ids.int(), weights.bfloat16(), pages, bias_EN=b)
    want = experts_down(h.double(), ids, weights.bfloat16(), pages, bias_EN=b, decode=decode)
    assert error(y, want) < 4e-3
    assert gpu == (["token_kernel"] if tokens == 1 else ["rows_kernel", "sum_kernel"])


@pytest.mark.sample(1)
@matrix(dtype=[torch.float16, torch.float32, torch.bfloat16], tokens=[3, 1], gpu=GPUS, indirect=("gpu",))
def test_other_dtypes_and_ragged_shapes(dtype, tokens, gpu, monkeypatch):  # noqa: F811
    pages, decode = made(monkeypatch, "nvfp4", {"up": (24, 130), "down": (24, 12)}, 2, dtype=dtype)
    ids, weights = routing(tokens, 2, 2)
    x, gate = torch.randn(tokens, 130).to(dtype), Gate("gelu", interleaved=tokens == 3)
    h = few_tokens.up(x, ids, pages, gate=gate)
    want = experts_up(x.double(), ids, pages, gate=gate, decode=decode)
    assert h.dtype is dtype and error(h, want) < CLOSE[dtype]
    y = few_tokens.down(h, ids, weights, pages)
    assert error(y, experts_down(h.double(), ids, weights, pages, decode=decode)) < CLOSE[dtype]
    assert gpu.count("split_kernel") == 2


def test_rows_of_pairs_without_weights(gpu, monkeypatch):  # noqa: F811
    pages, decode = made(monkeypatch, "mxfp4", {"down": (24, 136)}, 2)
    (ids, _), h = routing(3, 2, 2, sentinels=1), torch.randn(6, 136).bfloat16()
    want = experts_down(h.double(), ids, None, pages, decode=decode)
    assert error(few_tokens.down(h, ids, None, pages), want) < 4e-3 and gpu == ["rows_kernel"]


def test_an_x_of_another_width_is_refused():
    pages, _ = expert_pages("nvfp4", {"up": (32, 128), "down": (128, 16)}, 2, tiled=True)
    ids, weights = routing(3, 2, 2)
    with pytest.raises(KernelError, match=r"part 'up': x has shape \(3, 64\); expected \(..., 128\)"):
        few_tokens.up(torch.zeros(3, 64), ids, pages)
    with pytest.raises(KernelError, match=r"part 'down'.*expected \(..., 16\)"):
        few_tokens.down(torch.zeros(6, 32), ids, weights, pages)


def test_no_pairs_give_no_rows_and_sums_of_nothing():
    pages, _ = expert_pages("nvfp4", {"up": (32, 128), "down": (128, 16)}, 2, tiled=True)
    ids, weights = routing(0, 2, 2)
    assert few_tokens.up(torch.zeros(0, 128), ids, pages, gate=Gate("silu")).shape == (0, 16)
    assert few_tokens.down(torch.zeros(0, 16), ids, weights, pages).shape == (0, 128)
