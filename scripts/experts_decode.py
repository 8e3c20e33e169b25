"""Decode with routed experts, batch 1, a CUDA graph a step; write benchmarks/results/experts-decode-<gpu>.json.

A model of Qwen3-30B-A3B's shape with random weights: in bf16 and in 4 bits all on the GPU, and then with a share of the
expert pages there, the others page-locked in host memory, where the GPU decides which experts stay and fetches what is
missing. Experts are routed to by a generated trace with published reuse, or with `--routing` by a recording
(`vb.record_routing`, mapped by `recorded_routing.py`); routers compute, but what they say is replaced. The limit of a
step is that of the resident one and the missing bytes at 50 GB/s.

With several ways of `experts.miss` each share has a row for each: missed experts are fetched, computed by the CPU, or
divided; the limit counts what the CPU computes at its rate beside the link. Where the host decides, steps are eager,
and hits, misses and bytes are the host's counts. With `--breakdown`
rows in which it does say where a layer's time goes, in microseconds of the host (`missed_breakdown.py`).

With `--drive` all expert pages live on a drive, and host memory has room for all but that percentage of them; the
device asks for what lies on the drive alone. `posts`, `drive_pages` and `drive_mb` are per token: how often it waited,
and what was read. With `--decide host` the host leases instead, as where the device cannot decide.

    python3 scripts/experts_decode.py [--layers 48] [--shares 50 25 10] [--how joined] [--out results.json]
    python3 scripts/experts_decode.py --shares 10 --miss fetch compute auto [--breakdown]
    python3 scripts/experts_decode.py --shape large --layers 8 --shares 50 25 --miss fetch compute auto
    python3 scripts/experts_decode.py --shares 10 --drive 10 25 50 --decide gpu host --ssd /mnt/nvme
    python3 scripts/experts_decode.py --format nvfp4+exact --layers 8 --shares 25
    python3 scripts/experts_decode.py --routing tests/data/experts/balanced.routing
"""

import argparse
import contextlib
import itertools
import json
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # after the checkout is on the path
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

import vbrt
from scripts.full_models import drawn_in
from scripts.measuring import machine
from scripts.missed_breakdown import Spans, breakdown
from scripts.recorded_routing import Recorded, mapped
from vbrt.config import MISSES
from vbrt.generation.fusion.fuse_step import joined
from vbrt.layers import weights_in
from vbrt.layers.experts import ExpertsHandle
from vbrt.layers.experts.hosted_experts import HostedMisses
from vbrt.layers.experts.missed_experts import MissedExperts
from vbrt.residency.expert_pages import ExpertsPolicy
from vbrt.residency.routing_trace import Routed, RoutedLayer, Routing, generate_routing
from vbrt.residency.simulate import simulate

CACHE_TOKENS = 1024
LINK_BYTES_S = 50e9
WARM, COUNTED = 64, 128
SHAPE = {
    "vocab_size": 151936,
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
}
#: few large experts, as Mixtral-8x7B has them
LARGE = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "moe_intermediate_size": 14336,
    "num_key_value_heads": 8,
    "num_experts": 8,
    "num_experts_per_tok": 2,
}
SHAPES = {"qwen3-30b-a3b": {}, "large": LARGE}
FOUR_BITS = "nvfp4"


def build(layers: int, device: torch.device, **shape: int) -> nn.Module:
    """Return a random bf16 model of the shape, on the device."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(**SHAPE | shape, num_hidden_layers=layers, norm_topk_prob=True, tie_word_embeddings=False)
    torch.manual_seed(0)
    with torch.device(device), drawn_in(torch.bfloat16):
        return Qwen3MoeForCausalLM(config).eval().requires_grad_(False)


def routers(model: nn.Module) -> list[nn.Module]:
    """The routers of a transformers model in order: they return logits, weights and ids [T, k]."""
    return [module for module in model.modules() if type(module).__name__.lower().endswith("topkrouter")]


class Trace:
    """Routing that a model follows: a token's row is put where every router's hook reads it.

    Attributes:
        rows: [tokens, layers, 1, k], the experts of each token.
        done: the tokens whose routing a model has followed, in order.
    """

    def __init__(self, routing: Routing, device: torch.device) -> None:
        chosen = [list(record.tokens[0]) for record in routing.records if isinstance(record, Routed)]
        self.routing, self.done = routing, []
        self.rows = torch.tensor(chosen, device=device).view(routing.tokens, len(routing.layers), 1, -1)
        self._now = self.rows[0].clone()

    def lead(self, model: nn.Module) -> list[RemovableHandle]:
        """Have the model's routers name the trace's experts, with the scores that they find; return the hooks."""
        return [
            router.register_forward_hook(lambda module, args, out, ids=ids: (*out[:-1], ids))
            for router, ids in zip(routers(model), self._now, strict=True)
        ]

    def turn(self, token: int) -> None:
        """Put a token's routing in place."""
        self._now.copy_(self.rows[token])
        self.done.append(token)

    def follows(self, leases: int) -> None:
        """Take note that so many leases of each layer have followed the trace: a step that is joined runs twice."""
        self.done += self.done[-1:] * (leases - len(self.done))


