"""Milliseconds of a step, predicted from a plan, from what was traced, and from the rates of a machine.

A step takes as long as the slowest of three that run side by side: copies over the links, what the device reads and
computes, and the host that launches it where no graph does. Weights that the CPU computes where they lie (hosted) are
not copied, and their time adds to the device's, which waits for them. Experts that a step misses are waited for. What
runs is traced (`Meter.work`); weights are read as the plan holds them. `CostModel` has the shares of a peak that
kernels reach. A CPU launches nothing: its host and device are one, so that their times add up.

Training: checkpointed blocks are CUDA graphs (`vbrt.model.recorded_blocks`), so the host launches the operators outside
of them. Updates on the host begin within the backward pass where there is memory for them, else with the step; the next
forward waits for the rest.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from itertools import pairwise

from torch import nn

from vbrt.config import VBConfig, load_config
from vbrt.config.format_records import FORMATS
from vbrt.estimation.advice.cost_model import CostModel, default_cost_model, kernels_of
from vbrt.estimation.advice.machine_rates import Rates
from vbrt.estimation.memory.estimate_report import Estimate
from vbrt.estimation.memory.expert_workspace import touched_share
from vbrt.estimation.memory.traced_checkpointing import asked_of
from vbrt.kernels.cpu.experts import is_decoded
from vbrt.model.repeated_blocks import stacks_of
from vbrt.model.weight_choice import choose
from vbrt.residency.activation_plan import OFFLOAD, RECOMPUTE
from vbrt.residency.byte_text import format_bytes
from vbrt.residency.hosted_share import CALL_S, MORE, HostRates, Sides, planned_sides
from vbrt.residency.miss_policy import missed_gb_per_s
from vbrt.residency.plan import Plan, Swap
from vbrt.residency.token_cost import LINK_GB_PER_S, TokenCost, token_cost
from vbrt.residency.training_memory import GRADIENT

__all__ = ["Speed", "experts_us", "predict", "product_us", "streamed_share"]

_STAGED = 80 << 20  # bytes that are staged ahead
_FINE_MARGIN = 1.1  # by which plans take fine planes for larger than they are
#: share of a layer's experts that are resident -> of those that a token goes to; with reuse as published routing has it
_HITS = ((0.0, 0.0), (0.1, 0.6), (0.25, 0.8), (0.5, 0.89), (1.0, 1.0))


@dataclass(frozen=True, slots=True)
class Speed:
    """Milliseconds of a step, and of what runs side by side in it; the next forward waits for the part of an update on
    the host that does not overlap the passes.

    cpu_ms, hosted_bytes: of weights that the CPU computes where they lie, while the device waits.
    """

    ms: float
    link_ms: float
    device_ms: float
    host_ms: float
    tokens: int
    update_ms: float = 0.0
    cpu_ms: float = 0.0
    hosted_bytes: int = 0

    @property
    def tokens_s(self) -> float:
        """Tokens, or images, a second."""
        return 1e3 * self.tokens / self.ms if self.ms else float("inf")

    @property
    def computed(self) -> str:
        """Say how much the CPU computes; "" without hosted weights."""
        return f"{format_bytes(self.hosted_bytes)} computed by the CPU where they lie" if self.hosted_bytes else ""

    @property
    def bound(self) -> str:
        """What decides: "link", "device", "cpu" (hosted weights, and the device), "host" or "update"."""
        of = {"link": self.link_ms, "device": self.device_ms, "host": self.host_ms, "update": self.update_ms}
        of |= {"cpu": self.cpu_ms + self.device_ms} if self.cpu_ms else {}
        return max(of, key=of.__getitem__)


def predict(
    model: nn.Module,
    found: Estimate,
    rates: Rates,
    *,
    hit_rate: float | None = None,
    cost_model: CostModel | None = None,
) -> Speed:
    """Predict a step of an estimated task: one token a sequence with "decode", else the whole batch.

    Args:
        hit_rate: of routed experts, where it is known; by default as published routing has it.
        cost_model: of the tier that computes; by default the one that ships for it.
    """
    ways = {"fetch": ("fetch",), "compute": ("compute",), "auto": ("fetch", "auto")}[_miss(found)]
    costs = cost_model or default_cost_model(found.compute_tier)
    return min((_predict(model, found, rates, costs, miss, hit_rate) for miss in ways), key=lambda speed: speed.ms)


def product_us(
    elements: float, nbytes: float, tokens: float, rates: Rates, costs: CostModel, *, format: str | None, dtype: str
) -> float:
    """Predict a product of `tokens` rows with a resident weight in microseconds, without the launch.

    Args:
        nbytes: of the weight as it is held; format: None for a dense one.
        dtype: of the product, by torch's name.
    """
    kernels = kernels_of(format)
    share = costs.read_share(kernels)
    if kernels is None and 1 < tokens <= costs.few_rows_most:
        share *= costs.few_rows_read_share
    read_s = nbytes / (share * 1e9 * rates.memory_gb_s)
    product_s = 2 * tokens * elements / _flops_s(rates, costs, dtype, False)
    return 1e6 * max(read_s, product_s / (1.0 if kernels is None else costs.packed_matmul_share)) + costs.weight_us


def experts_us(
    elements: float,
    nbytes: float,
    experts: int,
    top_k: int,
    tokens: int,
    rates: Rates,
    costs: CostModel,
    *,
    format: str,
) -> float:
    """Predict a layer of resident routed experts of `elements` weights and `nbytes` each, in microseconds, without its
    router and launches."""
    touched = touched_share(experts, top_k, tokens) * experts
    rows = tokens * top_k / touched  # each touched expert's
    sizes = (touched * elements, touched * nbytes)
    repacked = costs.repacks and is_decoded(rows, rates.most_pairs)
    repack_us = 1e6 * touched * elements * rates.repack_s(decoded=True) if repacked else 0.0
    return product_us(*sizes, rows, rates, costs, format=format, dtype="bfloat16") + costs.weight_us + repack_us


def _routed_us(swap: Swap, costs: CostModel, *, fetches: bool) -> float:
    """Return the microseconds that a layer of routed experts takes beside its weights, in a recorded step."""
    if swap.lossless:
        return costs.routed_dense_us + costs.fetch_dense_us * fetches
    return costs.routed_us + costs.fetch_us * fetches


def _miss(found: Estimate) -> str:
    """Return what becomes of experts that are missing on the GPU in the steps of a task, as `experts.miss` has it."""
    plan = found.plan
    if plan is None or plan.compute_tier != "gpu" or found.task.kind != "decode":
        return "fetch"
    return "fetch" if not plan.routed or any(s.lossless for s in plan.routed) else found.config.missed_experts


def _divided_on_device(plan: Plan) -> bool:
    """True if the device decides which missed experts the CPU computes, so that steps are recorded."""
    return all(FORMATS[swap.format].kernels == "e2m1" for swap in plan.routed)


def _predict(
    model: nn.Module, found: Estimate, rates: Rates, costs: CostModel, miss: str, hit_rate: float | None
) -> Speed:
    task, plan = found.task, found.plan
    tokens = task.batch if task.kind == "decode" else task.batch * task.context
    passes = _passes(found)
    device = 1e3 * _device_s(model, found, rates, costs, tokens, passes)
    hosted, sides = _hosted(found, rates, 1e-3 * device)
    cpu = 1e3 * sides.cpu_s
    seconds = _link_s(plan, rates, tokens, miss, hit_rate, hosted)
    streamed, missed = (1e3 * each * min(passes, 2) for each in seconds)
    link, recorded = streamed + missed, found.recorded and (miss == "fetch" or not missed or _divided_on_device(plan))
    # those of a prompt are staged ahead, and where the host leases them they come while it launches what is next
    waited = missed if task.kind == "decode" and (recorded or miss != "fetch") else 0.0
    host = 0.0
    if recorded and costs.queued:
        routed = sum(_routed_us(swap, costs, fetches=missed > 0) for swap in plan.routed)
        device += 1e-3 * (costs.weight_us * len(plan.swaps) + routed) + costs.generate_ms
    else:
        host = 1e-3 * _host_us(model, found, rates, costs, passes if link else 0, recorded=recorded)
    # a copy waits for a slot of the ring where the CPU has several pages in a row
    computing = max(device + cpu, 1e3 * sides.pass_s) if hosted else device
    beside = max(link - waited, computing, host) if costs.queued else max(link - waited, device + host)
    update, longest = _update_ms(found, rates, costs), beside + waited
    ms = longest
    if update:
        forward = longest / passes
        ms += _exposed_ms(update, forward, longest - forward, found, costs) + _step_ms(found, rates, costs)
    return Speed(ms, link, device, host, tokens, update, cpu, sides.hosted_bytes)


# -- the host ---------------------------------------------------------------------------------------------------------


def _host_us(
    model: nn.Module, found: Estimate, rates: Rates, costs: CostModel, leases: int, *, recorded: bool
) -> float:
    """Return the microseconds in which the host launches a step; leases: of each weight. recorded: it is replayed."""
    plan, blocks = found.plan, _records_blocks(found)
    of_operator = costs.recorded_operator_launches if recorded else costs.operator_launches[found.task.kind]
    operators = found.work.get("operators", 0) - blocks * found.work.get("block operators", 0)
    launches = operators * of_operator
    if blocks:
        launches += costs.block_launches * sum(len(stack.kinds) for stack in stacks_of(model))
    elif plan is not None:
        launches += costs.lease_launches * len(plan.swaps) * leases
    routed = 0 if plan is None or recorded or blocks else len(plan.routed)
    return launches * rates.launch_us + costs.routed_layer_us * routed


def _records_blocks(found: Estimate) -> bool:
    """True if blocks that compute again in the backward pass are replayed as CUDA graphs, which have to fit the GPU."""
    plan, config = found.plan, found.config
    if plan is None or config is None or plan.compute_tier != "gpu" or not config.compute.captures:
        return False
    stacked = plan.mode == "full" and any(swap.experts for swap in plan.swaps)  # experts that train are eager
    return plan.mode != "train" and not stacked and _recomputes(found)


def _recomputes(found: Estimate) -> bool:
    """True if a training step computes all of its blocks a second time; under a budget in bytes only some do."""
    return found.task.trains and (
        found.task.checkpointing or asked_of(found.config, found.compute_tier) in (RECOMPUTE, OFFLOAD)
    )


def _passes(found: Estimate) -> int:
    """Return how often a step goes through the weights: forward, gradients of inputs, of weights, and once more."""
    task, plan = found.task, found.plan
    if not task.trains:
        return 1
    all_train = not task.lora and (plan is None or plan.mode != "infer")
    return 2 + all_train + _recomputes(found)


# -- updates of weights that train from the tiers ---------------------------------------------------------------------


def _update_ms(found: Estimate, rates: Rates, costs: CostModel) -> float:
    """Return the milliseconds of an update of weights that train from the tiers; else 0."""
    plan = found.plan
    if plan is None or plan.mode != "full" or not found.task.trains:
        return 0.0
    nbytes = costs.update_bytes[found.config.training.moments] * sum(swap.site.parameters for swap in plan.swaps)
    return nbytes / (1e6 * rates.host_gb_s)


def _exposed_ms(update: float, forward: float, backward: float, found: Estimate, costs: CostModel) -> float:
    """Return the milliseconds of an update that passes of so many milliseconds wait for.

    An update ahead of the step overlaps the backward pass. The first layers' gradients come last, and the next forward
    needs them first, so that it waits for all that is left. Updates at the step, in the order of the forward, overlap
    that. On a CPU that computes the model nothing overlaps.
    """
    if not costs.queued:
        return update
    ahead = _ahead_share(found) * update
    return max(0.0, ahead - backward) + max(0.0, update - ahead - forward)


def _ahead_share(found: Estimate) -> float:
    """Return the share of updates that begin within the backward pass, by the memory that they take."""
    pages = [page.nbytes for swap in found.plan.swaps for page in swap.pages if page.plane != GRADIENT]
    return min(1.0, found.spare_bytes / max(1, sum(pages)))


def _step_ms(found: Estimate, rates: Rates, costs: CostModel) -> float:
    """Return the milliseconds of the optimizer's step between two passes, apart from the updates, in Python."""
    return 1e-3 * costs.update_launches * rates.launch_us * len(found.plan.swaps)


