"""The first forward of a wrapped model, which encodes, shows how far it is."""

import copy
import pickle
import time

import pytest
import torch

from tests.models import mlp, wrap
from vbrt.report import progress


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(progress, "_SILENT_S", 0.01)
    monkeypatch.setattr(progress, "_LINE_S", 0.02)
    monkeypatch.delenv("VBRT_PROGRESS")


def slow(vb, seconds=0.05):
    """Encoding one of the layers takes long."""
    handle = vb.model[6].handle
    store = handle.store
    handle.store = lambda planes: (time.sleep(seconds), store(planes))


def test_the_first_forward_shows_how_much_is_encoded_and_later_ones_show_nothing(capsys):
    vb, x = wrap(mlp(), "nvfp4"), torch.randn(1, 64)
    slow(vb)
    with torch.no_grad():
        vb(x)
    err = capsys.readouterr().err
    assert "vbrt: encoding: 50 %, 48.0 KiB of 96.0 KiB, " in err and "vbrt: encoding: 96.0 KiB in 0." in err
    assert not vb.model._forward_hooks
    with torch.no_grad():
        vb(x)
    wrap(mlp(), "nvfp4").materialize()
    assert capsys.readouterr().err == ""


def test_an_interrupted_first_forward_leaves_a_model_that_can_be_copied_and_goes_on(capsys, monkeypatch):
    monkeypatch.setattr(progress, "_STALLED_S", 0.05)
    vb, x = wrap(mlp(), "nvfp4"), torch.randn(1, 64)

    def interrupt(*_):
        time.sleep(0.03)
        raise KeyboardInterrupt

    hook = vb.model[6].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        vb(x)
    hook.remove()
    time.sleep(0.3)
    shown = capsys.readouterr().err
    time.sleep(0.1)
    assert "encoding" in shown and capsys.readouterr().err == ""  # nothing more: it has stalled
    copied = copy.deepcopy(vb.model)
    pickle.loads(pickle.dumps(vb.model))
    with torch.no_grad():
        assert torch.equal(vb(x), vb(x)) and copied(x).shape == x.shape
    assert not vb.model._forward_hooks
