"""FlashAttention and OptimizedTransformerBlock on a CUDA device: the definition, in memory that grows with N alone."""

import copy
import itertools
import warnings

import pytest
import torch

import vbrt
from tests.blocks.attention_cases import INF, definition
from vbrt.blocks import FlashAttention, OptimizedTransformerBlock
from vbrt.blocks.attention import attention

pytestmark = pytest.mark.gpu

B, H, HK, D = 2, 4, 2, 64
TOLERANCE = {torch.float32: 5e-3, torch.float16: 6e-3, torch.bfloat16: 4e-2}  # fp32: kernels may multiply in tf32


def tensors(queries, keys, dtype, *, head_dim=D, heads=H, kv=HK):
    torch.manual_seed(3)
    shapes = [(B, heads, queries, head_dim), (B, kv, keys, head_dim), (B, kv, keys, head_dim)]
    return [torch.randn(shape, dtype=dtype, device="cuda", requires_grad=True) for shape in shapes]


def make_mask(kind, queries, keys):
    if kind == "none":
        return None
    shapes = {"2d": (queries, keys), "4d": (B, H, queries, keys), "padding": (B, 1, 1, keys)}
    torch.manual_seed(5)
    mask = torch.rand(shapes[kind.split()[1]], device="cuda") < 0.6
    if "padding" not in kind:
        mask[..., 2, :] = False  # a row that attends to nothing
    if kind.startswith("bool"):
        return mask
    return torch.randn(mask.shape, device="cuda").masked_fill(~mask, -INF)


def relative(ours, exact):
    return ((ours.double() - exact).norm() / exact.norm().clamp(min=1e-9)).item()


