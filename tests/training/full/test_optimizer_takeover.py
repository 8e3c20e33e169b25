"""Steps of optimizers are noted at the parameters that train through 4 bits."""

import weakref

import torch
from torch.optim.optimizer import _global_optimizer_post_hooks

import vbrt
from tests.models import config, mlp
from vbrt.training.qat import qat_weight


def test_optimizers_are_watched_while_weights_train_and_no_longer(monkeypatch):
    hooks = _global_optimizer_post_hooks
    monkeypatch.setattr(qat_weight, "_live", weakref.WeakValueDictionary())
    monkeypatch.setattr(qat_weight, "_notes", qat_weight._StepNotes())
    before, models = len(hooks), [mlp(depth=1), mlp(depth=1)]
    one, two = (vbrt.wrap(model, config("nvfp4") | {"mode": "train"}) for model in models)
    assert len(hooks) == before + 1
    one(torch.randn(2, 64)).sum().backward()
    versions = [model[0].weight._version for model in models]
    torch.optim.SGD([*models[0].parameters(), *models[1].parameters()], lr=0.0, fused=True).step()
    noted = [model[0].weight._version > version for model, version in zip(models, versions, strict=True)]
    assert noted[0]  # a forward has seen it, and a fused step counts nothing itself
    one.unwrap()
    assert len(hooks) == before + 1
    two.unwrap()
    assert len(hooks) == before
