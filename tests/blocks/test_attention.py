"""FlashAttention and the function behind it, against the definition in float64."""

import gc
import itertools
import warnings
import weakref

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import vbrt
from tests.blocks.attention_cases import INF, definition
from vbrt.blocks import FlashAttention
from vbrt.blocks import attention as module
from vbrt.blocks.attention import attention
from vbrt.errors import ArgumentError

B, H, HK, D = 2, 4, 2, 8


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of five queries, so that short inputs have several, and a ragged one."""
    monkeypatch.setattr(module, "_BLOCK_SCORES", 1)
    monkeypatch.setattr(module, "_FEWEST", 5)


def tensors(queries=13, keys=13, dtype=torch.float64, kv=HK):
    torch.manual_seed(3)
    make = [(B, H, queries, D), (B, kv, keys, D), (B, kv, keys, D)]
    return [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in make]


def make_mask(kind, queries, keys, dtype=torch.float32):
    if kind == "none":
        return None
    generator = torch.Generator().manual_seed(5)
    shape = {"2d": (queries, keys), "4d": (B, H, queries, keys), "padding": (B, 1, 1, keys), "row": (queries, 1)}
    mask = torch.rand(shape[kind.split()[1]], generator=generator) < 0.6
    if "2d" in kind or "4d" in kind:
        mask[..., 2, :] = False  # a row that attends to nothing
    if kind.startswith("bool"):
        return mask
    added = torch.randn(mask.shape, generator=generator, dtype=dtype).masked_fill(~mask, -INF)
    return added.requires_grad_() if kind.startswith("trained") else added


def check(q, k, v, mask, causal, tolerance):
    y = attention(q, k, v, mask, causal=causal)
    twins = [t.detach().double().requires_grad_() for t in (q, k, v)]
    double = mask
    if mask is not None and mask.requires_grad:
        double = mask.detach().double().requires_grad_()
    expected = definition(*twins, double, causal)
    weights = torch.randn(y.shape, dtype=torch.float64)
    (y.double() * weights).sum().backward()
    (expected * weights).sum().backward()
    torch.testing.assert_close(y.double(), expected, **tolerance)
    for ours, theirs in zip((q, k, v), twins, strict=True):
        torch.testing.assert_close(ours.grad.double(), theirs.grad, **tolerance)
    if mask is not None and mask.requires_grad:
        torch.testing.assert_close(mask.grad.double(), double.grad, **tolerance)


MASKS = [
    "none",
    *(" ".join(pair) for pair in itertools.product(("bool", "added", "trained"), ("2d", "4d", "padding", "row"))),
]


@pytest.mark.sample(35)
@pytest.mark.filterwarnings("ignore:attention")
@pytest.mark.parametrize(("queries", "keys"), [(13, 13), (6, 17), (17, 6), (1, 9)])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", MASKS)
def test_equals_the_definition_with_gradients(kind, causal, queries, keys, small_blocks):
    if queries < 3 and ("2d" in kind or "4d" in kind):
        pytest.skip("the mask needs three rows")
    q, k, v = tensors(queries, keys)
    check(q, k, v, make_mask(kind, queries, keys, torch.float64), causal, {"rtol": 1e-9, "atol": 1e-9})


@pytest.mark.filterwarnings("ignore:attention")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 4e-2), (torch.float16, 5e-3)])
@pytest.mark.parametrize("kind", ["none", "bool 2d", "added 2d", "trained 2d"])
@pytest.mark.parametrize("causal", [False, True])
def test_equals_the_definition_in_other_dtypes(dtype, tolerance, kind, causal, small_blocks):
    q, k, v = tensors(12, 20, dtype)
    check(q, k, v, make_mask(kind, 12, 20), causal, {"rtol": tolerance, "atol": tolerance})


@pytest.mark.parametrize("kv", [1, 2, 4])
def test_groups_of_heads_share_keys_and_values(kv):
    q, k, v = tensors(kv=kv)
    check(q, k, v, None, True, {"rtol": 1e-9, "atol": 1e-9})


@pytest.mark.parametrize("kind", ["bool 2d", "added 2d"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_fully_masked_row_gives_zeros_and_takes_zero_gradients(kind, dtype):
    q, k, v = tensors(dtype=dtype)
    y = attention(q, k, v, make_mask(kind, 13, 13))
    assert torch.equal(y[:, :, 2], torch.zeros_like(y[:, :, 2]))
    y[:, :, 2].sum().backward()
    for tensor in (q, k, v):
        assert torch.equal(tensor.grad, torch.zeros_like(tensor))


def test_a_module_with_nothing_to_attend_to_gives_zeros():
    layer = FlashAttention(16, 2)
    x = torch.randn(2, 5, 16, requires_grad=True)
    for y in (layer(x, mask=torch.zeros(5, 5, dtype=torch.bool)), layer(x, context=x[:, :0])):
        assert torch.equal(y, torch.zeros_like(y))
        y.sum().backward()
        assert torch.equal(x.grad, torch.zeros_like(x))


def test_causal_is_aligned_bottom_right_as_in_decoding_with_a_cache():
    """Prefill at once, in two parts, and token by token: the same outputs."""
    torch.manual_seed(0)
    layer, x = FlashAttention(16, 2, 1, causal=True), torch.randn(2, 11, 16)
    whole = layer(x)
    parts = torch.cat([layer(x[:, :4]), layer(x[:, 4:], x)], 1)
    tokens = torch.cat([layer(x[:, i : i + 1], x[:, : i + 1]) for i in range(11)], 1)
    torch.testing.assert_close(parts, whole)
    torch.testing.assert_close(tokens, whole)


def test_large_finite_additive_values_stay_finite_in_fp16():
    """-1e9 everywhere is a shift of all scores, not a mask."""
    q, k, v = tensors(dtype=torch.float16)
    y = attention(q, k, v, torch.full((13, 13), -1e9))
    torch.testing.assert_close(
        y.double(), v.double().mean(2, keepdim=True).repeat_interleave(2, 1).expand_as(y), atol=2e-3, rtol=2e-3
    )


# -- dropout ----------------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:attention")
def test_dropout_drops_attention_weights_at_its_rate_and_keeps_their_mean(small_blocks):
    torch.manual_seed(0)
    n = 200
    q, k = torch.zeros(1, 2, n, 4), torch.zeros(1, 2, n, 4)
    v = torch.eye(n).expand(1, 2, n, n)  # the output is the weights
    weights = attention(q, k, v, dropout=0.3) * n
    dropped = (weights == 0).double().mean().item()
    assert abs(dropped - 0.3) < 4 * (0.21 / weights.numel()) ** 0.5
    torch.testing.assert_close(weights[weights != 0], torch.full_like(weights[weights != 0], 1 / 0.7))
    assert not torch.equal(weights[:, 0] == 0, weights[:, 1] == 0)  # each head its own


@pytest.mark.filterwarnings("ignore:attention")
def test_the_backward_pass_drops_what_the_forward_pass_dropped(small_blocks):
    torch.manual_seed(0)
    n = 23
    v = torch.eye(n).expand(1, 1, n, n).clone().requires_grad_()
    q = torch.zeros(1, 1, n, 4)
    y = attention(q, q, v, dropout=0.5)
    torch.rand(5)  # other draws in between change nothing
    y.sum().backward()
    torch.testing.assert_close(v.grad[0, 0], y[0, 0].sum(0)[:, None].expand(n, n))


def test_no_dropout_in_eval_mode():
    layer, x = FlashAttention(16, 2, dropout=0.5).eval(), torch.randn(1, 4, 16)
    assert torch.equal(layer(x), layer(x))
    assert layer.explain(x).backend == "sdpa"


# -- memory -----------------------------------------------------------------------------------------------------------


class Live(TorchDispatchMode):
    """Bytes that are alive among what was made inside, at their peak."""

    def __init__(self, *outside):
        super().__init__()
        self.held, self.peak = 0, 0
        self.seen = {tensor.untyped_storage()._cdata for tensor in outside if tensor is not None}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(out):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor.untyped_storage())
        return out

    def _count(self, storage):
        key, size = storage._cdata, storage.nbytes()
        if key not in self.seen:
            self.seen.add(key)
            self.held += size
            self.peak = max(self.peak, self.held)
            weakref.finalize(storage, self._gone, key, size)

    def _gone(self, key, size):
        self.seen.discard(key)
        self.held -= size


def peak_bytes(n, kind, causal, dropout, keys=None):
    keys = keys or n
    torch.manual_seed(0)
    q = torch.randn(1, 1, n, 8, requires_grad=True)
    k, v = (torch.randn(1, 1, keys, 8, requires_grad=True) for _ in range(2))
    mask = {
        "none": None,
        "bool": torch.ones(n, keys, dtype=torch.bool),
        "added": torch.zeros(n, keys),
        "padding": torch.ones(1, 1, 1, keys, dtype=torch.bool),
    }[kind]
    gc.collect()
    with Live(q, k, v, mask) as live:
        attention(q, k, v, mask, dropout=dropout, causal=causal).sum().backward()
    return live.peak


@pytest.mark.filterwarnings("ignore:attention")
@pytest.mark.parametrize(
    ("kind", "causal", "dropout", "factor"),
    [
        ("none", False, 0.0, 1),
        ("none", True, 0.0, 2),
        ("added", True, 0.0, 1),
        ("bool", True, 0.1, 1),
        *(
            pytest.param(*case, marks=pytest.mark.exhaustive)
            for case in [
                ("none", True, 0.0, 1),
                ("bool", False, 0.0, 1),
                ("padding", False, 0.0, 1),
                ("none", False, 0.1, 1),
            ]
        ),
    ],
)
def test_memory_grows_with_n_and_not_with_its_square(kind, causal, dropout, factor, monkeypatch):
    """Forward and backward together, beyond the mask that is given; the math path would take four times as much."""
    monkeypatch.setattr(module, "_BLOCK_SCORES", 32 * 1024)
    small, large = (peak_bytes(n, kind, causal, dropout, factor * n) for n in (512, 1024))
    assert large < 2.2 * small
    assert large < 1024 * 1024 * 4 * factor


def test_this_measure_sees_the_math_path():
    """The yardstick of the test above: torch's own call with dropout holds the square."""

    def peak(n):
        q = torch.randn(1, 1, n, 8, requires_grad=True)
        with Live(q) as live:
            nn.functional.scaled_dot_product_attention(q, q, q, dropout_p=0.1).sum().backward()
        return live.peak

    assert peak(2048) > 3 * peak(1024)
    assert peak(1024) > 1024 * 1024 * 4