KINDS = ["none", *(" ".join(pair) for pair in itertools.product(("bool", "added"), ("2d", "4d", "padding")))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("queries", "keys"), [(130, 130), (70, 201), (201, 70), (1, 130)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_equals_the_definition_with_gradients(kind, causal, queries, keys, dtype):
    if queries < 3 and ("2d" in kind or "4d" in kind):
        pytest.skip("the mask needs three rows")
    inputs, mask = tensors(queries, keys, dtype), make_mask(kind, queries, keys)
    twins = [t.detach().double().requires_grad_() for t in inputs]
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a fused kernel serves all of these
        y = attention(*inputs, mask, causal=causal)
    expected = definition(*twins, mask, causal)
    weights = torch.randn_like(expected)
    (y.double() * weights).sum().backward()
    (expected * weights).sum().backward()
    assert y.dtype is dtype and relative(y, expected) < TOLERANCE[dtype]
    for ours, exact in zip(inputs, twins, strict=True):
        assert relative(ours.grad, exact.grad) < TOLERANCE[dtype]
    if "2d" in kind or "4d" in kind:
        assert not y[:, :, 2].any() and not inputs[0].grad[:, :, 2].any()


@pytest.mark.parametrize("head_dim", [12, 40, 256, 320])
def test_head_dimensions_that_few_kernels_know(head_dim):
    inputs = tensors(65, 65, torch.bfloat16, head_dim=head_dim)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore" if head_dim == 12 else "error")
        y = attention(*inputs, causal=True)
    y.float().sum().backward()
    assert relative(y, definition(*inputs, causal=True)) < 4e-2
    assert all(t.grad.isfinite().all() for t in inputs)


def test_a_trained_mask_gets_its_gradient():
    q, k, v = (t.detach() for t in tensors(40, 40, torch.float32))
    mask = torch.randn(H, 40, 40, device="cuda")[None].requires_grad_()
    twin = mask.detach().double().requires_grad_()
    with pytest.warns(UserWarning, match="requires grad"):
        attention(q, k, v, mask).square().sum().backward()
    definition(q, k, v, twin).square().sum().backward()
    assert relative(mask.grad, twin.grad) < 5e-3


@pytest.mark.parametrize("kind", ["none", "bool 2d"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dropout_drops_the_same_weights_in_the_backward_pass(kind, dtype):
    """The output is linear in v: <w, y> = <dy/dv w, v> holds if, and only if, both passes drop the same."""
    q, k, v = tensors(256, 256, dtype)
    mask = make_mask(kind, 256, 256)
    torch.manual_seed(1)
    y = attention(q, k, v, mask, dropout=0.5)
    weights = torch.randn_like(y)
    y.backward(weights)
    forward = (y.double() * weights.double()).sum()
    backward = (v.grad.double() * v.double()).sum()
    assert abs(forward - backward) < 0.02 * (y.norm() * weights.norm()).double()
    assert relative(y, attention(q, k, v, mask).double()) > 0.1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("what", ["causal", "mask", "causal rectangle"])
def test_memory_grows_with_n_and_not_with_its_square(what, dtype):
    size = 8192
    q, k, v = tensors(size // 2 if what == "causal rectangle" else size, size, dtype, heads=8, kv=8)
    mask = torch.rand(size, size, device="cuda") < 0.9 if what == "mask" else None
    scores = B * 8 * q.shape[2] * size * dtype.itemsize
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    attention(q, k, v, mask, causal=what != "mask").sum().backward()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    assert peak < scores / 3, (peak, scores)


def test_explain_says_what_runs():
    layer, x = FlashAttention(256, 4, causal=True).cuda().bfloat16(), torch.randn(2, 64, 256).cuda().bfloat16()
    assert layer.explain(x).backend == "sdpa"
    assert layer.explain(x, mask=torch.ones(64, 64, dtype=torch.bool, device="cuda")).backend == "sdpa-blocks"
    assert layer.double().explain(x.double()).backend == "blocks"
    with torch.autocast("cuda", torch.bfloat16):
        assert layer.float().explain(x.float()).backend == "sdpa"


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("use_checkpoint", [False, True])
@pytest.mark.parametrize("autocast", [False, True])
def test_a_block_gives_what_it_gives_on_a_cpu(masked, use_checkpoint, autocast):
    torch.manual_seed(0)
    block = OptimizedTransformerBlock(256, 4, 1024, causal=True, use_checkpoint=use_checkpoint)
    twin, x = copy.deepcopy(block).double(), torch.randn(2, 100, 256)
    mask = torch.rand(100, 100) < 0.8 if masked else None
    block, ours = block.cuda(), x.cuda().requires_grad_()
    with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
        y = block(ours, None if mask is None else mask.cuda())
    expected = twin(x.double(), mask)
    y.double().square().sum().backward()
    expected.square().sum().backward()
    tolerance = 2e-2 if autocast else 1e-3
    assert relative(y.cpu(), expected) < tolerance
    for mine, exact in zip(block.parameters(), twin.parameters(), strict=True):
        assert relative(mine.grad.cpu(), exact.grad) < 2 * tolerance


def test_checkpointing_with_dropout_changes_no_bit():
    def gradients(use_checkpoint):
        torch.manual_seed(0)
        block = OptimizedTransformerBlock(256, 4, 1024, 0.1, causal=True, use_checkpoint=use_checkpoint).cuda()
        x = torch.randn(2, 128, 256, device="cuda")
        torch.use_deterministic_algorithms(True)
        try:
            with torch.autocast("cuda", torch.bfloat16):
                block(x).square().sum().backward()
        finally:
            torch.use_deterministic_algorithms(False)
        return [p.grad for p in block.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(gradients(False), gradients(True), strict=True))


def test_a_quantized_block_runs_on_the_kernels_and_trains_the_rest():
    torch.manual_seed(0)
    block = OptimizedTransformerBlock(256, 4, 1024, use_fp4=True, causal=True).cuda()
    x = torch.randn(2, 64, 256, device="cuda", requires_grad=True)
    dense = block(x).detach()
    assert vbrt.quantize(block) == 6
    y = block(x)
    y.square().sum().backward()
    assert 0 < relative(y, dense.double()) < 0.1
    assert x.grad.isfinite().all() and block.up.bias.grad.isfinite().all()
