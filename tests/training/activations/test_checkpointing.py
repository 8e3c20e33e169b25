"""What blocks keep for the backward pass changes memory, and no bit of a loss or a gradient."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import vbrt
from vbrt.residency.activation_plan import choose
from vbrt.tiers import MemoryTier
from vbrt.training.activations.activation_offload import HostLink, Offload
from vbrt.training.activations.checkpointing import Activations, HeldBlock

WIDTH, TOKENS = 64, 512  # an input of a block is 128 KiB


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x, *, scale=None):
        y = self.down(F.dropout(F.gelu(self.up(x)), 0.3, self.training))
        return x + (y if scale is None else y * scale)


class Model(nn.Module):
    def __init__(self, blocks=4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))

    def forward(self, x):
        x, scale = self.first(x), self.first.bias.sum()
        for block in self.blocks:
            x = block(x, scale=scale)  # a tensor that requires grad by keyword
        return x


def step(model, autocast=False):
    """Loss and gradients of a pass with dropout; the generator's state after it is in the loss of a second one."""
    torch.manual_seed(1)
    x = torch.randn(TOKENS, WIDTH)
    model.zero_grad()
    losses = []
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            losses.append(model(x).square().mean())
        losses[-1].backward()
    return [*losses, *(p.grad for p in model.parameters() if p.grad is not None)]


def offloading(model, asked="offload", room=1 << 30):
    """A model whose blocks' inputs wait in other memory of the host."""
    device = torch.device("cpu")
    offload = Offload(HostLink(), MemoryTier("activations", device, room), device)
    return Activations(asked, list(model.blocks), [0] * len(model.blocks), offload)


def wrapped(activations, preset="dense", **overrides):
    settings = {"training": {"activations": activations}, "tiers": {"gpu": {"enabled": False}}, **overrides}
    return vbrt.wrap(Model().train(), preset, **settings)


def same(these, those):
    return len(these) == len(those) and all(torch.equal(a, b) for a, b in zip(these, those, strict=True))


@pytest.mark.sample(2)
@pytest.mark.parametrize("preset", ["train", "fp4"])
@pytest.mark.parametrize("autocast", [False, True])
def test_every_way_gives_the_same_bits(preset, autocast):
    kept = step(wrapped("keep", preset), autocast)
    for activations in ("recompute", "offload", "1MiB", "6MiB"):
        vb = wrapped(activations, preset)
        assert same(step(vb, autocast), kept)
        assert vb.stats().activations.passes == 2
    assert vb.stats().activations.modes == {"keep": 4} if autocast else {"recompute", "keep"}


def test_offloaded_inputs_come_back_as_they_were_one_ahead_of_their_use():
    kept = step(Model())
    model = Model()
    activations = offloading(model)
    assert same(step(model), kept)
    stats, input_bytes = activations.stats(), 4 * WIDTH * TOKENS
    assert (stats.input_bytes, stats.offloaded_bytes) == (input_bytes, 2 * 4 * input_bytes)
    assert stats.returned_bytes == 2 * 2 * input_bytes  # of four, the last two had not left yet
    assert (stats.prefetched, stats.late) == (4, 0)
    assert stats.host_peak_bytes == 4 * input_bytes  # the second pass had the memory of the first


def test_an_offloaded_input_is_nowhere_on_the_device():
    model, inputs = Model(8), []
    for block in model.blocks:
        block.register_forward_pre_hook(lambda block, args: inputs.append(weakref.ref(args[0].untyped_storage())))
    offloading(model)
    loss = model(torch.ones(TOKENS, WIDTH)).mean()
    assert [ref() is not None for ref in inputs] == [False] * 6 + [True] * 2  # on their way out
    loss.backward()


def test_a_graph_that_is_kept_gives_the_same_gradients_again_and_a_dropped_one_gives_its_memory_back():
    model = Model()
    host = offloading(model).offload.host
    loss = model(torch.ones(TOKENS, WIDTH)).mean()
    weight = model.blocks[0].up.weight
    first, second = (torch.autograd.grad(loss, weight, retain_graph=True) for _ in range(2))
    assert torch.equal(*first, *second)
    assert host.used_bytes > 0
    del loss
    gc.collect()
    assert host.used_bytes == 0


