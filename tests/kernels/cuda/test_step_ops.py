"""The launches between the layers of a step on a GPU, against plain torch in higher precision."""

import pytest
import torch
import torch.nn.functional as F

from tests.kernels.cuda.gpu_cases import error, poison
from vbrt.kernels import step
from vbrt.kernels.step import NormRule, Part, RouteRule

pytestmark = pytest.mark.gpu
BF16 = torch.bfloat16


def normal(*shape, dtype=BF16):
    return torch.randn(*shape, device="cuda", dtype=dtype)


@pytest.mark.parametrize(
    ("batch", "heads", "groups", "queries", "length", "d"),
    [
        (1, 32, 8, 1, 4096, 128),
        (16, 32, 4, 1, 300, 80),
        (2, 8, 1, 1, 70000, 64),
        (3, 4, 4, 7, 1000, 256),
        (2, 8, 2, 1, 900, 512),
    ],
)
@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32])
@pytest.mark.parametrize("capability", [None, (7, 5)], indirect=True)
@pytest.mark.usefixtures("capability")
def test_attention_of_few_queries_matches_float64(batch, heads, groups, queries, length, d, dtype):
    q = normal(batch, queries, heads, d, dtype=dtype).transpose(1, 2)
    k, v = (normal(batch, groups, length + 5, d, dtype=dtype)[:, :, :length] for _ in range(2))
    mask = torch.rand(batch, 1, 1, length, device="cuda") < 0.1
    mask[..., 128:], mask[..., 0] = False, True
    for seen in (mask, None):
        poison()
        y = step.attended(q, k, v, seen, d**-0.5)
        wide = [
            t.double() for t in (q, k.repeat_interleave(heads // groups, 1), v.repeat_interleave(heads // groups, 1))
        ]
        want = F.scaled_dot_product_attention(*wide, attn_mask=seen)
        assert error(y, want) < (1e-5 if dtype is torch.float32 else 5e-3)


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_steady_attention_gives_each_query_the_bits_it_has_alone(dtype):
    q = normal(50, 5, 8 * 64, dtype=dtype).view(50, 5, 8, 64).transpose(1, 2)
    k, v = (normal(50, 2, 1024, 64, dtype=dtype)[:, :, :700] for _ in range(2))
    mask = torch.rand(50, 1, 5, 700, device="cuda") < 0.3
    mask[..., 0] = True
    whole = step.attended(q, k, v, mask, 0.1, True)
    for row, token in ((0, 0), (49, 4), (7, 2)):
        alone = [of[row : row + 1] for of in (q, k, v, mask)]
        repeated = [of.repeat_interleave(4, 1) for of in alone[1:3]]
        for keys in (alone[1:3], repeated):
            y = step.attended(alone[0][:, :, token : token + 1], *keys, alone[3][:, :, token : token + 1], 0.1, True)
            assert torch.equal(y, whole[row : row + 1, :, token : token + 1])


def test_a_query_that_may_attend_to_nothing_gives_zeros():
    q, k = normal(1, 4, 1, 64), normal(1, 2, 100, 64)
    y = step.attended(q, k, k, torch.zeros(1, 1, 1, 100, dtype=torch.bool, device="cuda"), 1.0)
    assert torch.equal(y, torch.zeros_like(y))


@pytest.mark.parametrize("k", [64, 200, 2730, 4096, 16384])
def test_norms_match_float64(k):
    gain = normal(k)
    for tokens in (1, 3, 40):
        x, other = (normal(2 * tokens, k)[::2] for _ in range(2))
        for rule in (NormRule(gain, 1e-5), NormRule(gain, 1e-5, 1.0, rounds=False), NormRule(None, 1e-5)):
            total, y = step.summed(x, other, rule)
            scale = 1.0 if rule.gain is None else gain.double() + rule.shift
            want = F.rms_norm(total.double(), (k,), None, 1e-5) * scale
            assert torch.equal(total, x + other) and error(y, want) < 4e-3
            assert torch.equal(step.normed(total, rule), y)


@pytest.mark.parametrize(("experts", "k"), [(8, 2), (128, 8), (512, 10), (1000, 32)])
def test_routers_choose_what_torch_chooses(experts, k):
    logits = torch.randperm(5 * experts, device="cuda").view(5, experts).float() / experts  # no two are equal
    for first, renormalized in ((True, True), (True, False), (False, False)):
        rule = RouteRule(k, first, renormalized, torch.float32)
        weights, ids = step.routed(logits, rule)
        want, order = step.routed(logits.cpu().double(), rule)
        assert torch.equal(ids.cpu(), order) and error(weights.cpu(), want) < 1e-5


@pytest.mark.parametrize("dtype", [BF16, torch.float16, torch.float32])
def test_rotation_gives_the_bits_of_eager_kernels(dtype):
    query, key, value = (normal(2, 3, heads, 96, dtype=dtype).transpose(1, 2) for heads in (8, 2, 2))
    cos, sin = (normal(2, 3, 64, dtype=dtype) for _ in range(2))
    caches = [torch.zeros(2, 2, 9, 96, device="cuda", dtype=dtype) for _ in range(4)]
    at, parts = torch.tensor([1, 5, 8], device="cuda"), (Part(query), Part(key))
    got, *_ = step.rotated_into(parts, cos, sin, value, *caches[:2], at)
    want = [step._rotated(part, cos.unsqueeze(1), sin.unsqueeze(1)) for part in parts]
    caches[2].index_copy_(2, at, want[1])
    caches[3].index_copy_(2, at, value)
    assert torch.equal(got, want[0]) and torch.equal(caches[0], caches[2]) and torch.equal(caches[1], caches[3])
