"""Updates that begin before the step: the bits of updates at the step, whatever happens in between."""

import threading
import time
from collections.abc import Callable, Iterator

import pytest
import torch

import vbrt
from tests.training.full.full_models import Tiny, adamw, batches, loss_of
from tests.training.full.test_optimizer_update import OPTIMIZERS, partly_in_files
from vbrt.training.full.optimizer_update import Prepared
from vbrt.training.full.update_ahead import Ahead

BATCHES = batches(12)
WEIGHTS = 5  # of Tiny() in the tiers
MIB = 1 << 20


def caught_up(vb) -> None:
    """Wait until all updates that were begun ahead are complete, so that what a step takes does not depend on time."""
    ahead = vb.optimizer._vb_ahead
    deadline = time.monotonic() + 30
    while ahead is not None and any(_runs(place.note) for place in ahead._places.values()):
        assert time.monotonic() < deadline
        time.sleep(0.001)


def _runs(note) -> bool:
    return note is not None and note.prepared is not None and not note.prepared.done


def backward(vb, number: int, scale: Callable[[torch.Tensor], torch.Tensor] = torch.clone) -> float:
    loss = loss_of(vb, *BATCHES[number])
    scale(loss).backward()
    caught_up(vb)
    return loss.item()


def steps(vb, numbers, between: Callable[[], object] = lambda: None) -> Iterator[float]:
    """Yield the loss of each step; `between` is called between backward and step."""
    for number in numbers:
        yield backward(vb, number)
        between()
        vb.optimizer.step()
        vb.optimizer.zero_grad()


def plain(vb) -> list:
    return list(steps(vb, range(6)))


def clipped(norm: float) -> Callable:
    def loop(vb) -> list:
        norms = []
        return [*steps(vb, range(3)), *steps(vb, range(3, 6), lambda: norms.append(vb.clip_grad_norm_(norm))), norms]

    return loop


def clipped_by_torch(norm: float) -> Callable:
    def loop(vb) -> list:
        norms, every = [], list(vb.parameters())
        clip = torch.nn.utils.clip_grad_norm_
        return [*steps(vb, range(3)), *steps(vb, range(3, 6), lambda: norms.append(clip(every, norm))), norms]

    return loop


def accumulated(vb) -> list:
    losses = list(steps(vb, range(3)))
    for number in (3, 5, 7):
        losses.append(backward(vb, number))
        losses += steps(vb, [number + 1])
    return losses


def scheduled(vb) -> list:
    """The rate changes after each step."""
    rates = torch.optim.lr_scheduler.ExponentialLR(vb.optimizer, 0.5)
    losses = []
    for number in range(6):
        losses += steps(vb, [number])
        rates.step()
    return losses


def scheduled_before(vb) -> list:
    """The rate changes between backward and step."""
    rates = torch.optim.lr_scheduler.ExponentialLR(vb.optimizer, 0.5)
    return [*steps(vb, range(3)), *steps(vb, range(3, 6), rates.step)]


def written(vb) -> list:
    """A gradient is changed in place between backward and step, and another one is replaced."""
    first, second = (vb.module.layers[at].weight for at in (0, 1))

    def write() -> None:
        first.grad.mul_(0.5)
        second.grad = second.grad * 3

    return [*steps(vb, range(3)), *steps(vb, range(3, 6), write)]


def dropped(vb) -> list:
    """Gradients of a pass are dropped, and one weight's are."""
    losses = list(steps(vb, range(3)))
    losses.append(backward(vb, 3))
    vb.zero_grad()
    losses += steps(vb, range(4, 7))
    losses += steps(vb, [7], lambda: setattr(vb.module.layers[2].weight, "grad", None))
    return losses + list(steps(vb, range(8, 10)))


def scaled(vb) -> list:
    """As GradScaler does it: the loss is scaled, one overflows, and the optimizer divides."""
    losses, scaler = list(steps(vb, range(3))), torch.amp.GradScaler("cpu", init_scale=1024.0)
    for number in range(3, 7):
        overflow = float("inf") if number == 4 else 1.0
        losses.append(backward(vb, number, lambda loss, by=overflow: scaler.scale(loss) * by))
        scaler.step(vb.optimizer)
        scaler.update()
        vb.optimizer.zero_grad()
    return losses + list(steps(vb, range(7, 10)))


