"""Checkpointed blocks whose pages stream through a ring: the losses and weights of eager streaming, bit for bit.

On a CPU a budget in front of host memory stands for a GPU's.
"""

import contextlib

import pytest
import torch

from tests.model.checkpointed import IDS, adapted, same, trained, weights_of
from vbrt.errors import TierError
from vbrt.model import runtime
from vbrt.residency.scheduled import ScheduledPolicy
from vbrt.tiers import Level, MemoryTier, Owner, SsdTier, TierStack
from vbrt.tiers.schedule import graph_capture

pytestmark = pytest.mark.filterwarnings("ignore")
CPU, PAGE = torch.device("cpu"), 4096
LAYERS, OF_BLOCK, ROOM = 6, 7, 24  # pages of a block, and of the budget; all pages have the same size


class Models:
    """Models whose pages live below a budget of some pages."""

    def __init__(self, monkeypatch, tmp_path, device):
        self.device, self.ids, self._patch, self._path = device, IDS.to(device), monkeypatch, tmp_path
        self.page = PAGE
        if device == "cpu":
            monkeypatch.setattr(graph_capture, "refusal", lambda *given: None)
        else:
            self.page = max(page.nbytes for page in adapted(device, layers=1)[0].stack.pages.values())

    def __call__(self, *, records=True, room=ROOM, drive=False):
        kinds = {"records": records, "layers": LAYERS, "attn_implementation": "eager"}  # the others' sums vary on GPUs
        if self.device != "cpu":
            return adapted(self.device, tiers={"gpu": {"budget": room * self.page}}, **kinds)

        def build_stack(plan, config, policy=None):
            near = Level(MemoryTier("gpu", CPU, room * PAGE), ScheduledPolicy(room * PAGE))
            return TierStack([near, SsdTier(self._path, 1 << 30) if drive else MemoryTier("cpu", CPU, 1 << 30)])

        with self._patch.context() as patched:
            patched.setattr(runtime, "build_stack", build_stack)
            if drive:
                patched.setattr(TierStack, "add", _on_drive(TierStack.add))
            return adapted(**kinds)

    def replays(self, *steps):
        """Replays of blocks in recorded steps between changes; on a GPU a block's first pass may change attributes."""
        most = LAYERS * sum(steps)
        return range(most - LAYERS * (self.device != "cpu"), most + 1)

    def trained(self, model, steps, between=lambda step: None):
        return trained(model, steps, between, ids=self.ids)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def streamed(request, monkeypatch, tmp_path):
    return Models(monkeypatch, tmp_path, request.param)


@pytest.fixture
def on_cpu(monkeypatch, tmp_path):
    return Models(monkeypatch, tmp_path, "cpu")


def _on_drive(add):
    return lambda stack, key, layout, home, *args, **options: add(stack, key, layout, "ssd", *args, **options)


def recorded_of(vb):
    return vb._attachment.recorded


def ring_of(vb):
    return recorded_of(vb)._rings.ring


def moved(vb):
    return sum(vb.stats().bytes_moved.values())


def within_budget(vb):
    tier = vb.stack.levels[0].tier
    return tier.held_bytes <= tier.capacity_bytes and tier.peak_bytes <= tier.capacity_bytes


def test_steps_are_those_of_eager_streaming(streamed):
    (vb, recorded), (eager_vb, eager) = streamed(), streamed(records=False)
    assert streamed.trained(recorded, 8) == streamed.trained(eager, 8) and same(recorded, eager)
    assert recorded_of(vb).replays in streamed.replays(6) and not vb.stats().fallbacks
    forwards = {name: layer.forwards for name, layer in vb.stats().layers.items()}
    assert forwards == {name: layer.forwards for name, layer in eager_vb.stats().layers.items()}
    assert within_budget(vb)


