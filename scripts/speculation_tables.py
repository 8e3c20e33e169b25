"""What scripts/speculate.py measured, as a section of docs/benchmarks.md."""

import json
from pathlib import Path

__all__ = ["speculation_table"]


def speculation_table(path: Path) -> list[str]:
    """The section of one result."""
    result = json.loads(path.read_text())
    where, rows = result["machine"], result["rows"]
    named = where["gpu"] or f"{where['cpu']}, {where['cores']} cores"
    kind = "a trained model" if any("drawn" in row for row in rows) else "8B shape"
    out = [f"## self-speculation, {kind}, {named}", "", *([f"{result['note']}.", ""] if "note" in result else [])]
    out += _plain(rows)
    out += _forced([row for row in rows if "acceptance_forced" in row])
    out += _trained([row for row in rows if "drawn" in row])
    versions = ", ".join(f"{name} {version}" for name, version in where["versions"].items() if version)
    return [*out, f"{versions}, Python {where['python']}, commit {where['commit']}.", ""]


def _plain(rows: list[dict]) -> list[str]:
    plain = next((row["ms_a_token"] for row in rows if "ms_a_token" in row), None)
    if plain is None:
        return []
    equal = [row for row in rows if str(row.get("what", "")).startswith("tokens equal")]
    tokens = f"{sum(row['same'] for row in equal)} of {len(equal)} runs with drafts gave the same tokens."
    what = (
        "A random model of the 8B shape, prompt of 128 tokens: coarse planes on the GPU, fine ones streamed from host "
        f"memory. Without drafts: {plain:.1f} ms a token, {1000 / plain:.1f} tokens/s. "
        f"{tokens} With drafts whose acceptance rate is forced:"
    )
    return [what, ""]


def _forced(rows: list[dict]) -> list[str]:
    if not rows:
        return []
    names = ("acceptance", "exactness", "drafts", "tokens/s", "ms a draft", "ms a verification")
    names += ("tokens a round", "GB a token")
    values = (
        [
            f"{row['acceptance_forced']:.2f}",
            row["exactness"],
            str(row["drafts"]),
            f"{row['tokens_per_s']:.1f}",
            f"{row['draft_ms']:.2f}",
            f"{row['verify_ms']:.0f}",
            f"{row['tokens_per_round']:.2f}",
            f"{row['bytes_per_token'] / 1e9:.2f}",
        ]
        for row in rows
    )
    return _grid(names, values)


def _trained(rows: list[dict]) -> list[str]:
    if not rows:
        return []
    timed, twice = (all(name in row for row in rows) for name in ("drafts", "plain_again"))
    names = ("parameters", "drawn", "batch", "exactness", "tokens each", "same as plain")
    names += ("same again, plain",) if twice else ()
    names += ("acceptance", "tokens a round")
    names += ("drafts", "tokens/s plain", "tokens/s") if timed else ()
    values = (
        [
            row["model"],
            row["drawn"],
            str(row["batch"]),
            row["exactness"],
            str(row["new_tokens"]),
            f"{row['same']} of {row['of']}",
            *([f"{row['plain_again']} of {row['of']}"] if twice else []),
            "-" if row.get("acceptance") is None else f"{row['acceptance']:.3f}",
            f"{row['tokens_per_round']:.2f}" if "tokens_per_round" in row else "no drafts",
            *([str(row["drafts"]), _rate(row, "plain_s"), _rate(row, "s")] if timed else []),
        ]
        for row in rows
    )
    return ["A trained byte model, in bf16:", "", *_grid(names, values)]


def _rate(row: dict, seconds: str) -> str:
    """Tokens a second of all prompts."""
    return f"{row['of'] * row['new_tokens'] / row[seconds]:.0f}"


def _grid(names: tuple[str, ...], values: object) -> list[str]:
    return [
        f"| {' | '.join(names)} |",
        "| " + " | ".join("---" for _ in names) + " |",
        *(f"| {' | '.join(row)} |" for row in values),
        "",
    ]
