"""The table of `scripts/valley_bench.py`'s results in docs/measurements.md."""

import json
from pathlib import Path

WHAT = (
    "Speedup of the 4-bit layer over bf16 cuBLAS, at shapes (K→N) and token counts outside the launch table. "
    "All weights rotate past L2; interleaved CUDA graphs."
)


def valley_table(path: Path, what: str = "fused layers at 65 to 4096 tokens") -> list[str]:
    """Ratios of each shape and number of tokens, a table a format; `what`: the heading."""
    result = json.loads(path.read_text())
    named = ", ".join(f"{k} {v}" for k, v in result["versions"].items() if v)
    note = [f"{result['note']}.", ""] if "note" in result else []
    out = [f"## {what}, {result['gpu']}", "", WHAT, "", *note]
    for format, figures in result["summary"].items():
        rows = [row for row in result["rows"] if row["format"] == format]
        tokens = sorted({row["m"] for row in rows})
        shapes = sorted({(row["k"], row["n"]) for row in rows})
        ratios = {(row["k"], row["n"], row["m"]): row["ratio"] for row in rows}
        out += [
            (
                f"`{format}`: {figures['points']} points, lowest {figures['lowest']:.2f}, geometric mean "
                f"{figures['geometric_mean']:.3f}, largest relative error {figures['largest_error']:.1e}."
            ),
            "",
            f"| shape | {' | '.join(map(str, tokens))} |",
            "| --- " * (len(tokens) + 1) + "|",
            *(f"| {k}→{n} | {' | '.join(f'{ratios[k, n, m]:.2f}' for m in tokens)} |" for k, n in shapes),
            "",
        ]
    return [*out, f"{named}, CUDA {result['cuda']}, commit {result['commit']}.", ""]
