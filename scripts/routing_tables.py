"""The part of docs/measurements.md on recorded routing, and words of other tables on where routing is from."""

import json
from pathlib import Path
from typing import Any

RUNS = {
    "balanced": "trained with load balancing",
    "free": "trained without",
    "generated": "`generate_routing`, the published reuse",
}


def origin(row: dict[str, Any]) -> str:
    """Whether a row's routing was "generated" or "recorded"."""
    return row.get("routing", "generated")


def routed_case(row: dict[str, Any]) -> str:
    """A row's case, with the origin of its routing in the same cell."""
    return f"{row['case']}, {origin(row)} routing"


def trace_of(result: dict[str, Any]) -> str:
    """The sentence on the trace that a benchmark followed."""
    if "recording" not in result:
        return "Experts are chosen by a generated trace with published reuse rates."
    found = result["recording"]
    return (
        f"Experts are chosen by the recording {found['file']}, of {found['layers']} layers, {found['top_k']} of "
        f"{found['experts']} experts: {found['side_by_side']} layers side by side stand for one of "
        f"{found['of_experts']} experts, each is used {found['repeated']:.0f} times with shuffled ids, and "
        f"{found['of_experts'] - found['side_by_side'] * found['experts']} experts are never chosen."
    )


def routing_table(path: Path) -> list[str]:
    """Reuse and hit rates of recorded routing, from `scripts/routing.py`."""
    result = json.loads(path.read_text())
    what = (
        f"Routing of {result['tokens']:,} bytes of held-out text in the byte-level model of docs/accuracy.md: "
        f"{result['layers']} layers, {result['top_k']} of {result['experts']} experts for each byte, decoded one by "
        "one; in the same model trained without load balancing; and generated routing for the same layers. "
        "Published reuse of token-level models is higher (45 % at the next token, 80 % within eight for "
        "Qwen3-30B-A3B)."
    )
    reuse = (
        f"Reuse: the share of selections repeated by the next byte, or by one of the next {result['within']}; the "
        "share of the busiest tenth of a layer's experts; experts selected at all. From the first layer to the last."
    )
    hits = (
        "Hit rates by `vbrt.simulate`, per layer and byte, with memory for a share of all pages, common to "
        "all layers (LRU; scope model) or divided among them (scope layer)."
    )
    return ["## routing", "", what, "", reuse, "", *_reuse_rows(result), "", hits, "", *_hit_rows(result), ""]


def _reuse_rows(result: dict) -> list[str]:
    head = ["| routing | next | within | busiest tenth | experts used |", "| --- " * 5 + "|"]
    rows = []
    for name, what in RUNS.items():
        layers = result["runs"][name]["reuse"]
        shares = (" ".join(f"{100 * layer[key]:.0f}" for layer in layers) for key in ("next", "within", "busiest"))
        used = " ".join(str(layer["used"]) for layer in layers)
        rows.append(f"| {what} | {' | '.join(f'{share} %' for share in shares)} | {used} |")
    return [*head, *rows]


def _hit_rows(result: dict) -> list[str]:
    shares = [f"{100 * share:.0f} %" for share in result["shares"]]
    head = [f"| routing | policy | {' | '.join(shares)} |", "| --- " * (2 + len(shares)) + "|"]
    return head + [
        f"| {what} | {policy} | {' | '.join(f'{rate:.3f}' for rate in rates)} |"
        for name, what in RUNS.items()
        for policy, rates in result["runs"][name]["hits"].items()
    ]
