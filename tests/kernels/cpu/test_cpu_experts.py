"""The C kernels of routed experts against products in float64, with the weights that the reference decodes."""

import math

import pytest
import torch

from tests.kernels.cuda.gpu_cases import error
from tests.matrix import matrix
from vbrt.errors import KernelError
from vbrt.formats import get_format
from vbrt.formats.joint_planes import join_fields, join_layouts
from vbrt.formats.page import new_page, pack
from vbrt.kernels import experts as reference
from vbrt.kernels import resolve
from vbrt.kernels.cpu import build
from vbrt.kernels.cpu import experts as cpu_experts
from vbrt.kernels.cpu import linear as cpu_linear
from vbrt.kernels.experts import ExpertPages, Gate, apply_gate, part_planes

CPU = torch.device("cpu")
FORMATS = (
    *cpu_linear.FORMATS,
    *cpu_linear.BYTES,
    "affine32-float16",
    "signed64-float32",
    "zeros64-float32",
    "superblock32",
)
BOUND = {torch.float32: 1e-5, torch.bfloat16: 4e-3, torch.float16: 2e-3}
WHY = build.refusal(CPU, "experts")
built = pytest.mark.skipif(WHY is not None, reason=str(WHY))
GATES = {
    "none": None,
    "silu": Gate("silu"),
    "interleaved": Gate("silu", interleaved=True, alpha=1.702, limit=0.7, shift=1.0),
    "gelu": Gate("gelu"),
    "gelu_tanh": Gate("gelu_tanh", interleaved=True),
    "relu": Gate("relu", limit=0.1),
    "relu2 ungated": Gate("relu2", gated=False),
}


def bank(format, *, experts=6, hidden=70, inner=22, dtype=torch.float32):
    """Pages of random experts; `up` is [2 inner, hidden], `down` [hidden, inner]."""
    shapes = {"up": (2 * inner, hidden), "down": (hidden, inner)}
    fmt = get_format(format)
    layout = join_layouts({part: fmt.layout(shape, dtype) for part, shape in shapes.items()})
    pages = []
    for _ in range(experts):
        fields = {part: fmt.encode((torch.randn(shape) * 0.2).to(dtype)) for part, shape in shapes.items()}
        for tensors in fields.values():
            if "tensor_scale" in tensors:
                tensors["tensor_scale"] *= 1.2345  # published checkpoints: not a power of two
        pages.append(pack(join_fields(fields), layout, new_page(layout)))
    return ExpertPages(format, dtype, shapes, layout, pages)


def routed(pages, tokens, k):
    """Ids and routing weights; some are sentinels, but not all."""
    ids = torch.randint(0, pages.experts, (tokens, k))
    ids[torch.rand(ids.shape) < 0.2] = pages.experts
    ids[torch.rand(ids.shape) < 0.1] = -1
    ids[0, 0] = 0
    return ids, torch.rand(tokens, k)


def weight(pages, expert, part):
    planes = part_planes(pages, expert, part)
    return get_format(pages.format).decode(dict(planes.coarse), planes.shape, torch.float64)


