"""Milliseconds a token of `generate`, as a user types it, on the shape of an 8B model; writes JSON.

Random weights, made on the GPU; greedy, a prompt of 128 tokens, 128 new ones. Cases: peers (eager bf16, transformers'
static cache without compilation, bitsandbytes NF4, one bf16 step captured by hand on transformers' StaticCache), the
wrapped model with everything resident (`dense`, `fp4`), with `compute.captures = false`, and with shares of the pages
on the GPU (`fp4`, `exact`). Where pages come over the link, the limit of a token is the larger of its bytes at the
link's rate, measured here, and the resident step.

    python3 scripts/generate_bench.py [--batches 1 16] [--shares 10 50 90] [--parts hand dense fp4] [--out results.json]

Rows are added to those that a results file of the same commit has.
"""

import argparse
import contextlib
import copy
import gc
import json
import re
import signal
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # after the checkout is on the path

import vbrt
from scripts.experts_decode import build
from scripts.measuring import llama_8b, machine, moved_bytes
from vbrt.estimation.advice.machine_rates import link_gb_s
from vbrt.integrations.token_times import Clock

PROMPT, NEW = 128, 128
PARTS = ("eager", "static", "nf4", "hand", "dense", "fp4", "unrecorded", "shares", "exact", "experts")
OF_8B = frozenset(PARTS) - {"experts"}


def prompt(batch: int) -> torch.Tensor:
    torch.manual_seed(3)
    return torch.randint(10, 1000, (batch, PROMPT), device="cuda")


def generate(model, batch: int, new: int, clock: Clock | None = None, **options: object) -> torch.Tensor:
    ids = prompt(batch)
    criteria = {} if clock is None else {"stopping_criteria": [clock]}
    lengths = {"max_new_tokens": new, "min_new_tokens": new}
    return model.generate(ids, **lengths, do_sample=False, pad_token_id=0, use_cache=True, **criteria, **options)


def timed(model, batch: int, new: int, *, warm: int = 4, **options: object) -> dict[str, float]:
    """Milliseconds of a token after the first, of the whole call for each token, and of a call for one; of a first call
    of `warm` tokens, in which recordings are made, its first token and its longest one; and the CPU's share of time:
    above 1, other threads of the process compete for the interpreter."""
    begun, first_call, clock = time.perf_counter(), Clock(), Clock()
    generate(model, batch, warm, clock=first_call, **options)
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.synchronize()
    start, busy = time.perf_counter(), time.process_time()
    generate(model, batch, new, clock=clock, **options)
    torch.cuda.synchronize()
    whole, busy = time.perf_counter() - start, time.process_time() - busy
    start = time.perf_counter()
    generate(model, batch, 1, **options)
    torch.cuda.synchronize()
    first = time.perf_counter() - start
    row = {"new": new, "ms": clock.ms, "call_ms": whole / new * 1e3, "first_ms": first * 1e3, "cpu": busy / whole}
    row["first_call_first_ms"] = (first_call.moments[0] - begun) * 1e3
    row["first_call_longest_ms"] = max(b - a for a, b in pairwise(first_call.moments)) * 1e3
    return row | {"peak_gb": torch.cuda.max_memory_allocated() / 1e9}


