"""Milliseconds to the first token of a process that has computed nothing, on the shape of an 8B model.

Each case is a process of its own: eager bf16; `fp4` with an empty cache of compiled kernels; `fp4` with the kernels
that the process before has compiled. Loading and encoding are over before the clock starts. Rows are added to a results
file of scripts/generate_bench.py.

    python3 scripts/generate_cold.py [--layers 32] [--out results.json]
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

CASES = ("bf16, eager", "fp4, nothing compiled", "fp4, kernels compiled before")
NEW = 12


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--case", choices=CASES, help="measure this one, in this process")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.case:
        print(json.dumps(measured(args.case, args.layers)))
        return
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        children = [(case, child(case, args.layers, folder)) for case in CASES]  # which import meanwhile
        for case, process in children:
            said, _ = process.communicate("go\n")
            lines = said.strip().splitlines()
            row = (
                json.loads(lines[-1]) if process.returncode == 0 and lines else {"error": f"exit {process.returncode}"}
            )
            rows.append({"case": f"cold: {case}", "batch": 1, **row})
            print(json.dumps(rows[-1]), flush=True)
    if args.out:
        from scripts.generate_bench import add_rows
        from scripts.measuring import machine

        add_rows(args.out, {"machine": machine(), "layers": args.layers}, rows)


def child(case: str, layers: int, folder: str) -> subprocess.Popen:
    command = [sys.executable, __file__, "--case", case, "--layers", str(layers)]
    environment = os.environ | {"TRITON_CACHE_DIR": folder}
    return subprocess.Popen(
        command, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, encoding="utf-8"
    )


def measured(case: str, layers: int) -> dict[str, object]:
    """Milliseconds of a call's first tokens, and the kernels that were compiled or read for them."""
    import torch
    import transformers.models.llama.modeling_llama  # noqa: F401  the import is not what is measured

    import vbrt
    from scripts.generate_bench import Clock, generate
    from scripts.measuring import llama_8b

    sys.stdin.readline()
    model = llama_8b(layers)
    if case != CASES[0]:
        model = vbrt.wrap(model, "fp4", tiers={"gpu": {"budget": "24GiB"}}).materialize(progress=False)
    torch.cuda.synchronize()
    clock = Clock()
    with compilations() as compiled:
        start = time.perf_counter()
        generate(model, 1, NEW, clock=clock)
        torch.cuda.synchronize()
    first = clock.moments[0]
    gaps = [b - a for a, b in pairwise(clock.moments)]
    row: dict[str, object] = {"first_ms": (first - start) * 1e3, "later_ms": [gap * 1e3 for gap in gaps]}
    row["kernels"] = [{"name": name, "ms": ms, "at_ms": (at - start) * 1e3} for name, ms, at in compiled]
    for name in ("first", "later"):
        chosen = [ms for _, ms, at in compiled if (at <= first) == (name == "first")]
        row[f"compiled_{name}"], row[f"compiled_{name}_ms"] = len(chosen), sum(chosen)
    return row


@contextlib.contextmanager
def compilations() -> Iterator[list[tuple[str, float, float]]]:
    """Yield a list that gets name, milliseconds and end of each kernel that Triton compiles, or reads from disk."""
    from triton import knobs

    found: list[tuple[str, float, float]] = []

    def heard(*, src: object, times: object, **_: object) -> None:
        stages = sum(micros for _, micros in times.lowering_stages)
        total = times.ir_initialization + stages + times.store_results
        found.append((getattr(src, "name", "?"), total / 1e3, time.perf_counter()))

    knobs.compilation.listener = heard
    try:
        yield found
    finally:
        knobs.compilation.listener = None


if __name__ == "__main__":
    main()
