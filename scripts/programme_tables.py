"""The section of docs/measurements.md on streamed passes, from what `scripts/programme_bench.py` wrote."""

import json
from pathlib import Path

from scripts.plots import Labels, line_plot

__all__ = ["programme_table"]

_HEAD = (
    "budget %",
    "one graph ms",
    "copied bytes, at the link's rate, ms",
    "over the limit",
    "host ms",
    "recorded in s",
    "eager, by a programme, ms",
    "eager, by the policy, ms",
    "host µs a lease: programme",
    "policy",
)


def programme_table(path: Path, docs: Path) -> list[str]:
    """Return the section; its plot is drawn beside the page."""
    result = json.loads(path.read_text())
    where = result["machine"]
    out = [f"## streamed passes, {where['gpu']}", ""]
    if "decode" in result:
        drawing = f"{path.stem}.svg"
        _draw(result["decode"], docs.parent / drawing)
        out += [*_decode(result["decode"], drawing), ""]
    for name, lines in (("exact", _exact), ("lease", _lease), ("lora", _lora), ("dense", _dense)):
        if name in result:
            out += [*lines(result[name]), ""]
    named = ", ".join(f"{k} {v}" for k, v in where["versions"].items() if v)
    return [*out, f"{named}, Python {where['python']}, commit {where['commit']}.", ""]


def _draw(of: dict, path: Path) -> None:
    rows, resident = of["rows"], of["resident_ms"]
    curves = {
        "one graph": {row["percent"]: row["graph_ms"] for row in rows},
        "larger of copied bytes and resident step": {r["percent"]: max(r["link_ms"], resident) for r in rows},
        "programme, eager": {row["percent"]: row["programme_ms"] for row in rows if "programme_ms" in row},
        "policy, eager": {row["percent"]: row["policy_ms"] for row in rows if "policy_ms" in row},
    }
    labels = Labels("One token of an 8B shape in fp4", "budget, % of the pages", "milliseconds a token")
    line_plot(path, curves, labels)


def _decode(of: dict, drawing: str) -> list[str]:
    what = (
        "One token of a Llama-3-8B shape in `fp4` (random weights, static KV cache, head kept), budget: a share of the "
        f"pages' bytes for tiers.gpu, ring included. Link: {of['link_gb_s']:.1f} GB/s in this run; all resident: "
        f"{of['resident_ms']:.2f} ms as a graph, {of['resident_eager_ms']:.1f} eager. The limit is the larger of the "
        "copied bytes over the link and the resident step."
    )
    head = [f"| {' | '.join(_HEAD)} |", "| --- " * len(_HEAD) + "|"]
    rows = [_row(row, of["resident_ms"]) for row in of["rows"]]
    return [what, "", f"![time against budget]({drawing})", "", *head, *rows]


def _row(row: dict, resident: float) -> str:
    eager = [f"{row[key]:.1f}" if key in row else "–" for key in ("programme_ms", "policy_ms")]
    lease = [f"{row[key]:.1f}" if key in row else "–" for key in ("programme_lease_us", "policy_lease_us")]
    over = row["graph_ms"] / max(row["link_ms"], resident)
    cells = [row["percent"], f"{row['graph_ms']:.2f}", f"{row['link_ms']:.2f}", f"{over:.3f}"]
    cells += [f"{row['graph_host_ms']:.2f}", f"{row['prepare_s']:.2f}", *eager, *lease]
    return f"| {' | '.join(map(str, cells))} |"


def _exact(of: dict) -> list[str]:
    what = (
        f"`exact`, coarse planes on the GPU, fine planes streamed, one token: {of['graph_ms']:.1f} ms as one graph, "
        f"{of['programme_ms']:.1f} eager by a programme, {of['policy_ms']:.1f} by the policy; the copied bytes at the "
        f"link's rate: {of['link_ms']:.1f}."
    )
    return [what]


def _lora(of: dict) -> list[str]:
    limit = max(of["resident_ms"], of["two_reads_ms"])
    names = [key.removesuffix("_ms") for key in of if key.startswith(("policy_", "programme_")) and "host" not in key]
    what = (
        "A LoRA step (r = 16 on q and v, AdamW, 2,048 tokens) through `fp4` planes in host memory. Resident: "
        f"{of['resident_ms']:.0f} ms; two reads of the pages: {of['two_reads_ms']:.0f} ms."
    )
    head = [
        "| leases decided by, MiB on the GPU | step ms | over the larger of resident and two reads |",
        "| --- " * 3 + "|",
    ]
    rows = [
        f"| {name.replace('_', ', ')} | {of[f'{name}_ms']:.0f} | {of[f'{name}_ms'] / limit:.2f} |" for name in names
    ]
    return [what, "", *head, *rows]


def _dense(of: dict) -> list[str]:
    what = (
        f"`dense`, all resident, one token, eager, interleaved with the unwrapped model: {of['wrapped_ms']:.2f} ms "
        f"against {of['unwrapped_ms']:.2f} ({of['ratio']:.3f}×). Without the hook that marks passes: "
        f"{of['unhooked_ms']:.2f}; with only the product on each page: {of['bare_ms']:.2f}. The host's variation is "
        "larger than these differences."
    )
    return [what]


def _lease(of: dict) -> list[str]:
    """Of turns that were measured one after the other, the quietest of each kind."""
    best = {name: min(us for key, us in of.items() if key.startswith(name)) for name in _LEASES}
    torch, direct, torch_calls, direct_calls = best.values()
    what = (
        "Host time of a lease replayed by a programme, eager, half of the pages resident: "
        f"{direct:.1f} µs with direct CUDA runtime calls, {torch:.1f} with torch's, of which {of['measuring_us']:.1f} "
        f"are the measurement. The five calls of a streamed page take {direct_calls:.1f} µs, through torch "
        f"{torch_calls:.1f}; the rest is Python."
    )
    return [what]


_LEASES = ("torch_lease", "direct_lease", "torch_calls", "direct_calls")
