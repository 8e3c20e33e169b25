"""Checkpointed blocks as graphs: steps, losses and gradients are those of eager blocks, and what changes is noticed.

On a CPU a stand-in for CUDA graphs runs the recorded function again, on the same static tensors.
"""

import contextlib
import copy
import types

import pytest
import torch

from tests.model.checkpointed import IDS, adapted, same, trained, weights_of
from vbrt.model import recorded_blocks
from vbrt.model.recorded_blocks import Checkpoint
from vbrt.tiers.schedule import graph_capture

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture
def graphs(monkeypatch):
    """CUDA graphs are taken for possible."""
    monkeypatch.setattr(graph_capture, "refusal", lambda *given: None)


def test_steps_are_those_of_eager_blocks(graphs):
    (vb, recorded), (eager_vb, eager) = adapted(), adapted(records=False)
    assert trained(recorded, 8) == trained(eager, 8) and same(recorded, eager)
    assert vb._attachment.recorded.replays == 3 * (8 - 2) and not vb.stats().fallbacks
    forwards = {name: layer.forwards for name, layer in vb.stats().layers.items()}
    assert forwards == {name: layer.forwards for name, layer in eager_vb.stats().layers.items()}


def test_gradients_accumulate_and_batches_of_other_lengths_have_recordings_of_their_own(graphs):
    (vb, recorded), (_, eager) = adapted(), adapted(records=False)
    for model in (recorded, eager):
        for turn in range(10):
            ids = IDS if turn % 2 else IDS[:, :7]
            model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    assert vb._attachment.recorded.replays == 3 * 2 * 3
    others = weights_of(eager)
    assert all(torch.equal(weight.grad, others[name].grad) for name, weight in weights_of(recorded).items())


@pytest.mark.parametrize("change", ["scaling", "hook", "budget", "unmerged"])
def test_what_changes_between_steps_is_followed(graphs, change):
    def between(model, vb, step):
        if step != 4:
            return
        layers = [module for module in model.modules() if hasattr(module, "lora_A")]
        if change == "scaling":
            for layer in layers:
                layer.scaling["default"] *= 3
        elif change == "hook":
            layers[0].register_forward_hook(lambda module, args, y: 2 * y)
        elif change == "unmerged":
            layers[0]._disable_adapters = True
        else:
            vb.stack.ledger.changes += 1

    runs = [adapted(records=records) for records in (True, False)]
    losses = [trained(model, 9, lambda step, m=model, v=vb: between(m, v, step)) for vb, model in runs]
    assert losses[0] == losses[1] and same(runs[0][1], runs[1][1])
    vb = runs[0][0]
    # two steps of four are recorded before the change, and three of five after it
    assert vb._attachment.recorded.replays == 3 * 2 + (2 if change == "hook" else 3) * 3
    assert bool([why for why in vb.stats().fallbacks if "one has hooks" in why]) == (change == "hook")


def test_weights_that_train_from_some_step_on_get_gradients(graphs):
    def freeze(model, step):
        for name, weight in model.named_parameters():
            if "layers.1" in name and "lora_B" in name:
                weight.requires_grad_(step not in (0, 1, 2, 3))

    runs = [adapted(records=records)[1] for records in (True, False)]
    trained_ = [weights_of(model) for model in runs]
    for model, weights in zip(runs, trained_, strict=True):
        optimizer = torch.optim.SGD(weights.values(), 1e-2)
        for step in range(8):
            freeze(model, step)
            model(input_ids=IDS, labels=IDS, use_cache=False).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    assert all(torch.equal(weight, trained_[1][name]) for name, weight in trained_[0].items())


def test_a_backward_whose_recording_was_dropped_is_computed_eagerly(graphs):
    (vb, recorded), (_, eager) = adapted(), adapted(records=False)
    trained(recorded, 4), trained(eager, 4)
    for model in (recorded, eager):
        loss = model(input_ids=IDS, labels=IDS, use_cache=False).loss
        vb._attachment.recorded._forget()
        loss.backward()
    others = weights_of(eager)
    assert all(torch.equal(weight.grad, others[name].grad) for name, weight in weights_of(recorded).items())