def masks(config: Any, device: torch.device) -> dict[str, Tensor] | None:
    """Masks of a step at the first place, where attention makes them with a copy from the host, as gpt-oss's does."""
    if config._attn_implementation != "eager":
        return None
    found = {}
    for kind in dict.fromkeys(config.layer_types):
        columns = min(CACHE_TOKENS, config.sliding_window) if kind == "sliding_attention" else CACHE_TOKENS
        found[kind] = torch.full((1, 1, 1, columns), torch.finfo(torch.bfloat16).min, dtype=torch.bfloat16)
        found[kind][..., 0] = 0
    return {kind: mask.to(device) for kind, mask in found.items()}


class Decoder:
    """Steps of one token on a static cache."""

    def __init__(self, model: nn.Module, device: torch.device, *, how: str) -> None:
        from transformers import StaticCache

        self._model, self._how = model, how
        config = model.config
        self._cache = StaticCache(config=config, max_cache_len=CACHE_TOKENS)
        self._masks = masks(config, device)
        self._token = torch.ones(1, 1, dtype=torch.int64, device=device)
        self._position = torch.zeros(1, dtype=torch.int64, device=device)
        self.logits: Tensor | None = None
        self._compute: Callable[[], Tensor] = self._forward

    def step(self) -> None:
        """Compute one token, at the same place each time."""
        self.logits = self._compute()

    @torch.no_grad()
    def _forward(self) -> Tensor:
        return self._model(
            input_ids=self._token,
            position_ids=self._position[None],
            attention_mask=self._masks,
            cache_position=self._position,
            past_key_values=self._cache,
            use_cache=True,
        ).logits

    def recorded(self, warm: Callable[[], None]) -> Callable[[], None]:
        """Return a step as a CUDA graph; `step` itself where there is no GPU."""
        for turn in range(3):
            warm()
            self.step()
            if turn == 0 and self._how == "compiled":  # an eager pass comes first: it gives the experts their cache
                self._model = torch.compile(self._model, options=vbrt.compile_options(), dynamic=False)
        if self._how == "steps" or host_decides(self._model):
            return self.step
        if self._how == "joined":
            warm()
            self._compute = joined(self._forward, same_bits=False)
            if self._compute.report.refused:
                raise RuntimeError(f"the step is not joined: {self._compute.report.refused}")
        if self._token.device.type != "cuda":
            return self.step
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        if not isinstance(self._model, vbrt.VBModelWrapper):
            with torch.cuda.graph(graph):
                self.step()
            return graph.replay
        hosting, experts = self._model._attachment.hosting, self._model._attachment.expert_cache
        with hosting.captured() as counted, torch.cuda.graph(graph):
            self.step()
        posts = counted()

        def replay() -> None:
            experts.begin_replay()
            if posts:
                hosting.replayed(posts, lambda: graph.replay() or True)
            else:
                graph.replay()

        return replay


class Turns(NamedTuple):
    """Tokens of a run: those before the clock, and those that count."""

    warm: int
    counted: int


def usual_turns() -> Turns:
    return Turns(WARM, COUNTED)


@dataclass(frozen=True)
class Run:
    """What a run over the trace has shown: seconds a token, and the accesses of a token that hit and missed."""

    seconds: float
    hits: float = 0.0
    misses: float = 0.0
    bytes_in: float = 0.0
    computed: float = 0.0
    posts: float = 0.0
    drive_pages: float = 0.0
    drive_bytes: float = 0.0


