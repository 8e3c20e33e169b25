"""Parameters that stay on the device in mode "full": stepped as fp32 masters, large ones in chunks."""

import copy

import pytest
import torch
from torch import nn

import vbrt
from tests.training.full.full_models import Masters, Tiny
from tests.training.full.test_full import in_bf16
from tests.training.full.test_optimizer_update import OPTIMIZERS
from vbrt.config import Machine, load_config
from vbrt.training.full import resident_params

GIB = 1 << 30


@pytest.mark.sample(7)
@pytest.mark.parametrize("chunk", [1024, 1 << 24])
@pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=OPTIMIZERS)
def test_they_have_the_bits_of_resident_masters_also_in_chunks(tmp_path, monkeypatch, make, chunk):
    monkeypatch.setattr(resident_params, "_CHUNK", chunk)
    model = Tiny(1).to(torch.bfloat16)
    twin = copy.deepcopy(model)
    by = Masters(twin, make)
    vb = vbrt.wrap(model, "full", optimizer=make, weights={"embeddings": False})
    assert "embed" in vb.plan.skipped  # 3,200 numbers: three chunks and a rest
    assert in_bf16(vb, vb.optimizer) == in_bf16(twin, by)
    vb.save_checkpoint(tmp_path)
    other = vbrt.wrap(Tiny(1).to(torch.bfloat16), "full", optimizer=make, weights={"embeddings": False})
    other.load_checkpoint(tmp_path)
    assert in_bf16(vb, vb.optimizer) == in_bf16(other, other.optimizer) == in_bf16(twin, by)
    assert all(torch.equal(p, m) for p, (_, m) in zip(vb.unwrap().parameters(), by.pairs, strict=True))


def clamped(parameter) -> None:
    parameter.data.clamp_(-0.02, 0.02)


def scaled(parameter) -> None:
    with torch.no_grad():
        parameter.mul_(1.5)


def drawn(parameter) -> None:
    nn.init.normal_(parameter, generator=torch.Generator().manual_seed(0))


def replaced(parameter) -> None:
    parameter.data = parameter.data.flip(0)


@pytest.mark.sample(4)
@pytest.mark.parametrize("chunk", [1024, 1 << 24])
@pytest.mark.parametrize("write", [clamped, scaled, drawn, replaced])
def test_numbers_that_are_written_are_the_new_masters_and_the_others_stay(monkeypatch, write, chunk):
    monkeypatch.setattr(resident_params, "_CHUNK", chunk)
    model = Tiny(1).to(torch.bfloat16)
    twin = copy.deepcopy(model)
    by = Masters(twin, OPTIMIZERS["Adam"])
    vb = vbrt.wrap(model, "full", optimizer=OPTIMIZERS["Adam"], weights={"embeddings": False})
    assert in_bf16(vb, vb.optimizer) == in_bf16(twin, by)
    write(model.embed.weight)
    parameter, master = by.pairs[0]
    before = parameter.clone()
    write(parameter)
    with torch.no_grad():
        master.copy_(master.where(parameter == before, parameter.float()))
    assert (parameter != before).any() and ((parameter == before).any() or write is not clamped)
    assert torch.equal(resident_params.master_of(vb.optimizer, model.embed.weight), master)
    assert in_bf16(vb, vb.optimizer) == in_bf16(twin, by)
    assert all(torch.equal(p, m) for p, (_, m) in zip(vb.unwrap().parameters(), by.pairs, strict=True))


@pytest.mark.parametrize("chunk", [1, 1 << 24])
def test_a_master_half_way_between_two_bf16_numbers_rounds_as_torchs_and_stays(monkeypatch, chunk):
    monkeypatch.setattr(resident_params, "_CHUNK", chunk)
    parameter = nn.Parameter(torch.tensor([1.0, 1.0 + 2**-7]).bfloat16())
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    for _ in range(2):
        parameter.grad = torch.full_like(parameter, -(2**-8))
        resident_params.step_kept(optimizer, torch.optim.SGD)
        master = resident_params.master_of(optimizer, parameter)
        assert torch.equal(parameter, master.bfloat16())
    assert torch.equal(master, torch.tensor([1.0 + 2**-7, 1.0 + 2**-6]))


@pytest.mark.parametrize("chunk", [1, 1 << 24])
@pytest.mark.parametrize("has_high", [True, False])
def test_halves_of_an_older_checkpoint_are_the_master_of_a_parameter_that_stayed(monkeypatch, chunk, has_high):
    monkeypatch.setattr(resident_params, "_CHUNK", chunk)
    master = torch.tensor([1.0 + 2**-8, 1.0 + 3 * 2**-8, 0.3, -5e-3])
    bits = master.view(torch.int32) + 0x8000  # rounded half up
    high, low = (bits >> 16).to(torch.int16).view(torch.bfloat16), bits.to(torch.int16)
    parameter = nn.Parameter(high.clone())
    optimizer = torch.optim.SGD([parameter], lr=1.0)
    own = {"low": low, "high": high} if has_high else {"low": low}
    resident_params.load_kept(optimizer, {**optimizer.state_dict(), "state": {0: own}})
    assert torch.equal(resident_params.master_of(optimizer, parameter), master)
    parameter.grad = torch.zeros_like(parameter)
    resident_params.step_kept(optimizer, torch.optim.SGD)
    assert torch.equal(resident_params.master_of(optimizer, parameter), master) and torch.equal(
        parameter, master.bfloat16()
    )
    assert set(optimizer.state[parameter]) == {"master"}


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(4096, 64), nn.Linear(64, 64)

    def forward(self, input_ids):
        return self.head(self.embed(input_ids))


def test_a_step_in_chunks_needs_no_room_for_a_master_and_its_gradient(monkeypatch):
    config = load_config("full", tiers={"gpu": {"budget": "4MiB"}}, weights={"embeddings": False})
    found, numbers = [], 4096 * 64

    def step(model):
        return model(torch.zeros(1, 8, dtype=torch.int64)).float().sum()

    for chunk in (1 << 24, 1 << 12):
        monkeypatch.setattr(resident_params, "_CHUNK", chunk)
        machine = Machine(GIB, GIB, 32 * GIB, 32 * GIB)
        with torch.device("meta"):
            model = Table().to(torch.bfloat16)
        found.append(dict(vbrt.estimate(model, "train", config, machine=machine, step=step).moments)["optimizer"])
    assert found[0] - found[1] > 8 * numbers
