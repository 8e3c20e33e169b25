"""The sections of docs/measurements.md that scripts/capability_bench.py measures."""

import json
import statistics
from pathlib import Path


def capability_table(path: Path) -> list[str]:
    """Return the section of docs/measurements.md for a result."""
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
    return [f"## other compute capabilities, {where['gpu']}", "", what, "", *lines, "", _measured_on(where), ""]


def mma_table(path: Path) -> list[str]:
    """Return the section of docs/measurements.md for a sweep of launches with `mma.sync`."""
    found = json.loads(path.read_text())
    where, taken = found["machine"], found["capability"]
    tokens, formats = ([*dict.fromkeys(row[key] for row in found["formats"])] for key in ("tokens", "format"))
    what = (
        f"Weights that a kernel with `mma.sync` multiplies as they are, beside decoding them for the vendor's matmul, "
        f"on a GPU taken for {taken}. That matmul uses all of this GPU, which one of that capability does not have. "
        "Time of decoding and matmul / fastest launch, lowest and highest of three shapes:"
    )
    lines = [f"| tokens | {' | '.join(formats)} |", "| --- |" + " --- |" * len(formats)]
    for count in tokens:
        cells = []
        for format in formats:
            all_us = [row["us"] for row in found["formats"] if (row["tokens"], row["format"]) == (count, format)]
            ratios = [us["decoded"] / min(t for name, t in us.items() if " ring " in name) for us in all_us]
            cells.append(f"{min(ratios):.2f}, {max(ratios):.2f}")
        lines.append(f"| {count} | {' | '.join(cells)} |")
    of = (
        "Routed experts in `nvfp4`, an MoE layer: microseconds with the launches that were chosen before the sweep, "
        "and how many times as long decoding with torch's grouped matmul took."
    )
    lines += ["", of, "", "| layer | pairs per expert | us | decoded |", "| --- | --- | --- | --- |"]
    for row in found["grouped"]:
        us = row["us"]
        cells = row["layer"], f"{row['mean_pairs']:.0f}", f"{us['taken']:.0f}", f"{us['decoded'] / us['taken']:.2f}"
        lines.append(f"| {' | '.join(cells)} |")
    return [f"## launches with `mma.sync`, {where['gpu']}", "", what, "", *lines, "", _measured_on(where), ""]


def _measured_on(where: dict) -> str:
    versions = ", ".join(f"{k} {v}" for k, v in where["versions"].items() if v)
    later = " with changes that were committed later" if where.get("modified") else ""
    return f"{where['gpu']}, {versions}, CUDA {where['cuda']}, commit {where['commit']}{later}."
