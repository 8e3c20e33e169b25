"""Loops that people write around mode "full": the bits of resident training, or a refusal by name."""

import collections
import contextlib
import copy
import pickle
from collections.abc import Iterator

import pytest
import torch

import vbrt
from tests.training.full.full_models import Tiny, adamw, batches, loss_of, train
from tests.training.full.test_full import assert_same_training, small_tiers

BATCHES = batches(8)


def backward(model, number: int, **given) -> float:
    loss = loss_of(model, *BATCHES[number])
    loss.backward(**given)
    return loss.item()


def parameter(model, name: str) -> torch.nn.Parameter:
    return model.get_parameter(name)


class Skipping(Tiny):
    """One of the layers is left out in each pass."""

    passes = 0

    def forward(self, ids):
        x, self.passes = self.embed(ids), self.passes + 1
        for at, layer in enumerate(self.layers):
            if at != self.passes % 3:
                x = x + torch.relu(layer(x))
        return self.head(self.norm(x))


def stepped(model, optimizer, count: int) -> Iterator[float]:
    """Yield the loss of each batch after its step; gradients are there still."""
    for number in range(count):
        loss = backward(model, number)
        optimizer.step()
        yield loss


def without_zero_grad(model, optimizer) -> list:
    return list(stepped(model, optimizer, 4))


def zeroed(model, optimizer) -> list:
    losses = []
    for number, loss in enumerate(stepped(model, optimizer, 5)):
        losses.append(loss)
        (optimizer if number % 2 else model).zero_grad(set_to_none=False)
    return losses


def stepped_twice(model, optimizer) -> list:
    """With a look at the gradients behind the step."""
    losses = []
    for loss in stepped(model, optimizer, 3):
        optimizer.step()
        losses += [loss, *(p.grad.norm().item() for p in model.parameters())]
        optimizer.zero_grad()
    return losses


def frozen_with_a_gradient(model, optimizer) -> list:
    losses = []
    for number in range(3):
        losses.append(backward(model, number))
        parameter(model, "layers.1.weight").requires_grad_(False)
        optimizer.step()
        optimizer.zero_grad()
        parameter(model, "layers.1.weight").requires_grad_(True)
    return losses


def hooked(model, optimizer) -> list:
    """Hooks of a step see and change all gradients, and what it has made of the weights."""
    seen = []
    optimizer.load_state_dict(optimizer.state_dict())

    def before(*_) -> None:
        for p in model.parameters():
            seen.append(tuple(p.shape))
            p.grad.mul_(0.5)

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(lambda *_: seen.append(model.state_dict()["layers.0.weight"].sum().item()))
    return train(model, optimizer, 3) + seen


def edited(model, optimizer) -> list:
    """Gradients are changed between backward and step, and a graph is gone through again."""
    losses = []
    for number in range(3):
        losses.append(backward(model, number))
        loss = loss_of(model, *BATCHES[number + 3])
        loss.backward(retain_graph=True)
        loss.backward()
        parameter(model, "layers.0.weight").grad.mul_(0.3)
        parameter(model, "layers.1.weight").grad = None
        parameter(model, "head.weight").grad = parameter(model, "head.weight").grad * 2
        optimizer.step()
        optimizer.zero_grad()
    return losses


def graded_apart(model, optimizer) -> list:
    """Backward passes that are for some parameters only, and one whose weight is frozen before it."""
    losses, table = [], parameter(model, "embed.weight")
    for number in range(3):
        losses.append(backward(model, number))
        (found,) = torch.autograd.grad(loss_of(model, *BATCHES[number + 1]), [table])
        loss = loss_of(model, *BATCHES[number + 2])
        loss.backward(inputs=[table], retain_graph=True)
        parameter(model, "layers.1.weight").requires_grad_(False)
        loss.backward()
        parameter(model, "layers.1.weight").requires_grad_(True)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(found.norm().item())
    return losses


