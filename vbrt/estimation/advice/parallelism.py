"""Multi-GPU cost model: single GPU, peer memory, data parallel, link-sharded or tensor parallel.

A pass takes the maximum of its overlapping parts (H2D copies, device reads, compute), plus the collectives, for which a
layer waits. Legend: N ranks, T tokens, P bytes of pages, S bytes of them that are streamed, H hidden size.

| way | streamed by a rank | its link | computed by a rank | sums |
| --- | --- | --- | --- | --- |
| one GPU | S | alone | all | none |
| data parallel | S | shared by N | all, N times as many tokens | none |
| neighbours | S, from the others' memory where it holds them | alone | all | none |
| link-sharded | S / N | shared by N, then gathered | all, N times as many tokens | none |
| tensor parallel, in turn | its shard's pages beyond the budget | shared by N | its shard | T x H, twice a block |
| columns alone, rows alone | the same | the same | the same | the outputs of every layer |

A rank's shard follows the model's own plan (`rank_share.py`) and is planned like any model. "In turn": column-parallel
and row-parallel layers alternate, so that one's sharded output is the next one's input.

Compute against communication: sharding a product with a weight (N, K) over n ranks saves 2 T N K (1 - 1/n) operations
and costs an all-reduce of 2 T N bytes. It pays while K (1 - 1/n) / rate > 1 / sum rate (many tokens), and while reading
or streaming the bytes saved takes longer than an all-reduce's latency (few).
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass

from vbrt.estimation.advice.cost_model import default_cost_model
from vbrt.estimation.advice.machine_rates import Rates
from vbrt.estimation.advice.multi_gpu_rates import GroupRates
from vbrt.estimation.advice.step_time import streamed_share
from vbrt.residency.plan import Plan, Swap

__all__ = ["Comparison", "Way", "compare_ways"]


@dataclass(frozen=True, slots=True)
class Way:
    """One way to run a model.

    Attributes:
        pass_ms: of a pass of one token, and of many.
        tokens_s: of all ranks together, for passes of one token, and of many.
        bound: bottleneck of a pass of one token, and of many: "link", "memory", "matmul" or "sums".
        streamed_gb: H2D bytes of a rank per pass.
        host_gb: pages in host memory, per rank.
    """

    name: str
    pass_ms: tuple[float, float]
    tokens_s: tuple[float, float]
    bound: tuple[str, str]
    streamed_gb: float
    host_gb: float


@dataclass(frozen=True, slots=True)
class Comparison:
    """All ways, and the verdict: `advice` is a line for a single stream of tokens, and one for many; `refused`: why
    tensor parallelism is excluded, or empty."""

    ranks: int
    tokens: int
    ways: tuple[Way, ...]
    advice: tuple[str, str]
    source: str
    refused: str = ""

    def to_dict(self) -> dict:
        """Return plain data."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class _Load:
    """A rank's load in a pass."""

    streamed: float
    link_gb_s: float
    read: float
    operations: float
    sums: Sequence[float] = ()  # bytes of each all-reduce
    gathers: Sequence[float] = ()
    passes: int = 1  # passes of the whole model at once, over all ranks


@dataclass(frozen=True, slots=True)
class _Asked:
    """Inputs of the comparison: plans of the whole model on one GPU and of one rank's shard, and the rates."""

    plan: Plan
    part: Plan
    rates: Rates
    group: GroupRates


def compare_ways(plan: Plan, part: Plan | str, rates: Rates, group: GroupRates, *, tokens: int = 2048) -> Comparison:
    """Compare the ways to run a planned model on `group.ranks` GPUs like this one.

    Args:
        plan: of the whole model on one GPU.
        part: plan of one rank's shard (`rank_share.rank_plan`), or why the model cannot be sharded.
        tokens: of a many-token pass.
    """
    refused = part if isinstance(part, str) else ""
    asked = _Asked(plan, plan if isinstance(part, str) else part, rates, group)
    names = [name for name in _WAYS if not (refused and name in _SPLIT)]
    ways = tuple(_way(name, asked, tokens) for name in names)
    return Comparison(group.ranks, tokens, ways, _advice(ways), _source(rates, group), refused)


