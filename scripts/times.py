"""Predicted milliseconds beside every time that other scripts have measured on an H200 and committed.

    python3 scripts/times.py               no GPU
    python3 scripts/times.py --table       as the table of docs/howto/estimating.md

Rates are those that scripts/advice.py measured on the same kind of machine. A row is near where it is within 15 % and
the link decides, or within 25 %.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # after the checkout is on the path
from torch import nn

import vbrt
from scripts.estimates import estimated_355m, last_logits, llama_8b_meta
from scripts.lm import LanguageModel, Shape
from vbrt.config import Machine, VBConfig
from vbrt.estimation.estimate import bare_model, estimate_of
from vbrt.estimation.rates import Rates
from vbrt.estimation.report import Estimate
from vbrt.estimation.speed import predict
from vbrt.estimation.task import Task
from vbrt.estimation.trace import Trace
from vbrt.estimation.whole import whole_trace
from vbrt.model.planner import make_plan

_RESULTS = ROOT / "benchmarks" / "results"
_PAGE = ROOT / "docs" / "howto" / "estimating.md"
ON = Machine(140 << 30, 139 << 30, 128 << 30, 120 << 30, 1 << 40)
_SAMPLED = (10, 30, 50, 70, 90, 100)  # percents of a sweep


@dataclass(frozen=True, slots=True)
class Row:
    """A time that was measured, and its prediction."""

    case: str
    predicted_ms: float
    ms: float
    bound: str

    @property
    def off(self) -> float:
        return self.predicted_ms / self.ms - 1

    @property
    def near(self) -> bool:
        """True if it is within what was asked for."""
        return abs(self.off) <= (0.15 if self.bound == "link" else 0.25)


class Model:
    """A model without weights, and what was traced of it."""

    def __init__(self, model: nn.Module, rates: Rates) -> None:
        self.bare, self.rates = bare_model(model, Task()), rates
        self._traces: dict[tuple[Task, bool], Trace] = {}

    def row(self, case: str, task: Task, config: VBConfig | None, ms: float) -> Row:
        """Return what is predicted of a task under a config, beside what was measured."""
        plan = None if config is None else make_plan(self.bare, config, ON, charge_kept=False)
        key = task, plan is None
        if key not in self._traces:
            self._traces[key] = whole_trace(self.bare, task, plan)
        found = estimate_of(self.bare, task, config, ON, plan, self._traces[key])
        return row_of(case, self.bare, found, self.rates, ms)


def row_of(case: str, model: nn.Module, found: Estimate, rates: Rates, ms: float) -> Row:
    speed = predict(model, found, rates)
    return Row(case, speed.ms, ms, speed.bound)


def _committed(name: str) -> dict[str, Any]:
    return json.loads((_RESULTS / f"{name}-nvidia-h200.json").read_text())


def rates() -> Rates:
    """Return the committed rates of an H200."""
    return Rates(**_committed("advice")["rates"])


def _config(preset: str, budget: float | None = None, **weights: Any) -> VBConfig:
    return vbrt.load_config(preset, tiers={"gpu": {"budget": int(budget or 40e9)}}, weights=weights)


def generating(model: Model) -> Iterator[Row]:
    """Yield times of a token by `generate`, of the 8B shape: scripts/generate_bench.py and scripts/memory_bench.py."""
    for row in _committed("generate")["rows"]:
        preset, _, rest = row["case"].partition(",")
        task = Task("decode", row["batch"], 128, row.get("new", 128))
        if row["case"] == "bf16, static cache, eager":
            yield model.row(f"unwrapped, batch {row['batch']}", task, None, row["ms"])
        elif "of the pages" in rest:
            pages = make_plan(model.bare, _config(preset), ON).page_bytes
            yield model.row(row["case"], task, _config(preset, pages * row["share"] / 100), row["ms"])
        elif row["case"] in ("dense", "fp4", "exact") and row.get("captured"):
            yield model.row(f"{preset}, batch {row['batch']}", task, _config(preset), row["ms"])
    for row in _committed("memory")["rows"]:
        config = _config(row["case"], row["budget_gb"] * 1e9)
        yield model.row(
            f"{row['case']}, {row['budget_gb']} GB of pages", Task("decode", 1, 128, 128), config, row["ms"]
        )


def _one_token(model: nn.Module) -> Any:
    return model(input_ids=torch.zeros(1, 1, dtype=torch.long), use_cache=False, logits_to_keep=1)


def streaming(model: Model) -> Iterator[Row]:
    """Yield times of passes of one and of 2048 tokens: scripts/stream.py."""
    one, many, found = (
        Task("prefill", step=_one_token, context=1),
        Task("prefill", step=last_logits),
        _committed("stream"),
    )
    for tokens, task in (("1", one), ("2048", many)):
        yield model.row(f"pass of {tokens}: unwrapped", task, None, found["resident_ms"][tokens])
    for row in found["rows"]:
        preset = row["case"].partition("-")[0]
        if (
            preset not in ("dense", "exact", "fp4")
            or "gpu_budget_bytes" not in row
            or row["case"].endswith(("able", "ssd"))
        ):
            continue  # pageable memory and this drive are in no rate
        for tokens, task in (("1", one), ("2048", many)):
            config = _config(preset, row["gpu_budget_bytes"], keep_head=True)
            yield model.row(f"pass of {tokens}: {row['case']}", task, config, row[f"T{tokens}_ms"])
    for row in found["sweep"]:
        if row["policy"] == "scheduled" and row["percent"] in _SAMPLED:
            config = _config(row["preset"], row["gpu_budget_bytes"], keep_head=True)
            yield model.row(f"pass of 1: {row['preset']}, {row['percent']} % of the pages", one, config, row["T1_ms"])


def training(rates: Rates) -> Iterator[Row]:
    """Yield times of training and inference of the 355 M model: scripts/train_bench.py."""
    committed = _committed("training")
    shape = Shape(**committed["shape"])
    for kind in ("training", "inference"):
        for row in committed[kind]:
            name = row["case"]
            attention = "sdpa" if "fused" in name or "flash" in name else "plain"
            with torch.device("meta"):
                model = LanguageModel(shape, attention=attention, checkpointing="checkpointing" in name)
            found = estimated_355m(model, name, kind, shape)
            yield row_of(f"355M, {kind}: {name}", bare_model(model, found.task), found, rates, row["ms"])


def every() -> Iterator[Row]:
    """Yield all rows."""
    known = rates()
    model = Model(llama_8b_meta(), known)
    yield from generating(model)
    yield from streaming(model)
    yield from training(known)


def write_table() -> None:
    """Put the table between the marks of the page."""
    lines = ["| case | predicted | measured | off | limit |", "| --- " * 5 + "|"]
    for row in every():
        lines.append(
            f"| {row.case} | {row.predicted_ms:.1f} ms | {row.ms:.1f} ms | {100 * row.off:+.0f} % | {row.bound} |"
        )
    before, begin, rest = _PAGE.read_text().partition("<!-- times:begin -->\n")
    _, end, after = rest.partition("<!-- times:end -->")
    _PAGE.write_text(before + begin + "\n" + "\n".join(lines) + "\n\n" + end + after)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--table", action="store_true", help="write the table of the docs")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.table:
        write_table()
        return
    for row in every():
        mark = " " if row.near else "!"
        print(f"{mark} {row.case:<72}{row.predicted_ms:9.1f}{row.ms:9.1f} {100 * row.off:+7.1f} %  {row.bound}")


if __name__ == "__main__":
    main()
