"""Layers whose weight is a shell, resident, or streamed, for tests of its temporary."""

import torch
from torch import nn

from tests.layers.holdings import dtype_of
from tests.models import mlp, wrap, wrap_streamed

HOLDINGS = [("shell", "nvfp4"), ("resident", "dense"), ("resident", "nvfp4"), ("streamed", "exact")]


def holding(how, format, path):
    """A wrapped mlp of six layers; materialized but for "shell"."""
    model = mlp(dtype=dtype_of(format))
    with wrap_streamed(model, format, path) if how == "streamed" else wrap(model, format) as vb:
        if how != "shell":
            with torch.no_grad():
                vb(inputs(vb)), vb(inputs(vb))
        yield vb


def inputs(vb, rows=2):
    torch.manual_seed(7)
    return torch.randn(rows, 64, dtype=vb.module[0].bias.dtype)


def tied(format="dense"):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64)).to(dtype_of(format)).eval()
    model[2].weight = model[0].weight
    return model
