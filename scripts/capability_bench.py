"""Paths of GPUs without `warpgroup_mma`, on one that has it: choose kernels as for another compute capability.

    python3 scripts/capability_bench.py [--capability 8.0] [--parts linear experts grouped formats] [--out results.json]

linear: bf16 matmul time / ours by shape and number of tokens, of shapes to which nothing was fitted. experts: a token
of twelve layers of Qwen3-30B-A3B, 4-bit, with a share of the expert pages on the GPU. Each as it is and as for the
other capability, in one process. Rates of the GPU stay its own: what another GPU does is expected, not measured.

grouped, formats: launches of the kernel with `mma.sync` for routed experts and for formats of rows of codes, checked
and timed beside decoding, see `mma_sweep.py`; not among the default parts.
"""

import argparse
import json
import statistics
import sys
import time
from functools import partial
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # after the checkout is on the path
import torch.nn.functional as F

import vbrt
from scripts import mma_sweep
from scripts.experts_decode import build
from scripts.gpu_timing import BF16, CUDA, dense_weights, machine, planes_of, side_by_side
from vbrt.kernels.cuda import devices
from vbrt.kernels.cuda.e2m1 import linear as e2m1_linear

SHAPES = [(2048, 5632), (3072, 8192), (3584, 18944), (5120, 13824), (2560, 10240), (1536, 8960), (4096, 11008),
          (8192, 1024), (6144, 16384)]  # fmt: skip  # (K, N)
TOKENS = (16, 33, 64, 100, 200, 320, 777, 2048)
SHARES = (0.5, 0.25)
PARTS = ("linear", "experts", "grouped", "formats")


def linear_rows(taken: tuple[int, int]) -> list[dict]:
    """Rows of one shape and number of tokens: the kernels' names, and bf16 time / ours of both."""
    rows = []
    for k, n in SHAPES:
        dense = dense_weights(k, n)
        planes = [planes_of("nvfp4", weight) for weight in dense] * 3
        for tokens in TOKENS:
            x = torch.randn(tokens, k, device=CUDA, dtype=BF16)
            row = {"k": k, "n": n, "tokens": tokens}
            for name, capability in (("own", None), ("taken", taken)):
                devices.taken_for(capability)
                route = e2m1_linear.route(x, planes[0])
                sets = [partial(F.linear, x, w) for w in dense], [partial(e2m1_linear.linear, x, p) for p in planes]
                bf16, ours = side_by_side(*sets, repeats=9)
                row[name] = {"kernel": route, "bf16_us": round(bf16, 2), "us": round(ours, 2), "ratio": bf16 / ours}
            rows.append(row)
            print(k, n, tokens, *(f"{row[name]['kernel']} {row[name]['ratio']:.2f}" for name in ("own", "taken")))
    devices.taken_for(None)
    return rows


def experts_rows(taken: tuple[int, int]) -> list[dict]:
    """Milliseconds a token with shares of the expert pages on the GPU, least of three calls."""
    rows = []
    for name, capability in (("own", None), ("taken", taken)):
        devices.taken_for(capability)
        model, tiers = build(12, CUDA), {"gpu": {"budget": "24GiB"}}
        vb = vbrt.wrap(model, "fp4", policy={"kind": "experts"}, tiers=tiers).materialize(progress=False)
        ids = torch.arange(64, device=CUDA)[None]
        for share in SHARES:
            vb.set_budget("gpu", int(vb.plan.page_bytes * share))
            times = []
            for _ in range(4):
                torch.cuda.synchronize()
                start = time.perf_counter()
                vb.generate(ids, max_new_tokens=48, min_new_tokens=48, do_sample=False, pad_token_id=0)
                torch.cuda.synchronize()
                times.append((time.perf_counter() - start) / 48 * 1e3)
            decides = {layer.experts.decides for layer in vb.stats(experts=True).layers.values() if layer.experts}
            rows.append(
                {"capability": name, "share": share, "ms": round(min(times[1:]), 3), "decides": sorted(decides)}
            )
            print(rows[-1])
        vb.close()
        del vb, model
        torch.cuda.empty_cache()
    devices.taken_for(None)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--capability", default="8.0", help="major.minor that kernels are chosen for")
    parser.add_argument("--parts", nargs="*", default=["linear", "experts"], choices=PARTS)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("error: scripts/capability_bench.py chooses kernels of a GPU, and torch finds no CUDA device here")
    taken = tuple(map(int, args.capability.split(".")))
    result = {"machine": machine(), "capability": args.capability}
    failed = mma_sweep.failed_checks(args.parts, taken) if {"grouped", "formats"} & set(args.parts) else {}
    said = [f"{check}: {found}" for check, found in failed.items()]
    print(*said, sep="\n", end="\n" * bool(said), flush=True)
    with torch.no_grad():
        for part, rows in (("grouped", mma_sweep.grouped_rows), ("formats", mma_sweep.format_rows)):
            if part in args.parts:
                result[part] = list(rows(taken, failed))
    devices.taken_for(None)
    if "experts" in args.parts:
        result["experts"] = experts_rows(taken)
    if "linear" in args.parts:
        result["linear"] = linear_rows(taken)
        for tokens in TOKENS:
            own, other = ([r[n]["ratio"] for r in result["linear"] if r["tokens"] == tokens] for n in ("own", "taken"))
            means = (f"lowest {min(v):.2f} mean {statistics.mean(v):.2f}" for v in (own, other))
            print(f"{tokens} tokens:", "; taken for another: ".join(means))
    device = torch.cuda.get_device_name().lower().replace(" ", "-")
    out = args.out or ROOT / "benchmarks" / "results" / f"capability-{device}.json"
    out.write_text(json.dumps(result, indent=1) + "\n")
    if failed:
        sys.exit("\n".join(["error: launches that compute something else or do not run", *said]))


if __name__ == "__main__":
    main()