def decode(model: nn.Module, trace: Trace, *, how: str, spans: Spans | None = None, turns: Turns | None = None) -> Run:
    """Decode along the trace: warm tokens, then counted ones by the clock, nobody waiting in between.

    Args:
        spans: which forget what was timed before the counted tokens.
        turns: None: WARM and COUNTED. The trace has as many and those of the first steps: `traced_tokens`.
    """
    turns = turns or usual_turns()
    device, tokens = trace.rows.device, iter(range(len(trace.rows)))
    decoder = Decoder(model, device, how=how)
    replay = decoder.recorded(lambda: trace.turn(next(tokens)))
    if device_caches(model):
        trace.follows(device_caches(model)[0].totals()[device_caches(model)[0].layers[0]].leases)

    def run(count: int) -> None:
        for _ in range(count):
            trace.turn(next(tokens))
            replay()
        if device.type == "cuda":
            torch.cuda.synchronize()

    run(turns.warm)
    if spans is not None:
        spans.forget()
    before, start = counts_of(model), time.perf_counter()
    run(turns.counted)
    seconds = (time.perf_counter() - start) / turns.counted
    if not bool(decoder.logits.isfinite().all()):
        raise RuntimeError("the model's logits are not finite")
    counts = zip(counts_of(model), before, strict=True)
    return Run(seconds, *((after - early) / turns.counted for after, early in counts))


def host_decides(model: nn.Module) -> bool:
    """True for a wrapped model whose experts move, and the host decides which."""
    wrapped = isinstance(model, vbrt.VBModelWrapper)
    return wrapped and any(handle.streams and handle.deciding.cache is None for handle in expert_handles(model))


def counts_of(model: nn.Module) -> tuple[int, ...]:
    """Hits, misses, bytes and computed experts of a wrapped model, as the device counts them, or the host; posts to the
    drive, pages and bytes read. Zeros where no page moves."""
    if host_decides(model):
        layers = [layer for layer in model.stats().layers.values() if layer.experts is not None]
        top = f">{model.stack.names[0]}"
        moved = sum(n for layer in layers for link, n in layer.bytes_moved.items() if link.endswith(top))
        counts = (sum(layer.hits for layer in layers), sum(layer.misses for layer in layers))
        read = sum(n for layer in layers for link, n in layer.bytes_moved.items() if link.startswith("ssd>"))
        page = expert_handles(model)[0].pages[0].nbytes
        return *counts, moved, sum(layer.experts.computed for layer in layers), 0, read // page, read
    drives = [cache.drive.counts for cache in device_caches(model) if cache.drive is not None]
    found = [counts for cache in device_caches(model) for counts in cache.counts().values()]
    return (
        sum(int(c.hits.sum()) for c in found),
        sum(int(c.misses.sum()) for c in found),
        sum(c.bytes_in for c in found),
        sum(int(c.computed.sum()) for c in found),
        *map(sum, zip((0, 0, 0), *drives, strict=True)),
    )


def device_caches(model: nn.Module) -> list:
    """The device caches of a wrapped model: none where the host decides."""
    if not isinstance(model, vbrt.VBModelWrapper):
        return []
    return list(
        {
            id(h.deciding.cache.cache): h.deciding.cache.cache
            for h in expert_handles(model)
            if h.deciding.cache is not None
        }.values()
    )


def expert_handles(vb: vbrt.VBModelWrapper) -> list[ExpertsHandle]:
    return [handle for handle in weights_in(vb.stack) if isinstance(handle, ExpertsHandle)]


# -- a share of the pages on the GPU ----------------------------------------------------------------------------------


def put_below(vb: vbrt.VBModelWrapper, tier: str = "cpu") -> None:
    """Have the experts live in host memory, or on a drive, and all other pages on the GPU."""
    vb.runtime.open_stores()
    experts = {key for handle in expert_handles(vb) for key in handle.keys}
    vb.stack.rehome({key: tier if key in experts else "gpu" for key in vb.stack.pages})


def limit_host(vb: vbrt.VBModelWrapper, drive: float) -> None:
    """Give host memory room for all expert pages but a share of them, and for those that pass through it."""
    handles = expert_handles(vb)
    experts = sum(page.nbytes for handle in handles for page in handle.pages)
    lease = max(sum(page.nbytes for page in handle.pages[: handle.spec.top_k * handle.planes]) for handle in handles)
    vb.set_budget("cpu", int((1 - drive) * experts) + lease)