def test_inputs_that_host_memory_has_no_room_for_stay_and_it_is_said():
    model = Model()
    activations = offloading(model, room=5 * WIDTH * TOKENS)
    assert same(step(model), step(Model()))
    assert activations.stats().host_peak_bytes == 4 * WIDTH * TOKENS
    assert "no room for one more input" in activations.fallbacks[0]


def test_a_budget_measures_one_pass_and_then_keeps_what_fits():
    vb = wrapped(6 * WIDTH * TOKENS * 4 * 4)
    vb(torch.randn(TOKENS, WIDTH)).mean().backward()
    assert vb.stats().activations.modes == {"recompute": 3, "keep": 1}
    inside = vb.stats().activations.inside_bytes
    assert inside // vb.stats().activations.input_bytes == 9  # two of the inner width, and the input
    for tokens, modes in ((TOKENS // 4, {"keep": 4}), (TOKENS, {"recompute": 3, "keep": 1})):
        vb(torch.randn(tokens, WIDTH)).mean().backward()
        assert vb.stats().activations.modes == modes


def test_a_budget_works_while_weights_train_from_the_tiers():
    def trained(activations):
        model = Model().train()
        optimizer = torch.optim.AdamW(model.parameters())
        settings = {"activations": activations}
        with vbrt.wrap(model, "full", optimizer=optimizer, training=settings, tiers={"gpu": {"enabled": False}}) as vb:
            for _ in range(2):
                torch.manual_seed(1)
                with torch.autocast("cpu", torch.bfloat16):
                    vb(torch.ones(TOKENS, WIDTH)).float().square().mean().backward()
                vb.step()
                vb.zero_grad()
            return list(vb.state_dict().values()), vb.stats().activations

    kept, budgeted = trained("keep"), trained(6 * WIDTH * TOKENS * 4 * 4)
    assert same(kept[0], budgeted[0])
    assert budgeted[1].modes["keep"] > 0


def test_the_faster_way_is_taken_where_it_fits():
    assert choose(400, [10] * 4, [100] * 4) == ["keep"] * 4
    assert choose(399, [10] * 4, [100] * 4) == ["recompute", "recompute", "keep", "keep"]
    assert choose(140, [10] * 4, [100] * 4) == ["recompute"] * 4
    assert choose(139, [10] * 4, [100] * 4) == ["offload"] * 4
    assert choose(0, [10] * 4, [100] * 4) == ["offload"] * 4


def test_copies_pickles_and_unwrapped_models_have_plain_blocks():
    vb = wrapped("recompute")
    block = vb.module.blocks[0]
    assert isinstance(block, HeldBlock)
    assert isinstance(block, Block)
    assert type(copy.deepcopy(block)) is type(pickle.loads(pickle.dumps(block))) is Block
    twin = copy.deepcopy(vb)
    assert twin.module.blocks[0].__dict__["_vb_activations"] is not block.__dict__["_vb_activations"]
    assert same(step(twin), step(vb))
    plain = vb.unwrap()
    assert type(plain.blocks[0]) is Block
    assert "_vb_activations" not in plain.blocks[0].__dict__


def test_evaluation_and_passes_without_gradients_are_left_alone():
    vb = wrapped("recompute")
    with torch.no_grad():
        vb(torch.ones(2, WIDTH))
    vb.eval()(torch.ones(2, WIDTH))
    assert vb.stats().activations.passes == 0


@pytest.mark.exhaustive
def test_compiled_blocks_and_compiled_models_give_the_same_bits(monkeypatch):
    monkeypatch.setattr(F, "dropout", lambda x, p, training: x)  # compiled, it draws otherwise
    kept = step(wrapped("keep", "train"))
    vb = wrapped("recompute", "train")
    for block in vb.module.blocks:
        block.compile(backend="aot_eager")
    assert same(step(vb), kept)
    assert vb.stats().activations.modes == {"recompute": 4}
    vb = wrapped("recompute", "train")
    vb.module.compile(backend="aot_eager")
    assert same(step(vb), kept)


def test_a_model_without_equal_blocks_says_that_all_is_kept():
    vb = vbrt.wrap(nn.Sequential(nn.Linear(64, 64)), "dense", training={"activations": "recompute"})
    assert "no repeated blocks" in vb.stats().fallbacks[-1]