# -- the device -------------------------------------------------------------------------------------------------------


def _device_s(model: nn.Module, found: Estimate, rates: Rates, costs: CostModel, tokens: int, passes: int) -> float:
    """Return the seconds in which the device reads its weights and computes."""
    task, plan, rate = found.task, found.plan, 1e9 * rates.memory_gb_s
    swaps = plan.swaps if plan is not None else _routed(model)
    packed = plan is not None and any(not swap.lossless for swap in plan.swaps)
    products = sum(n / _flops_s(rates, costs, dtype, task.trains, packed=packed) for dtype, n in _flops(found, "flops"))
    products += sum(n / _attention_flops_s(rates, costs, dtype, task.trains) for dtype, n in _flops(found, "attention"))
    experts = sum(_elements(swap, 1) for swap in swaps if swap.experts)  # whose products no trace has
    products += 2 * tokens * passes * experts / _flops_s(rates, costs, "bfloat16", task.trains)
    products += passes * sum(_repack_s(swap, rates, tokens) for swap in swaps if swap.experts and costs.repacks)
    few = costs.few_rows_read_share if 1 < tokens <= costs.few_rows_most else 1.0
    read = _kept_bytes(model, swaps) / costs.dense_read_share / few
    read += sum(_read_bytes(swap, tokens, costs) / (few if swap.lossless else 1.0) for swap in swaps)
    merged = sum(costs.merged_bytes * _elements(swap, tokens) for swap in swaps if swap.fine == "exact")
    if plan is not None and plan.mode == "train":
        rounded = sum(costs.rounded_bytes * _elements(swap, tokens) for swap in swaps)
        merged = rounded * (2 + _recomputes(found)) / passes
    elementwise = costs.elementwise_train_share or costs.elementwise_share if task.trains else costs.elementwise_share
    moved = 0 if task.kind == "decode" and plan is not None else found.work.get("moved", 0) / elementwise
    ramps = 1e-6 * costs.train_operator_us * found.work.get("operators", 0) if task.trains else 0.0
    cache = sum(row.nbytes for row in found.rows if row.name == "KV cache") / costs.cache_read_share
    computing = products / (_packed(found.config, costs, tokens) if packed else 1.0)
    return max(read * passes / rate, computing) + (merged * passes + moved + cache) / rate + ramps


