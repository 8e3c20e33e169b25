"""The part of docs/measurements.md on recorded routing, and words of other tables on where routing is from."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from scripts.measuring import markdown_table, named_machine

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


_PREDICTORS = {
    "router": "its router, top k",
    "router, twice as many": "its router, top 2k",
    "router, one page": "its router, the likeliest missing one",
    "previous token": "its experts of the previous byte",
    "busiest": "its busiest k so far",
}
_PREFETCH_RUNS = {"balanced": RUNS["balanced"], "short": "400 steps without"}


def prefetch_table(path: Path) -> list[str]:
    """Prefetch of predicted experts, from `scripts/expert_prefetch.py`."""
    result = json.loads(path.read_text())
    what = (
        f"Experts of the next layer, predicted when a layer of the model above is routed: {result['tokens']:,} bytes "
        f"of held-out text, decoded one by one, {result['top_k']} of {result['experts']} experts. The next layer's "
        "router, behind its norm, scores the hidden state that this layer's router saw. The first layer, which has "
        "none before it, is left out. Losses are on held-out text, in nats a byte."
    )
    columns = (
        "Recall: the share of routed experts that are predicted. The other columns are for memory for "
        f"{_joined(f'{100 * share:.0f}' for share in result['shares'])} % of all pages, policy `experts`: the share of "
        "misses that a prefetch of the missing ones fetches; pages fetched in vain per miss fetched; and, if each page "
        "that the link does not bring while it rests delays the layer, how many pages a layer it must be able to bring "
        "in that time for the prefetch to break even, and how much of the wait for missing pages is saved with "
        f"{result['idle_pages']:.2f} pages: those that 50 GB/s bring in all of a resident layer's time of "
        "Qwen3-30B-A3B in 4 bits on an NVIDIA H200."
    )
    head = (
        "routing",
        "prediction for a layer",
        "recall",
        "misses predicted",
        "in vain",
        "breaks even at",
        "wait saved",
    )
    rows = [
        (
            f"{_PREFETCH_RUNS[run]} (loss {result['losses'][run]:.2f})",
            _PREDICTORS[name],
            f"{100 * found['recall']:.0f} %",
            *_room_cells(found["rooms"]),
        )
        for run, ways in result["runs"].items()
        for name, found in ways.items()
    ]
    machine = named_machine(result["machine"])
    return ["## routing ahead", "", what, "", columns, "", *markdown_table(head, rows), "", machine, ""]


def _room_cells(rooms: list[dict[str, Any]]) -> tuple[str, ...]:
    def cell(key: str, of: float, digits: int, unit: str = "") -> str:
        found = (room[key] for room in rooms)
        return " ".join("–" if value is None else f"{of * value:.{digits}f}" for value in found) + unit

    return (
        cell("predicted", 100, 0, " %"), cell("vain_per_saved", 1, 1), cell("break_even", 1, 2),
        cell("wait_saved", 100, 0, " %").replace("-", "−"),
    )  # fmt: skip


def _joined(words: Iterable[str]) -> str:
    *most, last = words
    return f"{', '.join(most)} and {last}"
