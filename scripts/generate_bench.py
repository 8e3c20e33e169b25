"""Milliseconds a token of `generate`, as a user types it, on the shape of an 8B model; writes JSON.

Random weights, made on the GPU; greedy, a prompt of 128 tokens, 128 new ones. Cases: eager bf16, one bf16 step captured
by hand on transformers' StaticCache, the wrapped model with everything resident (`dense`, `fp4`), with recording of
steps left out, with shares of the fp4 pages on the GPU, and `exact`. Where pages come over the link, the limit of a
token is the larger of its bytes at the link's rate, measured here, and the resident step.

    python3 scripts/generate_bench.py [--batches 1 16] [--shares 10 50 90] [--parts hand dense fp4] [--out results.json]
"""

import argparse
import contextlib
import json
import re
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # after the checkout is on the path

import vbrt
from scripts.measuring import llama_8b, machine

PROMPT, NEW = 128, 128
PARTS = ("eager", "hand", "dense", "fp4", "unrecorded", "shares", "exact")


class Clock:
    """A stopping criterion that never stops, and notes when it is asked: once a token, while the device computes."""

    def __init__(self) -> None:
        self.moments: list[float] = []

    def __call__(self, input_ids: torch.Tensor, scores: object, **kwargs: object) -> torch.Tensor:
        self.moments.append(time.perf_counter())
        return torch.zeros(input_ids.shape[0], dtype=torch.bool, device=input_ids.device)

    @property
    def ms(self) -> float:
        """Milliseconds from one token to the next, on average: transformers waits for each."""
        return (self.moments[-1] - self.moments[0]) / (len(self.moments) - 1) * 1e3


def prompt(batch: int) -> torch.Tensor:
    torch.manual_seed(3)
    return torch.randint(10, 1000, (batch, PROMPT), device="cuda")


def generate(model, batch: int, new: int, clock: Clock | None = None) -> torch.Tensor:
    ids = prompt(batch)
    criteria = {} if clock is None else {"stopping_criteria": [clock]}
    return model.generate(
        ids, max_new_tokens=new, min_new_tokens=new, do_sample=False, pad_token_id=0, use_cache=True, **criteria
    )


def timed(model, batch: int, new: int, *, warm: bool = True) -> dict[str, float]:
    """Milliseconds of a token after the first, of the whole call for each token, and of a call for one; and of the
    first call, which records, its first token and its longest one."""
    begun, first_call, clock = time.perf_counter(), Clock(), Clock()
    generate(model, batch, new if warm else 4, clock=first_call)
    torch.cuda.reset_peak_memory_stats()
    torch.cuda.synchronize()
    start = time.perf_counter()
    generate(model, batch, new, clock=clock)
    torch.cuda.synchronize()
    whole = time.perf_counter() - start
    start = time.perf_counter()
    generate(model, batch, 1)
    torch.cuda.synchronize()
    first = time.perf_counter() - start
    row = {"ms": clock.ms, "call_ms": whole / new * 1e3, "first_ms": first * 1e3}
    if warm:
        row["first_call_first_ms"] = (first_call.moments[0] - begun) * 1e3
        row["first_call_longest_ms"] = max(b - a for a, b in pairwise(first_call.moments)) * 1e3
    return row | {"peak_gb": torch.cuda.max_memory_allocated() / 1e9}


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

    def again() -> None:
        kept[-1].statics.position.fill_(span.start)  # which each replay moves on
        recording.again()

    return replayed_ms(again)


def wrapped_row(vb, batch: int, new: int) -> dict[str, object]:
    before = vb.stats().steps
    row = timed(vb, batch, new)
    steps = vb.stats().steps
    row |= {"captured": steps.captured - before.captured, "eager": steps.eager - before.eager}
    row |= {"recordings": steps.recordings - before.recordings, "reasons": list(steps.reasons)}
    row |= {"record_ms": (steps.record_us - before.record_us) / 1e3}
    alone = recorded_ms(vb)
    return row if alone is None else row | {"replay_ms": alone}


