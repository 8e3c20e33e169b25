"""The section of docs/measurements.md on joined decode steps, from the results of `scripts/step_bench.py`."""

import json
from pathlib import Path

__all__ = ["joined_table"]

#: what rows have that are no times of steps
_SENTENCES = {"eager", "both joined", "record"}


def joined_table(path: Path) -> list[str]:
    """Milliseconds of captured steps as they are and joined, and what each pattern gives."""
    result = json.loads(path.read_text())
    where, rows = result["machine"], result["rows"]
    what = (
        "Decode steps with random weights and transformers' static cache of 1,024 places, a CUDA graph each: as the "
        'model computes them, and fused ("joined") by `vbrt.generation.fusion.fuse_step`. Errors are relative errors '
        "of the logits against the eager step; seconds: capturing, fusing and checking, after kernels compiled."
    )
    out = [
        f"## fused decode steps, {where['gpu']}",
        "",
        what,
        "",
        "| step | ms | as it is / joined | error | s |",
        "| --- " * 5 + "|",
    ]
    for row in rows:
        if "ms" in row and "cost_ms" not in row:
            error, seconds = row.get("error"), row.get("join_s")
            numbers = [f"{row['ms']:.2f}", _number(row.get("speedup"), 2), _number(error, 3), _number(seconds, 2)]
            out.append(f"| {row['case']} | {' | '.join(numbers)} |")
    out += ["", "| left out | ms more |", "| --- | --- |"]
    out += [f"| {row['case']} | {row['cost_ms']:.2f} |" for row in rows if "cost_ms" in row]
    out += ["", *(_sentence(row) for row in rows if _SENTENCES & row.keys()), ""]
    for row in rows:
        if "top" in row and "joined" in row["case"]:
            out += [f"{row['case']}:", "", "| kernel | launches a step | µs a step |", "| --- " * 3 + "|"]
            out += [f"| {name} | {count} | {us:.0f} |" for name, count, us in row["top"]]
            out += ["", "Kernels that start before the previous one ends are counted from their early start.", ""]
    named = ", ".join(f"{k} {v}" for k, v in where["versions"].items() if v)
    return [*out, f"{named}, Python {where['python']}, commit {where['commit']}.", ""]


def _number(value: float | None, digits: int) -> str:
    return "–" if value is None else f"{value:.{digits}f}"


def _sentence(row: dict) -> str:
    figures = ", ".join(f"{name} {value:.3g}" for name, value in row.items() if isinstance(value, float))
    return f"- {row['case']}: {figures}"
