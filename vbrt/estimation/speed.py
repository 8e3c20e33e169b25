"""Milliseconds of a step, predicted from a plan and the rates of a machine.

A step takes as long as the slowest of three that run side by side: copies over the links, what the device reads or
computes, and the host that launches it where no graph does. The shares of a peak that kernels reach are those measured
on an H200 (docs/benchmarks.md).
"""

from dataclasses import dataclass

from torch import nn

from vbrt.estimation.rates import Rates
from vbrt.estimation.report import Estimate
from vbrt.residency.plan import Plan, Swap
from vbrt.residency.token_cost import token_cost

__all__ = ["Speed", "predict"]

_READS = 0.57  # of the rate of copies, at which products of one token read dense weights
_READS_PACKED = 0.75  # and 4-bit ones
_READS_CACHE = 0.25  # and attention keys and values
_MERGED_BYTES = 21  # of copies, that take as long as it takes to restore a weight from two planes and multiply by it
_MATMUL = 0.65  # of the rate of large products, over a whole pass
_STEP_MS = 0.45  # of `generate` itself, for each token: it chooses one and looks whether it is the last
_LAUNCH_US = 1.0  # that a weight's kernels take at least, in a recorded step
_OPERATORS = 13  # for each weight of an eager pass
_GENERATED = 2.0  # times as many in steps of `generate`, whose cache grows
_FINE_MARGIN = 1.1  # by which plans take fine planes for larger than they are
_LEASES = 18  # operators that take as long as a lease of pages that pass through
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
    read_s, products = _weights(model, plan, rates)
    cache = sum(row.nbytes for row in found.rows if row.name == "KV cache")
    passes = 1 if not task.trains else 3 if plan is None and not task.lora else 2
    flops = 2 * products * tokens * (passes + (task.trains and task.checkpointing))
    memory = read_s * passes + cache / (_READS_CACHE * rates.memory_gb_s * 1e9)
    compute = flops / (_MATMUL * rates.tflops * 1e12)
    weights = len(plan.swaps) if plan is not None else sum(isinstance(m, nn.Linear) for m in model.modules())
    decodes = task.kind == "decode"
    recorded = decodes and plan is not None and plan.compute_tier == "gpu"
    device_ms = 1e3 * max(memory, compute) + (1e-3 * weights * _LAUNCH_US + _STEP_MS if recorded else 0.0)
    link = 1e3 * _link_s(plan, rates) * min(passes, 2)
    operators = _OPERATORS * passes * (_GENERATED if decodes else 1.0) + (_LEASES * passes if link else 0.0)
    host = 0.0 if recorded else 1e-3 * weights * operators * rates.launch_us
    return Speed(max(link, device_ms, host), link, device_ms, host, tokens)


def _weights(model: nn.Module, plan: Plan | None, rates: Rates) -> tuple[float, int]:
    """Return the seconds in which a pass reads its weights, and the elements that it multiplies by."""
    swapped = {site.module for swap in plan.swaps for site in swap.sites} if plan is not None else set()
    read, elements, rate = 0.0, 0, 1e9 * rates.memory_gb_s
    for name, module in model.named_modules():
        if name in swapped or isinstance(module, nn.Embedding):
            continue
        for parameter in module.parameters(recurse=False):
            read += parameter.numel() * parameter.element_size() / (_READS * rate)
            elements += parameter.numel()
    for swap in plan.swaps if plan is not None else ():
        share = swap.top_k / swap.experts if swap.experts else 1.0
        of_swap = swap.shape[0] * swap.shape[1] * (swap.experts or 1) * share
        read += _read_bytes(swap, of_swap, share) / rate
        elements += round(of_swap)
    return read, elements


def _read_bytes(swap: Swap, elements: float, share: float) -> float:
    """Return the bytes of copies that take as long as it takes to read a swapped weight."""
    if swap.fine == "exact":
        return _MERGED_BYTES * elements
    reads = _READS if swap.lossless else _READS_PACKED
    return sum(page.nbytes for page in swap.pages) * share / reads


def _link_s(plan: Plan | None, rates: Rates) -> float:
    """Return the seconds of the copies of one pass."""
    if plan is None or plan.mode == "train" or len(plan.budgets) == 1:
        return 0.0
    by_tier = {"cpu": rates.link_gb_s or float("inf"), "ssd": rates.drive_gb_s}
    cost = token_cost(plan)
    if cost is not None:
        return 1 / cost.tokens_per_s(_HITS, by_tier)
    top = plan.compute_tier
    below = {tier: _bytes_at(plan, tier) for tier in plan.budgets if tier != top}
    total = sum(below.values())
    room = max(0, plan.budgets[top] - plan.home_bytes(top) - _passing_bytes(plan))
    passing = max(0.0, 1 - room / total) if total else 0.0
    return sum(nbytes * passing / (by_tier[tier] * 1e9) for tier, nbytes in below.items())


def _passing_bytes(plan: Plan) -> int:
    """Return the bytes that pass through at any time: the largest layer, and two that come behind it."""
    layers = sorted(sum(page.nbytes for page in swap.leased) for swap in plan.swaps)
    return layers[-1] + 2 * layers[3 * len(layers) // 4] if layers else 0


def _bytes_at(plan: Plan, tier: str) -> float:
    """Return the bytes of the pages at home in a tier, as large as they will be."""
    pages = (page for swap in plan.swaps for page in swap.pages if page.home == tier and not page.by_rows)
    return sum(page.nbytes / (_FINE_MARGIN if page.plane == "fine" else 1.0) for page in pages)
