"""Weights that train: dense bit for bit as without vbrt, 4-bit formats against a reference of a few lines."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import vbrt
from tests.matrix import matrix
from tests.models import TOKENS, gpt2, llama, mlp
from vbrt.errors import ConfigError, FormatError, VBError, WrapError
from vbrt.formats import get_format
from vbrt.training import TrainedLinear

FOUR_BIT = ("nvfp4", "mxfp4", "nf4", "quantile")


def wrap(model, format="nvfp4", *, every=100, **weights):
    return vbrt.wrap(
        model,
        mode="train",
        weights={"format": format, "min_parameters": 0, **weights},
        tiers={"gpu": {"enabled": False}},
        separation={"refresh_every": every},
    )


def layer(format="nvfp4", *, every=100, n=48, k=64, bias=True, dtype=torch.float32):
    torch.manual_seed(5)
    model = nn.Linear(k, n, bias).to(dtype)
    return model, wrap(model, format, every=every)


def rounded(format, w_NK):
    fmt = get_format(format)
    return fmt.decode(fmt.encode(w_NK), tuple(w_NK.shape), w_NK.dtype)


class StraightThrough(nn.Linear):
    """The reference: fresh scales in each forward, and autograd for everything else."""

    format = "nvfp4"

    def forward(self, x):
        w = self.weight
        return F.linear(x, w + (rounded(self.format, w.detach()) - w).detach(), self.bias)


def steps(model, count=3, *, autocast=False, batches=2, lr=3e-3, optimizer=None):
    """Losses of some AdamW steps on a language model, gradients accumulated and clipped."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=lr)
    losses = []
    for step in range(count):
        for batch in (TOKENS, TOKENS.flip(1))[:batches]:
            torch.manual_seed(step)  # dropout
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                loss = model(input_ids=batch, labels=batch, use_cache=False).loss / batches
            loss.backward()
            losses.append(loss.item())
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def counts(vb, name=None):
    stats = vb.stats().layers
    one = stats[name or next(iter(stats))]
    return one.separation_hits, one.separation_refreshes


# -- dense ------------------------------------------------------------------------------------------------------------


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
    for one in (vb.model, reference):
        inputs = x.clone().requires_grad_()
        (dx,) = torch.autograd.grad(one(inputs).square().sum(), inputs, create_graph=True)
        dx.square().sum().backward()
        penalties.append((one.weight.grad, inputs.grad))
    for got, want in zip(*penalties, strict=True):
        torch.testing.assert_close(got, want)


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


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpointing_changes_nothing(use_reentrant):
    plain, other = wrap(llama().train(), every=2), wrap(llama().train(), every=2)
    other.model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    other.model.enable_input_require_grads()
    assert steps(plain, 5) == steps(other, 5)
    assert counts(plain) == counts(other) == (2, 3)


def test_conv1d_layers_train_in_blocks_along_their_inputs():
    vb = wrap(gpt2().train())
    conv = vb.model.transformer.h[0].mlp.c_fc
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


# -- when scales are refreshed ----------------------------------------------------------------------------------------


def test_scales_are_refreshed_every_so_many_optimizer_steps():
    vb = wrap(llama().train(), every=3)
    steps(vb, 7, batches=1, lr=1e-5)
    assert counts(vb) == (4, 3)


def test_one_means_fresh_scales_in_each_step():
    vb = wrap(llama().train(), every=1)
    steps(vb, 4)
    assert counts(vb) == (0, 4)


def test_accumulation_evaluation_and_recomputation_are_no_steps():
    model, vb = layer(every=3)
    optimizer, x = torch.optim.SGD(vb.parameters(), lr=1e-3), torch.randn(4, 64)
    for _ in range(4):
        for _ in range(3):
            torch.utils.checkpoint.checkpoint(vb, x.requires_grad_(), use_reentrant=False).sum().backward()
        optimizer.step()
        vb.eval()
        before = counts(vb)
        vb(x)
        vb(x)
        assert counts(vb) == before
        vb.train()
    assert counts(vb) == (2, 2)
    assert model.handle.forwards == 4 * (6 + 2)


def test_an_evaluation_before_the_first_step_changes_no_schedule():
    one, other = wrap(llama().train(), every=3), wrap(llama().train(), every=3)
    other.eval()
    with torch.inference_mode():
        other(input_ids=TOKENS)
    other.train()
    assert steps(one, 5) == steps(other, 5)
    assert counts(one) == counts(other)


@pytest.mark.parametrize("format", ["nvfp4", "mxfp4", "nf4", "quantile"])
def test_blocks_that_a_weight_outgrows_get_a_larger_scale_at_once(format):
    model, vb = layer(format, every=1000)
    x = torch.randn(4, 64)
    vb(x)
    before = model.handle.separation._frame.tensors["scales"].view(torch.uint8).clone()
    with torch.no_grad():
        model.weight[5].mul_(3)
        vb(x)
        rounded = model.handle.rounded_as_before(model.weight, torch.float32)
    after = model.handle.separation._frame.tensors["scales"].view(torch.uint8)
    assert torch.equal(before[torch.arange(48) != 5], after[torch.arange(48) != 5]) and (after[5] > before[5]).all()
    error = (rounded - model.weight).norm(dim=1) / model.weight.norm(dim=1)
    assert error[5] < 1.6 * error.mean()
    assert counts(vb) == (1, 1)


