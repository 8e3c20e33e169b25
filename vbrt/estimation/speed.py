"""Milliseconds of a step, predicted from a plan and the rates of a machine.

A step takes as long as the slowest of three that run side by side: copies over the links, what the device reads or
computes, and the host that launches it where no graph does. The shares of a peak that kernels reach are those measured
on an H200 (docs/benchmarks.md).
"""

from dataclasses import dataclass

from torch import nn

from vbrt.estimation.rates import Rates
from vbrt.estimation.report import Estimate
from vbrt.residency.plan import Plan
from vbrt.residency.token_cost import token_cost

__all__ = ["Speed", "predict"]

_READS = 0.60  # of the rate of copies, that products of one token reach
_MATMUL = 0.65  # of the rate of large products, over a whole pass
_LAUNCH_US = 2.0  # that a kernel of a recorded step takes at least
_KERNELS = 1.7  # for each swapped weight of a recorded step
_OPERATORS = 13  # for each swapped weight of an eager pass
_HITS = 0.8  # of routed experts, where no routing was recorded


@dataclass(frozen=True, slots=True)
class Speed:
    """Milliseconds of a step, and of what runs side by side in it."""

    ms: float
    link_ms: float
    device_ms: float
    host_ms: float
    tokens: int

    @property
    def tokens_s(self) -> float:
        """Tokens, or images, a second."""
        return 1e3 * self.tokens / self.ms if self.ms else float("inf")

    @property
    def bound(self) -> str:
        """What decides: "link", "device" or "host"."""
        of = {"link": self.link_ms, "device": self.device_ms, "host": self.host_ms}
        return max(of, key=of.__getitem__)


def predict(model: nn.Module, found: Estimate, rates: Rates) -> Speed:
    """Predict a step of an estimated task: one token a sequence with "decode", else the whole batch."""
    task, plan = found.task, found.plan
    tokens = task.batch if task.kind == "decode" else task.batch * task.context
    read, products = _weights(model, plan)
    cache = sum(row.nbytes for row in found.rows if row.name == "KV cache")
    passes = 1 if not task.trains else 3 if plan is None and not task.lora else 2
    flops = 2 * products * tokens * (passes + (task.trains and task.checkpointing))
    memory = (read * passes + cache) / (_READS * rates.memory_gb_s * 1e9)
    compute = flops / (_MATMUL * rates.tflops * 1e12)
    weights = len(plan.swaps) if plan is not None else sum(isinstance(m, nn.Linear) for m in model.modules())
    recorded = task.kind == "decode" and plan is not None and plan.compute_tier == "gpu"
    launches = weights * (_KERNELS * _LAUNCH_US if recorded else 0.0)
    host = 0.0 if recorded else weights * _OPERATORS * passes * rates.launch_us
    link = _link_s(plan, rates) * min(passes, 2)
    device_ms = 1e3 * max(memory, compute) + 1e-3 * launches
    return Speed(max(1e3 * link, device_ms, 1e-3 * host), 1e3 * link, device_ms, 1e-3 * host, tokens)


def _weights(model: nn.Module, plan: Plan | None) -> tuple[int, int]:
    """Return the bytes that a pass reads of weights, and the elements that it multiplies by."""
    swapped = {site.module for swap in plan.swaps for site in swap.sites} if plan is not None else set()
    read = elements = 0
    for name, module in model.named_modules():
        if name in swapped or isinstance(module, nn.Embedding):
            continue
        for parameter in module.parameters(recurse=False):
            read += parameter.numel() * parameter.element_size()
            elements += parameter.numel()
    for swap in plan.swaps if plan is not None else ():
        share = swap.top_k / swap.experts if swap.experts else 1.0
        read += round(sum(page.nbytes for page in swap.pages) * share)
        out, width = swap.shape
        elements += round(out * width * (swap.experts or 1) * share)
    return read, elements


def _link_s(plan: Plan | None, rates: Rates) -> float:
    """Return the seconds of the copies of one pass."""
    if plan is None or plan.mode == "train" or len(plan.budgets) == 1:
        return 0.0
    by_tier = {"cpu": rates.link_gb_s or float("inf"), "ssd": rates.drive_gb_s}
    cost = token_cost(plan)
    if cost is not None:
        return 1 / cost.tokens_per_s(_HITS, by_tier)
    top = plan.compute_tier
    below = {tier: plan.home_bytes(tier) for tier in plan.budgets if tier != top}
    total = sum(below.values())
    room = max(0, plan.budgets[top] - plan.home_bytes(top) - 2 * plan.largest_layer_bytes)
    passing = max(0.0, 1 - room / total) if total else 0.0
    return sum(nbytes * passing / (by_tier[tier] * 1e9) for tier, nbytes in below.items())
