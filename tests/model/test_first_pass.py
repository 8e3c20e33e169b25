"""The first forward of a wrapped model, which encodes, shows how far it is."""

import copy
import pickle
import time

import pytest
import torch

import vbrt
from tests.models import TOKENS, mlp, qwen3_moe, wrap
from tests.patience import LONG_S, eventually
from vbrt.model.pass_hooks import move_rest_
from vbrt.report import progress


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(progress, "_SILENT_S", 0.01)
    monkeypatch.setattr(progress, "_LINE_S", 0.02)
    monkeypatch.delenv("VBRT_PROGRESS")


def until(seen, capsys):
    """Wait until stderr has got `seen`; return what came."""
    err, limit = "", time.monotonic() + LONG_S
    while seen not in err:
        assert time.monotonic() < limit, f"{seen!r} is not in {err!r}"
        err += capsys.readouterr().err
        time.sleep(0.01)
    return err


def test_the_first_forward_shows_how_much_is_encoded_and_later_ones_show_nothing(capsys):
    vb, x = wrap(mlp(), "nvfp4"), torch.randn(1, 64)
    handle = vb.module[6].handle
    store = handle.store
    handle.store = lambda planes: (until("vbrt: encoding: 50 %, 48.0 KiB of 96.0 KiB", capsys), store(planes))
    with torch.no_grad():
        vb(x)
    assert capsys.readouterr().err.splitlines()[-1].startswith("vbrt: encoding: 96.0 KiB in ")
    assert not vb.module._forward_hooks
    with torch.no_grad():
        vb(x)
    assert capsys.readouterr().err == ""


def test_a_model_that_is_on_its_device_is_not_moved_there_again():
    """torch would read its gradients, which another thread may be dropping: a budget may change at any time."""

    class Trained(torch.nn.Parameter):
        grad = property(lambda self: pytest.fail("its gradient was read"))

    here, there = torch.device("meta"), torch.device("cpu")
    for device in (here, there):
        layer = torch.nn.Linear(2, 2, device=device)
        layer.weight = Trained(layer.weight.data)
        if device == there:
            with pytest.raises(pytest.fail.Exception):
                move_rest_(layer, here)
        else:
            move_rest_(layer, here)


def test_a_model_that_trains_has_nothing_to_encode(capsys):
    settings = {"weights": {"min_parameters": 0}, "tiers": {"gpu": {"enabled": False}}}
    vb, routed = vbrt.wrap(mlp().train(), "train", **settings), vbrt.wrap(qwen3_moe().train(), "train", **settings)
    vb(torch.randn(1, 64)).sum().backward()
    routed(TOKENS)
    assert capsys.readouterr().err == "" and not vb.module._forward_hooks and not routed.module._forward_hooks


def test_an_interrupted_first_forward_leaves_a_model_that_can_be_copied_and_goes_on(capsys, monkeypatch):
    vb, x, stalled, draw = wrap(mlp(), "nvfp4"), torch.randn(1, 64), [], progress._Painter.draw

    def interrupt(*_):
        until("encoding", capsys)
        monkeypatch.setattr(progress, "_STALLED_S", 0.0)
        raise KeyboardInterrupt

    def drawn(self, work):
        stalled.append(work.stalls)
        return draw(self, work)

    monkeypatch.setattr(progress._Painter, "draw", drawn)

    hook = vb.module[6].register_forward_pre_hook(interrupt)
    with pytest.raises(KeyboardInterrupt):
        vb(x)
    hook.remove()
    eventually(lambda: stalled[-2:] == [True, True], "a look at work that has stalled")
    capsys.readouterr()
    looks = len(stalled)
    eventually(lambda: len(stalled) > looks + 2, "further looks")
    assert capsys.readouterr().err == "" and all(stalled[looks:])  # nothing more
    copied = copy.deepcopy(vb.module)
    pickle.loads(pickle.dumps(vb.module))
    with torch.no_grad():
        assert torch.equal(vb(x), vb(x)) and copied(x).shape == x.shape
    assert not vb.module._forward_hooks
