"""Mode "full": weights that train from the tiers end as those that train resident, bit for bit."""

import pytest
import torch

import vbrt
from tests.training.full_models import Tiny, resident, train
from vbrt.training.update import join_master, split_master

STEPS = 4


def adamw(parameters) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, fused=True)


def assert_same_training(model, tiers=None, make=adamw, run=train):
    """Train a model both ways; losses and every bit of the state are the same."""
    twin = resident(model)
    with vbrt.wrap(model, "full", optimizer=make(model.parameters()), tiers=tiers or {}) as vb:
        expected = run(twin, make(twin.parameters()))
        assert run(vb, vb.optimizer) == expected
        found = vb.state_dict()
        for name, value in twin.state_dict().items():
            assert torch.equal(value, found[name]), name
        return vb.stats()


def test_every_bit_of_a_master_is_in_its_halves():
    bits = torch.randint(-(2**31), 2**31 - 1, (4096,), dtype=torch.int32)
    bits[:6] = torch.tensor([0, -1, 0x7FFFFFFF, -0x80000000, 0x3F808000, 0x3F818000], dtype=torch.int64).to(torch.int32)
    master = bits.view(torch.float32)
    high, low = split_master(master)
    assert torch.equal(join_master(high, low).view(torch.int32), bits)
    finite = master[master.isfinite() & (master.abs() < 3e38)]
    assert ((split_master(finite)[0].float() - finite).abs() <= (finite.bfloat16().float() - finite).abs()).all()


def test_a_model_trains_as_resident():
    assert_same_training(Tiny())


def test_unwrap_gives_the_parameters_and_the_optimizer_back():
    model = Tiny()
    weight, optimizer = model.layers[0].weight, adamw(model.parameters())
    twin = resident(model)
    theirs = adamw(twin.parameters())
    vb = vbrt.wrap(model, "full", optimizer=optimizer)
    expected = train(twin, theirs)
    assert train(vb, optimizer) == expected
    assert vb.unwrap() is model
    assert type(model.layers[0]) is torch.nn.Linear and model.layers[0].weight is weight
    assert torch.equal(weight, twin.layers[0].weight)
    assert type(optimizer) is torch.optim.AdamW
    again = resident(model)
    assert train(again, adamw(again.parameters())) == train(twin, adamw(twin.parameters()))
    assert torch.equal(optimizer.state[weight]["exp_avg"], theirs.state_dict()["state"][1]["exp_avg"])


def test_an_optimizer_without_a_rule_is_refused_by_name():
    model = Tiny()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(vbrt.WrapError, match="Adagrad"):
        vbrt.wrap(model, "full", optimizer=torch.optim.Adagrad(model.parameters()))
    assert type(model.layers[0]) is torch.nn.Linear
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