def test_weights_that_outgrow_the_range_of_their_scales_refresh_them_early():
    model, vb = layer(every=1000)
    x = torch.randn(4, 64)
    for factor, expected in ((1.0, (0, 1)), (1.001, (1, 1)), (1e4, (2, 1)), (1.001, (2, 2)), (1.001, (3, 2))):
        with torch.no_grad():
            if factor != 1:
                model.weight.mul_(factor)
        vb(x)
        assert counts(vb) == expected
    assert vb.stats().layers["(root)"].clipped_share < 0.02
    assert torch.equal(vb(x), F.linear(x, model.handle.rounded_as_before(model.weight, torch.float32), model.bias))


def test_weights_that_were_zero_at_the_fit_are_seen_to_grow():
    model, vb = layer(every=1000)
    x = torch.randn(4, 64)
    with torch.no_grad():
        model.weight.zero_()
        vb(x)
        model.weight.normal_()
        assert torch.equal(vb(x), model.bias.expand(4, 48))
        model.weight.mul_(1.01)
        vb(x)
    assert counts(vb) == (1, 2)


class Descent(torch.optim.Optimizer):
    """Writes in a way that leaves no trace at the parameter."""

    def step(self):
        for p in self.param_groups[0]["params"]:
            p.data.add_(p.grad, alpha=-1e-3)


@pytest.mark.parametrize(
    "optimizer",
    [
        lambda p: torch.optim.AdamW(p, lr=1e-4),
        lambda p: torch.optim.AdamW(p, lr=1e-4, foreach=True),
        lambda p: torch.optim.AdamW(p, lr=1e-4, fused=True),
        lambda p: torch.optim.SGD(p, lr=1e-4, momentum=0.9),
        lambda p: torch.optim.Adagrad(p, lr=1e-4),
        lambda p: Descent(p, {}),
    ],
    ids=["adamw", "foreach", "fused", "sgd", "adagrad", "data"],
)
def test_steps_of_every_optimizer_are_seen(optimizer):
    vb = wrap(llama().train(), every=100)
    steps(vb, 4, optimizer=optimizer(vb.parameters()))
    assert counts(vb) == (3, 1)


# -- states and copies ------------------------------------------------------------------------------------------------


