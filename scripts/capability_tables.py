"""The section of docs/benchmarks.md that scripts/capability_bench.py measures."""

import json
import statistics
from pathlib import Path


def capability_table(path: Path) -> list[str]:
    """Return the section of docs/benchmarks.md for a result."""
    found = json.loads(path.read_text())
    where, taken, rows = found["machine"], found["capability"], found["linear"]
    tokens = sorted({row["tokens"] for row in rows})
    shapes = len({(row["k"], row["n"]) for row in rows})
    names = {"own": "its own kernels", "taken": f"kernels for {taken}"}
    what = (
        f"Kernels chosen as for a GPU of compute capability {taken}, without `warpgroup_mma`, beside its own. Linear "
        f"layers in `fp4`: bf16 matmul time / ours, lowest and mean of {shapes} shapes to which nothing was fitted. "
        "The vendor's matmul uses all of the GPU in both, which a GPU of that capability does not have: what such a "
        "GPU does is not measured."
    )
    lines = [f"| tokens | {' | '.join(names.values())} |", "| --- | --- | --- |"]
    for count in tokens:
        cells = [[row[name]["ratio"] for row in rows if row["tokens"] == count] for name in names]
        lines.append(f"| {count} | {' | '.join(f'{min(v):.2f}, {statistics.mean(v):.2f}' for v in cells)} |")
    experts = found["experts"]
    of = "Twelve layers of Qwen3-30B-A3B in `fp4`, milliseconds a token; the GPU decides which experts are resident."
    lines += ["", of, ""]
    lines += [f"| expert pages on the GPU | {' | '.join(names.values())} |", "| --- | --- | --- |"]
    for share in sorted({row["share"] for row in experts}, reverse=True):
        ms = {row["capability"]: row["ms"] for row in experts if row["share"] == share}
        lines.append(f"| {share:.0%} | {' | '.join(f'{ms[name]:.2f}' for name in names)} |")
    versions = ", ".join(f"{k} {v}" for k, v in where["versions"].items() if v)
    end = f"{where['gpu']}, {versions}, CUDA {where['cuda']}, commit {where['commit']}."
    return [f"## other compute capabilities, {where['gpu']}", "", what, "", *lines, "", end, ""]
