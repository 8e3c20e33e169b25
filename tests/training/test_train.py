"""Weights that train: dense bit for bit as without vbrt, 4-bit formats against a reference of a few lines."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import vbrt
from tests.matrix import matrix
from tests.models import gpt2, llama, mlp
from tests.training.reference import FOUR_BIT, StraightThrough, counts, layer, rounded, steps, wrap
from vbrt.errors import ConfigError, FormatError, VBError, WrapError

# -- dense ------------------------------------------------------------------------------------------------------------


@pytest.mark.sample(4)
@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "autocast"])
@pytest.mark.parametrize("checkpointing", [False, True], ids=["plain", "checkpointed"])
@pytest.mark.parametrize("make", [llama, gpt2])
def test_dense_trains_bit_for_bit_as_the_unwrapped_model(make, checkpointing, autocast):
    plain, model = make().train(), make().train()
    if checkpointing:
        plain.gradient_checkpointing_enable({"use_reentrant": False})
        model.gradient_checkpointing_enable({"use_reentrant": False})
    vb = wrap(model, "dense")
    assert steps(vb, autocast=autocast) == steps(plain, autocast=autocast)
    want, got = plain.state_dict(), vb.state_dict()
    assert want.keys() == got.keys() and all(torch.equal(want[name], got[name]) for name in want)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_dense_layers_with_a_bias_are_bit_for_bit_the_plain_ones(dtype):
    plain, vb = mlp(dtype=dtype).train(), wrap(mlp(dtype=dtype).train(), "dense")
    x = torch.randn(2, 3, 64, dtype=dtype)
    for model in (plain, vb):
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for _ in range(3):
            model(x).square().sum().backward()
            optimizer.step()
    want, got = plain.state_dict(), vb.state_dict()
    assert want.keys() == got.keys() and all(torch.equal(want[name], got[name]) for name in want)


# -- gradients --------------------------------------------------------------------------------------------------------


@pytest.mark.sample(16)
@pytest.mark.parametrize("shape", [(7, 64), (2, 3, 64)], ids=str)
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("format", FOUR_BIT)
def test_gradients_are_those_at_the_rounded_weight(format, dtype, bias, shape):
    model, vb = layer(format, bias=bias, dtype=dtype)
    x = torch.randn(shape).to(dtype).requires_grad_()
    w = rounded(format, model.weight.detach()).requires_grad_()
    b = model.bias.detach().clone().requires_grad_() if bias else None
    dy = torch.randn(*shape[:-1], 48).to(dtype)
    y, want = vb(x), F.linear(x, w, b)
    assert torch.equal(y, want)
    inputs, wanted_of = [x, model.weight, model.bias], [x, w, b]
    got = torch.autograd.grad(y, [t for t in inputs if t is not None], dy)
    expected = torch.autograd.grad(want, [t for t in wanted_of if t is not None], dy)
    for one, other in zip(got, expected, strict=True):
        assert one.dtype == dtype
        torch.testing.assert_close(one, other)


def test_a_weight_whose_columns_do_not_fill_the_last_block():
    model, vb = layer("quantile", n=10, k=70)
    x = torch.randn(4, 70, requires_grad=True)
    assert torch.equal(vb(x), F.linear(x, rounded("quantile", model.weight.detach()), model.bias))
    assert "padded" in vb.plan.swaps[0].note


def test_only_the_gradients_that_are_asked_for_are_computed():
    model, vb = layer()
    model.requires_grad_(False)
    x = torch.randn(4, 64, requires_grad=True)
    vb(x).sum().backward()
    assert x.grad is not None and model.weight.grad is None and model.bias.grad is None
    with torch.no_grad():
        assert not vb(x).requires_grad


def test_a_second_derivative_is_the_reference_one():
    _, vb = layer()
    reference = copy.deepcopy(vb).unwrap()
    reference.__class__ = StraightThrough
    x = torch.randn(4, 64)
    penalties = []
    for one in (vb.module, reference):
        inputs = x.clone().requires_grad_()
        (dx,) = torch.autograd.grad(one(inputs).square().sum(), inputs, create_graph=True)
        dx.square().sum().backward()
        penalties.append((one.weight.grad, inputs.grad))
    for got, want in zip(*penalties, strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.sample(3)
@matrix(format=FOUR_BIT, autocast={"fp32": False, "autocast": True})
def test_steps_with_fresh_scales_are_those_of_the_reference(format, autocast):
    reference = llama().train()
    vb = wrap(llama().train(), format, every=1)
    for name in vb.registry:
        module = reference.get_submodule(name)
        module.__class__, module.format = StraightThrough, format
    losses, want = steps(vb, 4, autocast=autocast), steps(reference, 4, autocast=autocast)
    torch.testing.assert_close(losses, want, rtol=2e-2 if autocast else 1e-4, atol=0)
    assert losses[-1] < losses[0]


@pytest.mark.sample(1)
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_changes_nothing(use_reentrant):
    plain, other = wrap(llama().train(), every=2), wrap(llama().train(), every=2)
    other.module.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    other.module.enable_input_require_grads()
    assert steps(plain, 5) == steps(other, 5)
    assert counts(plain) == counts(other) == (2, 3)


def test_conv1d_layers_train_in_blocks_along_their_inputs():
    vb = wrap(gpt2().train())
    conv = vb.module.transformer.h[0].mlp.c_fc
    conv(torch.randn(2, 40)).sum()
    w_hat = conv.handle.rounded_as_before(conv.weight, torch.float32)
    assert torch.equal(w_hat, rounded("nvfp4", conv.weight.detach().t().contiguous()))
    losses = steps(vb, 6)
    assert losses[-1] < losses[0]


def test_no_copy_of_the_weight_is_kept_for_the_backward_pass():
    model, vb = layer()
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(tuple(t.shape)), t)[1], lambda t: t):
        y = vb(torch.randn(5, 64, requires_grad=True))
    assert saved == [(5, 64)]
    y.sum().backward()
    assert model.weight.grad is not None
    kept = model.handle.separation.nbytes
    assert kept <= model.weight.nbytes / 16


# -- wrong use --------------------------------------------------------------------------------------------------------


def test_a_weight_that_changes_between_forward_and_backward_is_named():
    def step(model):
        with torch.no_grad():
            model[0].weight.add_(0.1)

    def load(model):
        model.load_state_dict(copy.deepcopy(model.state_dict()))

    def swap_memory(model):
        model[0].weight.data = model[0].weight.data.clone()

    for change in (step, load, swap_memory):
        vb = wrap(mlp().train())
        loss = vb(torch.randn(2, 64)).sum()
        change(vb.module)
        with pytest.raises(WrapError, match=r"^\d+: its weight was changed or loaded anew between forward and"):
            loss.backward()


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("format", FOUR_BIT)
def test_a_weight_that_is_not_finite_shows_and_is_named_at_the_next_refresh(format, value):
    vb = wrap(mlp().train(), format, every=2)
    x = torch.randn(2, 64)
    vb(x)
    with torch.no_grad():
        vb.module[2].weight[3, 5] = value
        assert vb.module[2](x)[:, 3].isnan().all()
        vb.module[2].weight[4, 6] = value
    with pytest.raises(FormatError, match=rf"^2: {format}: weight of shape \(64, 64\) holds \d NaN and \d Inf"):
        vb(x)


def test_what_has_no_meaning_in_training_says_so(tmp_path):
    vb = wrap(mlp().train())
    for use in (lambda: vb.set_budget("cpu", "1GiB"), lambda: vb.timeline(tmp_path / "t.html")):
        with pytest.raises(WrapError, match='mode = "train"'):
            use()
    with pytest.raises(ConfigError, match=r'mode = "train" with weights\.fine = "exact"'):
        vbrt.wrap(mlp(), "exact", mode="train")
    vb.save(tmp_path / "saved")
    with pytest.raises(ConfigError, match="load"):
        vbrt.load(tmp_path / "saved", mlp(), mode="train")
    with pytest.raises(WrapError, match="wrapped"):
        vbrt.wrap(vb.module)
    with pytest.raises(FormatError, match="meta device"):
        wrap(mlp().to("meta"))(torch.randn(2, 64))
    assert issubclass(WrapError, VBError)


def test_the_plan_says_that_nothing_moves():
    plan = wrap(mlp().train()).plan
    assert plan.page_bytes == 0 and 'mode = "train"' in plan.notes[0] and len(plan.swaps) == 6
    partly = mlp()
    partly[0].requires_grad_(False)
    assert len(wrap(partly).plan.swaps) == 6


def test_stats_show_the_engine_and_survive_json():
    vb = wrap(mlp().train())
    vb(torch.randn(2, 64))
    stats = vb.stats()
    assert "training" in str(stats) and "fits" in str(stats) and not stats.tiers
    assert vbrt.Stats.from_dict(stats.to_dict()) == stats
    assert stats.layers["0"].plane_bytes == {"dense": 64 * 64 * 4, "scales": 64 * 4 + 4}
    vb.close()
    vb.close()
    vb(torch.randn(2, 64))


# -- in compiled graphs -----------------------------------------------------------------------------------------------


def llama_of_a_layer():
    return llama(layers=1)


@matrix(make=[llama_of_a_layer, gpt2], format=["nvfp4", "dense", "quantile"], at_most=1)
def test_a_compiled_model_trains_as_the_eager_one(make, format):
    torch._dynamo.reset()
    eager, other = wrap(make().train(), format, every=2), wrap(make().train(), format, every=2)
    compiled = torch.compile(other.module, backend="aot_eager")
    losses = steps(compiled, 4)
    torch.testing.assert_close(losses, steps(eager, 4), rtol=1e-5, atol=0)
    assert counts(eager) == counts(other)
    torch._dynamo.reset()


# -- on a GPU ---------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("format", FOUR_BIT)
def test_a_step_on_kept_scales_does_not_wait_for_the_gpu(format):
    torch.manual_seed(5)
    model = nn.Linear(256, 192).cuda()
    vb = vbrt.wrap(model, mode="train", weights={"format": format}, separation={"refresh_every": 100})
    optimizer, x = torch.optim.AdamW(vb.parameters(), lr=1e-4), torch.randn(8, 256, device="cuda")

    def step():
        vb(x).sum().backward()
        optimizer.step()

    step()
    step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert counts(vb) == (2, 1)
    w_hat = model.handle.rounded_as_before(model.weight, torch.float32)
    other = nn.Linear(256, 192)
    other.load_state_dict(model.state_dict(), strict=False)
    onto_cpu = wrap(other, format)
    onto_cpu.load_state_dict(vb.state_dict())
    assert torch.equal(w_hat.cpu(), other.handle.rounded_as_before(other.weight, torch.float32))


def test_a_dense_layer_whose_weight_a_norm_computes_can_be_cast():
    model, vb = layer("dense")
    torch.nn.utils.parametrizations.weight_norm(model)
    vb.to(torch.bfloat16)
    assert vb(torch.randn(2, 64, dtype=torch.bfloat16)).dtype is torch.bfloat16
