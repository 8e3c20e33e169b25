"""docs/measurements.md: training from the tiers, from the results of `scripts/full_bench.py`."""

import json
from pathlib import Path

__all__ = ["full_cpu_table", "full_tables"]

_PEERS = """\
A Llama of 1.57 B parameters, AdamW, bf16 autocast, fp32 weights, {tokens:,} tokens a step in sequences of 2048;
blocks are recomputed in the backward pass unless the row says otherwise. "estimated" is by `vbrt.estimate`."""
_LARGE = """\
The 8B shape, {parameters:.2f} B parameters in bf16 with fp32 masters, AdamW, sequences of 2048, on {limit:.0f}
GB of GPU memory; {host:.0f} GB of host memory. Link, update and compute were measured separately: the bytes
of a pass at the rate of a copy, the optimizer step alone, and forward and backward with all weights on the
GPU."""
_LARGEST = """\
The largest model: {parameters:.1f} B parameters{moments}, on {limit:.0f} GB of GPU memory, with a peak of {peak:.1f},
{host:.0f} GB of host memory and {drive:.1f} GB of a drive: {steps} steps{rate}, losses {first:.3f} to {last:.3f}."""
_BITS = """\
{parameters:.0f} M parameters, {steps} steps: losses and all weights have {found} as with the same model trained
resident by torch's fused AdamW on the CPU in fp32, under `torch.use_deterministic_algorithms(True)`{again}."""

_THREADS = """\
Number of update threads: the first table's model, {tokens:,} tokens a step, at commit {commit}, on 16 cores. The
default is {chosen}, three quarters of the cores, which leaves cores for launching GPU work. The row of the first
table was measured earlier, with {all} threads and updates in backward order. A step that begins after
the backward pass takes {after:.2f} s, forward and backward without any update {without:.2f} s (one run)."""

_CPU = """\
{parameters:.1f} M parameters, {rows} rows a step, AdamW, bf16 autocast, on {cpu}, {cores} shared cores.
Of {state:.0f} MB of fp32 weights and moments, half is in host memory, half in files. Losses and weights have {found} as
those of the same model trained resident with the same arithmetic."""


def full_cpu_table(path: Path) -> list[str]:
    """What `scripts/full_cpu.py` measured."""
    result = json.loads(path.read_text())
    where, found = result["machine"], result["figures"]
    said = _CPU.format(
        parameters=found["parameters"] / 1e6,
        rows=found["rows"],
        cpu=where["cpu"],
        cores=where["cores"],
        state=found["state_bytes"] / 1e6,
        found="the same bits" if found["equal"] else "other bits",
    )
    seconds = found["seconds"]
    return [
        "## training from the tiers, CPU",
        "",
        _flat(said),
        "",
        "| | seconds a step |",
        "| --- | --- |",
        f"| resident, torch | {seconds['resident']:.2f} |",
        f"| from the tiers | {seconds['tiers']:.2f}, {found['ratio']:.2f} of that |",
        "",
        f"torch {where['versions']['torch']}, Python {where['python']}, commit {where['commit']}.",
        "",
    ]


def full_tables(path: Path) -> list[str]:
    """What was measured: beside peers, the 8B shape beside its limits, the largest model, bits."""
    result = json.loads(path.read_text())
    where = result["machine"]
    named = ", ".join(f"{k} {v}" for k, v in where["versions"].items() if v)
    lines = [line for part in (_peers, _threads, _large, _largest, _bits) for line in part(result)]
    last = f"{named}, Python {where['python']}, commit {where['commit']}."
    note = [result["note"], ""] if "note" in result else []
    return [f"## training from the tiers, {where['gpu']}", "", *lines, *note, last, ""]


def _peers(result: dict) -> list[str]:
    rows = [*result.get("peers", []), *result.get("full", [])]
    if not rows:
        return []
    base = next((row["tokens_per_s"] for row in rows if row["way"] == "resident" and "tokens_per_s" in row), None)
    return [
        _flat(_PEERS.format(tokens=rows[0]["tokens"])),
        "",
        "| way | tokens/s | of resident | peak GPU GB | estimated | ready s |",
        "| --- | --- | --- | --- | --- | --- |",
        *(_peer(row, base) for row in rows),
        "",
    ]