def test_each_streamed_page_is_copied_twice_a_step_but_those_at_the_turns(on_cpu):
    vb, model = on_cpu()
    on_cpu.trained(model, 4)
    staying = len(ring_of(vb)._places.staying)
    assert staying == 2 * LAYERS  # in the room of 22 pages beside two regions of five; two pages are left for leases
    before, hits = moved(vb), sum(page.hits for page in vb.stack.pages.values())
    misses = sum(page.misses for page in vb.stack.pages.values())
    prefetched = sum(page.prefetched for page in vb.stack.pages.values())
    on_cpu.trained(model, 1)
    assert moved(vb) - before == 2 * (LAYERS - 2) * 5 * PAGE
    pages = vb.stack.pages.values()
    assert sum(page.misses for page in pages) - misses == 2 * (LAYERS - 2) * 5
    assert sum(page.prefetched for page in pages) - prefetched == 2 * (LAYERS - 2) * 5  # none came on demand
    assert sum(page.hits for page in pages) - hits == 2 * LAYERS * OF_BLOCK - 2 * (LAYERS - 2) * 5


def test_passes_in_another_order_are_right(streamed):
    def steps(model):
        optimizer = torch.optim.SGD(weights_of(model).values(), 1e-2)
        losses = []

        def loss(ids=streamed.ids):
            return model(input_ids=ids, labels=ids, use_cache=False).loss

        for turn in range(9):
            if turn % 3 == 0:
                losses.append(loss())  # a forward without backward
            if turn % 3 == 1:
                (loss() + loss(streamed.ids[:1])).backward()  # two forwards before their backwards
            with torch.no_grad():
                losses.append(loss())
            first = loss()
            if turn % 3 == 2:  # an exception in the middle of the backward
                weight = next(weight for name, weight in weights_of(model).items() if "layers.3" in name)
                hook = weight.register_hook(lambda gradient: 1 / 0)
                with pytest.raises(ZeroDivisionError):
                    loss().backward()
                hook.remove()
                optimizer.zero_grad()
            first.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(first)
        return [each.item() for each in losses]

    (vb, recorded), (_, eager) = streamed(), streamed(records=False)
    assert steps(recorded) == steps(eager) and same(recorded, eager)
    assert recorded_of(vb).replays > 9 * LAYERS and not vb.stats().fallbacks and within_budget(vb)


@pytest.mark.parametrize("room", [ROOM + 8, LAYERS * OF_BLOCK])
def test_a_changed_budget_is_followed(streamed, room):
    def between(vb, step):
        if step == 4:
            vb.stack.set_budget("gpu", room * streamed.page)
            vb._attachment.registry.forget_ready()

    (vb, recorded), (eager_vb, eager) = streamed(), streamed(records=False)
    losses = streamed.trained(recorded, 9, lambda step: between(vb, step))
    assert losses == streamed.trained(eager, 9, lambda step: between(eager_vb, step)) and same(recorded, eager)
    assert recorded_of(vb).replays in streamed.replays(2, 3) and not vb.stats().fallbacks and within_budget(vb)
    assert (ring_of(vb) is None) == (room == LAYERS * OF_BLOCK)  # all pages are at home on the device then


def test_a_budget_that_changes_between_forward_and_backward_is_followed(streamed):
    (vb, recorded), (eager_vb, eager) = streamed(), streamed(records=False)
    streamed.trained(recorded, 4), streamed.trained(eager, 4)
    for model, stack in ((recorded, vb.stack), (eager, eager_vb.stack)):
        loss = model(input_ids=streamed.ids, labels=streamed.ids, use_cache=False).loss
        ring = ring_of(vb)
        stack.set_budget("gpu", (ROOM - 8) * streamed.page)
        loss.backward()
    assert ring.ended and within_budget(vb)
    others = weights_of(eager)
    assert all(torch.equal(weight.grad, others[name].grad) for name, weight in weights_of(recorded).items())


def test_pages_that_come_and_go_are_followed(streamed):
    (vb, recorded), (_, eager) = streamed(), streamed(records=False)
    owners = [Owner(vb.stack)]
    layout = next(iter(vb.stack.pages.values())).layout
    vb.stack.add("another", layout, "cpu", torch.Tensor.zero_, owners[0])

    def between(step):
        if step == 4:
            owners.clear()  # the page is retired at the next access

    assert streamed.trained(recorded, 9, between) == streamed.trained(eager, 9) and same(recorded, eager)
    assert recorded_of(vb).replays in streamed.replays(2, 3) and not vb.stats().fallbacks and within_budget(vb)


