"""Milliseconds of a step, predicted from a plan, from what was traced, and from the rates of a machine.

A step takes as long as the slowest of three that run side by side: copies over the links, what the device reads and
computes, and the host that launches it where no graph does. Experts that a step misses are waited for. What runs is
traced (`Meter.work`); weights are read as the plan holds them. `calibrated_rates.py` has the shares of a peak that
kernels reach. A CPU launches nothing: its host and device are one, so that their times add up.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from torch import nn

from vbrt.config import VBConfig, load_config
from vbrt.config.format_records import FORMATS
from vbrt.estimation.advice.calibrated_rates import SHARES, Shares
from vbrt.estimation.advice.machine_rates import Rates
from vbrt.estimation.memory.estimate_report import Estimate
from vbrt.estimation.memory.expert_workspace import touched_share
from vbrt.estimation.memory.task import Task
from vbrt.kernels.cpu.experts import is_decoded
from vbrt.model.weight_choice import choose
from vbrt.residency.miss_policy import missed_gb_per_s
from vbrt.residency.plan import Plan, Swap
from vbrt.residency.token_cost import LINK_GB_PER_S, TokenCost, token_cost

__all__ = ["STEP_MS", "Speed", "predict", "streamed_share"]

#: milliseconds of `generate` itself, for each token: it chooses one and looks whether it is the last
STEP_MS = 0.27
#: of the rate at which torch's products in 16 bits read weights for one row, that for several rows on a GPU
_FEW_ROWS, _READS_FEW_ROWS = range(2, 65), 0.7
#: of the rate of products in 16 bits, by 4-bit weights with compute.fp8, from so many tokens on
_PACKED_FP8 = ((8192, 1.7), (2048, 1.5), (512, 1.1))
_ROUNDED_BYTES = 240  # of copies, that take as long as it takes to round a weight that trains in 4 bits, in each pass
_LAUNCH_US = 2.5  # that a weight's kernels and those around it take beside reading, in a recorded step
#: microseconds that a layer of routed experts in 4 bits, and dense, takes to find what it misses, in a recorded step
_FETCH_US, _FETCH_DENSE_US = 15, 110
_UPDATES = 150  # bare launches that take as long as what Python does to begin and to end a weight's update on the host
_LEASES = 20  # bare launches that take as long as a lease of pages that pass through
#: microseconds that routing takes in a layer of 4-bit experts, and with torch's products in one of dense ones, in a
#: recorded step
_ROUTED_US, _ROUTED_DENSE_US = 12, 200
_STAGED = 80 << 20  # bytes that are staged ahead
_FINE_MARGIN = 1.1  # by which plans take fine planes for larger than they are
#: bytes that take as long as it takes to update a weight: two halves, two moments, the gradient; moments of 8 bits
_UPDATE_BYTES = {"fp32": 28, "8bit": 23}
_UNHIDDEN = 0.5  # of the shorter of an update and of what runs beside it, that is not hidden
#: share of a layer's experts that are resident -> of those that a token goes to; with reuse as published routing has it
_HITS = ((0.0, 0.0), (0.1, 0.6), (0.25, 0.8), (0.5, 0.89), (1.0, 1.0))


@dataclass(frozen=True, slots=True)
class Speed:
    """Milliseconds of a step, and of what runs side by side in it; an update on the host is not hidden as a whole."""

    ms: float
    link_ms: float
    device_ms: float
    host_ms: float
    tokens: int
    update_ms: float = 0.0

    @property
    def tokens_s(self) -> float:
        """Tokens, or images, a second."""
        return 1e3 * self.tokens / self.ms if self.ms else float("inf")

    @property
    def bound(self) -> str:
        """What decides: "link", "device", "host" or "update"."""
        of = {"link": self.link_ms, "device": self.device_ms, "host": self.host_ms, "update": self.update_ms}
        return max(of, key=of.__getitem__)


def predict(model: nn.Module, found: Estimate, rates: Rates, *, hit_rate: float | None = None) -> Speed:
    """Predict a step of an estimated task: one token a sequence with "decode", else the whole batch.

    Args:
        hit_rate: of routed experts, where it is known; by default as published routing has it.
    """
    ways = {"fetch": ("fetch",), "compute": ("compute",), "auto": ("fetch", "auto")}[_miss(found)]
    return min((_predict(model, found, rates, miss, hit_rate) for miss in ways), key=lambda speed: speed.ms)


def _routed_us(swap: Swap, *, fetches: bool) -> int:
    """Return the microseconds that a layer of routed experts takes beside its weights, in a recorded step."""
    if swap.lossless:
        return _ROUTED_DENSE_US + _FETCH_DENSE_US * fetches
    return _ROUTED_US + _FETCH_US * fetches


def _miss(found: Estimate) -> str:
    """Return what becomes of experts that are missing on the GPU in the steps of a task, as `experts.miss` has it."""
    plan = found.plan
    if plan is None or plan.compute_tier != "gpu" or found.task.kind != "decode":
        return "fetch"
    return "fetch" if not plan.routed or any(s.lossless for s in plan.routed) else found.config.experts.miss


def _predict(model: nn.Module, found: Estimate, rates: Rates, miss: str, hit_rate: float | None) -> Speed:
    task, plan, shares = found.task, found.plan, SHARES[found.compute_tier]
    tokens = task.batch if task.kind == "decode" else task.batch * task.context
    passes = _passes(task, plan)
    streamed, missed = (1e3 * seconds * min(passes, 2) for seconds in _link_s(plan, rates, tokens, miss, hit_rate))
    link, recorded = streamed + missed, found.recorded and not (miss != "fetch" and missed > 0)
    # those of a prompt are staged ahead, and where the host leases them they come while it launches what is next
    waited = missed if task.kind == "decode" and (recorded or miss != "fetch") else 0.0
    device = 1e3 * _device_s(model, found, rates, tokens, passes)
    host = 0.0
    if recorded and shares.queued:
        routed = sum(_routed_us(swap, fetches=missed > 0) for swap in plan.routed)
        device += 1e-3 * (_LAUNCH_US * len(plan.swaps) + routed) + STEP_MS
    else:
        launches = found.work.get("operators", 0) * shares.operator["recorded" if recorded else task.kind]
        launches += len(plan.swaps) * _LEASES * passes if plan is not None and link else 0
        launches += len(plan.swaps) * _UPDATES if plan is not None and plan.mode == "full" else 0
        routed = shares.routed_us * len(plan.routed) if plan is not None and not recorded else 0.0
        host = 1e-3 * (launches * rates.launch_us + routed)
    beside = max(link - waited, device, host) if shares.queued else max(link - waited, device + host)
    update, longest = _update_ms(found, rates), beside + waited
    return Speed(max(longest, update) + _UNHIDDEN * min(longest, update), link, device, host, tokens, update)


def _update_ms(found: Estimate, rates: Rates) -> float:
    """Return the milliseconds of an update of weights that train from the tiers; else 0."""
    plan = found.plan
    if plan is None or plan.mode != "full":
        return 0.0
    nbytes = _UPDATE_BYTES[found.config.training.moments] * sum(swap.site.parameters for swap in plan.swaps)
    return nbytes / (1e6 * rates.host_gb_s)


def _passes(task: Task, plan: Plan | None) -> int:
    """Return how often a step goes through the weights: forward, gradients of inputs, of weights, and once more."""
    if not task.trains:
        return 1
    all_train = not task.lora and (plan is None or plan.mode != "infer")
    return 2 + all_train + task.checkpointing


# -- the device -------------------------------------------------------------------------------------------------------


def _device_s(model: nn.Module, found: Estimate, rates: Rates, tokens: int, passes: int) -> float:
    """Return the seconds in which the device reads its weights and computes."""
    task, plan, rate, shares = found.task, found.plan, 1e9 * rates.memory_gb_s, SHARES[found.compute_tier]
    swaps = plan.swaps if plan is not None else _routed(model)
    packed = plan is not None and any(not swap.lossless for swap in plan.swaps)
    products = sum(n / _flops_s(rates, shares, dtype, task.trains) for dtype, n in _flops(found, "flops"))
    products += sum(
        n / _attention_flops_s(rates, shares, dtype, task.trains) for dtype, n in _flops(found, "attention")
    )
    experts = sum(_elements(swap, 1) for swap in swaps if swap.experts)  # whose products no trace has
    products += 2 * tokens * passes * experts / _flops_s(rates, shares, "bfloat16", task.trains)
    products += passes * sum(_repack_s(swap, rates, tokens) for swap in swaps if swap.experts and shares.repacks)
    few = _READS_FEW_ROWS if shares.queued and tokens in _FEW_ROWS else 1.0
    read = _kept_bytes(model, swaps) / shares.reads / few
    read += sum(_read_bytes(swap, tokens, shares) / (few if swap.lossless else 1.0) for swap in swaps)
    merged = sum(shares.merged_bytes * _elements(swap, tokens) for swap in swaps if swap.fine == "exact")
    if plan is not None and plan.mode == "train":
        merged = sum(_ROUNDED_BYTES * _elements(swap, tokens) for swap in swaps) * (2 + task.checkpointing) / passes
    moved = 0 if task.kind == "decode" and plan is not None else found.work.get("moved", 0) / shares.moves
    cache = sum(row.nbytes for row in found.rows if row.name == "KV cache") / shares.reads_cache
    computing = products / (_packed(found.config, shares, tokens) if packed else 1.0)
    return max(read * passes / rate, computing) + (merged * passes + moved + cache) / rate


def _flops_s(rates: Rates, shares: Shares, dtype: str, trains: bool) -> float:
    """Return the floating-point operations a second that products of a dtype reach over a whole step."""
    return rates.flops_of(dtype) * (shares.matmul_train if trains and dtype != "float32" else shares.matmul)


def _attention_flops_s(rates: Rates, shares: Shares, dtype: str, trains: bool) -> float:
    """Return the floating-point operations a second of fused attention in a dtype, of which the softmax is in fp32."""
    own = shares.attention * rates.flops_of("float32")
    return own or _flops_s(rates, shares, dtype, trains)


def _packed(config: VBConfig, shares: Shares, tokens: int) -> float:
    """Return the rate of products with 4-bit weights, in that of dense ones."""
    fp8 = _PACKED_FP8 if config.compute.fp8 else ()
    return next((rate for least, rate in fp8 if tokens >= least), shares.packed)


def _flops(found: Estimate, of: str) -> Iterable[tuple[str, int]]:
    """Yield dtypes and the floating-point operations in them of products ("flops") or fused "attention"."""
    return ((name.partition(" ")[2], n) for name, n in found.work.items() if name.startswith(f"{of} "))


def _routed(model: nn.Module) -> tuple[Swap, ...]:
    """Return the routed experts of a model that is not wrapped, as the planner finds them."""
    return tuple(swap for swap in choose(model, load_config("dense"))[0] if swap.experts)


def _kept_bytes(model: nn.Module, swaps: Iterable[Swap]) -> int:
    """Return the bytes of the parameters that a pass reads as they are: all but those of swaps and lookup tables."""
    swapped = {site.module for swap in swaps for site in swap.sites}
    modules = ((name, module) for name, module in model.named_modules() if name not in swapped)
    kept = (module for _, module in modules if not isinstance(module, nn.Embedding))
    return sum(p.numel() * p.element_size() for module in kept for p in module.parameters(recurse=False))


def _touched(swap: Swap, tokens: int) -> float:
    """Return the share of a layer's experts that some of the tokens go to; 1 without experts."""
    return touched_share(swap.experts, swap.top_k, tokens) if swap.experts else 1.0