def _flops_s(rates: Rates, costs: CostModel, dtype: str, trains: bool, *, packed: bool = False) -> float:
    """Return the floating-point operations a second that products of a dtype reach over a whole step; packed: with
    4-bit weights, which kernels for CPUs without bf16 instructions multiply in fp32."""
    rate = rates.flops_of(dtype)
    if packed and costs.computes_on == "cpu" and not trains:
        rate = max(rate, rates.flops_of("float32"))
    return rate * (costs.matmul_train_share if trains and dtype != "float32" else costs.matmul_share)


def _attention_flops_s(rates: Rates, costs: CostModel, dtype: str, trains: bool) -> float:
    """Return the floating-point operations a second of fused attention in a dtype, of which the softmax is in fp32."""
    if costs.attention_share is not None:
        return costs.attention_share * rates.flops_of("float32")
    return _flops_s(rates, costs, dtype, trains)


def _packed(config: VBConfig, costs: CostModel, tokens: int) -> float:
    """Return the rate of products with 4-bit weights, in that of dense ones."""
    reached = [least for least in costs.fp8_matmul_ratio or () if config.compute.fp8 and tokens >= least]
    return costs.fp8_matmul_ratio[max(reached)] if reached else costs.packed_matmul_share


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


def _read_bytes(swap: Swap, tokens: int, costs: CostModel) -> float:
    """Return the bytes of copies that take as long as it takes to read a swapped weight; merging it is apart."""
    if swap.fine == "exact":
        return 0.0
    held = sum(page.nbytes for page in swap.pages if not page.by_rows) or swap.dense_bytes
    return held * _touched(swap, tokens) / _reads(swap, costs)