def test_random_numbers_keep_blocks_eager(graphs):
    vb, model = adapted(attention_dropout=0.5)
    trained(model, 5)
    assert not vb._attachment.recorded.replays
    assert "checkpointed blocks run from Python, as one draws random numbers" in vb.stats().fallbacks


def test_moved_pages_between_forward_and_backward_are_computed_eagerly(graphs):
    (vb, recorded), (_, eager) = adapted(), adapted(records=False)
    trained(recorded, 4), trained(eager, 4)
    for model in (recorded, eager):
        loss = model(input_ids=IDS, labels=IDS, use_cache=False).loss
        vb.stack.ledger.changes += 1
        loss.backward()
    others = weights_of(eager)
    assert all(torch.equal(weight.grad, others[name].grad) for name, weight in weights_of(recorded).items())


def test_wrong_results_are_not_believed(graphs):
    (vb, model), (_, eager) = adapted(), adapted(records=False)
    recorder = vb._attachment.recorded._new_recorder

    class Late(recorder):
        def record(self, step, within):
            graph = super().record(step, within)
            return types.SimpleNamespace(replay=lambda: (graph.replay(), self.spoil()))

        def spoil(self):
            for name, tensor in vb._attachment.recorded._memory._tensors.items():
                tensor.mul_(1.5 if name[0][0] == "out" else 1)

    vb._attachment.recorded._new_recorder = Late
    assert trained(model, 4) == trained(eager, 4)
    assert not vb._attachment.recorded.replays
    assert any("other results than its eager" in why for why in vb.stats().fallbacks)


def test_released_and_copied_blocks_have_their_own_function(graphs):
    vb, model = adapted()
    trained(model, 4)
    name = "_gradient_checkpointing_func"
    blocks = [module for module in model.modules() if isinstance(vars(module).get(name), Checkpoint)]
    assert len(blocks) == 3
    assert not isinstance(copy.deepcopy(getattr(blocks[0], name)), Checkpoint)
    vb._attachment.recorded.release()
    assert not any(isinstance(getattr(block, name), Checkpoint) for block in blocks)
    assert trained(model, 1)


@pytest.mark.gpu
@pytest.mark.parametrize("seen", [True, False])
def test_a_block_that_waits_for_the_gpu_stays_eager_and_the_process_usable(seen, monkeypatch):
    if not seen:  # before the capture
        monkeypatch.setattr(recorded_blocks, "waits_noticed", lambda device: contextlib.nullcontext(lambda: ""))
    vb, model = adapted("cuda")
    attention = vb.module.model.layers[1].self_attn
    plain = attention.forward

    def waits(*args, **kwargs):
        outputs = plain(*args, **kwargs)
        outputs[0].sum().item()
        return outputs

    attention.forward = waits
    assert len(trained(model, 5, ids=IDS.cuda())) == 5
    said = "one waits for the GPU" if seen else "recording one failed"
    assert any(said in why for why in vb.stats().fallbacks)
    assert torch.randn(4, device="cuda").isfinite().all() and vb._attachment.recorded.replays
    vb.close()
    (vb, model), other = adapted("cuda"), trained(adapted("cuda", records=False)[1], 5, ids=IDS.cuda())
    assert trained(model, 5, ids=IDS.cuda()) == pytest.approx(other, rel=2e-2) and vb._attachment.recorded.replays


@pytest.mark.gpu
def test_steps_on_a_gpu_are_those_of_eager_blocks():
    (vb, recorded), (_, eager) = adapted("cuda"), adapted("cuda", records=False)
    ids = IDS.cuda()
    one, other = trained(recorded, 8, ids=ids), trained(eager, 8, ids=ids)
    assert one == pytest.approx(other, rel=2e-2)
    # the first pass moves what was on the CPU, so that pages and attributes settle a step later than on a CPU
    assert vb._attachment.recorded.replays >= 3 * 5 and not vb.stats().fallbacks
