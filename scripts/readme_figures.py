"""README's table of figures: measured ones from benchmarks/results, and what a PC gets by prediction.

python3 scripts/readme_figures.py --predict     # predict again, for a GPU's data sheet; then the table
python3 scripts/readme_figures.py               # the table alone, from committed results; nothing is measured
"""

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import vbrt  # after the checkout is on the path
from scripts import memory_bench
from scripts.measuring import machine
from scripts.routing_tables import origin
from scripts.story_models import outline
from vbrt.config import Machine
from vbrt.estimation.advice.data_sheets import named_sheet
from vbrt.estimation.advice.step_time import predict

RESULTS = ROOT / "benchmarks" / "results"
PREDICTED = RESULTS / "predicted-rtx-4070.json"
README = ROOT / "README.md"
MARKS = "<!-- figures: scripts/readme_figures.py -->", "<!-- end of figures -->"
GPU, RAM = "RTX 4070", 64 << 30


def read(name: str) -> dict[str, Any]:
    """Committed results."""
    return json.loads((RESULTS / f"{name}.json").read_text())


STORY = read("stories-nvidia-h200")["generate"]
(QUARTER,) = (row for row in read("experts-decode-nvidia-h200")["rows"] if row["case"].startswith("25%"))
#: name -> shape, preset, GB of the GPU for pages (None: as much as there is), `compute.where`, as the measured column
CASES: dict[str, tuple[str, str, float | None, str]] = {
    "8B fp4": ("llama-3-8b", "fp4", None, "auto"),
    "8B fp4, 2 GB": ("llama-3-8b", "fp4", 2.0, "auto"),
    "8B exact, 5 GB": ("llama-3-8b", "exact", 5.0, "auto"),
    "32B fp4": ("qwen3-32b", "fp4", STORY["budget_gb"], "auto"),
    "30B-A3B fp4, 25 %": ("qwen3-30b-a3b", "fp4", QUARTER["budget_gb"], "auto"),
}


def predictions(cases: dict[str, tuple[str, str, float | None, str]] = CASES) -> dict[str, Any]:
    """Milliseconds a token by the cost model, and bytes by the estimator, on a GPU's data sheet."""
    memory, rates = named_sheet(GPU).free_bytes, vbrt.data_sheet(GPU)
    on = Machine(memory, memory, RAM, int(0.9 * RAM))
    rows = {}
    for name, (shape, preset, budget, where) in cases.items():
        tiers = {} if budget is None else {"gpu": {"budget": int(budget * 1e9)}}
        model = outline(shape)
        config = vbrt.load_config(preset, tiers=tiers, compute={"where": where})
        found = vbrt.estimate(model, "decode", config, machine=on, context=256)
        rows[name] = {"ms": predict(model, found, rates).ms, "gb": found.peak_bytes / 1e9, "fits": found.fits}
        print(name, rows[name], file=sys.stderr)
    return {"machine": machine(), "gpu": GPU, "rates": dataclasses.asdict(rates), "rows": rows}


def table() -> str:
    """README's rows, each with the command that measures it again."""
    lines = memory_bench.points()
    plain, captured = (lines[name][0] for name in memory_bench.DRAWN if name.startswith("bf16"))
    offloaded, fp4 = lines["accelerate, bf16 (one forward)"], lines["vbrt fp4"]
    exact = lines["vbrt exact: every bit of the weights"]
    (whole,) = (row for row in read("generate-nvidia-h200")["rows"] if row["case"] == "fp4" and row["batch"] == 1)
    shared = [row for row in read("hosted-nvidia-h200")["rows"] if row["copies"] == 1 and row["where"] == "auto"]
    (half,) = (row for row in shared if (row["share"], row["threads"], row["batch"]) == ("50", 16, 1))
    predicted = json.loads(PREDICTED.read_text())["rows"]
    ours, eager = "`scripts/memory_bench.py`", "`scripts/generate_bench.py`"
    experts = (QUARTER["peak_gb"], QUARTER["ms"], "30B-A3B fp4, 25 %", "`scripts/experts_decode.py`")
    rows = (
        ("Llama-3-8B, bf16, transformers", *plain, "", eager),
        ("Llama-3-8B, bf16, captured", *captured, "", eager),
        ("Llama-3-8B, bf16, accelerate, half offloaded", *offloaded[-1], "", "`scripts/stream`"),
        ("Llama-3-8B, `fp4`", whole["peak_gb"], whole["ms"], "8B fp4", eager),
        ("Llama-3-8B, `fp4`, half in host memory", fp4[1][0], half["ms"], "8B fp4, 2 GB", "`scripts/hosted_bench.py`"),
        ("Llama-3-8B, `exact`", *exact[-1], "8B exact, 5 GB", ours),
        ("Qwen3-32B, `fp4`", STORY["device_gb"], STORY["ms"], "32B fp4", "`scripts/stories.py generate`"),
        (f"Qwen3-30B-A3B, `fp4`, a quarter of the experts, {origin(QUARTER)} routing", *experts),
    )
    out = [
        f"| one token | GPU memory | H200, link of 55 GB/s: measured | {GPU}, link of 25 GB/s: predicted | by |",
        "| --- | --- | --- | --- | --- |",
    ]
    for what, gb, ms, name, command in rows:
        other = f"{shown(predicted[name]['ms'])} ms" if name else "does not fit" if gb > 12 else "–"
        out.append(f"| {what} | {gb:.1f} GB | {shown(ms)} ms | {other} | {command} |")
    return "\n".join(out)


def shown(ms: float) -> str:
    """Two to three digits."""
    return f"{ms:.1f}" if ms < 10 else f"{ms:.0f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--predict", action="store_true", help=f"predict for an {GPU} again")
    if parser.parse_args().predict:
        PREDICTED.write_text(json.dumps(predictions(), indent=1) + "\n")
    first, last = MARKS
    text = README.read_text()
    before, rest = text.split(first)
    README.write_text(f"{before}{first}\n{table()}\n{last}{rest.split(last)[1]}")


if __name__ == "__main__":
    main()