@matrix(format=["dense", *FOUR_BIT], stop=[1, 4, 5])
def test_a_run_that_is_taken_up_again_is_the_same_run(format, stop, tmp_path):
    vb = wrap(llama().train(), format, every=3)
    optimizer = torch.optim.AdamW(vb.parameters(), lr=3e-3)
    steps(vb, stop, optimizer=optimizer)
    torch.save({"model": vb.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "run.pt")
    saved = torch.load(tmp_path / "run.pt", weights_only=True)
    other = wrap(llama().train(), format, every=3)
    other.load_state_dict(saved["model"])
    again = torch.optim.AdamW(other.parameters(), lr=3e-3)
    again.load_state_dict(saved["optimizer"])
    assert steps(vb, 5, optimizer=optimizer) == steps(other, 5, optimizer=again)
    assert counts(vb) == counts(other)


def test_a_state_between_a_forward_and_the_step_is_not_taken_for_a_step():
    _, vb = layer(every=2)
    x = torch.randn(4, 64)
    vb(x)
    other = layer(every=2)[1]
    other.load_state_dict(vb.state_dict())
    other(x)
    assert counts(other) == counts(vb) == (0, 1)


def test_a_dense_state_dict_loads_strictly_and_starts_a_new_history():
    _, vb = layer()
    x = torch.randn(4, 64)
    vb(x)
    dense = nn.Linear(64, 48)
    assert not vb.load_state_dict(dense.state_dict()).missing_keys
    assert torch.equal(vb(x), F.linear(x, rounded("nvfp4", dense.weight.detach()), dense.bias))
    assert counts(vb) == (0, 1)


@pytest.mark.parametrize("number", [float("inf"), float("nan")])
def test_a_history_that_is_not_finite_is_refused_by_name(number):
    _, vb = layer()
    vb(torch.randn(4, 64))
    state = vb.state_dict()
    state["separation"][8:16] = torch.tensor([number], dtype=torch.float64).view(torch.uint8)  # its steps
    with pytest.raises(RuntimeError, match=r"separation.*finite numbers"):
        vb.load_state_dict(state)


def test_a_state_of_another_format_is_refused_by_name():
    vb, other = wrap(llama().train(), "nvfp4"), wrap(llama().train(), "nf4")
    steps(vb, 1)
    with pytest.raises(RuntimeError, match=r"model\.layers\.0\.mlp\.up_proj\.separation.*in nf4: saved with another"):
        other.load_state_dict(vb.state_dict())
    dense = wrap(llama().train(), "dense")
    dense.load_state_dict(vb.state_dict())  # whoever goes on dense needs no scales


@pytest.mark.parametrize(
    "copied", [copy.deepcopy, lambda vb: pickle.loads(pickle.dumps(vb))], ids=["deepcopy", "pickle"]
)
def test_a_copy_trains_on_as_the_original_and_apart_from_it(copied):
    vb = wrap(llama().train(), every=3)
    optimizer = torch.optim.AdamW(vb.parameters(), lr=3e-3)
    steps(vb, 4, optimizer=optimizer)
    other = copied(vb)
    again = torch.optim.AdamW(other.parameters(), lr=3e-3)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert steps(vb, 4, optimizer=optimizer) == steps(other, 4, optimizer=again)
    assert counts(vb) == counts(other)
    steps(other, 1)
    assert counts(vb) != counts(other)


def test_parameters_are_the_very_ones_before_while_and_after():
    model = llama().train()
    before = list(model.parameters())
    vb = wrap(model)
    optimizer = torch.optim.AdamW(vb.parameters(), lr=3e-3)
    assert all(one is other for one, other in zip(vb.parameters(), before, strict=True))
    steps(vb, 2, optimizer=optimizer)
    plain = vb.unwrap()
    assert plain is model and not any(isinstance(module, TrainedLinear) for module in model.modules())
    assert all(one is other for one, other in zip(plain.parameters(), before, strict=True))
    weight = model.model.layers[0].mlp.up_proj.weight.clone()
    steps(plain, 1, optimizer=optimizer)
    assert not torch.equal(model.model.layers[0].mlp.up_proj.weight, weight)
    wrap(model)  # and once more


def test_tied_layers_share_one_engine():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(64, 64), nn.Linear(64, 64)
            self.b.weight = self.a.weight

        def forward(self, x):
            return self.b(self.a(x))

    torch.manual_seed(0)
    model = Tied()
    vb = wrap(model, every=3)
    optimizer = torch.optim.SGD(vb.parameters(), lr=1e-3)
    for _ in range(4):
        vb(torch.randn(4, 64)).sum().backward()
        optimizer.step()
    assert model.a.handle is model.b.handle and len(vb.stats().layers) == 1
    assert counts(vb) == (2, 2)
    other = wrap(Tied(), every=3)
    other.load_state_dict(vb.state_dict())
    assert other.model.a.weight is other.model.b.weight
    other(torch.randn(4, 64))
    assert counts(other) == (3, 2)
    model.b.weight = nn.Parameter(torch.randn(64, 64))  # untied
    assert model.a.handle is not model.b.handle
    vb(torch.randn(4, 64))
    assert counts(vb) == (3, 2)


def test_a_cast_model_goes_on_in_its_new_dtype():
    _, vb = layer(every=100)
    vb(torch.randn(4, 64))
    vb.to(torch.bfloat16)
    y = vb(torch.randn(4, 64, dtype=torch.bfloat16))
    assert y.dtype is torch.bfloat16 and counts(vb) == (1, 1)


def test_a_save_loads_as_an_inference_model_of_what_the_forward_computed(tmp_path):
    vb = wrap(gpt2().train(), "nf4", every=100)
    steps(vb, 3)
    vb.eval()
    with torch.no_grad():
        vb.train()(input_ids=TOKENS)  # the forward that sees the last step
        want = vb.eval()(input_ids=TOKENS).logits
        loaded = vbrt.load(vb.save(tmp_path), gpt2(), tiers={"gpu": {"enabled": False}})
        torch.testing.assert_close(loaded(input_ids=TOKENS).logits, want)
    for name, swapped in vb.registry.items():
        w_hat = swapped.handle.rounded_as_before(swapped.weight, torch.float32)
        assert torch.equal(loaded.registry[name].weight, w_hat.t())
    loaded.close()


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
        change(vb.model)
        with pytest.raises(WrapError, match=r"^\d+: its weight was changed or loaded anew between forward and"):
            loss.backward()


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("format", FOUR_BIT)
def test_a_weight_that_is_not_finite_shows_and_is_named_at_the_next_refresh(format, value):
    vb = wrap(mlp().train(), format, every=2)
    x = torch.randn(2, 64)
    vb(x)
    with torch.no_grad():
        vb.model[2].weight[3, 5] = value
        assert vb.model[2](x)[:, 3].isnan().all()
        vb.model[2].weight[4, 6] = value
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
        vbrt.wrap(vb.model)
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


@matrix(make=[llama, gpt2], format=["dense", "nvfp4", "quantile"])
def test_a_compiled_model_trains_as_the_eager_one(make, format):
    torch._dynamo.reset()
    eager, other = wrap(make().train(), format, every=2), wrap(make().train(), format, every=2)
    compiled = torch.compile(other.model, backend="aot_eager")
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
