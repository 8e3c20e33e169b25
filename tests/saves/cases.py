"""Models and settings that the tests of saves share."""

import torch

from tests.models import TOKENS, config, llama

__all__ = ["files", "logits", "on_meta", "settings", "tied_llama"]


def settings(format, fine="none", **weights):
    given = config(format, **weights)
    given["weights"]["fine"] = fine
    return given


def on_meta(make, **given):
    with torch.device("meta"):
        return make(**given)


def tied_llama(**given):
    return llama(tied=True, **given)


def logits(model, x=TOKENS):
    with torch.no_grad():
        y = model(x)
    return getattr(y, "logits", y)


def files(directory):
    return sorted(path.name for path in directory.iterdir())