def _elements(swap: Swap, tokens: int) -> float:
    """Return how many weights some of the tokens are multiplied by."""
    matrices = sum(site.shape[0] * site.shape[1] for site in (swap.site, *swap.parts)) * max(1, swap.experts)
    return matrices * _touched(swap, tokens)


def _repack_s(swap: Swap, rates: Rates, tokens: int) -> float:
    """Return the seconds in which matrices of routed experts are made ready for products of more than a few rows."""
    pairs = tokens * swap.top_k / (swap.experts * _touched(swap, tokens))
    if not is_decoded(pairs, rates.most_pairs):
        return 0.0
    return _elements(swap, tokens) * rates.repack_s(decoded=not swap.lossless)


def _read_bytes(swap: Swap, tokens: int, shares: Shares) -> float:
    """Return the bytes of copies that take as long as it takes to read a swapped weight; merging it is apart."""
    if swap.fine == "exact":
        return 0.0
    held = sum(page.nbytes for page in swap.pages if not page.by_rows) or swap.dense_bytes
    return held * _touched(swap, tokens) / _reads(swap, shares)


def _reads(swap: Swap, shares: Shares) -> float:
    """Return the share of the rate of copies at which a weight is read for products of one token."""
    kernels = None if swap.lossless else FORMATS[swap.format].kernels
    return shares.reads_packed.get(kernels or "", shares.reads)