@pytest.mark.parametrize("decodes", [True, False])
def test_the_policy_gets_the_room_where_no_gradients_are_wanted(streamed, decodes):
    vb, model = streamed()
    streamed.trained(model, 4)
    ids = streamed.ids[:, :1] if decodes else streamed.ids
    with torch.no_grad():
        for _ in range(0 if decodes else 64):
            model(input_ids=ids, use_cache=False)
        assert ring_of(vb) is not None and vb.stack.levels[0].home_bytes
        model(input_ids=ids, use_cache=False)
    assert ring_of(vb) is None and not vb.stack.levels[0].home_bytes
    streamed.trained(model, 4)
    assert ring_of(vb) is not None, vb.stats().fallbacks


def test_room_that_is_taken_back_again_and_again_is_not_asked_for_any_more(on_cpu):
    vb, model = on_cpu()
    for _ in range(4):
        on_cpu.trained(model, 4)
        vb.stack.rehome({})
    assert recorded_of(vb).replays == 3 * LAYERS * 2
    assert any("their room was needed otherwise 3 times" in why for why in vb.stats().fallbacks)


@pytest.mark.parametrize(
    ("how", "why"),
    [
        (
            {"room": 12},
            "tiers.gpu.budget has 40960 bytes left for pages of blocks, of which two at a time take 57344; raise it",
        ),
        ({"drive": True}, "model.layers.0.self_attn.q_proj: in ssd, not in memory"),
    ],
)
def test_what_cannot_stream_stays_eager_and_says_why(on_cpu, how, why):
    (vb, recorded), (_, eager) = on_cpu(**how), on_cpu(records=False, **how)
    assert on_cpu.trained(recorded, 5) == on_cpu.trained(eager, 5) and same(recorded, eager)
    assert not recorded_of(vb).replays
    assert f"checkpointed blocks run from Python, as the pages of one move: {why}" in vb.stats().fallbacks


def test_adapters_may_be_added_and_merged_and_the_model_unwrapped(streamed):
    (vb, recorded), (eager_vb, eager) = streamed(), streamed(records=False)
    for model in (recorded, eager):
        streamed.trained(model, 4)
        model.add_adapter("more", model.peft_config["default"])
        model.set_adapter("more")
        torch.manual_seed(2)
        for name, weight in weights_of(model).items():
            torch.nn.init.normal_(weight, std=1e-2 if "lora_B" in name else 1e-1)
    assert streamed.trained(recorded, 6) == streamed.trained(eager, 6) and same(recorded, eager)
    assert recorded_of(vb).replays > LAYERS * 4
    merged = [model.merge_and_unload() for model in (recorded, eager)]
    with torch.no_grad():
        first, second = (model(input_ids=streamed.ids, use_cache=False).logits for model in merged)
    assert torch.equal(first, second)
    dense = [each.unwrap() for each in (vb, eager_vb)]
    with torch.no_grad():
        first, second = (model(input_ids=streamed.ids, use_cache=False).logits for model in dense)
    assert torch.equal(first, second)


def test_a_capture_that_fails_leaves_the_policy_the_room(streamed):
    vb, model = streamed()

    class Fails(recorded_of(vb)._new_recorder):
        def record(self, step, within):
            raise RuntimeError("no graph")

    recorded_of(vb)._new_recorder = Fails
    streamed.trained(model, 5)
    assert any("recording one failed: no graph" in why for why in vb.stats().fallbacks)
    assert ring_of(vb) is None and not vb.stack.levels[0].home_bytes


@pytest.mark.gpu
def test_the_memory_of_a_ring_is_freed(monkeypatch, tmp_path):
    models = Models(monkeypatch, tmp_path, "cuda")
    vb, model = models()
    models.trained(model, 5)
    nbytes, before = ring_of(vb)._places.nbytes, torch.cuda.memory_allocated()
    ring_of(vb).give_back()
    assert torch.cuda.memory_allocated() <= before - nbytes


def test_a_closed_model_has_given_its_room_back(streamed):
    vb, model = streamed()
    streamed.trained(model, 4)
    ring = ring_of(vb)
    vb.close()
    assert ring.ended and not ring.run(0, "forward", pytest.fail)
    with contextlib.suppress(TierError):
        vb.stack.levels[0].tier.trim()
    assert not vb.stack.levels[0].tier.held_bytes
