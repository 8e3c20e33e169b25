"""The section of docs/measurements.md that scripts/live_cost.py measures."""

import json
from pathlib import Path

_WHAT = (
    "`generate` in `fp4` on {model}, unwatched, polled twice a second by another process as `vbrt top` does, "
    'and under `vb.live()`; interleaved, medians, ms of {clock}; the spread is within one case. "of a core" is the '
    "CPU use of the watched process while idle (scripts/live_cost.py)."
)
_GPU = {"model": "the 8B shape", "clock": "wall-clock time"}
_CPU = {"model": "a small Llama of 32 layers", "clock": "the process's CPU time, which a busy machine disturbs"}


def live_table(path: Path) -> list[str]:
    """Return the section of docs/measurements.md for a result."""
    found = json.loads(path.read_text())
    figures, where = found["figures"], found["machine"]
    parts = {name: of for name, of in figures.items() if isinstance(of, dict) and "ms_a_token" in str(of)}
    cores = figures["percent of a core"]
    head = " | ".join(f"{name}: ms a token | more | spread" for name in parts)
    versions = ", ".join(f"{k} {v}" for k, v in where["versions"].items() if v)
    return [
        f"## overhead of watching, {where['gpu'] or 'CPU'}",
        "",
        _WHAT.format(**(_GPU if where["gpu"] else _CPU)),
        "",
        f"| | {head} | of a core |",
        "| --- | " + " | ".join(["---"] * (3 * len(parts) + 1)) + " |",
        *(_row(case, [of[case] for of in parts.values()], cores[case]) for case in cores),
        "",
        _told(figures),
        "",
        f"{where['cpu']}, {where['cores']} cores, {versions}, Python {where['python']}, commit {where['commit']}.",
        "",
    ]


def _told(figures: dict) -> str:
    meanwhile = figures["recorded meanwhile"]
    told = f"A sample takes {figures['sample_us']:.0f} µs, counting a pass {figures['count_a_pass_us']:.1f} µs."
    if not meanwhile["captured"]:
        return told
    return (
        f"{told} {meanwhile['samples']:,} samples without a pause during {meanwhile['captured']} captured steps: "
        f"{meanwhile['recordings']} recordings, {len(meanwhile['errors'])} errors."
    )


def _row(case: str, rows: list[dict[str, float]], core: float) -> str:
    cells = [f"{row['ms_a_token']:.3f} | {row['more_percent']:+.2f} % | {row['spread_percent']:.1f} %" for row in rows]
    return f"| {case} | {' | '.join(cells)} | {core:.2f} % |"
