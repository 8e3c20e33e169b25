"""The table of what mixtures of experts cost in docs/experts.md, from benchmarks/results.

python3 scripts/experts_table.py    # writes it
"""

import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from scripts.measuring import between, markdown_table
from scripts.routing_tables import origin

PAGE = ROOT / "docs" / "experts.md"
MARKS = "<!-- costs: scripts/experts_table.py -->", "<!-- end of costs -->"
_RESULTS = ROOT / "benchmarks" / "results"
_TOKENS = (2048, 4096, 8192, 32768)
_HEADS = (
    "model", "experts on the GPU", "GPU memory, GB", "first token behind 512, ms",
    *(f"prompt tokens/s, {tokens:,}" for tokens in _TOKENS), "decoded tokens/s", "by",
)  # fmt: skip
_SHAPE = "Qwen3-30B-A3B's shape in 4 bits; random weights, {} routing"
_LAYERS = 48
_CASE = "30B-A3B fp4, 25 %"


def costs() -> str:
    """The table: measured shares of the experts, the largest first, then what is predicted for a PC.

    A row says whether its decoding followed generated or recorded routing; prompts' is random.
    """
    prompts, decode = _read("experts-prompt-nvidia-h200"), _read("experts-decode-nvidia-h200")
    whole = {row["tokens"]: row["resident_ms"] for row in prompts["rows"] if row["layers"] == _LAYERS}
    by = f"measured, {prompts['machine']['gpu']}"
    steps = {row["case"]: row for row in decode["rows"]}
    rows = [_row("all", whole, steps["4 bits, resident, joined"], by)]
    for share in sorted({row["share"] for row in prompts["rows"]}, reverse=True):
        found = [row for row in prompts["rows"] if (row["layers"], row["share"]) == (_LAYERS, share)]
        step = steps.get(f"{share:.0%} of the expert pages", {})
        rows.append(_row(f"{share:.0%}", {row["tokens"]: row["ms"] for row in found}, step, by))
    recorded = _read_if_there("experts-decode-recorded-nvidia-h200")
    for row in recorded.get("rows", ()):
        if "missed_mb" in row:
            found = _row(row["case"].partition(" ")[0], {}, row, by)
            rows.append((f"{recorded['layers']} layers of {found[0]}", *found[1:]))
    for models in ("experts-models", "experts-models-qwen3-8"):
        rows += [_published(row, by) for row in _read(f"{models}-nvidia-h200")["rows"]]
    predicted = _read("predicted-rtx-4070")["rows"][_CASE]
    step = {"tokens_s": 1e3 / predicted["ms"], "peak_gb": predicted["gb"]}
    rows.append(_row("25%", {}, step, "predicted, RTX 4070"))
    return "\n".join(markdown_table(_HEADS, rows))


def _row(share: str, prompt_ms: dict[int, float], step: dict[str, Any], by: str) -> tuple[str, ...]:
    first = f"{prompt_ms[512]:.0f}" if prompt_ms else "–"
    rates = (f"{tokens / prompt_ms[tokens] * 1e3:,.0f}" if tokens in prompt_ms else "–" for tokens in _TOKENS)
    memory = f"{step['peak_gb']:.1f}" if "peak_gb" in step else "–"
    return _SHAPE.format(origin(step)), share, memory, first, *rates, f"{step['tokens_s']:.0f}" if step else "–", by


def _published(row: dict[str, Any], by: str) -> tuple[str, ...]:
    """A row of `experts_models.py`: of all layers, in proportion to those that were there."""
    times, share = row["of"] / row["layers"], "all" if row["share"] == 1 else f"{row['share']:.0%}"
    name = f"{row['model']}'s shape in 4 bits; random weights, {row['routing']} routing"
    rates = (row.get(f"whole_prompt_{tokens}_tokens_s") for tokens in _TOKENS)
    memory = max(gb for key, gb in row.items() if key.startswith("whole_") and key.endswith("_gb"))
    return (
        name,
        share,
        f"{memory:.1f}",
        f"{row['prompt_512_ms'] * times:.0f}",
        *("–" if rate is None else f"{rate:,.0f}" for rate in rates),
        f"{row['whole_tokens_s']:.0f}",
        by if times == 1 else f"extrapolated from {row['layers']} of {row['of']} layers, {by.partition(', ')[2]}",
    )


def _read(name: str) -> dict[str, Any]:
    return json.loads((_RESULTS / f"{name}.json").read_text("utf-8"))


def _read_if_there(name: str) -> dict[str, Any]:
    return _read(name) if (_RESULTS / f"{name}.json").exists() else {}


def written(text: str) -> str:
    """A page with its table made anew."""
    return between(text, MARKS, costs())


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text("utf-8")), "utf-8")
