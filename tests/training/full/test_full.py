"""Mode "full": weights that train from the tiers end as those that train resident, bit for bit."""

import contextlib
import copy

import pytest
import torch

import vbrt
from tests.training.full.full_models import Masters, Tiny, adamw, batches, loss_of, resident, train
from vbrt.training.full import optimizer_takeover
from vbrt.training.full.full_weight import FullWeight
from vbrt.training.full.optimizer_update import Updater

STEPS = 4


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


def test_a_model_trains_as_resident():
    assert_same_training(Tiny())


@pytest.mark.parametrize("make", [adamw, lambda p: torch.optim.SGD(p, lr=2**-7, fused=True)], ids=["adamw", "sgd"])
@pytest.mark.parametrize("seed", range(3))
def test_weights_half_way_between_two_bf16_numbers_round_as_plain_torchs(seed, make):
    torch.manual_seed(seed)
    model = Tiny().half().float()  # an eighth of numbers with 10 bits is half way between two with 7
    ties = sum((p.view(torch.int32) & 0xFFFF == 0x8000).sum() for p in model.layers.parameters())
    assert ties > 1000
    assert_same_training(model, make=make)


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
    for optimizer in (torch.optim.Adagrad(model.parameters()), torch.optim.Adagrad, torch.optim.RMSprop):
        with pytest.raises(vbrt.WrapError, match=r"^(Adagrad|RMSprop): .* it can do for AdamW, Adam"):
            vbrt.wrap(model, "full", optimizer=optimizer)
        assert type(model.layers[0]) is torch.nn.Linear
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_a_step_that_was_replaced_on_the_instance_is_refused_by_name_and_one_put_on_later_runs():
    model, called = Tiny(), []
    optimizer = adamw(model.parameters())
    optimizer.step = lambda: called.append("before")
    with pytest.raises(vbrt.WrapError, match=r"AdamW: its step was replaced on the instance"):
        vbrt.wrap(model, "full", optimizer=optimizer)
    del optimizer.step
    vb = vbrt.wrap(model, "full", optimizer=optimizer)
    optimizer.step = lambda closure, plain=optimizer.step: (called.append("later"), plain(closure))
    train(vb, vb, 1)
    assert called == ["later"]


def test_a_model_in_another_dtype_is_refused_by_name():
    model = Tiny().half()
    with pytest.raises(vbrt.FormatError, match=r"layers.0: its weight is torch.float16; .*float32 or bfloat16"):
        vbrt.wrap(model, "full", optimizer=adamw)
    assert type(model.layers[0]) is torch.nn.Linear


def small_tiers(tmp_path, pages: float) -> dict:
    """Room for some of Tiny's 8 KiB pages in memory, the others in files."""
    return {"cpu": {"budget": int(pages * 8192)}, "ssd": {"enabled": True, "path": str(tmp_path), "budget": "1MiB"}}


def in_pieces(model, optimizer) -> list[float]:
    """Three steps of two pieces each, with clipped gradients."""
    losses = []
    for step in range(3):
        for ids, target in batches(2, seed=step):
            loss = loss_of(model, ids, target)
            loss.backward()
            losses.append(loss.item())
        losses.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.3).item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def test_gradients_are_added_and_clipped_as_resident():
    updates = assert_same_training(Tiny(), run=in_pieces).updates
    assert updates.steps == 3 and "3 steps" in str(updates)


@pytest.mark.parametrize("pages", [3, 6.5])
def test_pages_in_files_train_as_resident(tmp_path, pages):
    stats = assert_same_training(Tiny(), small_tiers(tmp_path, pages))
    assert stats.tiers["ssd"].home_pages and stats.tiers["cpu"].peak_bytes <= stats.tiers["cpu"].budget_bytes


def groups(parameters) -> torch.optim.Optimizer:
    every = list(parameters)
    split = [{"params": every[:5], "weight_decay": 0.1}, {"params": every[5:], "lr": 3e-3, "weight_decay": 0.0}]
    return torch.optim.AdamW(split, lr=1e-2, fused=True)


def test_groups_have_learning_rates_and_weight_decays_of_their_own():
    assert_same_training(Tiny(), make=groups)


def scheduled(model, optimizer) -> list[float]:
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 8)
    losses = train(model, optimizer, 2)
    schedule.step()
    return losses + train(model, optimizer, 2)


@pytest.mark.parametrize("run", [train, scheduled])
def test_tied_weights_train_as_one(run):
    model = Tiny(tied=True)
    assert_same_training(model, run=run)
    assert model.layers[-1].weight is model.layers[-2].weight


