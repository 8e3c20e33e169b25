"""`parameter.grad` of weights in the tiers: lazy for what most code asks for, and the gradient itself for all else."""

import copy
import io
import pickle

import numpy
import pytest
import torch

import vbrt
from tests.training.full.full_models import Tiny, adamw, batches, loss_of, resident
from vbrt.training.full.lazy_gradient import LazyGradient

BATCHES, MODEL = batches(4), Tiny()


@pytest.fixture(params=["ours", "resident"])
def trainee(request):
    """A model after a backward pass, in the tiers and resident: every test's results are the same."""
    model = resident(MODEL)
    if request.param == "resident":
        twin = resident(model)
        loss_of(twin, *BATCHES[0]).backward()
        yield twin
        return
    with vbrt.wrap(model, "full", optimizer=adamw) as vb:
        loss_of(vb, *BATCHES[0]).backward()
        yield vb


def weight_of(model, at: int = 1) -> torch.nn.Parameter:
    return getattr(model, "module", model).layers[at].weight


def expected(at: int = 1, *, batch: int = 0) -> torch.Tensor:
    twin = resident(MODEL)
    loss_of(twin, *BATCHES[batch]).backward()
    return weight_of(twin, at).grad


def test_presence_type_and_shape_read_no_numbers():
    with vbrt.wrap(resident(MODEL), "full", optimizer=adamw) as vb:
        assert weight_of(vb).grad is None
        loss_of(vb, *BATCHES[0]).backward()
        weight, gradient = weight_of(vb), weight_of(vb).weight.gradient
        before, shown = gradient.key, weight.grad
        assert isinstance(shown, LazyGradient) and weight.grad is shown
        assert (shown.shape, shown.dtype, shown.device.type) == (weight.shape, weight.dtype, "cpu")
        assert shown.numel() == weight.numel() and not shown.is_sparse and not shown.requires_grad
        assert shown.mul_(torch.tensor(1.0)) is shown
        torch.linalg.vector_norm(shown)
        assert gradient.key == before and shown.found is None and not gradient.exposed
        assert torch.equal(shown, expected()) and gradient.exposed


@pytest.mark.parametrize(
    "use",
    [
        copy.deepcopy,
        lambda g: pickle.loads(pickle.dumps(g)),
        lambda g: torch.load(_saved(g)),
        lambda g: torch.from_numpy(numpy.asarray(g)),
        lambda g: torch.from_dlpack(g),
        lambda g: g + 0,
        lambda g: torch.stack([g, g])[1],
        lambda g: torch.cat([row[None] for row in g]),
        lambda g: torch.as_strided(g, g.shape, g.stride()),
        lambda g: torch._foreach_mul([g], 1.0)[0],
        lambda g: torch.tensor(g.tolist()),
    ],
)
def test_whatever_needs_numbers_gets_the_gradient(trainee, use):
    found = use(weight_of(trainee).grad)
    assert type(found) is torch.Tensor and torch.equal(found, expected())


def _saved(value) -> io.BytesIO:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return file


def test_a_held_gradient_sees_accumulation_and_keeps_its_numbers_when_it_is_dropped(trainee):
    weight = weight_of(trainee)
    held, twin = weight.grad, expected()
    loss_of(trainee, *BATCHES[1]).backward()
    twin.add_(expected(batch=1))
    weight.grad = None
    loss_of(trainee, *BATCHES[2]).backward()
    assert torch.equal(held, twin) and torch.equal(weight.grad, expected(batch=2))


def test_writes_count_and_a_gradient_can_become_another_weights(trainee):
    first, second = weight_of(trainee, 0), weight_of(trainee, 1)
    first.grad.mul_(0.3)
    first.grad *= 2
    assert torch.equal(first.grad, expected(0) * 0.3 * 2)
    first.grad = second.grad
    second.grad = second.grad
    assert torch.equal(first.grad, second.grad) and torch.equal(second.grad, expected(1))
    held = second.grad
    held.mul_(0.5).add_(1.0)
    assert torch.equal(second.grad, expected(1) * 0.5 + 1.0)


def test_torchs_clipping_reads_gradients_once_and_scales_them_in_the_update():
    model = resident(MODEL)
    twin = resident(model)
    theirs = adamw(twin.parameters())
    reads = []
    with vbrt.wrap(model, "full", optimizer=adamw) as vb:
        for number, limit in enumerate((0.1, 1e9, 0.1, float("inf"))):
            for one, optimizer in ((vb, vb.optimizer), (twin, theirs)):
                loss_of(one, *BATCHES[number]).backward()
                norm = torch.nn.utils.clip_grad_norm_(one.parameters(), limit)
                again = torch.nn.utils.get_total_norm([p.grad for p in one.parameters()])
                reads += [norm.item(), again.item()]
                if one is vb:
                    streamed = [layer.handle.gradient for layer in vb._attachment.layers.values()]
                    assert not any(gradient.exposed for gradient in streamed)
                optimizer.step()
                optimizer.zero_grad()
        assert reads[0::4] == reads[2::4] and reads[1::4] == reads[3::4]
        state = vb.state_dict()
        assert all(torch.equal(value, state[name]) for name, value in twin.state_dict().items())


def test_a_user_who_writes_a_gradient_after_its_norm_was_asked_for_gets_the_new_norm(trainee):
    weight = weight_of(trainee)
    once = torch.linalg.vector_norm(weight.grad)
    held = weight.grad
    held[0] = 7.0
    changed = expected()
    changed[0] = 7.0
    assert torch.linalg.vector_norm(held) == torch.linalg.vector_norm(changed) != once
    held[1] = 9.0
    changed[1] = 9.0
    assert torch.linalg.vector_norm(weight.grad) == torch.linalg.vector_norm(changed)
    assert torch.linalg.vector_norm(weight.grad, 1) == torch.linalg.vector_norm(changed, 1)
