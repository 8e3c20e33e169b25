"""When scales are refreshed, and how states and copies of layers in training go on."""

import copy
import pickle

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import vbrt
from tests.matrix import matrix
from tests.models import TOKENS, gpt2, llama
from tests.training.reference import FOUR_BIT, counts, layer, rounded, steps, wrap
from vbrt.training import TrainedLinear

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


@pytest.mark.sample(4)
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


@pytest.mark.sample(2)
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


@pytest.mark.parametrize(
    ("history", "message"),
    [
        (None, "a NoneType; expected the uint8 tensor"),
        ([1, 2], "a list; expected the uint8 tensor"),
        ({"steps": 1}, "a dict; expected the uint8 tensor"),
        (
            torch.empty(308, dtype=torch.uint8, device="meta"),
            "a torch.strided tensor on meta; expected the dense tensor",
        ),
        (torch.ones(308, dtype=torch.uint8).to_sparse(), "a torch.sparse_coo tensor on cpu; expected the dense tensor"),
    ],
    ids=["none", "list", "dict", "meta", "sparse"],
)
def test_a_history_that_is_no_tensor_with_values_is_refused_by_name(history, message):
    vb = vbrt.wrap(
        nn.Sequential(nn.Linear(64, 64)), "fp4", mode="train", weights={"min_parameters": 0, "keep_head": False}
    )
    vb(torch.ones(2, 64))
    state = vb.state_dict() | {"0.separation": history}
    with pytest.raises(RuntimeError, match=rf"0\.separation: {message}"):
        vb.load_state_dict(state)
    vb.load_state_dict(vb.state_dict())


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


@pytest.mark.sample(1)
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
    assert other.module.a.weight is other.module.b.weight
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
