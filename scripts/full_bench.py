"""Training of models larger than the GPU: vbrt's mode "full" beside resident training and beside its peers.

Each part is a process of its own (`--part`), adds its figures to `full-<gpu>.json` under --out, and says what failed:

    peers     1.5 B parameters, 16 k tokens a step: resident, torchao, FSDP2, DeepSpeed: peak memory, tokens/s
"""

import argparse
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")  # resident memory near the peak

import torch  # after the checkout is on the path

from scripts.full_models import SHAPES, batch, measured
from scripts.full_peers import PEERS
from scripts.measuring import machine

CONTEXT = 2048


def limited(gigabytes: float | None) -> None:
    """Make the GPU as small as that, CUDA's own memory aside."""
    if gigabytes is not None:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(gigabytes * 1e9 / total)


def peer(name: str, tokens: int, steps: int, limit: float | None) -> dict:
    """Measure one peer in this process."""
    limited(limit)
    start = time.perf_counter()
    shape = SHAPES["1.5b"]
    model, step = PEERS[name](shape)
    ready = time.perf_counter() - start
    ids = batch(shape, tokens, CONTEXT)
    found = measured(lambda: step(ids), steps=steps)
    del model
    return {"tokens_per_s": tokens / found["seconds"], "ready_s": round(ready, 1), **found}


def peers(options: argparse.Namespace) -> list[dict]:
    """Measure each peer in a process of its own; a row each."""
    rows = []
    for name in options.only or PEERS:
        row = {"way": name, "tokens": options.tokens, "limit_gb": options.limit}
        rows.append(row | _in_process(["--peer", name], options))
        print(json.dumps(rows[-1])[:400], flush=True)
    return rows


def _in_process(arguments: list[str], options: argparse.Namespace) -> dict:
    """Run this script again for one measurement; what went wrong is a row, too."""
    shared = ["--tokens", str(options.tokens), "--steps", str(options.steps)]
    if options.limit is not None:
        shared += ["--limit", str(options.limit)]
    try:
        done = subprocess.run(
            [sys.executable, __file__, *arguments, *shared],
            capture_output=True,
            text=True,
            check=False,
            timeout=options.seconds,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
        )
    except subprocess.TimeoutExpired:
        return {"failed": f"not done within {options.seconds} s"}
    if done.returncode:
        sys.stderr.write(done.stderr[-3000:])
        return {"failed": (done.stderr.strip().splitlines() or ["no word"])[-1][:300]}
    return json.loads(done.stdout.splitlines()[-1])


PARTS: dict[str, Callable[[argparse.Namespace], object]] = {"peers": peers}


def add(out: Path, part: str, found: object) -> None:
    """Add a part's figures to the results of this GPU."""
    device = torch.cuda.get_device_name().lower().replace(" ", "-")
    path = out / f"full-{device}.json"
    result = json.loads(path.read_text()) if path.exists() else {}
    result |= {"machine": machine(), part: found}
    out.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--part", action="append", choices=list(PARTS), default=[])
    parser.add_argument("--peer", choices=list(PEERS), help="measure this one here, and print it")
    parser.add_argument("--only", action="append", help="of the peers")
    parser.add_argument("--tokens", type=int, default=16384, help="a step")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--limit", type=float, help="GB of GPU memory")
    parser.add_argument("--seconds", type=float, default=60, help="that one measurement may take")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("error: scripts/full_bench.py measures a GPU, and torch finds no CUDA device here")
    if options.peer:
        print(json.dumps(peer(options.peer, options.tokens, options.steps, options.limit)))
        return
    for part in options.part or PARTS:
        try:
            add(options.out, part, PARTS[part](options))
        except Exception:  # noqa: BLE001  # the other parts have figures all the same
            traceback.print_exc()
            add(options.out, part, {"failed": traceback.format_exc().strip().splitlines()[-1]})


if __name__ == "__main__":
    main()
