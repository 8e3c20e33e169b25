"""The kernels between the layers of a step as they are compiled, behind their launches, run on the CPU: see `ptx`."""

import pytest
import torch
import torch.nn.functional as F

from tests.emulator.test_ptx import gpu  # noqa: F401  # a fixture
from tests.kernels.cuda.gpu_cases import error
from vbrt.kernels import step
from vbrt.kernels.cuda import step_ops
from vbrt.kernels.step import NormRule, Part, RouteRule

pytest.importorskip("triton.experimental.gluon")


def test_a_norm_and_a_sum_with_its_norm(gpu):  # noqa: F811
    gain, other = (torch.rand(*shape).bfloat16() for shape in ((200,), (3, 200)))
    x = torch.randn(3, 400).bfloat16()[:, ::2].contiguous().view(1, 3, 200)
    for rule in (NormRule(gain, 1e-5), NormRule(gain, 1e-5, 1.0, rounds=False), NormRule(None, 1e-5)):
        _, y = step_ops.norm_rows(x, None, rule)
        assert error(y, step.normed(x, rule)) < 2e-3
        total, y = step_ops.norm_rows(x, other.view(1, 3, 200), rule)
        assert torch.equal(total, x + other) and error(y, step.normed(x + other, rule)) < 2e-3
    assert gpu == ["norm_kernel"] * 6


def heads(*shape):
    return torch.randn(*shape).bfloat16().transpose(1, 2)


def test_queries_and_keys_are_rotated_to_the_bits_of_torch(gpu):  # noqa: F811
    query, key, cos, sin = heads(2, 3, 4, 24), heads(2, 3, 2, 24), *(torch.randn(2, 3, 24).bfloat16() for _ in range(2))
    got = step_ops.rotate([Part(query), Part(key)], cos, sin)
    want = step.rotated([Part(query), Part(key)], cos, sin)
    assert all(torch.equal(a, b) and a.stride() == b.stride() for a, b in zip(got, want, strict=True))
    assert torch.equal(
        step_ops.rotate([Part(query)], cos[:1], sin[:1])[0], step.rotated([Part(query)], cos[:1], sin[:1])[0]
    )


def test_columns_that_are_not_rotated_are_copied(gpu):  # noqa: F811
    query, key, value = (heads(1, 2, 2, 40) for _ in range(3))
    cos, sin = (torch.randn(1, 2, 24).bfloat16() for _ in range(2))
    caches = [torch.zeros(1, 2, 5, 40).bfloat16() for _ in range(4)]
    parts, at = [Part(query), Part(key)], torch.tensor([1, 4])
    (got,) = step_ops.rotate(parts, cos, sin, step_ops.Store(value, *caches[:2], at))
    want, *_ = step.rotated_into(parts, cos, sin, value, *caches[2:], at)
    assert torch.equal(got, want) and torch.equal(caches[0], caches[2]) and torch.equal(caches[1], caches[3])


def test_heads_are_normed_and_rotated_into_a_cache(gpu):  # noqa: F811
    query, key, value = heads(2, 1, 4, 32), heads(2, 1, 2, 32), heads(2, 1, 2, 32)
    cos, sin = (torch.randn(1, 1, 32).bfloat16() for _ in range(2))
    parts = [Part(x, NormRule(torch.rand(32).bfloat16(), 1e-6)) for x in (query, key)]
    caches = [torch.zeros(2, 2, 5, 32).bfloat16() for _ in range(4)]
    at = torch.tensor([3])
    (got,) = step_ops.rotate(parts, cos, sin, step_ops.Store(value, *caches[:2], at))
    want, *_ = step.rotated_into(parts, cos, sin, value, *caches[2:], at)
    assert error(got, want) < 4e-3 and error(caches[0], caches[2]) < 4e-3 and torch.equal(caches[1], caches[3])


@pytest.mark.parametrize("rule", [RouteRule(3, True, True, torch.bfloat16), RouteRule(2, True, False, torch.float32),
                                  RouteRule(4, False, False, torch.bfloat16)])  # fmt: skip
def test_a_router_s_choice(rule, gpu):  # noqa: F811
    logits = torch.randn(3, 20).bfloat16()
    logits[0, 5] = logits[0].max() + 1
    logits[0, 9] = logits[0, 5]  # of equal ones the first
    weights, ids = step_ops.route(logits, rule)
    want, order = step.routed(logits, rule)
    assert ids[0, :2].tolist() == [5, 9] and torch.equal(ids[1:], order[1:])
    assert weights.dtype is rule.dtype and error(weights, want) < 4e-3


@pytest.mark.sample(1)
@pytest.mark.parametrize(("q_heads", "queries"), [(6, 1), (2, 3)])
def test_attention_of_few_queries(q_heads, queries, gpu):  # noqa: F811
    q, k, v = heads(2, queries, q_heads, 64), *(torch.randn(2, 2, 90, 64).bfloat16() for _ in range(2))
    mask = torch.rand(2, 1, 1, 90) < 0.4
    mask[..., 32:64], mask[..., 0] = False, True
    for seen in (mask, mask[:1], None):
        want = F.scaled_dot_product_attention(
            q.double(), k.double(), v.double(), attn_mask=seen, scale=0.3, enable_gqa=True
        )
        assert error(step_ops.attend(q, k, v, seen, 0.3), want) < 5e-3
    assert gpu[:2] == ["attend_kernel", "gather_kernel"]


@pytest.mark.sample(1)
@pytest.mark.parametrize(("gpu", "dtype", "d"), [(75, torch.float16, 48), (80, torch.float32, 136)], indirect=["gpu"])
def test_attention_without_tensor_cores(dtype, d, gpu):  # noqa: F811
    """Products in fp32, of short rows with all keys of a block, of long ones with half of them."""
    q, k, v = (torch.randn(1, heads, tokens, d).to(dtype) for heads, tokens in ((2, 1), (1, 40), (1, 40)))
    mask = torch.rand(1, 1, 1, 40) < 0.4
    mask[..., 16:32], mask[..., 0] = False, True
    want = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), mask, scale=0.3, enable_gqa=True)
    assert error(step_ops.attend(q, k, v, mask, 0.3), want) < (1e-5 if dtype is torch.float32 else 1e-3)


def test_steady_attention_gives_each_query_the_bits_it_has_alone(gpu):  # noqa: F811
    q, k, v = heads(1, 2, 4, 16), *(torch.randn(1, 2, 70, 16).bfloat16() for _ in range(2))
    mask = torch.rand(1, 1, 2, 70) < 0.4
    mask[..., 32:64], mask[..., 0] = False, True
    got = step_ops.attend(q, k, v, mask, 0.3, steady=True)
    want = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), mask, scale=0.3, enable_gqa=True)
    assert error(got, want) < 5e-3
    packed = step_ops.attend(q[:, :, 1:].view(1, 2, 2, 16), k, v, mask[:, :, 1:], 0.3, steady=True)
    assert torch.equal(packed.view(1, 4, 1, 16), got[:, :, 1:])
    repeated = [of.repeat_interleave(2, 1) for of in (k, v)]
    assert torch.equal(step_ops.attend(q, *repeated, mask, 0.3, steady=True), got)
