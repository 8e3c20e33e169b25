"""How long a model with routed experts takes until it is ready; write benchmarks/results/experts-ready-<gpu>.json.

Layers of Qwen3-30B-A3B's shape with random bf16 weights in pageable host memory are wrapped and encoded, into pages on
the GPU and into page-locked pages in host memory. What counts is bytes of dense weights a second, from the call of
`wrap` until all pages are there.

    python3 scripts/experts_ready.py [--layers 12] [--out results.json]
"""

import argparse
import json
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # after the checkout is on the path

import vbrt
from scripts.experts_decode import build
from scripts.measuring import machine

HOMES = {"gpu": "64GiB", "cpu": "1GiB"}  # of most pages, and the budget of the GPU that brings that about


def rows(layers: int, device: torch.device, **shape: int) -> Iterator[dict[str, object]]:
    """Yield the row of each home of the pages. The model is made on `device` and computes there."""
    for home in HOMES if device.type == "cuda" else ("cpu",):
        model = build(layers, device, **shape).to("cpu")
        tiers = {"gpu": {"budget": HOMES[home]}} if device.type == "cuda" else {"gpu": {"enabled": False}}
        start = time.perf_counter()
        with vbrt.wrap(model, "fp4", tiers=tiers) as vb:
            vb.materialize(progress=False)
            if device.type == "cuda":
                torch.cuda.synchronize()
            seconds = time.perf_counter() - start
            pages = vb.stack.pages.values()
            dense = sum(swap.dense_bytes for swap in vb.plan.swaps)
            yield {
                "home": home,
                "pages": len(pages),
                "at_home": sum(vb.stack.names[page.home] == home for page in pages),
                "pages_gb": sum(page.nbytes for page in pages) / 1e9,
                "dense_gb": dense / 1e9,
                "seconds": seconds,
                "dense_gb_per_s": dense / 1e9 / seconds,
                "kernel": sorted({layer.kernel for layer in vb.stats().layers.values()}),
                "fallbacks": list(vb.stats().fallbacks),
            }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    done = []
    for turn in range(2):  # what is compiled, and the first page-locked memory of a process, come in the first
        for row in rows(args.layers, torch.device("cuda", 0)):
            row["turn"] = turn
            print(json.dumps({k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()}), flush=True)
            done.append(row)
    name = re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name().lower()).strip("-")
    out = args.out or ROOT / "benchmarks" / "results" / f"experts-ready-{name}.json"
    out.write_text(json.dumps({"machine": machine(), "layers": args.layers, "rows": done}, indent=1) + "\n")


if __name__ == "__main__":
    main()
