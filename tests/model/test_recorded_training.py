"""Checkpointed blocks of a model that trains from the tiers, as graphs: losses, weights and gradients of eager blocks.

On a CPU a budget in front of host memory stands for a GPU's, and running a function again for its graph.
"""

import gc
import threading
import time
import weakref
from types import SimpleNamespace

import pytest
import torch

import vbrt
from tests.model.checkpointed import IDS, Again, llama
from tests.models import qwen3_moe
from vbrt.errors import WrapError
from vbrt.model import recorded_blocks, recording_room, runtime
from vbrt.model.recorded_blocks import RecordedBlocks
from vbrt.residency.scheduled import ScheduledPolicy
from vbrt.tiers import Level, MemoryTier, TierStack
from vbrt.tiers.schedule import graph_capture
from vbrt.training.full.optimizer_update import Prepared, _Update

pytestmark = pytest.mark.filterwarnings("ignore")
CPU, LAYERS = torch.device("cpu"), 5
PAGE, ROOM = 2 * 64 * 96, 24  # bytes of the largest page, and such pages in the budget


class Trainee:
    """A model under autocast, its optimizer, and losses of steps."""

    def __init__(self, device, *, records=True, activations="recompute", ahead=0, room=ROOM, build=llama, **kinds):
        model = build(layers=LAYERS, attn_implementation="eager", **kinds).float().to(device)
        own = activations == "transformers"
        if own:
            model.gradient_checkpointing_enable()
        self.optimizer = torch.optim.AdamW(model.parameters(), 1e-2, fused=True)
        training = {"activations": "keep" if own else activations, "ahead": ahead}
        settings = {"weights": {"min_parameters": 1}, "training": training}
        if device == "cuda":
            settings["tiers"] = {"gpu": {"budget": room * PAGE}}
        self.vb = vbrt.wrap(model, "full", optimizer=self.optimizer, **settings)
        self.attachment, self.ids = self.vb._attachment, IDS.to(device)
        if device == "cpu":
            stands_in = {"handles": self.attachment.registry.handles, "ledger": self.vb.stack.ledger}
            recorder = type("Recorder", (Again,), stands_in)
            self.attachment.recorded = RecordedBlocks(self.vb.stack, captures=records, recorder=recorder)
        elif not records:
            self.attachment.recorded.release()
        self.vb.train()

    @property
    def replays(self):
        return self.attachment.recorded.replays

    def loss(self, ids=None):
        ids = self.ids if ids is None else ids
        with torch.autocast(self.ids.device.type, torch.bfloat16):
            return self.vb(input_ids=ids, labels=ids, use_cache=False).loss

    def step(self, ids=None):
        loss = self.loss(ids)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return loss.item()

    def state(self):
        return {name: value.cpu() for name, value in self.vb.state_dict().items()}

    def expected(self):
        return [weight.gradient.expected for weight in self.attachment.weights]

    def forwards(self):
        return {name: layer.forwards for name, layer in self.vb.stats().layers.items()}


def alike(one, other):
    first, second = one.state(), other.state()
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def made(request, monkeypatch):
    """Makes trainees."""
    if request.param == "cuda":
        return lambda **kinds: Trainee("cuda", **kinds)
    monkeypatch.setattr(graph_capture, "refusal", lambda *given: None)

    def make(*, room=ROOM, **kinds):
        def build_stack(plan, config, policy=None):
            near = Level(MemoryTier("gpu", CPU, room * PAGE), ScheduledPolicy(room * PAGE))
            return TierStack([near, MemoryTier("cpu", CPU, 1 << 30)])

        monkeypatch.setattr(runtime, "build_stack", build_stack)
        return Trainee("cpu", **kinds)

    return make