# -- the choice -------------------------------------------------------------------------------------------------------


def case(**given):
    usual = {
        "device": "cpu",
        "dtype": torch.float32,
        "batch": 1,
        "heads": 2,
        "queries": 8,
        "keys": 8,
        "head_dim": 64,
        "masks": 0,
        "mask_trains": False,
        "dropout": 0.0,
        "causal": False,
    }
    return module._Case(**usual | given)


@pytest.mark.parametrize(
    ("given", "backend", "reason"),
    [
        ({}, "sdpa", "no mask, float32 on cpu"),
        ({"causal": True}, "sdpa", "causal"),
        ({"causal": True, "queries": 1}, "sdpa", "causal"),
        ({"causal": True, "queries": 12}, "sdpa", "causal"),
        ({"causal": True, "queries": 5}, "sdpa-blocks", "bottom-right"),
        ({"masks": 1}, "sdpa-blocks", "a mask"),
        ({"dropout": 0.1}, "blocks", "dropout has no fused kernel on a CPU"),
        ({"masks": 1, "mask_trains": True}, "blocks", "requires grad"),
        ({"device": "cuda", "dropout": 0.1}, "sdpa", "float32 on cuda"),
        ({"device": "cuda", "dtype": torch.bfloat16}, "sdpa", "bfloat16 on cuda"),
        ({"device": "cuda", "dtype": torch.float64}, "blocks", "float64 has no fused kernel"),
        ({"device": "cuda", "dtype": torch.bfloat16, "head_dim": 60}, "blocks", "60 is not a multiple of 8"),
        ({"device": "cuda", "head_dim": 60}, "sdpa", "float32 on cuda"),
        ({"device": "mps"}, "blocks", "mps"),
    ],
)
def test_the_backend_follows_from_device_dtype_shape_and_mask(given, backend, reason):
    choice = module._choose(case(**given))
    assert choice.backend == backend
    assert reason in choice.reason