def interrupted(vb) -> list:
    """A backward pass raises before it is through, and the next one begins anew."""
    losses = list(steps(vb, range(3)))
    loss = loss_of(vb, *BATCHES[3])
    hook = vb.module.embed.weight.register_hook(lambda gradient: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    hook.remove()
    caught_up(vb)
    vb.zero_grad()
    return losses + list(steps(vb, range(4, 7)))


def kept_gradients(vb) -> list:
    """Without zero_grad(), and with a second step of the same gradients."""
    losses = list(steps(vb, range(3)))
    for number in (3, 4):
        losses.append(backward(vb, number))
        vb.step()
        vb.step()
    vb.zero_grad()
    return losses + list(steps(vb, range(5, 8)))


def loaded(vb) -> list:
    """Moments and weights are set between backward and step; a state dict is kept, and written."""
    losses, optimizer = list(steps(vb, range(3))), vb.optimizer

    def halve() -> None:
        for state in optimizer.state_dict()["state"].values():
            state["exp_avg"].mul_(0.5)

    losses += steps(vb, [3], lambda: optimizer.load_state_dict(optimizer.state_dict()))
    losses += steps(vb, [4], halve)
    held = {name: value * 0.9 for name, value in vb.state_dict().items()}
    losses += steps(vb, [5, 6], lambda: vb.load_state_dict(held))
    kept = optimizer.state_dict()["state"]
    losses += steps(vb, [7, 8])
    vb.settle()
    losses += [*(state["exp_avg"].norm().item() for state in kept.values())]
    for state in kept.values():
        state["exp_avg"].mul_(0.5)
    return losses + list(steps(vb, [9, 10]))


def within_the_pass(vb) -> list:
    losses = list(steps(vb, range(3)))
    for number in (3, 4):
        loss = loss_of(vb, *BATCHES[number])
        with vb.stepping():
            loss.backward()
        vb.zero_grad()
        losses.append(loss.item())
    return losses + list(steps(vb, [5, 6]))


def trained(loop: Callable, make=adamw, ahead: int = 64 * MIB, **config):
    """Train a model; return what the loop has, every bit of weights and moments, and the counters."""
    torch.manual_seed(0)
    model = Tiny()
    training = config.pop("training", {}) | {"ahead": ahead}
    with vbrt.wrap(model, "full", optimizer=make(model.parameters()), training=training, **config) as vb:
        losses = loop(vb)
        vb.settle()
        state = {f"{at} {name}": value.clone() for at, own in vb.optimizer.state_dict()["state"].items()
                 for name, value in own.items()}  # fmt: skip
        return losses, state | {name: value.clone() for name, value in vb.state_dict().items()}, vb.stats().updates


def assert_same_bits(loop: Callable, make=adamw, **config):
    """A loop with and without updates ahead; return the counters with them."""
    losses, state, found = trained(loop, make, **config)
    expected, bits, none = trained(loop, make, ahead=0, **config)
    assert losses == expected and state.keys() == bits.keys()
    assert [name for name, value in bits.items() if not torch.equal(value, state[name])] == []
    assert (none.ahead, none.discarded, none.spare_bytes) == (0, 0, 0)
    return found


@pytest.mark.parametrize(
    ("make", "moments"),
    [(name, moments) for name in OPTIMIZERS for moments in ("fp32", "8bit") if (name, moments) != ("AMSGrad", "8bit")],
)
def test_every_rule_updates_ahead_with_the_same_bits(make, moments):
    found = assert_same_bits(plain, OPTIMIZERS[make], training={"moments": moments})
    assert (found.ahead, found.discarded) == (5 * WEIGHTS, 0)  # all but the first step's


@pytest.mark.parametrize(
    ("loop", "ahead", "discarded"),
    [
        (clipped(1e9), 5 * WEIGHTS, 0),
        (clipped(0.1), 2 * WEIGHTS, WEIGHTS),
        (clipped_by_torch(1e9), 5 * WEIGHTS, 0),
        (clipped_by_torch(0.1), 2 * WEIGHTS, WEIGHTS),
        (accumulated, 2 * WEIGHTS, WEIGHTS),
        (scheduled, 5 * WEIGHTS, 0),
        (scheduled_before, 2 * WEIGHTS, WEIGHTS),
        (written, 5 * WEIGHTS - 2 * 3, 2),
        (dropped, 2 * WEIGHTS + WEIGHTS + 3 * WEIGHTS - 2, WEIGHTS + 1),
        (scaled, 2 * WEIGHTS + 2 * WEIGHTS, WEIGHTS),
        (interrupted, 2 * WEIGHTS + WEIGHTS, WEIGHTS),
        (kept_gradients, 3 * WEIGHTS + 3 * WEIGHTS, 0),
        (within_the_pass, 4 * WEIGHTS, 0),
    ],
)
def test_what_changes_between_backward_and_step_counts_and_work_for_nothing_is_done_once(loop, ahead, discarded):
    found = assert_same_bits(loop)
    assert (found.ahead, found.discarded) == (ahead, discarded)


@pytest.mark.parametrize("moments", ["fp32", "8bit"])
def test_states_that_are_loaded_or_lent_between_backward_and_step_are_what_the_step_reads(moments):
    found = assert_same_bits(loaded, training={"moments": moments})
    assert found.ahead and found.discarded


def test_tables_whose_rows_are_looked_up_in_place_are_updated_ahead_too():
    def bf16(seed: int = 0) -> Tiny:
        torch.manual_seed(seed)
        return Tiny().to(torch.bfloat16)

    states = []
    for ahead in (MIB, 0):
        config = {"training": {"ahead": ahead}, "weights": {"embeddings": True}}
        with vbrt.wrap(bf16(), "full", optimizer=adamw, **config) as vb:
            losses, streamed = plain(vb), vb.module.embed.handle
            vb.settle()
            found = vb.stats().updates
            states.append([losses, *vb.state_dict().values()])
            assert (found.ahead, streamed.state.spare is not None) == (5 * (WEIGHTS + 1) * bool(ahead), bool(ahead))
    assert states[0][0] == states[1][0] and all(map(torch.equal, states[0][1:], states[1][1:]))


def test_spare_memory_is_for_the_first_layers_within_its_bytes():
    model = Tiny()
    with vbrt.wrap(model, "full", optimizer=adamw, training={"ahead": 130 << 10}) as vb:
        plain(vb)
        vb.settle()
        spares = [layer.handle.state.spare for layer in (*model.layers, model.head)]
        found = vb.stats().updates
        assert [spare is not None for spare in spares] == [True, True, False, False, False]
        assert found.spare_bytes == sum(spare.nbytes for spare in spares[:2]) <= 130 << 10
        assert found.ahead == 2 * 5


def test_a_budget_that_shrinks_takes_the_spare_memory_back_and_states_in_files_wait_for_the_step(tmp_path):
    def loop(vb) -> list:
        losses = list(steps(vb, range(3)))
        held = vb.stats().tiers["cpu"].held_bytes
        vb.set_budget("cpu", held - vb.stats().updates.spare_bytes + (8 << 10))
        assert vb.stats().updates.spare_bytes == 0
        return losses + list(steps(vb, range(3, 6)))

    ssd = {"enabled": True, "path": str(tmp_path)}
    found = assert_same_bits(plain, tiers=partly_in_files(tmp_path, 150 << 10))
    assert found.ahead < 5 * WEIGHTS
    assert assert_same_bits(loop, tiers={"ssd": ssd}).ahead == 2 * WEIGHTS


def test_an_update_ahead_that_fails_is_made_at_the_step_and_said(monkeypatch):
    monkeypatch.setattr(Prepared, "run", lambda *_: 1 / 0)
    model = Tiny()
    with vbrt.wrap(model, "full", optimizer=adamw, training={"ahead": MIB}) as vb:
        for number in range(3):
            loss_of(vb, *BATCHES[number]).backward()
            vb.step()
            vb.zero_grad()
        found = vb.state_dict()
        assert vb.stats().updates.ahead == 0
        assert any("ahead of the step failed (division by zero)" in line for line in vb.stats().fallbacks)
    assert all(value.isfinite().all() for value in found.values())


def test_steps_that_do_not_wait_for_what_was_begun_have_the_same_bits():
    """Some updates are taken, some not begun, some in progress when the step comes."""

    def loop(vb) -> list:
        losses = []
        for at in range(30):
            loss = loss_of(vb, *BATCHES[at % 12])
            loss.backward()
            if at % 3:
                vb.step()
                vb.zero_grad()
            losses.append(loss.item())
        return losses

    assert_same_bits(loop)


def test_a_step_takes_what_is_still_being_computed(monkeypatch):
    """One of two threads computes ahead while the other comes to the update that is due."""
    run, begun, goes_on = Prepared.run, list[Prepared](), threading.Event()

    def slow(self, *args):
        begun.append(self)
        assert begun[0] is not self or goes_on.wait(30)
        run(self, *args)

    with vbrt.wrap(Tiny(), "full", optimizer=adamw, training={"ahead": MIB}) as vb:
        plain(vb)
        vb.settle()
        before = vb.stats().updates.ahead
        monkeypatch.setattr(Prepared, "run", slow)
        loss_of(vb, *BATCHES[0]).backward()
        deadline = time.monotonic() + 30
        while sum(prepared.done for prepared in begun) < WEIGHTS - 1:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        vb.step()
        later = threading.Timer(0.3, goes_on.set)
        later.start()
        vb.settle()
        later.join()
        assert vb.stats().updates.ahead - before == WEIGHTS


def test_an_optimizer_that_outlives_the_pages_says_so():
    vb = vbrt.wrap(Tiny(), "full", optimizer=adamw, training={"ahead": MIB})
    plain(vb)
    optimizer = vb.optimizer
    assert vb.stats().updates.spare_bytes > 0
    vb.settle()
    vb.close()
    with pytest.raises(vbrt.TierError, match="the model was closed"):
        optimizer.step()


def test_a_cpu_that_computes_the_model_updates_at_the_step_unless_asked():
    with vbrt.wrap(Tiny(), "full", optimizer=adamw) as vb:
        assert vb.optimizer._vb_ahead is None
    with vbrt.wrap(Tiny(), "full", optimizer=adamw, training={"ahead": MIB}) as vb:
        assert isinstance(vb.optimizer._vb_ahead, Ahead)
        optimizer = vb.optimizer
        plain(vb)
        model = vb.unwrap()
    assert "_vb_ahead" not in optimizer.__dict__ and type(model.layers[0]) is torch.nn.Linear
