"""Milliseconds a token of llama.cpp at the shape and GPU budgets of `scripts/hosted_bench.py`; writes JSON.

A Q4_0 file of the 8B shape with random codes (4.5 bits a weight, as nvfp4), decoding after 128 tokens. A room of the
pages is so many layers on the GPU (`-ngl`), and the head, which vbrt keeps there as well.

    python3 scripts/hosted_peers.py --llama-bench PATH [--shares ring 50] [--threads 16 15 8] [--out FILE]

PATH: llama.cpp's `llama-bench`, built with its CUDA backend; `gguf` of its gguf-py must be importable.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from scripts import cpu_models
from scripts.measuring import machine

PROMPT, NEW = 128, 64


def layers_on_gpu(share: str, layers: int) -> int:
    """`-ngl`: the head and so many layers; a ring of 110 MiB holds less than one."""
    return 1 + (0 if share == "ring" else layers * int(share) // 100)


def timed(bench: Path, file: Path, ngl: int, threads: list[int]) -> list[dict]:
    command = [bench, "-m", file, "-ngl", ngl, "-p", 0, "-n", NEW, "-d", PROMPT, "-r", 3, "-o", "json"]
    command += ["-t", ",".join(map(str, threads))]
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(map(str, command))}:\n{done.stderr[-2000:]}")
    return json.loads(done.stdout)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--llama-bench", type=Path, required=True)
    parser.add_argument("--shares", nargs="*", default=["ring", "50"], help="'ring', or per cent of the pages")
    parser.add_argument("--threads", type=int, nargs="*", default=[16, 15, 8])
    parser.add_argument("--shape", choices=list(cpu_models.SHAPES), default="8b")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    rows, layers = [], cpu_models.SHAPES[args.shape].layers
    with tempfile.TemporaryDirectory() as folder:
        file = cpu_models.gguf_file(Path(folder), args.shape, "Q4_0")
        for share in (*args.shares, "cpu"):
            ngl = 0 if share == "cpu" else layers_on_gpu(share, layers)
            for found in timed(args.llama_bench, file, ngl, args.threads):
                row = {"share": share, "ngl": ngl, "threads": found["n_threads"], "ms": 1000 / found["avg_ts"]}
                row |= {"backends": found["backends"], "build": found.get("build_number"), "shape": args.shape}
                rows.append(row)
                print(row, flush=True)
    if args.out:
        args.out.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1))


if __name__ == "__main__":
    main()
