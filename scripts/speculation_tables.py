"""docs/measurements.md: speculation, from the results of scripts/speculate.py and scripts/drafters.py."""

import json
from pathlib import Path

__all__ = ["drafters_table", "speculation_table"]


def speculation_table(path: Path) -> list[str]:
    """The section of one result."""
    result = json.loads(path.read_text())
    where, rows = result["machine"], result["rows"]
    named = where["gpu"] or f"{where['cpu']}, {where['cores']} cores"
    kind = "a trained model" if any("drawn" in row for row in rows) else "8B shape"
    out = [f"## speculation, {kind}, {named}", "", *([f"{result['note']}.", ""] if "note" in result else [])]
    out += _plain(rows)
    out += _forced([row for row in rows if "acceptance_forced" in row])
    out += _trained([row for row in rows if "drawn" in row])
    versions = ", ".join(f"{name} {version}" for name, version in where["versions"].items() if version)
    return [*out, f"{versions}, Python {where['python']}, commit {where['commit']}.", ""]


_DRAFTERS = (
    "From `scripts/drafters.py`, for {model}: {prompts} prompts, each decoded alone, up to {most} new tokens, {k} "
    "drafts a round. By kind of text: acceptance of a draft whose predecessors were accepted / accepted drafts a "
    "round, rounds without a draft included. Equal: prompts with all tokens of plain decoding by the same preset."
)
_MODELS = {"smollm2": "SmolLM2-135M-Instruct, decoded from Q4_1 to bf16", "lm": "the committed byte model in bf16"}


def drafters_table(path: Path) -> list[str]:
    """The section of one result: rows are preset, drafter and way of drawing; columns are kinds of text."""
    result = json.loads(path.read_text())
    where, rows = result["machine"], result["rows"]
    kinds = list(dict.fromkeys(row["kind"] for row in rows))
    cases: dict[tuple[str, str, str], dict[str, dict]] = {}
    for row in rows:
        cases.setdefault((row["preset"], row["drafter"], row["drawn"]), {})[row["kind"]] = row
    prompts = sum(row["prompts"] for row in next(iter(cases.values())).values())
    what = _DRAFTERS.format(**{**rows[0], "model": _MODELS[rows[0]["model"]], "prompts": prompts})
    values = (
        [
            *case,
            f"{sum(row['same'] for row in of.values())} of {sum(row['prompts'] for row in of.values())}",
            *(_accepted(of.get(kind, {})) for kind in kinds),
        ]
        for case, of in cases.items()
    )
    named = where["gpu"] or f"{where['cpu']}, {where['cores']} cores"
    versions = ", ".join(f"{name} {version}" for name, version in where["versions"].items() if version)
    return [
        f"## drafters, {_MODELS[rows[0]['model']]}, {prompts} prompts, {named}",
        "",
        what,
        "",
        *_grid(("preset", "drafter", "drawn", "equal", *kinds), values),
        f"{versions}, Python {where['python']}, commit {where['commit']}.",
        "",
    ]


def _accepted(row: dict) -> str:
    if row.get("acceptance") is None:
        return "no drafts"
    return f"{row['acceptance']:.2f} / {row['accepted_a_round']:.2f}"


def _plain(rows: list[dict]) -> list[str]:
    plain = {row["preset"]: row["ms_a_token"] for row in rows if "ms_a_token" in row}
    if not plain:
        return []
    equal = [row for row in rows if str(row.get("what", "")).startswith("tokens equal")]
    steps = ", ".join(f"{ms:.1f} ms a token of `{preset}`" for preset, ms in plain.items())
    what = (
        "A random model of the 8B shape, prompt of 128 tokens, 0.9 GB on the GPU for what streams: all of `fp4`, the "
        f"fine planes of `exact`. Without drafts: {steps}. {sum(row['same'] for row in equal)} of {len(equal)} runs "
        "with drafts gave the same tokens. Drafts of `fp4` cost nothing, as n-grams do, those of `exact` come from its "
        "coarse planes; their acceptance is forced. Ratio: tokens/s with drafts to those without."
    )
    wrong = [row for row in rows if "always wrong" in str(row.get("what"))]
    first = [
        f'64 tokens with `speculate="auto"`, drafts always wrong, `{row["preset"]}`, '
        f"{row['what'].rpartition(', ')[2]}: {row['ratio']:.3f} times as long as without."
        for row in wrong
    ]
    return [what, *first, ""]


def _drafts(row: dict) -> str:
    call = str(row.get("what", "")).rpartition(", ")[2]
    return f"auto, {call}" if row["drafts"] == "auto" and call else str(row["drafts"])


def _forced(rows: list[dict]) -> list[str]:
    if not rows:
        return []
    names = ("preset", "acceptance", "exactness", "drafts", "tokens/s", "ratio", "ms a draft", "ms a verification")
    names += ("tokens a round", "GB a token")
    values = (
        [
            f"`{row['preset']}`",
            f"{row['acceptance_forced']:.2f}",
            row["exactness"],
            _drafts(row),
            f"{row['tokens_per_s']:.1f}",
            f"{row['ratio']:.2f}",
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