@pytest.mark.parametrize("made", ["cpu"], indirect=True)
def test_a_hundred_steps_end_as_in_plain_torch(made):
    ours, plain = made(), llama(layers=LAYERS, attn_implementation="eager").float().train()
    optimizer, losses = torch.optim.AdamW(plain.parameters(), 1e-2, fused=True), []
    for _ in range(100):
        with torch.autocast("cpu", torch.bfloat16):
            loss = plain(input_ids=IDS, labels=IDS, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert [ours.step() for _ in range(100)] == losses and ours.replays > 90 * LAYERS
    assert losses[-1] < losses[0] / 2
    found = ours.state()
    assert all(torch.equal(value, found[name]) for name, value in plain.state_dict().items())


@pytest.mark.parametrize("activations", ["transformers", "recompute", "offload"])
def test_steps_are_those_of_eager_blocks(made, activations):
    one, other = made(activations=activations), made(activations=activations, records=False)
    assert [one.step() for _ in range(8)] == [other.step() for _ in range(8)] and alike(one, other)
    assert one.replays >= LAYERS * 5 and not other.replays
    assert one.forwards() == other.forwards() and one.expected() == other.expected()
    why = [each for each in one.vb.stats().fallbacks if "host memory" not in each]
    assert not why
    tier = one.vb.stack.levels[0].tier
    assert tier.held_bytes <= tier.capacity_bytes


def test_updates_ahead_of_the_step_are_taken(made):
    one, other = made(ahead="1GiB"), made(ahead="1GiB", records=False)
    assert [one.step() for _ in range(7)] == [other.step() for _ in range(7)] and alike(one, other)
    assert one.replays >= LAYERS * 4
    assert one.vb.stats().updates.ahead


def test_gradients_accumulate_are_clipped_and_seen(made):
    def steps(trainee):
        found = []
        for turn in range(12):
            for ids in (trainee.ids, trainee.ids[:1])[: 1 + turn % 2]:
                trainee.loss(ids).backward()
            found.append(torch.nn.utils.clip_grad_norm_(trainee.vb.parameters(), 0.5).item())
            held = trainee.attachment.weights[3].parameter.grad
            found.append(held.float().sum().item())
            trainee.optimizer.step()
            trainee.optimizer.zero_grad()
        with trainee.vb.stepping():
            trainee.loss().backward()
        return found

    one, other = made(), made(records=False)
    assert steps(one) == steps(other) and alike(one, other) and one.replays >= LAYERS * 5
    assert one.expected() == other.expected()


def test_only_what_a_backward_asks_for_gets_gradients(made):
    def gradients(trainee):
        for _ in range(4):
            trainee.step()
        embedding = trainee.vb.get_input_embeddings().weight
        trainee.loss().backward(inputs=[embedding])
        return [None if p.grad is None else p.grad.clone() for p in trainee.vb.parameters()]

    one, other = gradients(made()), gradients(made(records=False))
    assert sum(each is not None for each in one) == 1
    assert all((a is None) is (b is None) and (a is None or torch.equal(a, b)) for a, b in zip(one, other, strict=True))


def test_a_weight_may_be_frozen_and_thawed(made):
    def steps(trainee):
        losses = []
        for turn in range(9):
            frozen = [weight for weight in trainee.attachment.weights if ".1." in weight.name]
            for weight in frozen:
                weight.parameter.requires_grad_(turn < 4)
            losses.append(trainee.step())
        return losses

    one, other = made(), made(records=False)
    assert steps(one) == steps(other) and alike(one, other) and one.replays >= LAYERS * 3


def test_what_changes_between_forward_and_backward_is_followed_or_refused(made):
    one, other = made(), made(records=False)
    for trainee in (one, other):
        for _ in range(4):
            trainee.step()
        loss = trainee.loss()
        if trainee is one:
            assert trainee.attachment.recorded._rings.ring is not None
        trainee.vb.stack.set_budget("gpu", (ROOM - 4) * PAGE)
        loss.backward()  # eagerly: the ring's room is gone
        trainee.optimizer.step()
        trainee.optimizer.zero_grad()
    assert alike(one, other) and one.expected() == other.expected()
    replays = one.replays
    for trainee in (one, other):
        for _ in range(4):
            trainee.step()
    assert alike(one, other) and one.replays > replays
    loss = one.loss()
    one.vb.load_state_dict(one.vb.state_dict())
    with pytest.raises(WrapError, match="was updated between forward and backward"):
        loss.backward()


def test_loaded_values_and_passes_without_gradients_are_followed(made):
    def steps(trainee):
        losses = []
        for turn in range(8):
            if turn == 5:
                state = {name: 1.5 * value for name, value in trainee.vb.state_dict().items()}
                trainee.vb.load_state_dict(state)
            with torch.no_grad():
                losses.append(trainee.loss().item())
            losses.append(trainee.step())
        return losses

    one, other = made(), made(records=False)
    assert steps(one) == steps(other) and alike(one, other) and one.replays >= LAYERS * 4


@pytest.mark.parametrize(
    ("kinds", "why"),
    [
        ({"room": 8}, "bytes left for pages of blocks, of which two at a time take"),
        ({"attention_dropout": 0.5}, "one draws random numbers"),
        ({"build": lambda layers, **_: qwen3_moe(layers=layers)}, "experts of one train in the tiers"),
    ],
)
def test_what_cannot_be_recorded_stays_eager_and_says_why(made, kinds, why):
    one, other = made(**kinds), made(records=False, **kinds)
    torch.manual_seed(0)
    losses = [one.step() for _ in range(5)]
    torch.manual_seed(0)
    assert losses == [other.step() for _ in range(5)] and not one.replays
    assert any(why in each for each in one.vb.stats().fallbacks)


def test_an_unwrapped_model_has_its_weights(made):
    one, other = made(), made(records=False)
    for trainee in (one, other):
        for _ in range(5):
            trainee.step()
    first, second = (dict(trainee.vb.unwrap().named_parameters()) for trainee in (one, other))
    assert all(torch.equal(value, second[name]) for name, value in first.items())


def reserving(monkeypatch, *told, limit):
    """Bytes that a GPU is made to reserve: at the end of a pass outside of blocks, before recording, after emptying
    the cache, after an eager run, and after the capture. Returns which of them have not been asked for."""
    asked = iter(told)
    memory = SimpleNamespace(has_streams=lambda device: True, empty_cache=lambda: None)
    memory.memory_reserved, memory.memory_limit = lambda device: next(asked), lambda device: limit
    monkeypatch.setattr(recording_room, "accelerator", memory)
    return asked


@pytest.mark.parametrize("fits", ["yes", "no, says an eager run", "no, says the capture"])
@pytest.mark.parametrize("activations", ["transformers", "offload"])
def test_blocks_are_recorded_where_their_graphs_fit_beside_the_rest_of_a_step(made, fits, activations, monkeypatch):
    grown = {"yes": (140, 150), "no, says an eager run": (151,), "no, says the capture": (120, 151)}[fits]
    left = reserving(monkeypatch, 300, 400, 100, *grown, limit=350)
    one = made(activations=activations)
    losses = [one.step() for _ in range(8)]
    assert next(left, None) is None and one.replays == (LAYERS * 6 if fits == "yes" else 0)
    why = "their graphs would keep 0.0 GB, and the rest of a step takes 0.0 of 0.0 GB"
    assert any(why in reason for reason in one.vb.stats().fallbacks) is (fits != "yes")
    other = made(activations=activations, records=False)
    assert losses == [other.step() for _ in range(8)]
    if fits != "yes":  # a smaller batch is tried by itself
        left = reserving(monkeypatch, 30, 40, 10, 14, 15, limit=35)
        for _ in range(4):
            one.step(one.ids[:, :3])
        assert next(left, None) is None and one.replays == LAYERS * 2


def test_memory_that_a_capture_lacks_leaves_the_step_eager_and_nothing_behind(made, monkeypatch):
    def lacks(*args):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 896.00 MiB")

    one, other = made(), made(records=False)
    monkeypatch.setattr(recorded_blocks._Block, "capture", lacks)
    assert [one.step() for _ in range(6)] == [other.step() for _ in range(6)] and alike(one, other)
    assert one.attachment.recorded._recorder is None and one.attachment.recorded._rings.ring is None
    assert "recording one failed: CUDA out of memory" in str(one.vb.stats().fallbacks)


@pytest.mark.parametrize("ahead", [0, "1GiB"])
def test_a_model_that_is_dropped_while_its_weights_are_updated_frees_its_tiers(made, ahead, monkeypatch):
    goes_on = threading.Event()
    for kind in (_Update, Prepared):
        run = kind.run
        monkeypatch.setattr(kind, "run", lambda *args, run=run: goes_on.wait(10) and run(*args))
    trainee = made(ahead=ahead)
    trainee.step()
    stack = weakref.ref(trainee.vb.stack)
    del trainee
    gc.collect()
    assert stack() is not None  # updates have it
    goes_on.set()
    until = time.monotonic() + 10
    while stack() is not None and time.monotonic() < until:
        gc.collect()
        time.sleep(0.05)
    assert stack() is None


@pytest.mark.gpu
@pytest.mark.parametrize("records", [True, False])
def test_a_model_that_is_dropped_frees_the_gpu(records):
    held = []
    for _ in range(2):  # of the first one some library may keep something
        trainee = Trainee("cuda", records=records, ahead="1GiB", activations="offload")
        for _ in range(5):
            trainee.step()
        assert bool(trainee.replays) is records
        del trainee
        held.append(_allocated(at_most=min(held, default=0)))
    assert held[0] >= held[1]


def _allocated(*, at_most: int) -> int:
    """Bytes on the GPU, once threads that update have ended and they are few enough, or after some seconds."""
    until = time.monotonic() + 10
    while True:
        gc.collect()
        torch._C._cuda_clearCublasWorkspaces()  # one for each stream that has multiplied
        found = torch.cuda.memory_allocated()
        if found <= at_most or time.monotonic() > until:
            return found
        time.sleep(0.05)
