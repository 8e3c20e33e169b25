"""docs/measurements.md: weights shared by the link and the CPU, from the results of scripts/hosted_bench.py."""

import json
from pathlib import Path

from scripts.plots import Labels, line_plot

__all__ = ["hosted_table", "link_of", "peer_ms", "room_of"]

_WHAT = (
    "A Llama of the 8B shape in `fp4` with random weights, a prompt of 128 tokens, ms a step of `generate`, from "
    '`scripts/hosted_bench.py`. "Streamed" (`compute.where = "device"`) moves all that does not fit, "computed" has '
    'the CPU compute all of it where it lies, "both" (`"auto"`, the default) divides it. The limit is the longest of '
    "the bytes that moved at the link's rate, those that were computed at the CPU's (both as measured in the run), and "
    "the resident step. An emulated link copies the bytes of each page two or four times."
)
_PEER = (
    "llama.cpp ({build}, CUDA without flash attention) on the same machine: Q4_0 of the same shape, which has 4.5 bits "
    "a weight as well, the head and as large a share of its layers on the GPU (`-ngl`), the fastest of {threads} "
    "threads, from `scripts/hosted_peers.py`."
)
_HEAD = ("room on the GPU", "link", "threads", "batch", "streamed", "computed", "both", "limit", "llama.cpp")
_HEAD += ("of both, by the CPU",)


def room_of(share: str) -> str:
    """Name a row's room."""
    return {"ring": "a ring of 110 MiB", "100": "all pages"}.get(share, f"{share} % of the pages")


def link_of(copies: int) -> str:
    """Name the link of a row whose pages were copied so often."""
    return "as it is" if copies == 1 else f"emulated, 1/{copies}"


def peer_ms(path: Path) -> dict[str, float]:
    """llama.cpp's fastest ms a token by share, as `scripts/hosted_peers.py` wrote them; empty without its file."""
    best: dict[str, float] = {}
    for row in json.loads(path.read_text())["rows"] if path.exists() else ():
        best[row["share"]] = min(row["ms"], best.get(row["share"], row["ms"]))
    return best


def hosted_table(path: Path, docs: Path) -> list[str]:
    """Return the section of the page `docs`; its plot is written to the same directory."""
    result = json.loads(path.read_text())
    where = result["machine"]
    (resident,) = (row["ms"] for row in result["rows"] if row["share"] == "100")
    peers = path.with_name(path.name.replace("hosted-", "llama-cpp-"))
    llama = peer_ms(peers)
    found: dict[tuple, dict[str, dict]] = {}
    for row in result["rows"]:
        found.setdefault((row["share"], row["copies"], row["threads"], row["batch"]), {})[row["where"]] = row
    lines = []
    for (share, copies, threads, batch), by in found.items():
        cells = [f"{by[name]['ms']:.1f}" if name in by else "–" for name in ("device", "cpu", "auto")]
        compared = copies == batch == 1 and threads == where["cores"] and share in llama
        peer = f"{llama[share]:.1f}" if compared else "–"
        both = by.get("auto", {"rates_bytes_s": [], "told": ""})
        limit = f"{_limit_ms(both, resident):.1f}" if both["rates_bytes_s"] else "–"
        lines.append(
            [room_of(share), link_of(copies), str(threads), str(batch), *cells, limit, peer, both["told"] or "–"]
        )
    drawing = f"{path.stem}.svg"
    _draw(found, where["cores"], resident, llama, docs.parent / drawing)
    versions = ", ".join(f"{name} {version}" for name, version in where["versions"].items() if version)
    return [
        f"## weights shared by link and CPU, {where['gpu']}",
        "",
        _WHAT,
        *(["", _peer(peers)] if llama else []),
        "",
        f"![time against budget]({drawing})",
        "",
        f"| {' | '.join(_HEAD)} |",
        "| --- " * len(_HEAD) + "|",
        *(f"| {' | '.join(line)} |" for line in lines),
        "",
        (
            f"{result['note']}. {where['cpu']}, {where['cores']} cores; {versions}, Python {where['python']}, commit "
            f"{where['commit']}."
        ),
        "",
    ]


def _limit_ms(row: dict, resident: float) -> float:
    """Longest of what moved, what was computed, and the resident step."""
    link, cpu = row["rates_bytes_s"]
    return max(row["moved_mb"] * 1e9 / link, row["computed_mb"] * 1e9 / cpu, resident)


def _peer(path: Path) -> str:
    rows = json.loads(path.read_text())["rows"]
    threads = sorted({row["threads"] for row in rows})
    return _PEER.format(build=f"build {rows[0]['build']}", threads=", ".join(map(str, threads)))


def _draw(found: dict, cores: int, resident: float, llama: dict[str, float], path: Path) -> None:
    names = {"device": "streamed", "cpu": "computed", "auto": "both"}
    curves: dict[str, dict[float, float]] = {}
    for (share, copies, threads, batch), by in found.items():
        if not (copies == batch == 1 and threads == cores):
            continue
        percent = 0 if share == "ring" else float(share)
        for name, row in by.items():
            curves.setdefault(names[name], {})[percent] = row["ms"]
        if by.get("auto", {}).get("rates_bytes_s"):
            curves.setdefault("limit of both", {})[percent] = _limit_ms(by["auto"], resident)
        if share in llama:
            curves.setdefault("llama.cpp", {})[percent] = llama[share]
    labels = Labels("One token of an 8B shape in fp4", "on the GPU, % of the pages", "milliseconds a token")
    line_plot(path, curves, labels)
