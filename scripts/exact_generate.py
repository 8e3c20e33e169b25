"""Milliseconds a token of lossless `generate` with `compute.exactness` "bits" and "rounded"; writes JSON.

Random weights of an 8B shape and of twelve layers of Qwen3-30B-A3B, batch 1, greedy, a prompt of 128 tokens. Each case
runs both ways in turns, and compares their tokens with the plain model's. The first turn of "bits" meets lengths that
cuDNN, torch's attention on Hopper, has not planned in this process; later turns meet them again.

    python3 scripts/exact_generate.py [--parts dense exact experts] [--new 64] [--out results.json]
"""

import argparse
import contextlib
import copy
import json
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # after the checkout is on the path

import vbrt
from scripts.experts_decode import build
from scripts.generate_bench import Clock, computing, generate
from scripts.measuring import llama_8b, machine

PARTS = ("dense", "exact", "experts")
WAYS = ("bits", "rounded")


@contextlib.contextmanager
def exactness(vb, way: str) -> Iterator[None]:
    """Have the model, encoded as it is, run with another `compute.exactness`."""
    try:
        with computing(vb, exactness=way):
            yield
    finally:
        for each in vb._attachment.follower.generating:
            each.steps.release()  # captures of one way are none of the other


def both(case: str, vb, new: int, plain: torch.Tensor | None, turns: int = 3) -> dict[str, object]:
    """A row: ms a token of each way, in the first turn and the least of the others, and how many of its tokens are the
    plain model's."""
    row: dict[str, object] = {"case": case, "new": new}
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(turns):
        for way in WAYS:
            before = vb.stats().steps
            with exactness(vb, way):
                generate(vb, 1, 6)
                clock = Clock()
                tokens = generate(vb, 1, new, clock=clock)
                steps = vb.stats().steps
            times[way].append(clock.ms)
            row[f"{way}_captured"] = steps.captured - before.captured
            row[f"{way}_reasons"] = sorted(set(steps.reasons) - set(before.reasons))
            if plain is not None:
                row[f"{way}_equal"] = int((tokens == plain).all(0).int().cumprod(0).sum()) - tokens.shape[1] + new
    row |= {f"{way}_ms": min(values[1:]) for way, values in times.items()}
    row |= {f"{way}_first_ms": values[0] for way, values in times.items()}
    print(json.dumps({k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()}), flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--parts", nargs="*", default=list(PARTS), choices=PARTS)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--new", type=int, default=64, help="tokens to generate")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows: list[dict[str, object]] = []
    if {"dense", "exact"} & set(args.parts):
        model = llama_8b(args.layers)
        clocks = [Clock() for _ in range(3)]
        for clock in clocks:
            plain = generate(model, 1, args.new, clock=clock)
        first, *others = [clock.ms for clock in clocks]
        rows.append(
            {"case": "8B bf16, plain transformers", "new": args.new, "bits_ms": min(others), "bits_first_ms": first}
        )
        if "dense" in args.parts:
            vb = vbrt.wrap(copy.deepcopy(model), "dense", tiers={"gpu": {"budget": "40GiB"}}).materialize(
                progress=False
            )
            rows.append(both("8B dense, resident", vb, args.new, plain))
            vb.close()
        if "exact" in args.parts:
            vb = vbrt.wrap(model, "exact", tiers={"gpu": {"budget": "24GiB"}}).materialize(progress=False)
            rows.append(both("8B exact, resident", vb, args.new, plain))
            for share in (50, 10):
                vb.set_budget("gpu", vb.plan.page_bytes * share // 100)
                rows.append(
                    both(f"8B exact, {share} % of the pages", vb, 12, plain[:, : plain.shape[1] - args.new + 12])
                )
            vb.close()
        del model, vb
    if "experts" in args.parts:
        torch.cuda.empty_cache()
        model = build(12, torch.device("cuda"))
        plain = generate(model, 1, args.new)
        vb = vbrt.wrap(model, "dense", policy={"kind": "experts"}, tiers={"gpu": {"budget": "60GiB"}})
        vb.materialize(progress=False)
        rows.append(both("12 layers of Qwen3-30B-A3B dense, resident", vb, args.new, plain))
        vb.set_budget("gpu", 4 << 30)
        rows.append(both("12 layers of Qwen3-30B-A3B dense, 4 GiB", vb, args.new, plain))
        vb.close()
    if args.out is not None:
        args.out.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