# -- the links --------------------------------------------------------------------------------------------------------


def _link_s(plan: Plan | None, rates: Rates, tokens: int, miss: str, hit_rate: float | None) -> tuple[float, float]:
    """Return the seconds of the copies of one pass: of pages that are staged ahead, and of experts that are missed, or
    of the CPU that computes those."""
    if plan is None or plan.mode == "train" or len(plan.budgets) == 1:
        return 0.0, 0.0
    by_tier = {**LINK_GB_PER_S, "cpu": rates.link_gb_s or float("inf"), "ssd": rates.drive_gb_s}
    cost = token_cost(plan)
    if cost is not None:
        hits = _hit_rate(plan, cost, tokens) if hit_rate is None else hit_rate
        touched = max(_touched(swap, tokens) for swap in plan.routed)
        share = max(swap.top_k / swap.experts for swap in plan.routed)
        loaded = {tier: nbytes * touched / share * (1 - hits) for tier, nbytes in cost.cold_bytes.items()}
        experts = by_tier | {"cpu": missed_gb_per_s(miss, by_tier["cpu"], rates.experts_gb_s)}
        missed = sum(nbytes / (experts[tier] * 1e9) for tier, nbytes in loaded.items())
        return sum(nbytes / (by_tier[tier] * 1e9) for tier, nbytes in cost.streamed_bytes.items()), missed
    moved = sum(_bytes_at(plan, tier) / (by_tier[tier] * 1e9) for tier in plan.budgets if tier != plan.compute_tier)
    return moved * streamed_share(plan), 0.0


