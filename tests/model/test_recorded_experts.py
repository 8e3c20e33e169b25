"""Checkpointed blocks with routed experts as graphs: the steps of eager blocks, at home and streamed through a ring."""

import contextlib

import pytest
import torch

import vbrt
from tests.model.checkpointed import IDS, adapted, same, trained, weights_of, with_adapters
from tests.models import qwen3_moe
from vbrt.layers.experts import ExpertsHandle, leasing_all, run_experts
from vbrt.layers.experts.leased_experts import Leased
from vbrt.model import runtime
from vbrt.residency.scheduled import ScheduledPolicy
from vbrt.tiers import Level, MemoryTier, TierStack
from vbrt.tiers.schedule import graph_capture

pytestmark = pytest.mark.filterwarnings("ignore")
CPU, LAYERS, COUNT = torch.device("cpu"), 4, 8
TARGETS = {"target_modules": [], "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]}
PRESETS = ["fp4", "exact", "dense"]


def mixtures(device="cpu", **how):
    """A model with adapters on all experts, of which a token takes two of eight."""
    return adapted(device, **{"build": qwen3_moe, "targets": TARGETS, "layers": LAYERS, "count": COUNT} | how)


@pytest.fixture
def graphs(monkeypatch):
    """CUDA graphs are taken for possible."""
    monkeypatch.setattr(graph_capture, "refusal", lambda *given: None)


@pytest.fixture
def streamed(graphs, monkeypatch):
    """Models whose pages live in a tier below a budget for a share of them, on a CPU."""

    def make(share=0.75, **how):
        def build_stack(plan, config, policy=None):
            near = Level(MemoryTier("gpu", CPU, room := int(share * plan.page_bytes)), ScheduledPolicy(room))
            return TierStack([near, MemoryTier("cpu", CPU, 1 << 30)])

        with monkeypatch.context() as patched:
            patched.setattr(runtime, "build_stack", build_stack)
            return mixtures(**how)

    return make


def recorded_of(vb):
    return vb._attachment.recorded


def handles_of(vb):
    return [handle for handle in vb._attachment.registry.handles if isinstance(handle, ExpertsHandle)]


def gradients_of(model, ids=IDS):
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    return {name: weight.grad.clone() for name, weight in weights_of(model).items()}


def close(one, other):
    """Weights but for last bits: sums over all experts and over those that tokens are sent to are made in another order
    on some CPUs, and AdamW's first steps show each bit of a small gradient."""
    others = weights_of(other)
    return all(torch.allclose(weight, others[name], atol=1e-4) for name, weight in weights_of(one).items())


@pytest.mark.parametrize("preset", PRESETS)
def test_steps_are_those_of_eager_blocks(graphs, preset, monkeypatch):
    how = {"preset": preset, "count": 16}  # so that eager passes ask for a routing
    (vb, recorded), (eager_vb, eager) = mixtures(**how), mixtures(**how, records=False)
    assert trained(recorded, 4) == trained(eager, 4) and recorded_of(vb).replays == 2 * LAYERS

    def asks(*given):
        raise AssertionError("the host asks for the touched experts")

    with monkeypatch.context() as patched:
        patched.setattr(run_experts, "touched_experts", asks)
        one = trained(recorded, 4)
    assert one == pytest.approx(trained(eager, 4), rel=1e-5) and close(recorded, eager)
    assert recorded_of(vb).replays == 6 * LAYERS and not recorded_of(vb).reasons
    layers, others = vb.stats().layers, eager_vb.stats().layers
    assert {name: layer.forwards for name, layer in layers.items()} == {n: one.forwards for n, one in others.items()}


@pytest.mark.parametrize("preset", PRESETS)
def test_a_step_as_it_is_recorded_decodes_experts_twice(preset, monkeypatch):
    """In the forward, and again in front of the backward, which an eager block follows by a third time."""
    _, model = mixtures(preset=preset, records=False)
    decoded, plain, found = [], Leased.parameters, []
    monkeypatch.setattr(Leased, "parameters", lambda self: decoded.append(self.experts) or plain(self))
    for within, times in ((leasing_all(), 2), (contextlib.nullcontext(), 3)):
        decoded.clear()
        with within:
            found.append(gradients_of(model))
        assert len(decoded) == times * LAYERS
        model.zero_grad()
    assert all(torch.equal(gradient, found[1][name]) for name, gradient in found[0].items())


@pytest.mark.parametrize("share", [None, 0.75], ids=["at home", "streamed"])
def test_routings_that_change_between_steps_are_followed(streamed, share):
    """Each batch sends its tokens elsewhere, and leaves out some experts."""
    _, eager = mixtures(count=32, records=False)
    vb, recorded = mixtures(count=32) if share is None else streamed(share, count=32)
    for model in (recorded, eager):
        for step in range(8):
            ids = torch.randint(0, 128, (1, 12), generator=torch.Generator().manual_seed(step))
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    assert recorded_of(vb).replays == 6 * LAYERS and not recorded_of(vb).reasons
    others = weights_of(eager)
    for name, weight in weights_of(recorded).items():
        torch.testing.assert_close(weight.grad, others[name].grad, rtol=2e-2, atol=1e-4)


@pytest.mark.parametrize("preset", PRESETS)
def test_steps_of_streamed_experts_are_those_of_experts_at_home(streamed, preset):
    (vb, recorded), (_, home) = streamed(preset=preset), mixtures(preset=preset)
    losses = trained(recorded, 8), trained(home, 8)
    assert losses[0][:3] == losses[1][:3]  # the first steps stream, in chunks
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    assert recorded_of(vb).replays == 6 * LAYERS and not recorded_of(vb).reasons
    one, other = gradients_of(recorded), gradients_of(home)
    for name, gradient in one.items():
        assert (gradient - other[name]).norm() <= 0.05 * other[name].norm()
    tier = vb.stack.levels[0].tier
    assert tier.held_bytes <= tier.capacity_bytes
    for handle in handles_of(vb):
        tally, pages = handle.pages[0].tally, handle.pages
        assert (tally.hits, tally.misses) == (sum(page.hits for page in pages), sum(page.misses for page in pages))
        assert sum(tally.bytes_moved.values()) == sum(page.bytes_moved["cpu>gpu"] for page in pages) > 0


def test_a_replay_of_streamed_experts_gives_the_bits_of_experts_at_home(streamed):
    (vb, recorded), (_, home) = streamed(), mixtures(records=False)
    for model in (recorded, home):
        for _ in range(3):
            gradients_of(model)
        model.zero_grad()
    one, other = gradients_of(recorded), gradients_of(home)
    assert recorded_of(vb).replays == 2 * LAYERS
    assert all(torch.equal(gradient, other[name]) for name, gradient in one.items())


def test_adapters_elsewhere_are_recorded_beside_frozen_experts(graphs):
    targets = {"target_modules": ["q_proj"]}
    (vb, recorded), (_, eager) = mixtures(targets=targets), mixtures(targets=targets, records=False)
    assert trained(recorded, 6) == trained(eager, 6) and same(recorded, eager)
    assert recorded_of(vb).replays == 4 * LAYERS and not recorded_of(vb).reasons


def test_what_asks_for_a_routing_stays_eager_and_says_why(graphs):
    vb, model = mixtures(experts="eager")
    _, eager = mixtures(experts="eager", records=False)
    assert trained(model, 4) == trained(eager, 4) and not recorded_of(vb).replays
    name = handles_of(vb)[0].spec.name
    why = f"checkpointed blocks run from Python, as {name}: the implementation eager asks which experts are touched"
    assert why in vb.stats().fallbacks


def test_experts_whose_residency_the_gpu_decides_stay_eager(graphs):
    vb, model = mixtures()
    for handle in handles_of(vb):
        handle.deciding.begin_on_device(object())
    trained(model, 4)
    assert not recorded_of(vb).replays
    assert any("the GPU decides which experts are resident" in why for why in recorded_of(vb).reasons)


def test_a_budget_without_room_for_two_blocks_is_named(streamed):
    vb, model = streamed(share=0.2)
    trained(model, 4)
    assert not recorded_of(vb).replays
    assert any("bytes left for pages of blocks, of which two at a time take" in why for why in vb.stats().fallbacks)


# -- on a GPU ----------------------------------------------------------------------------------------------------------

TOKENS = torch.randint(0, 128, (2, 64), generator=torch.Generator().manual_seed(0))


def attended(**kinds):
    """Attention whose sums do not vary."""
    model = qwen3_moe(**kinds)
    model.set_attn_implementation("eager")
    return model


def on_gpu(*, share=None, **how):
    """A model on a GPU, with its experts below, and room for a share of them."""
    vb, model = mixtures("cuda", build=attended, policy={"kind": "experts"}, **how)
    if share is not None:
        vb.runtime.open_stores()
        experts = {page.key: page.nbytes for handle in handles_of(vb) for page in handle.pages}
        vb.stack.rehome({key: "cpu" if key in experts else "gpu" for key in vb.stack.pages})
        others = sum(page.nbytes for key, page in vb.stack.pages.items() if key not in experts)
        vb.set_budget("gpu", others + int(share * sum(experts.values())) + 4 * max(experts.values()))
    return vb, model


def plain_of(preset):
    """A plain model on a GPU, with the weights as they are held."""
    vb = vbrt.wrap(attended(layers=LAYERS, count=COUNT).cuda(), preset, weights={"min_parameters": 1}).materialize()
    plain = attended(layers=LAYERS, count=COUNT)
    plain.load_state_dict({name: tensor.clone().cpu() for name, tensor in vb.state_dict().items()})
    vb.close()
    return with_adapters(plain.cuda(), **TARGETS)


@pytest.mark.gpu
@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("share", [None, 0.6], ids=["at home", "streamed"])
def test_gradients_on_a_gpu_are_those_of_the_plain_model(preset, share):
    ids, (vb, recorded), plain = TOKENS.cuda(), on_gpu(preset=preset, share=share), plain_of(preset)
    for _ in range(6):
        recorded.zero_grad()
        one = gradients_of(recorded, ids)
    assert recorded_of(vb).replays >= 2 * LAYERS and not recorded_of(vb).reasons
    other = gradients_of(plain, ids)
    assert one.keys() == other.keys()
    for name, gradient in one.items():
        assert (gradient - other[name]).norm() <= 5e-2 * other[name].norm(), name
    vb.close()


@pytest.mark.gpu
@pytest.mark.parametrize("preset", PRESETS)
def test_replays_on_a_gpu_give_the_bits_of_eager_experts_at_home(preset):
    ids = TOKENS.cuda()
    (eager_vb, eager), (vb, home) = on_gpu(preset=preset, records=False), on_gpu(preset=preset)
    streamed_vb, streamed = on_gpu(preset=preset, share=0.6)
    found = []
    for model in (eager, home, streamed):
        for _ in range(6):
            model.zero_grad()
            gradients = gradients_of(model, ids)
        found.append(gradients)
    assert recorded_of(vb).replays >= 2 * LAYERS and recorded_of(streamed_vb).replays >= 2 * LAYERS
    assert not (recorded_of(vb).reasons or recorded_of(streamed_vb).reasons)
    if preset == "fp4":  # eager lossless experts are decoded in chunks
        assert all(torch.equal(gradient, found[0][name]) for name, gradient in found[1].items())
    assert all(torch.equal(gradient, found[1][name]) for name, gradient in found[2].items())
    for each in (eager_vb, vb, streamed_vb):
        each.close()


@pytest.mark.gpu
def test_frozen_experts_at_home_on_a_gpu_are_recorded_beside_adapters_elsewhere():
    ids, targets = TOKENS.cuda(), {"target_modules": ["q_proj"]}
    (vb, recorded), (eager_vb, eager) = on_gpu(targets=targets), on_gpu(targets=targets, records=False)
    assert trained(recorded, 6, ids=ids) == pytest.approx(trained(eager, 6, ids=ids), rel=1e-2)
    assert recorded_of(vb).replays >= 2 * LAYERS and not recorded_of(vb).reasons
    for each in (vb, eager_vb):
        each.close()