def kept_gradients(model, optimizer) -> list:
    """Who keeps a gradient sees what is added to it, and has it still when it was dropped."""
    losses, kept = [], []
    for number in range(3):
        losses.append(backward(model, number))
        kept.append([p.grad for p in model.parameters()])
        views = [gradient.view(-1)[::2].detach() for gradient in kept[-1]]
        losses += [backward(model, number + 3), *(view.norm().item() for view in views)]
        kept[-1][-1].mul_(0.3)
        optimizer.step()
        optimizer.zero_grad()
    return losses + [gradient.norm().item() for gradients in kept for gradient in gradients]


def written_after_the_step(model, optimizer) -> list:
    losses = []
    for number in range(3):
        losses.append(backward(model, number))
        gradients = [p.grad for p in model.parameters()]
        optimizer.step()
        for gradient in gradients:
            gradient.mul_(0.5)
    return losses


def assigned(model, optimizer) -> list:
    """Gradients in a buffer of the loop's, one that is two weights', and two that change places."""
    losses, flat = [], torch.zeros(2, 64, 64)
    first, second, third, head = (
        parameter(model, f"{name}.weight") for name in ("layers.0", "layers.1", "layers.2", "head")
    )
    for number in range(3):
        first.grad, head.grad = flat[0], flat.new_ones(50, 64)
        losses += [backward(model, number), flat.norm().item(), head.grad.norm().item()]
        third.grad, second.grad = second.grad, third.grad
        losses += [backward(model, number + 3), flat.norm().item(), head.grad.norm().item()]
        assert first.grad.data_ptr() == flat.data_ptr()
        second.grad *= 2
        third.grad = first.grad
        third.grad.add_(1e-3)
        optimizer.step()
        flat.zero_()
        model.zero_grad()
    return losses


def begun_anew(model, optimizer) -> list:
    """Without the moments so far, by both ways to drop them."""
    losses = train(model, optimizer, 2)
    optimizer.state.clear()
    losses += train(model, optimizer, 2)
    optimizer.state = collections.defaultdict(dict)
    return losses + train(model, optimizer, 2)


def put_back(model, optimizer) -> list:
    """A state dict that is not copied goes on with the moments."""
    losses = train(model, optimizer, 2)
    before = optimizer.state_dict()
    losses += train(model, optimizer, 1)
    optimizer.load_state_dict(before)
    return losses + train(model, optimizer, 2)


@pytest.mark.parametrize(
    "loop",
    [
        assigned,
        begun_anew,
        edited,
        frozen_with_a_gradient,
        graded_apart,
        hooked,
        kept_gradients,
        put_back,
        stepped_twice,
        without_zero_grad,
        written_after_the_step,
        zeroed,
    ],
)
def test_it_has_the_bits_of_resident_training(loop):
    assert_same_training(Skipping() if loop is zeroed else Tiny(tied=loop in (edited, kept_gradients)), run=loop)


@pytest.mark.parametrize("loop", [stepped_twice, assigned, kept_gradients, written_after_the_step])
def test_gradients_in_files_stay_and_are_their_owners_too(tmp_path, loop):
    assert_same_training(Tiny(), small_tiers(tmp_path, 3), run=loop)


def frozen_first() -> Tiny:
    model = Tiny()
    model.layers[1].weight.requires_grad_(False)
    return model


def trainable(parameters) -> torch.optim.Optimizer:
    return adamw([p for p in parameters if p.requires_grad])


def unfrozen(model, optimizer) -> list:
    losses = train(model, optimizer, 2)
    optimizer.add_param_group({"params": [parameter(model, "layers.1.weight")], "lr": 3e-3})
    parameter(model, "layers.1.weight").requires_grad_(True)
    return losses + train(model, optimizer, 3)