def streamed_share(plan: Plan) -> float:
    """Return the share of the pages at home below the computing tier that it has no room for: each pass copies them."""
    top = plan.compute_tier
    below = sum(_bytes_at(plan, tier) for tier in plan.budgets if tier != top)
    room = max(0, plan.budgets[top] - plan.home_bytes(top) - _passing_bytes(plan))
    return max(0.0, 1 - room / below) if below else 0.0


def _hit_rate(plan: Plan, cost: TokenCost, tokens: int) -> float:
    """Return the share of the experts wanted that are resident: with many tokens that of all, else more by reuse."""
    resident = min(1.0, cost.room_bytes / max(1, cost.all_bytes))
    (low, at_low), (high, at_high) = next(pair for pair in pairwise(_HITS) if pair[1][0] >= resident)
    reused = at_low + (at_high - at_low) * (resident - low) / (high - low)
    return resident + (reused - resident) * (1 - max(_touched(swap, tokens) for swap in plan.routed))


def _passing_bytes(plan: Plan) -> int:
    """Return the bytes that pass through at any time: one of the larger layers, and what is staged behind it; the very
    largest are kept."""
    layers = sorted(sum(page.nbytes for page in swap.leased) for swap in plan.swaps)
    larger = layers[3 * len(layers) // 4] if layers else 0
    return larger + max(larger, _STAGED)


def _bytes_at(plan: Plan, tier: str) -> float:
    """Return the bytes of the pages at home in a tier, as large as they will be."""
    pages = (page for swap in plan.swaps for page in swap.pages if page.home == tier and not page.by_rows)
    return sum(page.nbytes / (_FINE_MARGIN if page.plane == "fine" else 1.0) for page in pages)