def let_decide(vb: vbrt.VBModelWrapper, decides: str) -> None:
    """Have the device decide where it can, or the host everywhere."""
    attachment = vb._attachment
    for handle in expert_handles(vb):
        if decides == "host":
            handle.deciding.follow = None
        elif vb.stack.device.type == "cuda":
            handle.deciding.ask_with(attachment.expert_cache.follow)


def forget_graphs(vb: vbrt.VBModelWrapper) -> None:
    """Pages may move again: the graphs that were recorded are gone."""
    vb.stack.ledger.captured = False
    for cache in device_caches(vb):
        cache.recorded = False


def budget_of(vb: vbrt.VBModelWrapper, share: float) -> int:
    """Bytes for the pages of other layers, a share of the experts, and one lease of them."""
    handles = expert_handles(vb)
    experts = sum(page.nbytes for handle in handles for page in handle.pages)
    own = {page.key for handle in handles for page in handle.pages}
    others = sum(page.nbytes for key, page in vb.stack.pages.items() if key not in own and not page.put)
    lease = max(sum(page.nbytes for page in handle.pages[: handle.spec.top_k * handle.planes]) for handle in handles)
    return others + int(share * experts) + lease


def expected(vb: vbrt.VBModelWrapper, trace: Trace) -> tuple[int, int]:
    """Hits and misses of the policy in Python, on the routing that the model has followed."""
    (cache,) = device_caches(vb)
    sizes = {key: cache.slot_bytes[name] for name, keys in cache.keys.items() for key in keys}
    leases = []
    for token in trace.done:
        ids = trace.rows[token, :, 0].tolist()
        leases += [
            tuple(cache.keys[name][e] for e in sorted(chosen)) for name, chosen in zip(cache.layers, ids, strict=True)
        ]
    layers = {keys[0].rpartition(".")[0]: sizes[keys[0]] for keys in cache.keys.values()}
    policy = ExpertsPolicy(cache.capacity_bytes, prefetch=0, scope=cache.scope, layers=layers)
    counts = simulate(policy, leases, cache.capacity_bytes, sizes=sizes)
    return counts.hits.total(), counts.misses.total()


def limit_seconds(resident_s: float, bytes_in: float, cpu_s: float = 0.0) -> float:
    """Seconds of a step whose missing bytes come at the link's speed, behind each other, while the CPU computes."""
    return resident_s + max(bytes_in / LINK_BYTES_S, cpu_s)


def use_miss(vb: vbrt.VBModelWrapper, miss: str) -> None:
    """Have a model treat missed experts in another way, as if it had been wrapped so."""
    attachment = vb._attachment
    attachment.missed = None if miss == "fetch" else MissedExperts(miss)
    attachment.expert_cache.missed = attachment.missed
    hosted = None if miss == "fetch" else HostedMisses(attachment.missed, attachment.hosting.mailbox)
    attachment.expert_cache.hosted = hosted
    for handle in expert_handles(vb):
        handle.deciding.missed = attachment.missed
    attachment.expert_cache.reset()