def as_nf4(model):
    """Return a copy with its layers in NF4 by bitsandbytes, all but the head."""
    import bitsandbytes

    model = copy.deepcopy(model)
    for parent in list(model.model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is torch.nn.Linear:
                form = {"compute_dtype": torch.bfloat16, "quant_type": "nf4", "device": "meta"}
                layer = bitsandbytes.nn.Linear4bit(child.in_features, child.out_features, bias=False, **form)
                weight = bitsandbytes.nn.Params4bit(child.weight.data, requires_grad=False, quant_type="nf4")
                layer.weight = weight.to("cuda")
                setattr(parent, name, layer)
    return model


@torch.no_grad()
def by_hand(model, batch: int) -> dict[str, float]:
    """One step on transformers' StaticCache in a CUDA graph, replayed with nobody waiting in between."""
    from transformers import StaticCache

    cache = StaticCache(config=model.config, max_cache_len=PROMPT + NEW)
    ids = torch.ones(batch, 1, dtype=torch.int64, device="cuda")
    position = torch.full((1,), PROMPT, device="cuda")

    def step() -> torch.Tensor:
        given = {"past_key_values": cache, "use_cache": True, "position_ids": position[None].expand(batch, 1)}
        return model(input_ids=ids, cache_position=position, **given).logits

    for _ in range(2):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return {"ms": replayed_ms(graph.replay)}


def replayed_ms(replay: Callable[[], object], times: int = 60) -> float:
    rounds = []
    for _ in range(5):
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(times // 5):
            replay()
        torch.cuda.synchronize()
        rounds.append((time.perf_counter() - start) / (times // 5) * 1e3)
    return statistics.median(rounds)


@torch.no_grad()
def recorded_ms(vb) -> float | None:
    """Milliseconds of the last recording, replayed with nobody waiting in between."""
    kept = [kept for each in vb._attachment.follower.generating for kept in each.steps.kept]
    if not kept or not kept[-1].recordings:
        return None
    (_, span), recording = list(kept[-1].recordings.items())[-1]
    if recording.exact is not None:  # it attends to the cache of a call
        return None

    def again() -> None:
        kept[-1].statics.position.fill_(span.start)  # which each replay moves on
        recording.again()

    return replayed_ms(again)


def wrapped_row(vb, batch: int, new: int, *, warm: int | None = None) -> dict[str, object]:
    before = vb.stats().steps
    row = timed(vb, batch, new, warm=new if warm is None else warm)
    steps = vb.stats().steps
    row |= {"captured": steps.captured - before.captured, "eager": steps.eager - before.eager}
    reasons = [why for why, count in steps.reasons.items() if count > before.reasons.get(why, 0)]
    row |= {"recordings": steps.recordings - before.recordings, "reasons": reasons}
    row |= {"record_ms": (steps.record_us - before.record_us) / 1e3}
    alone = recorded_ms(vb) if row["captured"] else None
    return row if alone is None else row | {"replay_ms": alone}


@contextlib.contextmanager
def computing(vb, **compute: object) -> Iterator[None]:
    """Have the model, encoded as it is, run with other settings of `compute`."""
    attachment = vb._attachment
    before = attachment._settings
    attachment._settings = vbrt.load_config(before, compute=compute)
    try:
        yield
    finally:
        attachment._settings = before


class Bench:
    """Rows of cases; one that fails leaves its traceback, and the others run."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.rows = args, []
        self.start = time.perf_counter()

    def row(self, case: str, batch: int, measure: Callable[[], dict[str, object]]) -> dict[str, object]:
        row: dict[str, object] = {"case": case, "batch": batch}
        try:
            row |= measure()
        except Exception as error:  # noqa: BLE001  the other cases run
            traceback.print_exc()
            row["error"] = f"{type(error).__name__}: {error}"[:300]
        row["at_s"] = time.perf_counter() - self.start
        self.rows.append(row)
        print(json.dumps({k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()}), flush=True)
        return row

    def run(self) -> None:
        parts = self.args.parts
        if "experts" in parts:
            self.experts()
        if not OF_8B & set(parts):
            return
        model = llama_8b(self.args.layers)
        self.peers(model)
        if "dense" in parts:
            vb = vbrt.wrap(copy.deepcopy(model), "dense", tiers={"gpu": {"budget": "40GiB"}}).materialize()
            self.each("dense", lambda batch: wrapped_row(vb, batch, self.args.new))
            vb.close()
            del vb
        if "eager" in parts:  # a whole call first: the allocator grows with it
            self.each("bf16, eager", lambda batch: timed(model, batch, self.args.new, warm=self.args.new))
        if {"fp4", "unrecorded", "shares"} & set(parts):
            self.fp4(copy.deepcopy(model) if "exact" in parts else model)
        if "exact" in parts:
            self.exact(model)

    def experts(self) -> None:
        """Twelve layers of Qwen3-30B-A3B's shape, batch 1; random weights route each token anew."""
        model, name = build(12, torch.device("cuda")), "12 layers of Qwen3-30B-A3B"
        self.row(f"{name}: bf16, eager", 1, lambda: timed(model, 1, self.args.new, warm=self.args.new))
        vb = vbrt.wrap(copy.deepcopy(model), "dense", tiers={"gpu": {"budget": "60GiB"}}).materialize(progress=False)
        self.row(f"{name}: dense", 1, lambda: wrapped_row(vb, 1, self.args.new))
        vb.close()
        policy, tiers = {"kind": "experts"}, {"gpu": {"budget": "24GiB"}}
        vb = vbrt.wrap(model, "fp4", policy=policy, tiers=tiers).materialize(progress=False)
        self.row(f"{name}: fp4", 1, lambda: wrapped_row(vb, 1, self.args.new))
        vb.set_budget("gpu", vb.plan.page_bytes // 2)
        self.row(f"{name}: fp4, half of the pages", 1, lambda: wrapped_row(vb, 1, self.args.new, warm=16))
        vb.close()
        gc.collect()
        torch.cuda.empty_cache()

    def each(self, case: str, measure: Callable[[int], dict[str, object]]) -> None:
        for batch in self.args.batches:
            self.row(case, batch, lambda b=batch: measure(b))
        gc.collect()
        torch.cuda.empty_cache()

    def peers(self, model) -> None:
        parts, new = self.args.parts, self.args.new
        if "static" in parts:
            options = {"cache_implementation": "static", "disable_compile": True}
            self.each("bf16, static cache, eager", lambda batch: timed(model, batch, new, **options))
        if "nf4" in parts:
            made = []
            self.row("bitsandbytes NF4, made", 0, lambda: {"made": len(made.append(as_nf4(model)) or made)})
            if made:
                self.each("bitsandbytes NF4, eager", lambda batch: timed(made[0], batch, new))
        if "hand" in parts:
            self.each("bf16, captured by hand", lambda batch: by_hand(model, batch))

    def exact(self, model) -> None:
        """Coarse planes and a ring on the GPU, and shares of all pages."""
        vb = vbrt.wrap(model, "exact", tiers={"gpu": {"budget": "24GiB"}}).materialize(progress=False)
        self.row("exact", 1, lambda: wrapped_row(vb, 1, min(self.args.new, 16), warm=6))
        self.shares(vb, "exact", self.args.exact_shares, 12)
        vb.close()

    def fp4(self, model) -> None:
        vb = vbrt.wrap(model, "fp4", tiers={"gpu": {"budget": "24GiB"}}).materialize(progress=False)
        torch.cuda.synchronize()
        if "fp4" in self.args.parts:
            self.each("fp4", lambda batch: wrapped_row(vb, batch, self.args.new))
        if "unrecorded" in self.args.parts:
            with computing(vb, captures=False):
                self.each("fp4, compute.captures = false", lambda b: wrapped_row(vb, b, self.args.new, warm=4))
        if "shares" in self.args.parts:
            self.shares(vb, "fp4", self.args.shares, 32)
        vb.close()

    def shares(self, vb, case: str, shares: list[int], new: int) -> None:
        """Rows by the percent of the pages' bytes that tiers.gpu has, with their limits."""
        if "fp4" not in self.args.parts and case == "fp4":
            self.row(case, 1, lambda: wrapped_row(vb, 1, 32))
        resident = next((row.get("replay_ms") for row in self.rows if row["case"] == case), 0.0) or 0.0
        rate, pages = link_gb_s(), [page.nbytes for page in vb.stack.pages.values()]
        for share in sorted(shares, reverse=True):
            row = self.row(f"{case}, {share} % of the pages", 1, lambda s=share: self.share(vb, s, pages, new))
            link = sum(pages) * (1 - share / 100) / rate / 1e6
            row |= {"link_ms": link, "link_gb_s": rate, "limit_ms": max(link, resident), "share": share, "held": case}
            row["moved_ms"] = row.get("moved_bytes", 0) / rate / 1e6

    def share(self, vb, share: int, pages: list[int], new: int) -> dict[str, object]:
        vb.set_budget("gpu", int(sum(pages) * share / 100))
        row = wrapped_row(vb, 1, new, warm=6)
        before = moved_bytes(vb)
        generate(vb, 1, 6)
        return row | {"moved_bytes": (moved_bytes(vb) - before) / 6}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--new", type=int, default=NEW, help="tokens to generate")
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 16])
    parser.add_argument("--shares", type=int, nargs="*", default=[10, 20, 30, 40, 50, 60, 70, 80, 90])
    parser.add_argument("--parts", nargs="*", default=list(PARTS), choices=PARTS)
    parser.add_argument("--exact-shares", type=int, nargs="*", default=[10, 50, 90])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    bench = Bench(args)
    name = re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name().lower()).strip("-")
    out = args.out or ROOT / "benchmarks" / "results" / f"generate-{name}.json"
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("stopped: what was measured is written"))
    try:
        bench.run()
    finally:
        add_rows(out, {"machine": machine(), "layers": args.layers}, bench.rows)


def add_rows(path: Path, about: dict[str, object], rows: list[dict[str, object]]) -> None:
    """Write rows to a results file, behind those that it has of the same commit."""
    before = json.loads(path.read_text()) if path.exists() else {}
    same = before.get("machine", {}).get("commit") == about["machine"]["commit"]
    kept = [row for row in before.get("rows", []) if same and row["case"] not in {new["case"] for new in rows}]
    path.write_text(json.dumps(about | {"rows": [*kept, *rows]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