def test_frozen_weights_stay():
    model = Tiny()
    for parameter in model.layers[1].parameters():
        parameter.requires_grad_(False)
    assert_same_training(model, make=lambda every: adamw([p for p in every if p.requires_grad]))


@pytest.mark.parametrize("reentrant", [False, True])
def test_blocks_that_are_computed_again_train_as_resident(reentrant):
    class Recomputed(Tiny):
        def forward(self, ids):
            x = self.embed(ids)
            for layer in self.layers:
                x = x + torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=reentrant)
            return self.head(self.norm(x))

    assert_same_training(Recomputed())


def test_sgd_with_momentum_trains_as_resident():
    assert_same_training(Tiny(), make=lambda every: torch.optim.SGD(every, lr=0.1, momentum=0.9, fused=True))


def in_bf16(model, optimizer) -> list[float]:
    """Two pieces a step, without autocast."""
    losses = []
    for step in range(4):
        for ids, target in batches(2, seed=step):
            loss = torch.nn.functional.cross_entropy(model(ids).float().flatten(0, 1), target.flatten())
            loss.backward()
            losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.parametrize("tied", [False, True])
def test_tables_in_bf16_are_in_the_tiers(tied, tmp_path):
    model = Tiny().to(torch.bfloat16)
    if tied:
        model.head.weight = model.embed.weight
    twin = copy.deepcopy(model)
    by = Masters(twin, adamw)
    vb = vbrt.wrap(model, "full", optimizer=adamw, tiers=small_tiers(tmp_path, 6.5))
    assert "embed" in vb.registry and ("head" in vb.registry)
    expected = in_bf16(twin, by)
    assert in_bf16(vb, vb.optimizer) == expected
    assert all(torch.equal(p, m) for p, (_, m) in zip(vb.unwrap().parameters(), by.pairs, strict=True))


@pytest.mark.parametrize("tied", [False, True])
def test_a_model_in_bf16_trains_as_with_resident_masters(tied):
    model = Tiny(tied=tied).to(torch.bfloat16)
    twin = copy.deepcopy(model)
    by = Masters(twin, adamw)
    vb = vbrt.wrap(model, "full", optimizer=adamw)
    expected = in_bf16(twin, by)
    assert in_bf16(vb, vb.optimizer) == expected
    vb.unwrap()
    for parameter, (_, master) in zip(model.parameters(), by.pairs, strict=True):
        assert parameter.dtype is torch.float32 and torch.equal(parameter, master)


def test_moments_of_8_bits_take_a_quarter_and_train(tmp_path):
    plain, coded = (vbrt.wrap(Tiny(), "full", optimizer=adamw, training={"moments": m}) for m in ("fp32", "8bit"))
    held = [vb.stats().tiers["cpu"].held_bytes for vb in (plain, coded)]
    assert held[1] < 0.6 * held[0]


def stepping(model, optimizer) -> list[float]:
    """Three steps of two passes, the second of which begins the step where the model trains from the tiers."""
    losses = []
    begin = getattr(model, "stepping", None)
    for step in range(3):
        for last, (ids, target) in enumerate(batches(2, seed=step)):
            loss = loss_of(model, ids, target)
            with begin() if begin and last else contextlib.nullcontext():
                loss.backward()
            losses.append(loss.item())
        if begin is None:
            optimizer.step()
        model.zero_grad()
    return losses


@pytest.mark.parametrize("tied", [False, True])
def test_a_step_may_begin_within_the_backward_pass(tied):
    assert_same_training(Tiny(tied=tied), run=stepping)


def test_gradients_that_were_applied_are_not_none_but_refused():
    vb = vbrt.wrap(Tiny(), "full", optimizer=adamw)
    loss = loss_of(vb, *batches(1)[0])
    with pytest.raises(vbrt.WrapError, match=r"head: its gradient was applied within vb.stepping"), vb.stepping():
        loss.backward()
        assert vb.module.layers[0].bias.grad is not None
        vb.module.head.weight.grad  # noqa: B018 - raises
    with pytest.raises(vbrt.WrapError, match="second gradient"), vb.stepping():
        for ids, target in batches(2):
            loss_of(vb, ids, target).backward()


def test_a_save_has_the_masters(tmp_path):
    vb = vbrt.wrap(Tiny(), "full", optimizer=adamw)
    train(vb, vb.optimizer, 2)
    expected = vb.state_dict()
    vb.save(tmp_path / "saved")
    loaded = vbrt.load(tmp_path / "saved", Tiny())
    assert all(torch.equal(value, expected[name]) for name, value in loaded.unwrap().state_dict().items())


