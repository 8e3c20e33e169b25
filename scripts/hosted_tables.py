"""docs/measurements.md: weights shared by the link and the CPU, from the results of scripts/hosted_bench.py."""

import json
from pathlib import Path

__all__ = ["hosted_table", "room_of"]

_WHAT = (
    "A Llama of the 8B shape in `fp4` with random weights, batch 1, a prompt of 128 tokens, ms a token of `generate`, "
    'from `scripts/hosted_bench.py`. `"device"` moves all that does not fit, `"auto"` has the CPU compute some of it '
    "where it lies. An emulated link copies the bytes of each page two or four times."
)
_HEAD = ("room on the GPU", "link", "threads of torch", "all moved", "shared", "computed by the CPU, at rates measured")


def room_of(share: str) -> str:
    """Name a row's room."""
    return "a ring of 110 MiB" if share == "ring" else f"{share} % of the pages"


def hosted_table(path: Path) -> list[str]:
    """Return the section."""
    result = json.loads(path.read_text())
    where, rows, found = result["machine"], result["rows"], {}
    for row in rows:
        found.setdefault((row["share"], row["copies"], row["threads"]), {})[row["where"]] = row
    lines = []
    for (share, copies, threads), by in found.items():
        moved = f"{by['device']['ms']:.1f}" if "device" in by else "–"
        link = "as it is" if copies == 1 else f"emulated, 1/{copies}"
        shared = by["auto"]
        lines.append([room_of(share), link, str(threads), moved, f"{shared['ms']:.1f}", shared["told"]])
    versions = ", ".join(f"{name} {version}" for name, version in where["versions"].items() if version)
    return [
        f"## weights shared by link and CPU, {where['gpu']}",
        "",
        _WHAT,
        "",
        f"| {' | '.join(_HEAD)} |",
        "| --- " * len(_HEAD) + "|",
        *(f"| {' | '.join(line)} |" for line in lines),
        "",
        f"{where['cpu']}, {where['cores']} cores; {versions}, Python {where['python']}, commit {where['commit']}.",
        "",
    ]