def cached_row(
    vb: vbrt.VBModelWrapper,
    trace: Trace,
    share: float,
    resident: Run,
    *,
    how: str,
    miss: str = "fetch",
    parts: bool = False,
    drive: float = 0.0,
    decides: str = "gpu",
) -> dict[str, object]:
    """Decode with a share of the expert pages on the GPU.

    Args:
        drive: share of the expert pages that host memory has no room for.
        parts: the row says where a layer's time goes, if the host decides.
    """
    forget_graphs(vb)
    use_miss(vb, miss)
    let_decide(vb, decides)
    if drive:
        limit_host(vb, drive)
    vb.set_budget("gpu", budget_of(vb, share))
    trace.done.clear()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    with breakdown() if parts else contextlib.nullcontext() as spans:
        run = decode(vb, trace, how=how, spans=spans)
    stats = vb.stats()
    rates = getattr(vb._attachment.expert_cache.hosted, "rates", None)
    nbytes = expert_handles(vb)[0].pages[0].nbytes
    cpu_s = 0.0 if rates is None else run.computed * rates.cpu_seconds(nbytes)
    kept = sum(p.nbytes for p in vb.module.parameters()) + sum(b.nbytes for b in vb.module.buffers())
    budget = stats.tiers[stats.compute_tier].budget_bytes
    peak = torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
    row = {
        "case": f"{share:.0%} of the expert pages",
        "miss": miss,
        "decides": sorted({handle.deciding.by for handle in expert_handles(vb)}),
        "ms": run.seconds * 1e3,
        "tokens_s": 1 / run.seconds,
        "hit_rate": run.hits / max(1e-9, run.hits + run.misses),
        "missed_mb": run.bytes_in / 1e6,
        "computed": run.computed,
        "rates": stats.missed,
        "of_limit": limit_seconds(resident.seconds, run.bytes_in, cpu_s) / run.seconds,
        "over_resident": run.seconds / resident.seconds,
        "peak_gb": peak / 1e9,
        "budget_gb": budget / 1e9,
        "beyond_budget_and_kept_gb": (peak - budget - kept) / 1e9,
        "fallbacks": list(stats.fallbacks),
    }
    if drive:
        row |= {"drive": drive, "posts": run.posts, "drive_pages": run.drive_pages, "drive_mb": run.drive_bytes / 1e6}
    missed = vb._attachment.missed
    if missed is not None and missed.rates is not None:  # of a call of the CPU, and of a layer where the host decides
        row |= {"call_us": missed.rates.call_s * 1e6, "host_us": missed.rates.host_s * 1e6}
    if parts and host_decides(vb):
        layers = len(expert_handles(vb))
        found = spans.row(layers, COUNTED)
        row |= {"layer_us": found | {"rest of the step": run.seconds / layers * 1e6 - found["layer, in all"]}}
    if device_caches(vb):
        hits, misses, *_ = counts_of(vb)
        row |= {"slots": device_caches(vb)[0].slots(0)}
        if not run.computed:
            row |= {"counts_are_simulated": (hits, misses) == expected(vb, trace)}
    return row


def layers_of(layers: int, **shape: int) -> list[RoutedLayer]:
    """The layers of routed experts of a model of the shape."""
    shape = SHAPE | shape
    names = (f"model.layers.{n}.mlp.experts" for n in range(layers))
    return [RoutedLayer(name, shape["num_experts"], shape["num_experts_per_tok"]) for name in names]


def recorded(path: Path, layers: int, **shape: int) -> Recorded:
    """A recording on the layers of a model of the shape. Raises ArgumentError: it cannot be mapped."""
    return mapped(path, layers_of(layers, **shape), traced_tokens())


def traced_tokens(turns: Turns | None = None) -> int:
    """Return how many tokens a trace has: a run's, and those of its first steps."""
    return sum(turns or usual_turns()) + 4


def routing_of(model: nn.Module, tokens: int) -> Routing:
    found = routers(model)
    layers = layers_of(len(found), num_experts=found[0].num_experts, num_experts_per_tok=found[0].top_k)
    return generate_routing(layers, tokens=tokens, phase="decode")


def rows(
    layers: int,
    shares: Sequence[float],
    device: torch.device,
    *,
    gpu: str = "24GiB",
    how: str = "eager",
    misses: Sequence[str] = ("fetch",),
    parts: bool = False,
    format: str = FOUR_BITS,
    recording: Recorded | None = None,
    drives: Sequence[float] = (0.0,),
    decide: Sequence[str] = ("gpu",),
    ssd: str | None = None,
    **shape: int,
) -> Iterator[dict[str, object]]:
    """Yield the row of each case, which says where the routing is from.

    Args:
        recording: followed instead of a generated trace.
        drives: shares of the expert pages that host memory has no room for, all of which live in `ssd` then.
    """
    origin = {"routing": "generated" if recording is None else "recorded"}
    start = time.perf_counter()
    model = build(layers, device, **shape)
    trace = Trace(recording.routing if recording else routing_of(model, traced_tokens()), device)
    trace.lead(model)
    model.config._experts_implementation = "batched_mm"
    note("built", start)
    runs = {}
    for way in dict.fromkeys(("eager", how)):
        runs[way] = decode(model, trace, how=way)
        times = {"ms": runs[way].seconds * 1e3, "tokens_s": 1 / runs[way].seconds}
        yield {"case": f"bf16, resident, {way}"} | origin | times
        note(f"bf16, {way}", start)
    top = "gpu" if device.type == "cuda" else "cpu"
    tiers = {top: {"budget": gpu}} | ({"cpu": {"budget": "40GiB"}} if top == "gpu" else {})
    tiers |= {} if ssd is None else {"ssd": {"enabled": True, "path": ssd}}
    policy = {"kind": "experts"}
    vb = vbrt.wrap(model, "fp4", policy=policy, weights=weights_of(format), tiers=tiers).materialize()
    if device.type == "cuda":
        torch.cuda.synchronize()
    note("encoded", start)
    resident = decode(vb, trace, how=how)
    yield {
        "case": f"{'4 bits' if format == FOUR_BITS else format}, resident, {how}",
        **origin,
        "ms": resident.seconds * 1e3,
        "tokens_s": 1 / resident.seconds,
        "over_bf16": {way: run.seconds / resident.seconds for way, run in runs.items()},
    }
    forget_graphs(vb)
    if device.type == "cuda" and shares:
        put_below(vb, "cpu" if ssd is None else "ssd")
        note("put below", start)
    for share, drive, decides, miss in itertools.product(shares, drives, decide, misses):
        how_far = {"miss": miss, "drive": drive, "decides": decides}
        row = cached_row(vb, trace, share, resident, how=how, parts=parts, **how_far)
        yield {"case": row.pop("case")} | origin | row
        note(f"{share:.0%}, {miss}, {drive:.0%} on a drive, {decides}", start)
    vb.close()