def regrouped(model, optimizer) -> list:
    """A weight that leaves its group rests, and goes on in another one with the moments that it has."""
    losses, weight, (group,) = train(model, optimizer, 2), parameter(model, "layers.2.weight"), optimizer.param_groups
    group["params"] = [p for p in group["params"] if p is not weight]
    losses += train(model, optimizer, 1)
    optimizer.add_param_group({"params": [weight], "lr": 3e-3})
    return losses + train(model, optimizer, 2)


def unfrozen_in_no_group(model, optimizer) -> list:
    """The step begins within the backward pass, where it can."""
    parameter(model, "layers.1.weight").requires_grad_(True)
    losses, begin = [], getattr(model, "stepping", None)
    for number in range(2):
        loss = loss_of(model, *BATCHES[number])
        optimizer.zero_grad()  # between forward and backward
        with begin() if begin else contextlib.nullcontext():
            loss.backward()
        if begin is None:
            optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("loop", [regrouped, unfrozen, unfrozen_in_no_group])
def test_weights_that_are_unfrozen_train_from_then_on_if_they_are_in_a_group(loop):
    assert_same_training(frozen_first(), make=trainable, run=loop)


def test_groups_that_ask_for_other_moments_are_refused_before_anything_is_updated():
    vb = vbrt.wrap(Tiny(), "full", optimizer=lambda every: torch.optim.SGD(every, lr=0.1, fused=True))
    before = {name: value.clone() for name, value in vb.state_dict().items()}
    vb.optimizer.param_groups[0]["momentum"] = 0.9
    backward(vb, 0)
    with pytest.raises(vbrt.WrapError, match=r"layers.0: its param group asks for moments \['momentum_buffer'\]"):
        vb.step()
    assert all(torch.equal(value, before[name]) for name, value in vb.state_dict().items())
    late = vbrt.wrap(frozen_first(), "full", optimizer=trainable)
    late.optimizer.param_groups[0]["params"].append(parameter(late, "layers.1.weight"))  # without add_param_group
    parameter(late, "layers.1.weight").requires_grad_(True)
    backward(late, 0)
    with pytest.raises(vbrt.WrapError, match=r"layers.1: its param group asks .*add_param_group"):
        late.step()
    with pytest.raises(vbrt.WrapError, match=r"layers.0: it trains in the tiers of another model"):
        late.optimizer.add_param_group({"params": [parameter(vb, "layers.0.weight")]})
    assert len(late.optimizer.param_groups) == 1


def test_hooks_before_a_step_are_refused_within_the_backward_pass():
    vb = vbrt.wrap(Tiny(), "full", optimizer=adamw)
    vb.optimizer.register_step_pre_hook(lambda *_: None)
    with pytest.raises(vbrt.WrapError, match=r"register_step_pre_hook.*use vb.step\(\)"), vb.stepping():
        pass


def test_what_needs_a_parameters_values_in_the_graph_is_refused_by_name():
    model = Tiny()
    hook = model.layers[0].weight.register_hook(lambda gradient: gradient * 2)
    with pytest.raises(vbrt.WrapError, match=r"layers.0: hooks are registered on its weight"):
        vbrt.wrap(model, "full", optimizer=adamw)
    hook.remove()
    vb = vbrt.wrap(model, "full", optimizer=adamw)
    with pytest.raises(vbrt.WrapError, match=r"layers.0: register_hook"):
        model.layers[0].weight.register_hook(lambda gradient: gradient * 2)
    for wrong in (torch.zeros(3), torch.zeros(64, 64, dtype=torch.float64), 5):
        with pytest.raises(vbrt.WrapError, match=r"layers.0: a gradient has to be a tensor of \(64, 64\)"):
            model.layers[0].weight.grad = wrong
    with pytest.raises(vbrt.WrapError, match=r"layers.0: type needs the values"):
        model.layers[0].weight.type(torch.float64)
    with pytest.raises(vbrt.WrapError, match=r"AdamW: this optimizer updates another model"):
        vbrt.wrap(Tiny(), "full", optimizer=vb.optimizer)
    with pytest.raises(vbrt.WrapError, match=r"layers.0: its moments are in the tiers"):
        vb.optimizer.state[model.layers[0].weight]
    ids, _ = BATCHES[0]
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(vbrt.WrapError, match=r"layers.1: another tensor"):
        torch.func.functional_call(model, {"layers.1.weight": torch.zeros(64, 64)}, (ids,))
    model.layers[2].weight = torch.nn.Parameter(torch.zeros(64, 64))
    with pytest.raises(vbrt.WrapError, match=r"layers.2: another tensor was put in the place of its weight"):
        backward(vb, 0)


