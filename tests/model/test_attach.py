"""A runtime on a plain model, as a plug-in builds it: no wrapper, and everything but the façade."""

import copy
import gc
import pickle
import weakref

import pytest
import torch
from torch import nn

import vbrt
from tests.models import FORMATS, config, mlp
from vbrt.config import load_config
from vbrt.errors import TierError, WrapError
from vbrt.layers import VBLinear
from vbrt.model.attach import attach
from vbrt.model.timeline_recording import recorded
from vbrt.saves.load.load_model import load_attached
from vbrt.saves.load.sources import open_source
from vbrt.saves.saved.save import save_attached

PAGE = 16384  # of a dense layer of `mlp`


def settings(format="dense", path=None, pages=3, **sections):
    plain = config(format) | sections
    if path is not None:
        plain["tiers"] |= {"cpu": {"budget": pages * PAGE}, "ssd": {"enabled": True, "path": str(path)}}
    return load_config(plain)


@pytest.mark.parametrize("format", FORMATS)
def test_a_plain_model_runs_has_stats_and_budgets_and_is_given_back(format, tmp_path):
    model, x = mlp(depth=4), torch.randn(2, 64)
    want = vbrt.wrap(mlp(depth=4), config(format))(x)
    attachment = attach(model, settings(format, tmp_path))
    assert type(model) is nn.Sequential and type(model[0]) is VBLinear and attachment.model is model
    for _ in range(3):
        assert torch.equal(model(x), want)
    stats = attachment.stats()
    assert stats.passes == 3 and list(stats.layers) == ["0", "2", "4", "6"]
    assert stats.hits + stats.misses == 3 * len(attachment.stack.pages)
    assert attachment.set_budget("cpu", "1MiB") == 1 << 20 == attachment.plan.budgets["cpu"]
    assert torch.equal(model(x), want) and attachment.settings.tiers.cpu.budget == "1MiB"
    with recorded((attachment,), tmp_path / "t.json") as recording:
        model(x)
    assert set(recording.timeline.totals.layers) == {"0", "2", "4", "6"}
    assert attachment.lossless is (format != "nvfp4")
    assert attachment.detach() is model and type(model[0]) is nn.Linear and not model._forward_pre_hooks
    torch.testing.assert_close(model(x), want)
    assert attachment.stack.closed


def test_a_closed_attachment_says_so_and_frees_what_it_held(tmp_path):
    model, x = mlp(depth=4), torch.randn(2, 64)
    attachment = attach(model, settings(path=tmp_path))
    model(x)
    attachment.close()
    attachment.close()
    assert not any(tmp_path.iterdir()) and attachment.stats().tiers["cpu"].held_bytes == 0
    with pytest.raises(TierError, match="closed"):
        model(x)
    for use in (lambda: attachment.set_budget("cpu", PAGE), lambda: save_attached(attachment, tmp_path / "s")):
        with pytest.raises(WrapError, match="closed or unwrapped"):
            use()


def test_the_model_keeps_its_runtime_and_nothing_else_keeps_the_model(tmp_path):
    model, x = mlp(depth=4), torch.randn(2, 64)
    attachment = weakref.ref(attach(model, settings(path=tmp_path)))
    with torch.no_grad():  # or graphs of autograd hold the weights
        want = model(x)
        assert torch.equal(model(x), want) and attachment() is not None
    held, gone = attachment(), weakref.ref(model)
    gc.disable()
    try:
        del model
        assert gone() is None  # at once: no cycle leads through the model
    finally:
        gc.enable()
    with pytest.raises(WrapError, match="the model is gone"):
        held.materialize()
    assert held.runtime.attachments == () and held.stats().layers == {}
    held.close()
    assert held.stack.closed


def test_a_model_is_saved_and_loaded_without_a_wrapper(tmp_path):
    model, x = mlp(depth=3), torch.randn(2, 64)
    attachment = attach(model, settings("nvfp4"))
    assert save_attached(attachment, tmp_path / "saved") == tmp_path / "saved"
    want, other = model(x), mlp(depth=3).to("meta")
    source = open_source(tmp_path / "saved")
    loaded = load_attached(source, other, source.config(None, {}))
    assert torch.equal(other(x), want) and loaded.model is other
    assert loaded.stats().layers.keys() == attachment.stats().layers.keys()


@pytest.mark.parametrize("mode", ["infer", "train"])
def test_an_attachment_that_fails_leaves_the_model_and_closes_the_tiers(mode, tmp_path, monkeypatch):
    model = mlp(depth=3)
    before = [(type(layer), dict(vars(layer))) for layer in model]
    monkeypatch.setattr("vbrt.model.attachment.PassHook", lambda attachment: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        attach(model, settings(path=tmp_path, pages=2, mode=mode))
    assert [(type(layer), dict(vars(layer))) for layer in model] == before and not model._forward_pre_hooks
    assert not any(tmp_path.iterdir())


def test_a_model_that_is_attached_already_is_refused_and_runs_on(tmp_path):
    model, x = mlp(depth=3), torch.randn(2, 64)
    attachment = attach(model, settings(path=tmp_path, pages=2))
    want = model(x)
    for runtime in (None, attachment.runtime):
        with pytest.raises(WrapError, match="is a VB layer already"):
            attach(model, settings(path=tmp_path, pages=2), runtime=runtime)
        assert torch.equal(model(x), want) and attachment.stats().layers.keys() == {"0", "2", "4"}
    assert attachment.detach() is model


def test_a_model_that_trains_is_attached_and_detached_with_its_own_parameters():
    model = mlp(depth=2)
    parameters = list(model.parameters())
    attachment = attach(model, settings("nvfp4", mode="train"))
    model(torch.randn(2, 64)).sum().backward()
    assert all(p.grad is not None for p in parameters) and attachment.stats().policy == "none"
    with pytest.raises(WrapError, match="there is nothing to budget"):
        attachment.set_budget("cpu", PAGE)
    assert list(map(id, attachment.detach().parameters())) == list(map(id, parameters))


def test_a_copy_or_a_pickle_of_a_plain_model_runs_and_leaves_the_first_alone():
    model, x = mlp(depth=2), torch.randn(2, 64)
    attachment = attach(model, settings())
    want = model(x)
    twin, read = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    assert torch.equal(twin(x), want) and torch.equal(read(x), want)
    attachment.close()
    assert torch.equal(twin(x), want) and torch.equal(read(x), want)
