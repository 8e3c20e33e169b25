"""Milliseconds to the first token of a process that has computed nothing, on the shape of an 8B model.

Each case is a process of its own: eager bf16; `fp4` with an empty cache of compiled kernels; `fp4` with the kernels
that the process before has compiled; `fp4` with an empty cache and nothing compiled ahead, so that each launch compiles
what it needs. Loading and encoding are over before the clock starts. Says of each kernel how long compiling it (or
reading it) took, and whether its first launch found it: "ready", or "waited" for the thread that was at it, or had to
compile it, which was foreseen ("compiled"), "unforeseen", or had "failed" ahead. Rows are added to a results file of
scripts/generate_bench.py.

    python3 scripts/generate_cold.py [--layers 32] [--cases 0 1 2 3] [--out results.json]
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

EAGER, EMPTY, BEFORE, ALONE = CASES = (
    "bf16, eager",
    "fp4, nothing compiled",
    "fp4, kernels compiled before",
    "fp4, nothing compiled, not ahead",
)
NEW = 12


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--case", choices=CASES, help="measure this one, in this process")
    parser.add_argument("--cases", type=int, nargs="+", choices=range(len(CASES)), default=list(range(len(CASES))))
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.case:
        print(json.dumps(measured(args.case, args.layers)))
        return
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        cases = [CASES[at] for at in args.cases]
        children = [(case, child(case, args.layers, folder)) for case in cases]  # which import meanwhile
        for case, process in children:
            said, _ = process.communicate("go\n")
            lines = said.strip().splitlines()
            row = (
                json.loads(lines[-1]) if process.returncode == 0 and lines else {"error": f"exit {process.returncode}"}
            )
            rows.append({"case": f"cold: {case}", "batch": 1, **row})
            print("\n".join(told(rows[-1])), flush=True)
    if args.out:
        from scripts.generate_bench import add_rows
        from scripts.measuring import machine

        add_rows(args.out, {"machine": machine(), "layers": args.layers}, rows)


def told(row: dict) -> list[str]:
    """Lines about a row: its tokens, then a kernel a line in the order of first launches."""
    if "error" in row:
        return [f"{row['case']}: {row['error']}"]
    tokens = [row["first_ms"], *row["later_ms"][:3]]
    head = f"{row['case']}: tokens after {' '.join(f'{ms:.0f}' for ms in tokens)} ms, loaded in {row['load_s']:.1f} s"
    lines = [
        f"  {of['name']:<18} launched at {of['at_ms']:7.0f} ms, {of['how']:<10} compiling took "
        f"{of['compile_ms']:6.0f} ms, the launch waited {of['wait_ms']:6.0f} ms"
        for of in row["launches"]
    ]
    hows = Counter(of["how"] for of in row["launches"])
    return [head, *lines, "  " + json.dumps(dict(hows)), json.dumps(row)]


def child(case: str, layers: int, folder: str) -> subprocess.Popen:
    command = [sys.executable, __file__, "--case", case, "--layers", str(layers)]
    environment = os.environ | {"TRITON_CACHE_DIR": os.path.join(folder, "alone" if case == ALONE else "shared")}
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
    loading = time.perf_counter()
    model = llama_8b(layers)
    if case == ALONE:
        compile_nothing_ahead()
    if case != EAGER:
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
    row["load_s"], row["launches"] = start - loading, launches(start)
    row["kernels"] = [{"name": name, "ms": ms, "at_ms": (at - start) * 1e3} for name, ms, at in compiled]
    for name in ("first", "later"):
        chosen = [ms for _, ms, at in compiled if (at <= first) == (name == "first")]
        row[f"compiled_{name}"], row[f"compiled_{name}_ms"] = len(chosen), sum(chosen)
    return row


def compile_nothing_ahead() -> None:
    """Have each launch compile what it needs."""
    from vbrt.generation.fusion import fuse_step
    from vbrt.generation.generate import Terms

    fuse_step.compile_launches = lambda step: []
    Terms.compile_ahead = lambda terms, tokens, *, soon: []


def launches(start: float) -> list[dict[str, object]]:
    """The first launches of kernels since a moment, in their order."""
    from vbrt.kernels.cuda.compiling import FIRST

    rows = [
        {
            "name": of.name,
            "how": of.how,
            "at_ms": of.at_ns / 1e6 - start * 1e3,
            "wait_ms": of.wait_us / 1e3,
            "compile_ms": of.compile_us / 1e3,
        }
        for of in FIRST
    ]
    return [row for row in rows if row["at_ms"] >= 0]


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