def test_moments_that_are_copies_are_of_the_step_that_their_state_dict_says():
    vb = vbrt.wrap(Tiny(), "full", optimizer=adamw, training={"moments": "8bit"})
    train(vb, vb.optimizer, 1)
    kept, streamed = (vb.optimizer.state_dict()["state"][at] for at in (0, 1))
    before = streamed["exp_avg"].clone()
    train(vb, vb.optimizer, 1)
    assert kept["step"] == 2 and streamed["step"] == 1 and torch.equal(streamed["exp_avg"], before)


def test_what_would_leave_two_owners_or_mix_two_weights_is_refused_by_name():
    vb = vbrt.wrap(Tiny(), "full", optimizer=adamw)
    for copied in (copy.deepcopy, copy.copy, pickle.dumps):
        with pytest.raises(vbrt.WrapError, match=r"AdamW: an optimizer of weights that train in the tiers cannot be"):
            copied(vb.optimizer)
    for copied in (copy.deepcopy, pickle.dumps):
        with pytest.raises(vbrt.WrapError, match=r"cannot be copied or pickled"):
            copied(vb.module)
    table, saved = vb.module.embed.weight, {name: value + 1 for name, value in vb.state_dict().items()}
    with pytest.raises(vbrt.WrapError, match=r"layers.0: load_state_dict\(assign=True\)"):
        vb.load_state_dict(saved, assign=True)
    assert vb.module.embed.weight is table
    loss = loss_of(vb, *BATCHES[0])
    vb.module.head.load_state_dict({"weight": saved["head.weight"]})
    with pytest.raises(vbrt.WrapError, match=r"head: its weight was updated between forward and backward"):
        loss.backward()


def in_groups(cut: int):
    def make(parameters) -> torch.optim.Optimizer:
        every = list(parameters)
        return adamw([{"params": every[cut:]}, {"params": every[:cut]}])

    return make


def test_checkpoints_of_other_groups_and_other_dtypes_are_refused_before_anything_is_loaded(tmp_path):
    saved = vbrt.wrap(Tiny(), "full", optimizer=in_groups(6))
    train(saved, saved.optimizer, 1)
    saved.save_checkpoint(tmp_path)
    turned = vbrt.wrap(Tiny(), "full", optimizer=lambda every: in_groups(6)([*every][::-1]))
    rounded = vbrt.wrap(Tiny().to(torch.bfloat16), "full", optimizer=in_groups(6))
    for vb, why in ((turned, "another index in its param groups"), (rounded, r"bias is torch.float32 in the check")):
        before = {name: value.clone() for name, value in vb.state_dict().items()}
        with pytest.raises(vbrt.CheckpointError, match=rf"{why}.*nothing was loaded"):
            vb.load_checkpoint(tmp_path)
        assert all(torch.equal(value, before[name]) for name, value in vb.state_dict().items())


def test_a_compiled_model_is_not_compiled_again_for_each_layer():
    model = Tiny(4).to(torch.bfloat16)
    vb = vbrt.wrap(model, "full", optimizer=adamw)
    torch._dynamo.reset()
    compiled = [torch.compile(layer, backend="eager") for layer in model.layers]
    x = torch.ones(2, 64, dtype=torch.bfloat16)
    with torch._dynamo.config.patch(error_on_recompile=True):
        for layer in compiled:
            layer(x)
    vb.close()