def _source(rates: Rates, group: GroupRates) -> str:
    """Describe the source of each figure."""
    measured = f"{group.ranks} ranks of {group.name}, {group.backend}" if group.name else group.source
    together = f"{group.source} ({measured})" if group.name else measured
    return (
        f"memory {rates.memory_gb_s:.0f} GB/s, products {rates.tflops:.0f} TFLOP/s: {rates.source} ({rates.name}); "
        f"one link {rates.link_gb_s:.1f} GB/s; all links at once {group.link_gb_s:.1f} GB/s each, a sum "
        f"{group.sum_us:.0f} µs and {group.sum_gb_s:.0f} GB/s, gathers {group.gather_gb_s:.0f} GB/s, the next GPU's "
        f"memory {group.neighbour_gb_s:.0f} GB/s: {together}"
    )


def _way(name: str, asked: _Asked, tokens: int) -> Way:
    plan, ranks = asked.plan, asked.group.ranks
    loads = [_WAYS[name](asked, count) for count in (1, tokens)]
    costs = [_costs(load, asked.rates, asked.group) for load in loads]
    spans = [max(c["link"], c["memory"], c["matmul"]) + c["sums"] for c in costs]
    together = tuple(load.passes * count / span for load, count, span in zip(loads, (1, tokens), spans, strict=True))
    bounds = tuple(max(cost, key=cost.__getitem__) for cost in costs)
    host = _below(asked.part if name in _SPLIT else plan)
    host /= ranks if name == "link-sharded" else 1
    host = max(0.0, host - (ranks - 1) * next(iter(plan.budgets.values()))) if name == "neighbours" else host
    return Way(name, tuple(1e3 * s for s in spans), together, bounds, loads[0].streamed / 1e9, host / 1e9)


def _costs(load: _Load, rates: Rates, group: GroupRates) -> dict[str, float]:
    """Return the seconds of each part."""
    costs = default_cost_model("gpu")
    return {
        "link": load.streamed / (1e9 * load.link_gb_s) if load.streamed else 0.0,
        "memory": load.read / (1e9 * rates.memory_gb_s * costs.ranks_read_share),
        "matmul": load.operations / (1e12 * rates.tflops * costs.ranks_matmul_share),
        "sums": sum(map(group.sum_s, load.sums)) + sum(map(group.gather_s, load.gathers)),
    }


# -- loads ------------------------------------------------------------------------------------------------------------


def _below(plan: Plan) -> float:
    """Bytes of pages below the computing tier."""
    return sum(page.nbytes for swap in plan.swaps for page in swap.pages if page.home != plan.compute_tier)


def _streamed(plan: Plan) -> float:
    """H2D bytes per pass; of routed experts only those of one token."""
    below = ((swap, page) for swap in plan.swaps for page in swap.pages if page.home != plan.compute_tier)
    return streamed_share(plan) * sum(page.nbytes * _share(swap) for swap, page in below)


def _share(swap: Swap) -> float:
    return swap.top_k / swap.experts if swap.experts else 1.0


def _read(plan: Plan) -> float:
    return plan.kept_bytes + sum(page.nbytes * _share(swap) for swap in plan.swaps for page in swap.pages)


def _operations(plan: Plan, tokens: int) -> float:
    weights = sum(site.parameters * _share(swap) for swap in plan.swaps for site in (swap.site, *swap.parts))
    return 2.0 * tokens * weights


def _outputs(plan: Plan, tokens: int) -> list[float]:
    """Bytes of each layer's 16-bit outputs."""
    return [2.0 * tokens * (swap.parts[-1] if swap.parts else swap.site).shape[0] for swap in plan.swaps]


def _rowwise(plan: Plan, tokens: int) -> list[float]:
    """Bytes of the all-reduced outputs where column and row parallel alternate: of layers back to the hidden size,
    which is the most frequent input width."""
    inputs = [swap.site.shape[1] for swap in plan.swaps]
    hidden = max(set(inputs), key=inputs.count) if inputs else 0
    back = [
        swap for swap in plan.swaps if (swap.parts[-1] if swap.parts else swap.site).shape[0] == hidden
    ]  # o_proj, down_proj, and square projections, of which one per block is reduced
    narrow = [swap for swap in back if swap.parts or swap.site.shape[1] != hidden or "o_proj" in swap.name]
    return [2.0 * tokens * hidden for _ in (narrow or back)]


