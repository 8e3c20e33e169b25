"""docs/benchmarks.md: milliseconds a token of `generate`, from the results of `scripts/generate_bench.py`."""

import json
from pathlib import Path

from scripts.plots import Labels, line_plot

__all__ = ["curves", "generate_table"]

_LABELS = Labels("generate, 8B shape, fp4, batch 1", "pages on the GPU, %", "ms a token")


def generate_table(path: Path, docs: Path) -> list[str]:
    """Rows of all cases; with a plot beside `docs` where shares of the pages were measured."""
    result = json.loads(path.read_text())
    where, rows = result["machine"], [row for row in result["rows"] if "ms" in row]
    named = ", ".join(f"{k} {v}" for k, v in where["versions"].items() if v)
    what = (
        f"A Llama of the 8B shape ({result['layers']} layers, random weights), greedy, a prompt of 128 tokens, up to "
        "128 new ones, as a user types it. First: the call with one new token. Replay: the recorded step alone, nobody "
        "waiting in between; what is missing to ms is transformers' loop. Recording: all of it, comparisons with eager "
        "steps apart."
    )
    out = [
        f"## generate, {where['gpu']}",
        "",
        what,
        "",
        *([result["note"], ""] if result.get("note") else []),
        "| case | batch | ms a token | replay ms | first token ms | recording ms | steps captured | GPU peak GB |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
        *map(_row, rows),
        "",
    ]
    drawn = curves(rows)
    if drawn:
        name = f"{path.stem}.svg"
        line_plot(docs.parent / name, drawn, _LABELS)
        out += ["One token against the pages on the GPU, beside the larger of link and resident step:", ""]
        out += [f"![ms a token against the budget]({name})", ""]
    return [*out, f"{named}, Python {where['python']}, commit {where['commit']}.", ""]


def _row(row: dict) -> str:
    steps = row.get("captured", 0) + row.get("eager", 0)
    captured = f"{row['captured']} of {steps}" if steps else "–"
    shown = [f"{row[name]:.{digits}f}" if row.get(name) else "–" for name, digits in _COLUMNS]
    ms, replay, first, record, peak = shown
    return f"| {row['case']} | {row['batch']} | {ms} | {replay} | {first} | {record} | {captured} | {peak} |"


_COLUMNS = (("ms", 2), ("replay_ms", 2), ("first_ms", 1), ("record_ms", 0), ("peak_gb", 1))


def curves(rows: list[dict]) -> dict[str, dict[float, float]]:
    """Measured and limit, by percent of the pages; empty where no shares were measured."""
    shares = [row for row in rows if "share" in row]
    if not shares:
        return {}
    return {
        "measured": {row["share"]: row["ms"] for row in shares},
        "larger of link and resident step": {row["share"]: row["limit_ms"] for row in shares},
    }
