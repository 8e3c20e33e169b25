"""A wrapped model on two memories, of which the upper one stands for a GPU's: a budget in front of host memory."""

from typing import Any

import torch
from torch import nn

import vbrt
from tests.models import config
from vbrt.model import runtime
from vbrt.residency.expert_pages import ExpertsPolicy
from vbrt.residency.expert_room import largest_pages
from vbrt.tiers import Level, MemoryTier, TierStack

CPU = torch.device("cpu")


def wrap_beside(
    monkeypatch, model: nn.Module, format: str = "nvfp4", *, room: int, miss: str = "fetch", policy=None, **tiers: Any
) -> vbrt.VBModelWrapper:
    """The experts of a model live in host memory, or on a drive; `room` pages of them fit into the upper memory.

    `format` may name the coding of fine planes, too: "exact, coded"."""
    format, _, coding = format.partition(", ")
    settings = config(format, include=["*experts"], fine_coding=coding or "auto") | {"experts": {"miss": miss}}
    settings["tiers"] |= tiers

    def build_stack(plan, config, factory=None):
        pages = {page.key: page.nbytes for swap in plan.routed for page in swap.pages}
        top = room * max(pages.values())
        near = ExpertsPolicy(top, prefetch=0, layers=largest_pages(pages)) if policy is None else policy(top)
        far = MemoryTier("cpu", CPU, plan.budgets["cpu"])
        below = far
        if "ssd" in plan.budgets:
            below = Level(far, ExpertsPolicy(plan.budgets["cpu"], prefetch=0, layers=largest_pages(pages)))
        stack = TierStack([Level(MemoryTier("gpu", CPU, top), near), below])
        if "ssd" in plan.budgets:
            runtime.attach_stores(stack, config, plan.budgets)
        return stack

    with monkeypatch.context() as patched:
        patched.setattr(runtime, "build_stack", build_stack)
        vb = vbrt.wrap(model, settings)
    return vb.materialize()