def _one(asked: _Asked, tokens: int) -> _Load:
    plan = asked.plan
    return _Load(_streamed(plan), asked.rates.link_gb_s or 1.0, _read(plan), _operations(plan, tokens))


def _data(asked: _Asked, tokens: int) -> _Load:
    plan, group = asked.plan, asked.group
    work = _read(plan), _operations(plan, tokens)
    return _Load(_streamed(plan), group.link_gb_s, *work, passes=group.ranks)


def _neighbours(asked: _Asked, tokens: int) -> _Load:
    """One GPU computes; pages beyond its budget come from peers' memory as far as that goes."""
    plan, group = asked.plan, asked.group
    streamed, below = _streamed(plan), _below(plan)
    near = min(1.0, (group.ranks - 1) * next(iter(plan.budgets.values())) / below) if below else 0.0
    s_a_gb = near / group.neighbour_gb_s + (1 - near) / (asked.rates.link_gb_s or 1.0)
    return _Load(streamed, 1 / s_a_gb, _read(plan), _operations(plan, tokens))


def _link_sharded(asked: _Asked, tokens: int) -> _Load:
    plan, group = asked.plan, asked.group
    streamed = _streamed(plan)
    gathers = [streamed / max(1, len(plan.swaps))] * len(plan.swaps) if streamed else []
    work = _read(plan), _operations(plan, tokens)
    side_by_side = max(0.0, sum(map(group.gather_s, gathers)) - streamed / group.ranks / (1e9 * group.link_gb_s))
    late = [side_by_side * 1e9 * group.gather_gb_s] if side_by_side else []  # gathers overlap the copies
    return _Load(streamed / group.ranks, group.link_gb_s, *work, gathers=late, passes=group.ranks)


def _tensor(asked: _Asked, tokens: int) -> tuple[float, float, float, float]:
    """Return a rank's streamed bytes, link rate, read bytes and operations, with its shard of each weight."""
    part = asked.part
    return _streamed(part), asked.group.link_gb_s, _read(part), _operations(part, tokens)


def _in_turn(asked: _Asked, tokens: int) -> _Load:
    return _Load(*_tensor(asked, tokens), sums=_rowwise(asked.plan, tokens))


def _columns(asked: _Asked, tokens: int) -> _Load:
    return _Load(*_tensor(asked, tokens), gathers=_outputs(asked.plan, tokens))


def _rows(asked: _Asked, tokens: int) -> _Load:
    return _Load(*_tensor(asked, tokens), sums=_outputs(asked.plan, tokens))


#: ways that shard each weight over ranks
_SPLIT = {
    "tensor parallel, columns and rows in turn": _in_turn,
    "tensor parallel, columns": _columns,
    "tensor parallel, rows": _rows,
}
_WAYS = {"one GPU": _one, "neighbours": _neighbours, "data parallel": _data, "link-sharded": _link_sharded, **_SPLIT}
_HOW = {
    "one GPU": "leave the others to other work",
    "neighbours": "one process, tiers.peer.enabled = true",
    "data parallel": "a process a GPU, each with the whole model",
    "link-sharded": "a process a GPU, tiers.cpu.shared = true",
    "tensor parallel, columns and rows in turn": 'torchrun, and transformers\' tp_plan="auto" or parallelize_module',
}


def _advice(ways: Sequence[Way]) -> tuple[str, str]:
    one = ways[0]
    single = min(ways, key=lambda way: way.pass_ms[0])
    many = max(ways, key=lambda way: way.tokens_s[1])
    lines = (
        f"one stream of tokens: {single.name}, {one.pass_ms[0] / single.pass_ms[0]:.2f} times one GPU",
        f"many tokens: {many.name}, {many.tokens_s[1] / one.tokens_s[1]:.2f} times one GPU",
    )
    hows = (_HOW.get(single.name, ""), _HOW.get(many.name, ""))
    return tuple(f"{line} ({how})" if how else line for line, how in zip(lines, hows, strict=True))