def test_a_state_dict_stays_what_it_was_and_takes_a_model_back():
    vb = vbrt.wrap(Tiny(), "full", optimizer=adamw)
    train(vb, vb.optimizer, 1)
    best = vb.state_dict()
    expected = {name: value.clone() for name, value in best.items()}
    train(vb, vb.optimizer, 1)
    vb.load_state_dict(best)
    assert all(torch.equal(value, expected[name]) for name, value in vb.state_dict().items())
    assert vb.state_dict(keep_vars=True)["embed.weight"] is vb.module.embed.weight


def test_casts_are_refused_by_name_before_anything_is_cast():
    vb = vbrt.wrap(Tiny(), "full", optimizer=adamw)
    for cast in (vb.double, vb.module.double):
        with pytest.raises(vbrt.WrapError, match=r"layers.0: a cast from torch.float32 to torch.float64"):
            cast()
    assert {p.dtype for p in vb.parameters()} == {torch.float32}
    assert vb.unwrap().double().embed.weight.dtype is torch.float64


@pytest.mark.parametrize("call", [0, 4, 7, 9])
def test_an_interrupted_pass_loses_nothing(monkeypatch, call):
    """The 5 leases of a forward, then those of its backward pass."""
    model = Tiny()
    twin = resident(model)
    vb = vbrt.wrap(model, "full", optimizer=adamw)
    expected = train(twin, adamw(twin.parameters()))
    calls = iter(range(100))

    def lease(self, plain=FullWeight.lease):
        if next(calls) == call:
            raise KeyboardInterrupt
        return plain(self)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(FullWeight, "lease", lease)
        train(vb, vb.optimizer)
    vb.zero_grad()
    assert train(vb, vb.optimizer) == expected


def with_gradients():
    """A resident model, one in the tiers and the optimizer of the first, behind a backward pass of both."""
    model = Tiny()
    twin = resident(model)
    vb = vbrt.wrap(model, "full", optimizer=adamw)
    for one in (twin, vb):
        loss_of(one, *batches(1)[0]).backward()
    return twin, vb, adamw(twin.parameters())


@pytest.mark.parametrize("call", [0, 3])
def test_an_interrupted_step_is_completed_by_the_next_call(monkeypatch, call):
    twin, vb, theirs = with_gradients()
    calls = iter(range(100))

    def submit(self, *args, plain=Updater.submit, **options):
        if next(calls) == call:
            raise KeyboardInterrupt
        plain(self, *args, **options)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(Updater, "submit", submit)
        vb.step()
    vb.step()
    theirs.step()
    assert all(torch.equal(value, vb.state_dict()[name]) for name, value in twin.state_dict().items())
    vb.zero_grad()
    twin.zero_grad()
    assert train(vb, vb.optimizer) == train(twin, theirs)


def test_an_interrupt_behind_the_step_of_what_stays_does_not_repeat_it(monkeypatch):
    twin, vb, theirs = with_gradients()

    def hide(parameters, *, hidden, plain=optimizer_takeover._hide):
        plain(parameters, hidden=hidden)
        if not hidden:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(optimizer_takeover, "_hide", hide)
        vb.step()
    vb.step()
    theirs.step()
    assert all(torch.equal(value, vb.state_dict()[name]) for name, value in twin.state_dict().items())


class Block(torch.nn.Module):
    def __init__(self, layer) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x):
        return x + torch.relu(self.layer(x * 2))


def test_compiled_blocks_train_as_eager_ones_and_whole_graphs_are_refused_by_name():
    model, graphs = Tiny(2), []
    model.layers = torch.nn.ModuleList(Block(layer) for layer in model.layers)
    twin = resident(model)
    vb = vbrt.wrap(model, "full", optimizer=adamw)
    for block in model.layers:
        block.compile(backend=lambda graph, inputs: graphs.append(graph) or graph)
    assert train(vb, vb.optimizer, 2) == train(twin, adamw(twin.parameters()), 2) and graphs
    other = Tiny(1).to(torch.bfloat16)
    torch._dynamo.reset()  # a graph break that other tests have made is none that is refused
    vbrt.wrap(other, "full", optimizer=adamw)
    with pytest.raises(torch._dynamo.exc.Unsupported, match=r"leases weights .*; compile without fullgraph=True"):
        torch.compile(other.layers[0], backend="eager", fullgraph=True)(torch.ones(2, 64, dtype=torch.bfloat16))