def test_blocks_shrink_as_batch_heads_and_keys_grow():
    assert module._choose(case(dropout=0.1)).block == 512
    assert module._choose(case(dropout=0.1, batch=4, heads=16, keys=4096)).block == 64
    assert module._choose(case(dropout=0.1, batch=64, heads=64, keys=65536)).block == 16


def test_a_fused_kernel_takes_all_queries_whose_mask_is_within_the_limit():
    long = {"queries": 8192, "keys": 8192, "batch": 8, "heads": 16}
    assert module._choose(case(masks=1)).block == 8
    assert module._choose(case(masks=1, **long)).block == 2048
    assert module._choose(case(masks=8, **long)).block == 256
    assert module._choose(case(causal=True, **long | {"queries": 8000})).block == 2048


def test_explain_says_what_forward_takes_and_computes_nothing():
    layer = FlashAttention(32, 4, dropout=0.1).to("meta")
    x = torch.empty(2, 6, 32)
    assert layer.explain(x).backend == "blocks"
    layer.eval()
    assert layer.explain(x).backend == "sdpa"
    assert layer.explain(x, mask=torch.ones(6, 6, dtype=torch.bool)).backend == "sdpa-blocks"
    with torch.autocast("cpu", torch.bfloat16):
        assert "bfloat16" in layer.explain(x).reason


