"""docs/measurements.md: decoding with a KV cache in the tiers, from the results of `scripts/kv_bench.py`."""

import json
from pathlib import Path

__all__ = ["kv_table"]


def kv_table(path: Path) -> list[str]:
    """Milliseconds a token with a context of three times the cache's room, beside the larger of link and compute."""
    result = json.loads(path.read_text())
    where = result["machine"]
    named = ", ".join(f"{k} {v}" for k, v in where["versions"].items() if v)
    what = (
        f"A model of the 8B shape, resident in `nvfp4`, eager kernels, and a context of {result['tokens']:,} tokens, "
        "of which a third fits into the GPU memory of `vbrt.KVCache` (random keys and values). The limit of a "
        "token is the larger of the step with the cache in GPU memory and the bytes over the link at "
        f"{result['link_gb_per_s']} GB/s. Errors are relative, over all keys and values, unrounded ones included."
    )
    return [
        f"## KV cache in the tiers, {result['layers']} layers, {where['gpu']}",
        "",
        what,
        "",
        *([result["note"], ""] if result.get("note") else []),
        "| cache | ms a token | link ms | of limit | logits | error of keys, values | GPU peak GB |",
        "| --- | --- | --- | --- | --- | --- | --- |",
        *(_row(row) for row in result["rows"]),
        "",
        f"{named}, Python {where['python']}, commit {where['commit']}.",
        "",
    ]


def _row(row: dict) -> str:
    if "failed" in row:
        return f"| {row['cache']} | {row['failed']} | – | – | – | – | – |"
    link = f"{row['link_ms']:.1f}" if row.get("link_ms") else "–"
    limit = f"{row['of_limit']:.2f}" if "of_limit" in row else "–"
    logits = "bit for bit" if row["equal"] else f"{row['error']:.1e} off"
    errors = f"{row['key_error']:.1e}, {row['value_error']:.1e}" if row.get("value_error") else "–"
    return (
        f"| {row['cache']} | {row['ms']:.1f} | {link} | {limit} | {logits} | {errors} | {row['peak_bytes'] / 1e9:.2f} |"
    )
