"""The section of docs/benchmarks.md that scripts/load_bench.py measures."""

import json
from pathlib import Path

from scripts.load_bench import KINDS


def load_section(path: Path) -> list[str]:
    """Return the section of docs/benchmarks.md for a result."""
    found = json.loads(path.read_text())
    where = found["machine"]
    rows = []
    for kind in KINDS:
        made, read = found[f"{kind}_load"], found["drive"][f"{kind}_seconds"]
        encode = found["encoder"]["pageable_seconds"] if kind == "bf16" else 0.0
        values = (
            found["drive"][f"{kind}_gb"],
            read,
            encode,
            made["loaded_seconds"],
            made["token_seconds"],
            made["seconds"],
        )
        rows.append(
            f"| {kind} | {' | '.join(f'{v:.2f}' for v in values)} | {made['seconds'] / max(read, encode):.2f} |"
        )
    versions = ", ".join(f"{k} {v}" for k, v in where["versions"].items() if v)
    layers = " and ".join(map(str, found["layers"]))
    what = (
        f"Layers of the 8B shape ({layers}; {found['size']}), bf16 into `fp4` and NVFP4 of ModelOpt as it is; files "
        "out of the page cache, in a process whose imports are done. Seconds."
    )
    return [
        f"## from a drive to a first token, {where['gpu'] or 'CPU'}",
        "",
        what,
        "",
        "| checkpoint | GB | drive, O_DIRECT | encoder | loaded | first token | in all | of the larger |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
        *rows,
        "",
        f"{where['cpu']}, {where['cores']} cores, {versions}, Python {where['python']}, commit {where['commit']}.",
        "",
    ]
