"""docs/measurements.md: milliseconds a token of `generate`, from the results of `scripts/generate_bench.py`."""

import json
from pathlib import Path

from scripts.plots import Labels, line_plot

__all__ = ["curves", "exact_table", "generate_table"]

_LABELS = Labels("generate, 8B shape, batch 1", "bytes of the pages that the GPU may hold, %", "ms a token")
_WHAT = (
    "greedy, a prompt of 128 tokens, 128 new tokens, plain calls of `generate`, in one run. First: a warm call with "
    "one new token. Replay: the captured step alone, without synchronization; the rest of the time a token is "
    "transformers' loop. Recording: the whole capture, with kernel compilation, without comparisons with eager steps."
)
_COLUMNS = (("ms", 2), ("replay_ms", 2), ("first_ms", 1), ("record_ms", 0), ("peak_gb", 1))
_COLD = (("first_ms", 0), ("compiled_first", 0), ("compiled_first_ms", 0), ("compiled_later", 0))


def generate_table(path: Path, docs: Path) -> list[str]:
    """Rows of all cases; with a plot beside `docs` where shares of the pages were measured."""
    result = json.loads(path.read_text())
    where, rows = result["machine"], [row for row in result["rows"] if "ms" in row]
    named = ", ".join(f"{k} {v}" for k, v in where["versions"].items() if v)
    shares, cold = [row for row in rows if "share" in row], [row for row in result["rows"] if "compiled_first" in row]
    out = [
        f"## generate, {where['gpu']}",
        "",
        f"A Llama of the 8B shape ({result['layers']} layers, random weights), {_WHAT}",
        "",
        *([result["note"], ""] if result.get("note") else []),
        "| case | batch | ms a token | replay ms | first token ms | recording ms | steps captured | GPU peak GB |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
        *(_row(row) for row in rows if "share" not in row),
        "",
    ]
    if shares:
        name = f"{path.stem}.svg"
        line_plot(docs.parent / name, curves(rows), _LABELS)
        out += [*_share_table(shares), f"![ms a token against the budget]({name})", ""]
    return [
        *out,
        *(_cold_table(cold) if cold else []),
        f"{named}, Python {where['python']}, commit {where['commit']}.",
        "",
    ]


_EXACT = (
    "Milliseconds a token by `compute.exactness`, ways in turns, greedy, a prompt of 128 tokens, from "
    "`scripts/exact_generate.py`. First: lengths that cuDNN, torch's attention on Hopper, has not planned in this "
    "process; then: the least of later turns. Equal: tokens up to the first that is not the plain model's. Where pages "
    'stream, "bits" decodes eagerly.'
)
_DRAFTS = (
    "Self-speculation under `exact`, 8B shape, coarse planes on the GPU, fine ones streamed, acceptance forced to .9 a "
    'token (`scripts/speculate.py --shape 8b`), tokens a second. Verification of "tokens" under "bits" attends at each '
    "row's own length, which cuDNN plans on the host."
)


def exact_table(path: Path) -> list[str]:
    """Lossless `generate` with the plain model's bits and with faster attention, and speculation with each."""
    result = json.loads(path.read_text())
    where = result["machine"]
    named = ", ".join(f"{k} {v}" for k, v in where["versions"].items() if v)
    columns = (("bits_first_ms", 2), ("bits_ms", 2), ("rounded_first_ms", 2), ("rounded_ms", 2))
    lines = []
    for row in result["rows"]:
        equal = [f"{row[key]} of {row['new']}" if key in row else "–" for key in ("bits_equal", "rounded_equal")]
        lines.append(f"| {' | '.join((row['case'], *_shown(row, columns), *equal))} |")
    rates = {
        (r["compute"], r["exactness"], str(r["drafts"])): r["tokens_per_s"]
        for r in result["speculation"]
        if "drafts" in r
    }
    plain = {r["compute"]: 1e3 / r["ms_a_token"] for r in result["speculation"] if "ms_a_token" in r}
    cases = list(dict.fromkeys(key[1:] for key in rates))
    return [
        f"## Exact generate, {where['gpu']}",
        "",
        _EXACT,
        "",
        "| case | bits, first | bits, then | rounded, first | rounded, then | equal: bits | equal: rounded |",
        "| --- " * 7 + "|",
        *lines,
        "",
        _DRAFTS,
        "",
        f"| `compute.exactness` | plain | {' | '.join(f'{of}, drafts {k}' for of, k in cases)} |",
        "| --- " * (len(cases) + 2) + "|",
        *(
            f"| {how} | {plain[how]:.1f} | {' | '.join(f'{rates[(how, *case)]:.1f}' for case in cases)} |"
            for how in plain
        ),
        "",
        f"{named}, Python {where['python']}, commit {where['commit']}.",
        "",
    ]


def _shown(row: dict, columns: tuple[tuple[str, int], ...]) -> list[str]:
    return [f"{row[name]:.{digits}f}" if row.get(name) is not None else "–" for name, digits in columns]


def _row(row: dict) -> str:
    steps = row.get("captured", 0) + row.get("eager", 0)
    captured = f"{row['captured']} of {steps}" if steps else "–"
    ms, replay, first, record, peak = _shown(row | {"record_ms": row.get("record_ms") or None}, _COLUMNS)
    return f"| {row['case']} | {row['batch']} | {ms} | {replay} | {first} | {record} | {captured} | {peak} |"


_SHARES = (
    "tiers.gpu.budget is a share of the pages' bytes, including the ring for streamed pages. The limit is the "
    "larger of the resident step and the bytes beyond the share at the link's rate; as the ring takes part of the "
    'budget, more bytes move. The bound is 1.1 times the limit plus 1 ms; "by what moves" uses the moved bytes '
    "instead. New tokens: "
)


def _share_table(shares: list[dict]) -> list[str]:
    lines = [
        f"{_SHARES}{', '.join(sorted({str(row['new']) for row in shares}))}.",
        "",
        "| format | share % | ms a token | limit ms | moved bytes over the link, ms | of the bound | by what moves |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in shares:
        ms, limit, moved = row["ms"], row["limit_ms"], row["moved_ms"]
        bounds = 1.1 * limit + 1, 1.1 * max(limit, moved) + 1
        figures = f"{ms:.1f} | {limit:.1f} | {moved:.1f} | {ms / bounds[0]:.2f} | {ms / bounds[1]:.2f}"
        lines.append(f"| {row['held']} | {row['share']} | {figures} |")
    return [*lines, ""]


def _cold_table(cold: list[dict]) -> list[str]:
    lines = [
        "First call in a new process, with weights already encoded and on the GPU; 12 tokens.",
        "",
        "| process | first token ms | kernels loaded before it | compiling or reading them ms | kernels after it |",
        "| --- | --- | --- | --- | --- |",
    ]
    return [*lines, *(f"| {row['case'][6:]} | {' | '.join(_shown(row, _COLD))} |" for row in cold), ""]


def curves(rows: list[dict]) -> dict[str, dict[float, float]]:
    """Measured and limit, by percent of the pages; empty where no shares were measured."""
    found: dict[str, dict[float, float]] = {}
    for row in rows:
        if "share" in row:
            found.setdefault(row["held"], {})[row["share"]] = row["ms"]
            found.setdefault(f"{row['held']}: larger of link and resident step", {})[row["share"]] = row["limit_ms"]
    return found
