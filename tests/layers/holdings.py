"""VB layers in every holding: formats, resident or streamed, tied or alone."""

import torch
from torch import nn

from tests.models import dtype_of, mlp, wrap, wrap_streamed


def held(format, how, path):
    model = mlp(dtype=dtype_of(format))
    with wrap(model, format) if how == "resident" else wrap_streamed(model, format, path) as vb:
        yield vb


def dense_twin(vb, model=None):
    """A plain model with the decoded weights."""
    twin = model or mlp(dtype=vb.module[0].weight.dtype)
    twin.load_state_dict(vb.state_dict())
    return twin


def inputs(vb, rows=3):
    torch.manual_seed(7)
    return torch.randn(rows, 64, dtype=vb.module[0].weight.dtype)


def tied(dtype=torch.float32):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64, bias=False), nn.Linear(64, 64)).to(dtype)
    model[3].weight = model[0].weight
    return model.eval()
