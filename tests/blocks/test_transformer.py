"""OptimizedTransformerBlock against the same block in plain torch."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import vbrt
from vbrt.blocks import FusedFP4Linear, OptimizedTransformerBlock
from vbrt.errors import ArgumentError

D, HEADS, FF = 32, 4, 64


class Plain(nn.Module):
    """The block by hand, with the math written out."""

    def __init__(self, block):
        super().__init__()
        block = copy.deepcopy(block)
        self.norms = nn.ModuleList([block.attention_norm, block.mlp_norm])
        attention = block.attention
        self.weights = nn.ParameterList(
            [
                attention.q_proj.weight,
                attention.k_proj.weight,
                attention.v_proj.weight,
                attention.o_proj.weight,
                block.up.weight,
                block.up.bias,
                block.down.weight,
                block.down.bias,
            ]
        )
        self.causal = attention.causal

    def forward(self, x, mask=None):
        q, k, v, o, up, up_bias, down, down_bias = self.weights
        h = self.norms[0](x)
        heads = [F.linear(h, w).unflatten(-1, (HEADS, -1)).transpose(1, 2) for w in (q, k, v)]
        scores = heads[0] @ heads[1].mT / (D // HEADS) ** 0.5
        if self.causal:
            scores = scores.masked_fill(torch.ones(x.shape[1], x.shape[1]).triu(1).bool(), -float("inf"))
        if mask is not None:
            scores = scores.masked_fill(~mask, -float("inf"))
        x = x + F.linear((scores.softmax(-1) @ heads[2]).transpose(1, 2).flatten(2), o)
        return x + F.linear(F.gelu(F.linear(self.norms[1](x), up, up_bias)), down, down_bias)


def make(seed=0, **given):
    torch.manual_seed(seed)
    return OptimizedTransformerBlock(D, HEADS, FF, **given)


def inputs():
    torch.manual_seed(1)
    return torch.randn(2, 9, D)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("use_fp4", [False, True])
@pytest.mark.parametrize("use_checkpoint", [False, True])
def test_equals_plain_torch_with_gradients(causal, masked, use_fp4, use_checkpoint):
    block = make(causal=causal, use_fp4=use_fp4, use_checkpoint=use_checkpoint)
    plain, x = Plain(block), inputs().requires_grad_()
    twin = x.detach().clone().requires_grad_()
    mask = (torch.rand(9, 9) < 0.7) | torch.eye(9, dtype=torch.bool) if masked else None
    y, expected = block(x, mask), plain(twin, mask)
    y.square().sum().backward()
    expected.square().sum().backward()
    torch.testing.assert_close(y, expected)
    torch.testing.assert_close(x.grad, twin.grad, rtol=1e-4, atol=1e-4)
    attention = block.attention
    own = [
        attention.q_proj.weight,
        attention.k_proj.weight,
        attention.v_proj.weight,
        attention.o_proj.weight,
        block.up.weight,
        block.up.bias,
        block.down.weight,
        block.down.bias,
    ]
    for ours, theirs in zip(own, plain.weights, strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore:attention")
@pytest.mark.parametrize("use_fp4", [False, True])
def test_checkpointing_changes_no_bit_with_dropout(use_fp4):
    grads = []
    for use_checkpoint in (False, True):
        block, x = make(dropout=0.2, use_fp4=use_fp4, use_checkpoint=use_checkpoint), inputs().requires_grad_()
        torch.manual_seed(5)
        y = block(x)
        y.square().sum().backward()
        grads.append([y, x.grad, *(p.grad for p in block.parameters())])
    for without, with_ in zip(*grads, strict=True):
        assert torch.equal(without, with_)


def test_checkpointing_keeps_the_input_only():
    def saved(use_checkpoint):
        block, x, kept = make(use_checkpoint=use_checkpoint), inputs().requires_grad_(), []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
            block(x)
        return sum(kept)

    assert saved(use_checkpoint=True) <= inputs().numel()
    assert saved(use_checkpoint=False) > 10 * inputs().numel()


@pytest.mark.sample(1)
@pytest.mark.filterwarnings("ignore:attention")
@pytest.mark.parametrize("given", [{}, {"dropout": 0.1, "use_checkpoint": True}, {"use_fp4": True}])
def test_it_trains(given):
    block, x = make(causal=True, **given), inputs()
    target = x.roll(1, dims=1)  # to be copied from the position before
    optimizer = torch.optim.Adam(block.parameters(), lr=1e-2)
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = F.mse_loss(block(x)[:, 1:], target[:, 1:])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.4 * losses[0]


def test_use_fp4_is_frozen_by_quantize_and_stays_close():
    block = make(use_fp4=True).eval()
    x = inputs()
    dense = block(x)
    assert vbrt.quantize(block) == 6
    assert all(layer.format == "nvfp4" for layer in block.modules() if isinstance(layer, FusedFP4Linear))
    frozen = block(x)
    assert 0 < (frozen - dense).norm() < 0.1 * dense.norm()
    fresh = make(seed=3, use_fp4=True).eval()
    fresh.load_state_dict(block.state_dict())
    assert torch.equal(fresh(x), frozen)


def test_a_frozen_block_passes_gradients_to_its_input_and_trains_the_rest():
    block, x = make(use_fp4=True, use_checkpoint=True), inputs().requires_grad_()
    vbrt.quantize(block)
    block(x).sum().backward()
    assert x.grad.abs().sum() > 0
    names = {name for name, p in block.named_parameters() if p.grad is not None}
    assert names == {
        "attention_norm.weight",
        "attention_norm.bias",
        "mlp_norm.weight",
        "mlp_norm.bias",
        "up.bias",
        "down.bias",
    }


def test_it_compiles_to_the_same():
    block, x = make(causal=True, use_checkpoint=True), inputs()
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(block, backend="aot_eager", fullgraph=True)(x), block(x))


def test_dropout_is_off_in_eval_mode():
    block, plain = make(dropout=0.5).eval(), Plain(make(dropout=0.5))
    torch.testing.assert_close(block(inputs()), plain(inputs()))


@pytest.mark.parametrize("given", [{"d_ff": 0}, {"n_heads": 5}, {"dropout": -0.1}])
def test_sizes_that_do_not_fit_are_named(given):
    with pytest.raises(ArgumentError, match=next(iter(given))):
        OptimizedTransformerBlock(**{"d_model": 32, "n_heads": 4, "d_ff": 64} | given)