def rows(x, ids, pages, part, bias=None):
    """W x + b in float64 for each pair, zeros for sentinels."""
    out = torch.zeros(ids.numel(), pages.shapes[part][0], dtype=torch.float64)
    for p, e in enumerate(ids.view(-1).tolist()):
        if 0 <= e < pages.experts:
            out[p] = weight(pages, e, part) @ x[p // ids.shape[1]].double()
            out[p] += 0 if bias is None else bias[e].double()
    return out


@built
@matrix(gate=GATES, format=FORMATS, tokens=[1, 9, 40], dtype=list(BOUND), hidden=[16, 70, 4200])
def test_up_is_as_close_to_float64_as_the_dtype_allows(gate, format, tokens, dtype, hidden):
    pages = bank(format, hidden=hidden, experts=5)
    ids, _ = routed(pages, tokens, 3)
    x = (torch.randn(tokens, hidden) / math.sqrt(hidden)).to(dtype)
    bias = torch.randn(5, 44).to(dtype) if tokens > 1 else None
    v = rows(x, ids, pages, "up", bias)
    want = v if gate is None else apply_gate(v, gate)
    want[(ids.view(-1) < 0) | (ids.view(-1) >= 5)] = 0
    got = cpu_experts.experts_up(x, ids, pages, gate=gate, bias_EN=bias)
    assert got.dtype is dtype and error(got, want) <= 2 * BOUND[dtype]
    assert error(reference.experts_up(x, ids, pages, gate=gate, bias_EN=bias), want) <= 4 * BOUND[dtype]


@built
@matrix(format=FORMATS, tokens=[1, 2, 6, 40], dtype=list(BOUND), biased=[False, True], weighted=[True, False])
def test_down_sums_each_tokens_experts(format, tokens, dtype, biased, weighted):
    pages = bank(format, inner=300)
    ids, weights = routed(pages, tokens, 4)
    h, bias = torch.randn(4 * tokens, 300).to(dtype), torch.randn(6, 70).to(dtype) if biased else None
    want = rows(h, ids.view(-1, 1), pages, "down", bias)
    if weighted:
        want = (want.view(tokens, 4, -1) * weights.double().unsqueeze(-1)).sum(1)
    got = cpu_experts.experts_down(h, ids, weights if weighted else None, pages, bias_EN=bias)
    assert got.dtype is dtype and got.shape == want.shape and error(got, want) <= 2 * BOUND[dtype]


@built
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_numbers_of_16_bits_are_read_and_rounded_as_torch_does_it(dtype):
    pages = bank("mxfp4", experts=2, hidden=32, inner=1024)
    odd = torch.arange(-(1 << 15), 1 << 15, 16).add(torch.arange(4096) % 16).to(torch.int16)  # Inf, NaN, denormals
    ids, bias = torch.tensor([[0, 1]]), odd.view(dtype).view(2, 2048)
    got = cpu_experts.experts_up(torch.zeros(1, 32), ids, pages, bias_EN=bias)
    assert torch.equal(got.nan_to_num(7.0), bias.float().nan_to_num(7.0)) and got.isnan().any()
    fine = (bias.float() * (1 + torch.rand(2, 2048) / 64)).nan_to_num(1.0, 3e38, -3e38)
    got = cpu_experts.experts_up(torch.zeros(1, 32, dtype=dtype), ids, pages, bias_EN=fine)
    assert torch.equal(got, fine.to(dtype))


@built
def test_a_sentinel_adds_nothing_whatever_its_weight():
    pages, weights = bank("nvfp4"), torch.tensor([[0.5, math.nan], [math.inf, 2.0]])
    y = cpu_experts.experts_down(torch.randn(4, 22), torch.tensor([[1, 6], [-1, 0]]), weights, pages)
    assert y.isfinite().all() and y.abs().sum() > 0


@built
@pytest.mark.parametrize("tokens", [1, 5, 60])
def test_results_depend_neither_on_the_threads_nor_on_who_else_is_there(tokens, monkeypatch):
    pages = bank("nvfp4", hidden=500, inner=90)
    ids, weights = routed(pages, tokens, 3)
    x = torch.randn(tokens, 500).bfloat16()

    def run(x, ids, weights):
        h = cpu_experts.experts_up(x, ids, pages, gate=GATES["silu"])
        return cpu_experts.experts_down(h, ids, weights, pages)

    results = []
    for threads in (1, 2, 5):
        monkeypatch.setattr(cpu_experts, "threads_for", lambda work, threads=threads: threads)
        results.append(run(x, ids, weights))
    assert all(torch.equal(results[0], other) for other in results[1:])
    if tokens <= 5:
        alone = torch.cat([run(x[t : t + 1], ids[t : t + 1], weights[t : t + 1]) for t in range(tokens)])
        assert torch.equal(alone, results[0])


@built
@pytest.mark.parametrize("spare", [0, 3])
def test_experts_of_few_and_of_many_tokens_meet_in_one_call(spare):
    pages = bank("mxfp4", experts=4)
    tokens = cpu_experts.most_pairs() + 5
    ids = torch.zeros(tokens, 2, dtype=torch.int32)
    ids[:, 1] = 4  # a sentinel
    ids[: 1 + spare, 1] = 2
    x = torch.randn(tokens, 70)
    got = cpu_experts.experts_up(x, ids, pages, gate=GATES["gelu"])
    assert error(got, apply_gate(rows(x, ids, pages, "up"), GATES["gelu"])) <= 1e-5


@built
def test_autocast_around_a_call_changes_no_bit_of_experts_whose_matrices_are_decoded(monkeypatch):
    monkeypatch.setattr(cpu_linear, "slow_dtypes", lambda: (torch.bfloat16,))  # multiplied in fp32
    pages, tokens = bank("mxfp4", experts=2), cpu_experts.most_pairs() + 5
    x, ids = torch.randn(tokens, 70).bfloat16(), torch.zeros(tokens, 1, dtype=torch.int32)
    expected = cpu_experts.experts_up(x, ids, pages, gate=GATES["silu"])
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(cpu_experts.experts_up(x, ids, pages, gate=GATES["silu"]), expected)


@built
def test_gradients_reach_inputs_and_routing_weights():
    pages = bank("nvfp4")
    ids, weights = routed(pages, 4, 2)
    grads = []
    for module in (cpu_experts, reference):
        x, w = torch.ones(4, 70, requires_grad=True), weights.clone().requires_grad_()
        h = module.experts_up(x, ids, pages, gate=GATES["silu"])
        module.experts_down(h, ids, w, pages).sum().backward()
        grads.append((x.grad, w.grad))
    torch.testing.assert_close(*grads)
    assert grads[0][1].abs().sum() > 0


@built
def test_pages_that_nobody_is_sent_to_may_be_missing_and_others_are_named():
    pages = bank("nvfp4")
    part = ExpertPages("nvfp4", pages.dtype, pages.shapes, pages.layout, [None, *pages.pages[1:]])
    x, ids = torch.randn(2, 70), torch.tensor([[1, 2], [5, 6]])
    assert torch.equal(cpu_experts.experts_up(x, ids, part), cpu_experts.experts_up(x, ids, pages))
    with pytest.raises(KernelError, match="expert 0: its page is not here"):
        cpu_experts.experts_up(x, torch.tensor([[1, 0], [2, 3]]), part)
    with pytest.raises(KernelError, match=r"up: x has shape \(2, 69\); expected \(2, 70\)"):
        cpu_experts.experts_up(x[:, 1:], ids, pages)
    count, outputs = pages.experts, pages.shapes["up"][0]
    for bias in (torch.ones(count, 1), torch.ones(2, outputs), torch.ones(outputs)):
        with pytest.raises(KernelError, match=rf"up: the bias has shape .*; expected \({count}, {outputs}\)"):
            cpu_experts.experts_up(x, ids, pages, bias_EN=bias)


@built
@pytest.mark.parametrize("shape", [(0, 2), (3, 0)])
@pytest.mark.parametrize("ops", [cpu_experts, reference], ids=lambda ops: ops.__name__)
def test_no_pairs_give_empty_results(shape, ops):
    pages = bank("nf4")
    ids = torch.zeros(shape, dtype=torch.int64)
    assert ops.experts_up(torch.randn(shape[0], 70), ids, pages).shape == (0, 44)
    y = ops.experts_down(torch.randn(0, 22), ids, torch.zeros(shape), pages)
    assert torch.equal(y, torch.zeros(shape[0], 70))


@pytest.mark.parametrize("format", cpu_linear.FORMATS)
def test_the_values_of_scale_bytes_are_numbers_of_16_bits(format):
    """The C code for AVX-512 looks up their upper halves."""
    values = get_format(format).byte_values(CPU)
    assert torch.equal(values.bfloat16().float().nan_to_num(7.0), values.nan_to_num(7.0))


@built
def test_every_function_of_a_gate_has_its_number_in_c():
    assert set(cpu_experts._FUNCTIONS) == set(reference.GATES)


@built
@pytest.mark.parametrize("format", cpu_linear.FORMATS)
def test_auto_takes_the_compiled_experts(format):
    for op in ("experts_up", "experts_down"):
        assert resolve(op, "auto", CPU, format).backend == "compiled"