def _peer(row: dict, base: float | None) -> str:
    if "tokens_per_s" not in row:
        return f"| {row['way']} | {row.get('failed', 'no figures')} | – | – | – | – |"
    share = f"{row['tokens_per_s'] / base:.2f}" if base else "–"
    known = f"{row['estimated_bytes'] / 1e9:.1f}" if "estimated_bytes" in row else "–"
    cells = [row["way"], f"{row['tokens_per_s']:,.0f}", share, f"{row['peak_bytes'] / 1e9:.1f}", known]
    return f"| {' | '.join(cells)} | {row['ready_s']:.0f} |"


def _threads(result: dict) -> list[str]:
    found = result.get("threads")
    if found is None:
        return []
    every = [row["threads"] for row in found["rows"]]
    said = {"chosen": max(every) * 3 // 4, "all": max(every), "after": found["step_after_backward_s"]}
    said["without"] = found["forward_and_backward_without_update_s"]
    return [
        _flat(_THREADS.format(tokens=found["tokens"], commit=found["commit"], **said)),
        "",
        "| threads | step, s | of which layers waited for updates, s | update alone, s |",
        "| --- | --- | --- | --- |",
        *(
            f"| {row['threads']} | {row['step_s']:.2f} | {row['layers_waited_s']:.3f} | {row['update_alone_s']:.2f} |"
            for row in found["rows"]
        ),
        "",
    ]


def _large(result: dict) -> list[str]:
    large = result.get("large", {})
    if not large.get("rows"):
        return []
    said = _LARGE.format(
        parameters=large["parameters"] / 1e9, limit=large["limit_gb"], host=large.get("host_bytes", 0) / 1e9
    )
    return [
        _flat(said),
        "",
        "| tokens a step | passes | s | tokens/s | peak GPU GB | link s | update s | compute s | of the largest |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
        *(_size(row, large) for row in large["rows"]),
        "",
    ]


def _size(row: dict, large: dict) -> str:
    link, update = large.get("link_s", 0.0) * row["parts"], large.get("update_s", 0.0)
    limits = {"link": link, "update": update, "compute": large["compute_s"][str(row["tokens"])]}
    name = max(limits, key=limits.__getitem__)
    cells = [
        f"{row['tokens']:,}",
        str(row["parts"]),
        f"{row['seconds']:.2f}",
        f"{row['tokens_per_s']:,.0f}",
        f"{row['peak_bytes'] / 1e9:.1f}",
        *(f"{seconds:.2f}" for seconds in limits.values()),
        f"{limits[name] / row['seconds']:.2f}, {name}",
    ]
    return f"| {' | '.join(cells)} |"


def _largest(result: dict) -> list[str]:
    largest = result.get("largest", {})
    if not largest.get("losses"):
        return []
    losses = largest["losses"]
    rate = f", {largest['seconds']:.1f} s a step of {largest['tokens']:,} tokens" if "seconds" in largest else ""
    sizes = {"parameters": largest["parameters"] / 1e9, "host": largest.get("host_bytes", 0) / 1e9}
    sizes |= {"peak": largest.get("peak_bytes", 0) / 1e9, "drive": largest.get("tier_bytes", {}).get("ssd", 0) / 1e9}
    eight_bit = largest.get("training", {}).get("moments") == "8bit"
    said = _LARGEST.format(
        **sizes,
        moments=" with 8-bit moments" * eight_bit,
        limit=largest["limit"],
        steps=len(losses),
        rate=rate,
        first=losses[0],
        last=losses[-1],
    )
    return [_flat(said), ""]


def _bits(result: dict) -> list[str]:
    bits = result.get("bits", {})
    if "full" not in bits:
        return []
    found = "the same bits" if bits["equal"] else "other bits"
    again = "; two resident runs agree as well" if bits.get("resident_equals_itself") else ""
    said = _BITS.format(parameters=bits["parameters"] / 1e6, steps=bits["steps"], found=found, again=again)
    return [_flat(said), ""]


def _flat(text: str) -> str:
    return " ".join(text.split())