def weights_of(format: str) -> dict[str, str]:
    """The config of a format as statistics print it: "nvfp4", or "nvfp4+exact" with a fine plane."""
    format, _, fine = format.partition("+")
    return {"format": format, "fine": fine or "none"}


def note(what: str, start: float) -> None:
    """Minutes go by between figures."""
    print(f"# {what}: {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)


def say(row: dict[str, object]) -> None:
    parts = row.get("layer_us", {})
    shown = {k: round(v, 3) if isinstance(v, float) else v for k, v in row.items() if k != "layer_us"}
    print(
        "\n".join([json.dumps(shown), *(f"    {us:9.1f} us a layer: {line}" for line, us in parts.items())]), flush=True
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--layers", type=int, default=48)
    parser.add_argument("--shares", type=float, nargs="*", default=[50, 25, 10], help="percent of the expert pages")
    parser.add_argument(
        "--how", choices=("joined", "eager", "compiled"), default="joined", help="compiled takes minutes"
    )
    parser.add_argument("--miss", nargs="+", choices=MISSES, default=["fetch"], help="what becomes of missed experts")
    parser.add_argument("--breakdown", action="store_true", help="where a layer's time goes, in microseconds")
    parser.add_argument("--format", default=FOUR_BITS, help="of the experts: nvfp4, nf4, dense, nvfp4+exact, ...")
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-30b-a3b")
    parser.add_argument("--routing", type=Path, metavar="FILE", help="a recording to follow, of vb.record_routing")
    parser.add_argument(
        "--drive", type=float, nargs="+", metavar="PERCENT", help="of the expert pages, on a drive alone"
    )
    parser.add_argument("--ssd", type=Path, default=Path("pages"), help="folder for pages, with --drive")
    parser.add_argument("--decide", nargs="+", choices=("gpu", "host"), default=["gpu"], help="who decides residency")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    done, on_drive = [], {}
    if args.drive:
        on_drive = {"drives": [percent / 100 for percent in args.drive], "ssd": str(args.ssd)}
    shares, shape = [share / 100 for share in args.shares], SHAPES[args.shape]
    try:
        recording = recorded(args.routing, args.layers, **shape) if args.routing else None
    except vbrt.ArgumentError as error:
        parser.error(f"--routing {error}")
    name = re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name().lower()).strip("-")
    what = "experts-decode" if args.miss == ["fetch"] else "experts-missed"
    what += "-large" if args.shape == "large" else ""
    what += "-recorded" if recording else ""
    what += "-drive" if args.drive else ""
    what += "" if args.format == FOUR_BITS else f"-{args.format.replace('+', '-')}"
    out = args.out or ROOT / "benchmarks" / "results" / f"{what}-{name}.json"
    head = {"machine": machine(), "threads": torch.get_num_threads(), "shape": args.shape, "layers": args.layers}
    head |= {} if args.format == FOUR_BITS else {"format": args.format}
    head |= {"recording": recording.about} if recording else {}
    for row in rows(
        args.layers, shares, torch.device("cuda", 0), how=args.how, misses=args.miss, parts=args.breakdown,
        format=args.format, recording=recording, decide=args.decide, **on_drive, **shape,
    ):  # fmt: skip
        say(row)
        done.append(row)
        out.write_text(json.dumps(head | {"how": args.how, "rows": done}, indent=1) + "\n")


if __name__ == "__main__":
    main()