def test_plain_torch_is_announced_with_the_reason():
    layer, x = FlashAttention(16, 2, dropout=0.1), torch.randn(1, 4, 16)
    with pytest.warns(UserWarning, match="dropout has no fused kernel on a CPU; computed in plain torch, by blocks"):
        layer(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        layer.eval()(x)


# -- the module -------------------------------------------------------------------------------------------------------


def test_equals_torch_multi_head_attention_with_the_same_weights():
    torch.manual_seed(0)
    ours, theirs = FlashAttention(32, 4), nn.MultiheadAttention(32, 4, bias=False, batch_first=True)
    with torch.no_grad():
        for i, projection in enumerate((ours.q_proj, ours.k_proj, ours.v_proj)):
            theirs.in_proj_weight[32 * i : 32 * (i + 1)] = projection.weight
        theirs.out_proj.weight.copy_(ours.o_proj.weight)
    x, context = torch.randn(2, 5, 32), torch.randn(2, 9, 32)
    allowed = torch.rand(5, 9) < 0.7
    torch.testing.assert_close(ours(x, context, allowed), theirs(x, context, context, attn_mask=~allowed)[0])


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.filterwarnings("ignore:attention")
def test_autocast_computes_the_projections_and_the_product_in_its_dtype(dropout):
    layer, x = FlashAttention(32, 4, dropout=dropout), torch.randn(2, 7, 32, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x, mask=torch.zeros(7, 7))
    assert y.dtype is torch.bfloat16
    y.float().sum().backward()
    assert x.grad.isfinite().all()
    assert x.grad.dtype is torch.float32


def test_wrap_swaps_the_projections():
    model = nn.Sequential(FlashAttention(64, 4, causal=True)).eval()
    x = torch.randn(1, 5, 64)
    expected = model(x)
    with vbrt.wrap(model, "dense", weights={"min_parameters": 0}) as vb:
        assert torch.equal(vb(x), expected)
        assert isinstance(model[0].q_proj, vbrt.VBLinear)


@pytest.mark.parametrize(
    ("mask", "named"),
    [
        (torch.ones(5, 4, dtype=torch.bool), r"shape \(5, 4\); expected \[Sq, Sk\] = \(5, 5\)"),
        (torch.ones(2, 5, 5, dtype=torch.bool), "any dimension may be 1"),
        (torch.ones(3, 1, 5, 5, dtype=torch.bool), r"\(2, 4, 5, 5\)"),
        (torch.ones(5, dtype=torch.bool), "expected"),
        (torch.ones(5, 5, dtype=torch.int64), "the mask is torch.int64"),
    ],
)
def test_a_mask_of_another_shape_or_dtype_is_named(mask, named):
    layer, x = FlashAttention(16, 4), torch.randn(2, 5, 16)
    for call in (layer, layer.explain):
        with pytest.raises(ArgumentError, match=named):
            call(x, mask=mask)


@pytest.mark.parametrize(("given", "named"), [
    ({"n_heads": 3}, "n_heads = 3"), ({"n_heads": 0}, "n_heads = 0"), ({"n_heads": 4, "n_kv_heads": 3}, "n_kv_heads"),
    ({"n_heads": 4, "dropout": 1.0}, "dropout = 1.0"),
])  # fmt: skip
def test_numbers_that_do_not_fit_are_named(given, named):
    with pytest.raises(ArgumentError, match=named):
        FlashAttention(16, **given)


@pytest.mark.parametrize(
    ("x", "context"), [((5, 16), None), ((2, 5, 8), None), ((2, 5, 16), (3, 5, 16)), ((2, 5, 16), (2, 5, 8))]
)
def test_inputs_of_another_shape_are_named(x, context):
    with pytest.raises(ArgumentError, match="expected"):
        FlashAttention(16, 2)(torch.randn(x), None if context is None else torch.randn(context))