@contextlib.contextmanager
def unrecorded() -> Iterator[None]:
    with mock.patch("vbrt.generation.generating.recorder_for", lambda device: None):
        yield


def link_gb_s() -> float:
    """The rate of copies of 64 MiB from page-locked memory."""
    host, device = (
        torch.empty(1 << 26, dtype=torch.uint8, pin_memory=True),
        torch.empty(1 << 26, dtype=torch.uint8, device="cuda"),
    )
    device.copy_(host, non_blocking=True)
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(16):
        device.copy_(host, non_blocking=True)
    torch.cuda.synchronize()
    return 16 * host.numel() / (time.perf_counter() - start) / 1e9


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
        model = llama_8b(self.args.layers)
        self.plain(model)
        if "dense" in parts:
            vb = vbrt.wrap(model, "dense", tiers={"gpu": {"budget": "40GiB"}})
            self.each(vb, "dense")
            model = vb.unwrap()
        if "exact" in parts:
            self.exact(model)
            model = llama_8b(self.args.layers)
        if {"fp4", "unrecorded", "shares"} & set(parts):
            self.fp4(model)

    def plain(self, model) -> None:
        for batch in self.args.batches:
            if "eager" in self.args.parts:
                self.row("bf16, eager", batch, lambda b=batch: timed(model, b, min(48, self.args.new), warm=False))
            if "hand" in self.args.parts:
                self.row("bf16, captured by hand", batch, lambda b=batch: by_hand(model, b))

    def each(self, vb, case: str, most: int = 1 << 20) -> None:
        for batch in self.args.batches:
            self.row(case, batch, lambda b=batch: wrapped_row(vb, b, min(most, self.args.new)))

    def exact(self, model) -> None:
        vb = vbrt.wrap(model, "exact", tiers={"gpu": {"budget": self.args.exact_budget}}).materialize(progress=False)
        self.row("exact", 1, lambda: wrapped_row(vb, 1, self.args.new))
        vb.close()

    def fp4(self, model) -> None:
        vb = vbrt.wrap(model, "fp4", tiers={"gpu": {"budget": "24GiB"}}).materialize(progress=False)
        torch.cuda.synchronize()
        if "fp4" in self.args.parts:
            self.each(vb, "fp4")
        if "unrecorded" in self.args.parts:
            with unrecorded():
                self.each(vb, "fp4, unrecorded", 32)
        if "shares" in self.args.parts:
            self.shares(vb)
        vb.close()

    def shares(self, vb) -> None:
        rate, pages = link_gb_s(), [page.nbytes for page in vb.stack.pages.values()]
        resident = next((row.get("replay_ms") for row in self.rows if row["case"] == "fp4"), 0.0) or 0.0
        vb.stack.rehome(dict.fromkeys(vb.stack.pages, "cpu"))
        for share in self.args.shares:
            row = self.row(f"fp4, {share} % of the pages", 1, lambda s=share: self.share(vb, s, pages))
            link = sum(pages) * (1 - share / 100) / rate / 1e6
            row |= {"link_ms": link, "link_gb_s": rate, "limit_ms": max(link, resident), "share": share}

    def share(self, vb, share: int, pages: list[int]) -> dict[str, object]:
        vb.set_budget("gpu", int(sum(pages) * share / 100))
        return wrapped_row(vb, 1, self.args.new)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--new", type=int, default=NEW, help="tokens to generate")
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 16])
    parser.add_argument("--shares", type=int, nargs="*", default=[10, 20, 30, 40, 50, 60, 70, 80, 90])
    parser.add_argument("--parts", nargs="*", default=list(PARTS), choices=PARTS)
    parser.add_argument("--exact-budget", default="5GiB", help="of the GPU, for `exact`: room for the coarse planes")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    bench = Bench(args)
    name = re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name().lower()).strip("-")
    out = args.out or ROOT / "benchmarks" / "results" / f"generate-{name}.json"
    try:
        bench.run()
    finally:
        out.write_text(json.dumps({"machine": machine(), "layers": args.layers, "rows": bench.rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
