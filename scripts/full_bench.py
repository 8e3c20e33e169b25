"""Training of models larger than the GPU: vbrt's mode "full" beside resident training and beside its peers.

Each measurement is a process of its own; a part adds its figures to `full-<gpu>.json` under --out, or what failed:

    peers     1.5 B parameters, 16 k tokens a step: resident, torchao, FSDP2, DeepSpeed: peak memory, tokens/s
    full      the same from the tiers, with activations computed again, and offloaded on a small GPU
    large     8 B on 24 GB: 4 k, 16 k and 32 k tokens a step, beside link, update and compute, each by itself
    largest   13 B on 24 GB, ten steps
    bits      350 M for 100 steps, and the same resident: losses and weights, bit for bit
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # deterministic
os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")  # resident memory near the peak

import torch  # after the checkout is on the path

from scripts.full_models import SHAPES, batch, measured
from scripts.full_peers import PEERS
from scripts.full_profile import profiled
from scripts.full_runs import CONTEXT, RUNS, limited
from scripts.measuring import machine

K = 1024


def peer(options: argparse.Namespace) -> None:
    """Measure one peer in this process."""
    limited(options.limit)
    start, shape = time.perf_counter(), SHAPES[options.shape]
    _, step = PEERS[options.way](shape)
    ready, ids = time.perf_counter() - start, batch(shape, options.tokens, CONTEXT)
    found = measured(lambda: step(ids), steps=options.steps)
    found |= {"profile": profiled(lambda: step(ids))} if options.profile else {}
    print(json.dumps({"tokens_per_s": options.tokens / found["seconds"], "ready_s": round(ready, 1), **found}))


ALL = {"peer": peer, **RUNS}
DEFAULTS = {
    "shape": "1.5b",
    "tokens": 16 * K,
    "steps": 3,
    "parts": 1,
    "limit": None,
    "activations": "recompute",
    "training": {},
    "profile": False,
}


def in_process(run: str, limit_s: float, /, **given: object) -> dict:
    """Do one run in a process of its own, whose rows are shown as they come; what went wrong is in the last row, too,
    beside what was known by then."""
    settings = {**DEFAULTS, **given}
    with tempfile.TemporaryFile("w+") as errors:
        command = [sys.executable, __file__, "--run", json.dumps({"run": run, **settings})]
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        env = {**os.environ, "PYTHONPATH": path}
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, env=env, text=True)
        found: dict = {}
        reader = threading.Thread(target=_read, args=(process.stdout, found))
        reader.start()
        try:
            code: object = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            code = f"not done within {limit_s:.0f} s"
        reader.join()
        errors.seek(0)
        said = errors.read().strip()
    if code:
        sys.stderr.write(said[-3000:] + "\n")
        found["failed"] = code if isinstance(code, str) else (said.splitlines() or ["no word"])[-1][:300]
    return {**{key: settings[key] for key in ("shape", "tokens", "limit", "activations")}, **found}


def _read(lines: Iterable[str], found: dict) -> None:
    """Have `found` be the last row of a process; show each at once: who stops this script has seen them."""
    for line in lines:
        if line.startswith("{"):
            row = json.loads(line)
            found.clear()
            found.update(row)
            shown(row)


def shown(row: dict) -> dict:
    """Print a row, and return it."""
    print(json.dumps({k: v for k, v in row.items() if k not in ("resident", "full")})[:900], flush=True)
    return row


def peers(options: argparse.Namespace) -> list[dict]:
    """Measure each peer; a row each."""
    names = [name for name in PEERS if name in (options.only or PEERS)]
    given = {"profile": options.profile}
    return [shown({"way": name, **in_process("peer", options.seconds, way=name, **given)}) for name in names]


def full(options: argparse.Namespace) -> list[dict]:
    """Measure the model of `peers` from the tiers."""
    ways = {"vbrt, recomputed": {}, "vbrt, offloaded, small GPU": {"activations": "offload", "limit": 10.0}}
    given = {"training": options.training, "profile": options.profile}
    return [
        shown({"way": way, **in_process("steps", options.seconds, **given, **own)})
        for way, own in ways.items()
        if way in (options.only or ways)
    ]


def large(options: argparse.Namespace) -> dict:
    """Measure the 8 B shape."""
    sizes = {"sizes": options.sizes or [16 * K, 4 * K, 32 * K], "at_once": options.at_once, "steps": 2}
    given = {"shape": "8b", "limit": 24.0, "activations": "offload", "training": options.training, **sizes}
    return shown(in_process("large", options.seconds, **given))


def largest(options: argparse.Namespace) -> dict:
    """Measure the largest model."""
    given = {"shape": options.shape, "limit": 24.0, "steps": options.steps, "tokens": 8 * K}
    return shown(in_process("largest", options.seconds, training=options.training, **given))


def bits(options: argparse.Namespace) -> dict:
    """Compare two trainings bit for bit."""
    given = {"shape": "350m", "tokens": K, "steps": 100, "seconds": options.seconds - 30, "training": options.training}
    return shown(in_process("bits", options.seconds, **given))


PARTS: dict[str, Callable[[argparse.Namespace], object]] = {
    "peers": peers,
    "full": full,
    "large": large,
    "largest": largest,
    "bits": bits,
}


def add(out: Path, part: str, found: object) -> None:
    """Add a part's figures to the results of this GPU."""
    device = torch.cuda.get_device_name().lower().replace(" ", "-")
    path = out / f"full-{device}.json"
    result = json.loads(path.read_text()) if path.exists() else {}
    result |= {"machine": machine(), part: found}
    out.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")


def arguments() -> argparse.ArgumentParser:
    """Return what reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--part", action="append", choices=list(PARTS), default=[])
    parser.add_argument("--run", type=json.loads, help="one measurement, here: for this script's own processes")
    parser.add_argument("--only", action="append", help="of the peers, or of the ways to train from the tiers")
    parser.add_argument("--profile", action="store_true", help="a step more for each of these: what the GPU did")
    parser.add_argument("--sizes", type=int, nargs="+", help="tokens a step of the 8 B shape")
    parser.add_argument("--at-once", type=int, default=32 * K, help="tokens of one pass of it")
    parser.add_argument("--shape", default="13b", choices=list(SHAPES), help="of the largest model")
    parser.add_argument("--steps", type=int, default=10, help="of the largest model")
    parser.add_argument("--training", type=json.loads, default={}, help="more keys of [training], as JSON")
    parser.add_argument("--seconds", type=float, default=100, help="that one measurement may take")
    return parser


def main() -> None:
    options = arguments().parse_args()
    if options.run:
        ALL[options.run["run"]](argparse.Namespace(**options.run))
        return
    if not torch.cuda.is_available():
        sys.exit("error: scripts/full_bench.py measures a GPU, and torch finds no CUDA device here")
    for part in options.part or PARTS:
        try:
            add(options.out, part, PARTS[part](options))
        except Exception:  # noqa: BLE001  # the other parts have figures all the same
            traceback.print_exc()
            add(options.out, part, {"failed": traceback.format_exc().strip().splitlines()[-1]})


if __name__ == "__main__":
    main()
