"""The section of docs/measurements.md that scripts/update_bench.py measures."""

import json
from pathlib import Path


def update_table(path: Path) -> list[str]:
    """Return the section of docs/measurements.md for a result."""
    found = json.loads(path.read_text())
    where, by_threads = found["machine"], found["threads"]
    versions = ", ".join(f"{k} {v}" for k, v in where["versions"].items() if v)
    names = list(next(iter(by_threads.values())))
    equal = "All rules are bit-identical to torch's there." if all(found["same bits as torch"].values()) else ""
    what = (
        f"The update of {found['parameters'] / 1e6:.0f} M parameters in host memory: billions of parameters a second, "
        "and in brackets GB/s of required reads and writes. Halves are bf16 and 16 bits; torch's AdamW has fp32 "
        f"parameters and gradients; `memory` is an in-place sum of two arrays. {equal}"
    )
    return [
        f"## updates, host of {where['gpu'] or 'a CPU'}",
        "",
        what.strip(),
        "",
        f"| | {' | '.join(f'{threads} threads' for threads in by_threads)} |",
        "| --- " * (len(by_threads) + 1) + "|",
        *(f"| {name} | {' | '.join(_cell(of[name]) for of in by_threads.values())} |" for name in names),
        "",
        f"{where['cpu']}, {where['cores']} cores, {versions}, Python {where['python']}, commit {where['commit']}.",
        "",
    ]


def _cell(one: dict[str, float]) -> str:
    return f"{one['parameters_s'] / 1e9:.2f} ({one['bytes_s'] / 1e9:.0f})"
