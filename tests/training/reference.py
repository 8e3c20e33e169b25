"""Layers in training, and what they are compared with."""

import torch
import torch.nn.functional as F
from torch import nn

import vbrt
from tests.models import TOKENS
from vbrt.formats import get_format

FOUR_BIT = ("nvfp4", "mxfp4", "nf4", "quantile")


def wrap(model, format="nvfp4", *, every=100, **weights):
    return vbrt.wrap(
        model,
        mode="train",
        weights={"format": format, "min_parameters": 0, **weights},
        tiers={"gpu": {"enabled": False}},
        separation={"refresh_every": every},
    )


def layer(format="nvfp4", *, every=100, n=48, k=64, bias=True, dtype=torch.float32):
    torch.manual_seed(5)
    model = nn.Linear(k, n, bias).to(dtype)
    return model, wrap(model, format, every=every)


def rounded(format, w_NK):
    fmt = get_format(format)
    return fmt.decode(fmt.encode(w_NK), tuple(w_NK.shape), w_NK.dtype)


class StraightThrough(nn.Linear):
    """The reference: fresh scales in each forward, and autograd for everything else."""

    format = "nvfp4"

    def forward(self, x):
        w = self.weight
        return F.linear(x, w + (rounded(self.format, w.detach()) - w).detach(), self.bias)


def steps(model, count=3, *, autocast=False, batches=2, lr=3e-3, optimizer=None):
    """Losses of some AdamW steps on a language model, gradients accumulated and clipped."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=lr)
    losses = []
    for step in range(count):
        for batch in (TOKENS, TOKENS.flip(1))[:batches]:
            torch.manual_seed(step)  # dropout
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                loss = model(input_ids=batch, labels=batch, use_cache=False).loss / batches
            loss.backward()
            losses.append(loss.item())
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return losses


def counts(vb, name=None):
    stats = vb.stats().layers
    one = stats[name or next(iter(stats))]
    return one.separation_hits, one.separation_refreshes