def _reads(swap: Swap, costs: CostModel) -> float:
    """Return the share of the rate of copies at which a weight is read for products of one token."""
    return costs.read_share(None if swap.lossless else kernels_of(swap.format))


# -- the links --------------------------------------------------------------------------------------------------------


def _hosted(found: Estimate, rates: Rates, device_s: float) -> tuple[frozenset[str], Sides]:
    """Return the pages that the CPU computes where they lie, and the bytes and seconds of the pass with them."""
    plan = found.plan
    if plan is None or plan.routed or found.task.kind != "decode" or not rates.link_gb_s:
        return frozenset(), Sides(0, 0, 0.0, 0.0, 0.0)
    speeds = HostRates(1e9 * rates.link_gb_s, 1e9 * rates.experts_gb_s, MORE, CALL_S)
    how = {"where": found.config.compute.where, "prefetch": found.config.policy.prefetch}
    return planned_sides(plan, speeds, found.task.batch, **how, device_s=device_s)


def _link_s(
    plan: Plan | None, rates: Rates, tokens: int, miss: str, hit_rate: float | None, hosted: Collection[str]
) -> tuple[float, float]:
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
    below = [tier for tier in plan.budgets if tier != plan.compute_tier]
    moved = sum(_bytes_at(plan, tier, hosted) / (by_tier[tier] * 1e9) for tier in below)
    return moved * streamed_share(plan, hosted), 0.0


def streamed_share(plan: Plan, hosted: Collection[str] = ()) -> float:
    """Return the share of the pages at home below the computing tier that it has no room for: each pass copies them,
    except `hosted` ones."""
    top = plan.compute_tier
    below = sum(_bytes_at(plan, tier, hosted) for tier in plan.budgets if tier != top)
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


def _bytes_at(plan: Plan, tier: str, hosted: Collection[str]) -> float:
    """Return the bytes of the pages at home in a tier, except `hosted` ones, as large as they will be."""
    leased = (page for swap in plan.swaps for page in swap.pages if page.home == tier and not page.by_rows)
    pages = (page for page in leased if page.key not in hosted)
    return sum(page.nbytes / (_FINE_MARGIN if page.plane == "fine" else 1.0) for page in pages)
