"""The section of docs/measurements.md that scripts/load_bench.py measures."""

import json
from pathlib import Path
from typing import Any

from scripts.load_bench import KINDS


def load_section(path: Path) -> list[str]:
    """Return the section of docs/measurements.md for a result."""
    found = json.loads(path.read_text())
    where = found["machine"]
    versions = ", ".join(f"{k} {v}" for k, v in where["versions"].items() if v)
    layers = " and ".join(map(str, found["layers"]))
    what = (
        f"Layers of the 8B shape ({layers}; {found['size']}), bf16 encoded to `fp4`, and ModelOpt's NVFP4 copied; "
        'after imports. Seconds. "drive" reads all files with O_DIRECT, at the beginning '
        'and again just before loading, as this virtual drive\'s speed varies. "of the larger" compares with the '
        "larger of the latter read and the encoder."
    )
    return [
        f"## from a drive to a first token, {where['gpu'] or 'CPU'}",
        "",
        what,
        "",
        "| checkpoint | GB | drive | drive, just before | encoder | loaded | first token | in all | of the larger |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
        *(_row(found, kind) for kind in KINDS),
        "",
        *_beside(found),
        f"{where['cpu']}, {where['cores']} cores, {versions}, Python {where['python']}, commit {where['commit']}.",
        "",
    ]


def _row(found: dict[str, Any], kind: str) -> str:
    made, drive = found[f"{kind}_load"], found["drive"]
    encode = found["encoder"]["pageable_seconds"] if kind == "bf16" else 0.0
    before = made["gb"] / made["drive_gb_per_s"]
    read = drive[f"{kind}_gb"], drive[f"{kind}_seconds"], before, encode
    values = (
        *read,
        made["loaded_seconds"],
        made["token_seconds"],
        made["seconds"],
        made["seconds"] / max(before, encode),
    )
    return f"| {kind} | {' | '.join(f'{value:.2f}' for value in values)} |"


def _beside(found: dict[str, Any]) -> list[str]:
    """Return what was measured beside: files in the page cache, fresh host memory, conversion."""
    what = {
        "cached": ("loaded from the page cache: the loader alone", "loaded_seconds"),
        "heap": ("loaded from the drive, through fresh host memory", "loaded_seconds"),
        "convert": ("`vbrt convert` from the drive onto it", "seconds"),
    }
    rows = [
        f"| {kind} | {text} | {found[f'{kind}_{turn}'][key]:.2f} | {found[f'{kind}_{turn}'][key] / gigabytes:.2f} |"
        for turn, (text, key) in what.items()
        for kind in KINDS
        if key in found.get(f"{kind}_{turn}", {})
        for gigabytes in [found[f"{kind}_{turn}"]["gb"]]
    ]
    return ["| checkpoint | | seconds | seconds a GB |", "| --- | --- | --- | --- |", *rows, ""] if rows else []
