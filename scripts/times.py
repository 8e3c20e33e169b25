"""Predicted milliseconds beside every time that other scripts have measured on an H200 and committed.

    python3 scripts/times.py               no GPU
    python3 scripts/times.py --table       as the tables of docs/predictions.md

Rates are those that scripts/advice.py measured on the same kind of machine. A row is near where it is within 15 % and
the link decides, or within 25 %.
"""

import argparse
import contextlib
import json
import statistics
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # after the checkout is on the path
from torch import nn

import vbrt
from scripts import full_models, typed_training
from scripts.advice import cases
from scripts.advice_cpu import CANDIDATES, TASKS
from scripts.cpu_models import SHAPES, random_model
from scripts.estimates import estimated_355m, last_logits, llama_8b_meta
from scripts.experts_decode import build
from scripts.full_models import llama_of
from scripts.lm import LanguageModel, Shape
from vbrt.config import Machine, VBConfig
from vbrt.estimation.advice.candidates import Asked
from vbrt.estimation.advice.cost_model import default_cost_model
from vbrt.estimation.advice.machine_rates import Rates
from vbrt.estimation.advice.step_time import Speed, predict
from vbrt.estimation.memory.estimate_report import Estimate
from vbrt.estimation.memory.planned_estimate import bare_model
from vbrt.estimation.memory.task import Task
from vbrt.model.planner import make_plan
from vbrt.model.repeated_blocks import stacks_of

_RESULTS = ROOT / "benchmarks" / "results"
_PAGE = ROOT / "docs" / "predictions.md"
ON = Machine(140 << 30, 139 << 30, 128 << 30, 120 << 30, 1 << 40)
MUCH = Machine(140 << 30, 139 << 30, 256 << 30, 250 << 30)
HOST = Machine(None, None, 32 << 30, 32 << 30)
#: families of scripts/typed_training.py
_TYPED = {
    "full": "Llama 1.2B",
    "full8b": "Llama 8B in 24 GB",
    "gpt2": "GPT-2 large",
    "qwen3": "Qwen3 0.6B",
    "vit": "ViT huge",
    "lora": "LoRA on q and v, 8B",
}
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
    """A model without weights on a machine, and what was traced of it."""

    def __init__(self, model: nn.Module, rates: Rates, on: Machine = ON) -> None:
        self.rates, self._asked = rates, Asked(model, on, rates)

    def row(self, case: str, task: Task, config: VBConfig | None, ms: float) -> Row:
        """Return what is predicted of a task under a config, beside what was measured."""
        return row_of(case, self.bare(task), self.found(task, config), self.rates, ms)

    def bare(self, task: Task) -> nn.Module:
        """Return the model with the task's adapters."""
        return self._asked.bare(task)

    def found(self, task: Task, config: VBConfig | None) -> Estimate:
        """Return the estimate of a task under a config, as advice has it."""
        return self._asked.found(task, config)


def row_of(case: str, model: nn.Module, found: Estimate, rates: Rates, ms: float) -> Row:
    speed = predict(model, found, rates)
    return Row(case, speed.ms, ms, speed.bound)


def _committed(name: str) -> dict[str, Any]:
    return json.loads((_RESULTS / f"{name}-nvidia-h200.json").read_text())


def rates() -> Rates:
    """Return the committed rates of an H200."""
    return Rates(**_committed("advice")["rates"])


def _config(preset: str, budget: float | None = None, **weights: Any) -> VBConfig:
    tiers, compute = {"gpu": {"budget": int(budget or 40e9)}}, {"where": "device"}  # as all committed times
    return vbrt.load_config(preset, tiers=tiers, weights={"fine_coding": "plain", **weights}, compute=compute)


def generating(model: Model) -> Iterator[Row]:
    """Yield times of a token by `generate`, of the 8B shape: scripts/generate_bench.py and scripts/memory_bench.py."""
    for row in _committed("generate")["rows"]:
        preset, _, rest = row["case"].partition(",")
        task = Task("decode", row["batch"], 128, row.get("new", 128))
        if row["case"] == "bf16, static cache, eager":
            yield model.row(f"unwrapped, batch {row['batch']}", task, None, row["ms"])
        elif ":" in preset:
            continue  # see experts()
        elif "of the pages" in rest:
            pages = make_plan(model.bare(task), _config(preset), ON).page_bytes
            yield model.row(row["case"], task, _config(preset, pages * row["share"] / 100), row["ms"])
        elif row["case"] in ("dense", "fp4", "exact") and row.get("captured"):
            yield model.row(f"{preset}, batch {row['batch']}", task, _config(preset), row["ms"])
    for row in _committed("memory")["rows"]:
        config = _config(row["case"], row["budget_gb"] * 1e9)
        yield model.row(
            f"{row['case']}, {row['budget_gb']} GB of pages", Task("decode", 1, 128, 128), config, row["ms"]
        )


def experts(rates: Rates) -> Iterator[Row]:
    """Yield times of a token by `generate`, of layers of Qwen3-30B-A3B that are all resident: of random weights nobody
    knows the hit rate."""
    model = Model(build(12, torch.device("meta")), rates)
    for row in _committed("generate")["rows"]:
        layers, _, preset = row["case"].partition(": ")
        if layers.startswith("12 layers of Qwen3") and preset in ("bf16, eager", "dense", "fp4"):
            config = None if preset.startswith("bf16") else _config(preset)
            yield model.row(row["case"], Task("decode", 1, 128, row.get("new", 128)), config, row["ms"])


def missed_experts(rates: Rates) -> Iterator[Row]:
    """Yield times of steps whose routing is reused as published routing is: scripts/experts_decode.py, which replays
    steps without `generate`."""
    task, name = Task("decode", 1, 128, 128), "48 layers of Qwen3-30B-A3B"
    model = Model(build(48, torch.device("meta")), rates)
    others = [row for row in _committed("experts-missed")["rows"] if row.get("miss", "fetch") != "fetch"]
    for row in (*_committed("experts-decode")["rows"], *others):
        if row["case"].startswith("bf16"):
            continue
        miss = row.get("miss", "fetch")
        case = row["case"].replace("% of the expert pages", " % of the experts") + (miss != "fetch") * f", {miss}"
        config = _config("fp4", row["budget_gb"] * 1e9 if "budget_gb" in row else None)
        where = {"where": "device" if miss == "fetch" else "auto"}  # what fetches all computes nothing elsewhere
        config = vbrt.load_config(config, experts={"miss": miss}, compute=where)
        found = model.row(f"{name}: {case}", task, config, row["ms"])
        yield replace(found, predicted_ms=found.predicted_ms - default_cost_model("gpu").generate_ms)


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
    coded = {row["case"]: row for row in _committed("stream-coded")["rows"]}  # fine planes as they are today
    for row in found["rows"]:
        row = coded.get(row["case"], row)
        preset = row["case"].partition("-")[0]
        if (
            preset not in ("dense", "exact", "fp4")
            or "gpu_budget_bytes" not in row
            or row["case"].endswith(("able", "ssd"))
        ):
            continue  # pageable memory and this drive are in no rate
        for tokens, task in (("1", one), ("2048", many)):
            coding = "coded" if row is coded.get(row["case"]) else "plain"
            config = _config(preset, row["gpu_budget_bytes"], keep_head=True, fine_coding=coding)
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


@contextlib.contextmanager
def _meta_of_gpu() -> Iterator[None]:
    """Context in which scripts/typed_training.py makes its models as on a GPU, on the meta device."""
    before, typed_training.DEVICE = typed_training.DEVICE, "cuda"
    try:
        with torch.device("meta"):
            yield
    finally:
        typed_training.DEVICE = before


def _trainee(family: str) -> nn.Module:
    """Return a model of scripts/typed_training.py, without dropout, with adapters where its family has them."""
    with _meta_of_gpu():
        if family in typed_training.MODELS:
            model = typed_training.MODELS[family]()
        elif family == "full":
            model = llama_of(typed_training.SHAPE)
        elif family == "full8b":
            model = llama_of(full_models.SHAPES["8b"]).to(torch.bfloat16)
        else:
            from peft import LoraConfig, get_peft_model

            model = get_peft_model(llama_8b_meta(), LoraConfig(r=16, target_modules=["q_proj", "v_proj"]))
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    return model


def _typed_config(family: str, way: str, model: nn.Module) -> VBConfig | None:
    """Return the config of a way of scripts/typed_training.py; None: unwrapped."""
    if "vbrt" not in way:
        return None
    if family == "lora":
        return _config("fp4", (1 << 30) if "1 GiB" in way else None)
    training = {"activations": "offload" if "offloaded" in way else "recompute"}
    if way.startswith("Trainer"):
        training["ahead"] = 0  # it clips, so that no update begins before the backward pass has ended
    if family == "full8b":
        weights, pages = {"embeddings": True, "keep_head": False}, typed_training._PAGES_8B
    else:
        blocks = model.get_submodule(stacks_of(model)[0].name)
        weights, pages = {}, 2 * typed_training._SLOTS * max(weight.numel() for weight in blocks.parameters())
    return vbrt.load_config("full", tiers={"gpu": {"budget": pages}}, training=training, weights=weights)


def _typed_task(family: str, way: str, tokens: int) -> Task:
    sizes = (tokens // 256, 256) if family == "vit" else (tokens // typed_training.CONTEXT, typed_training.CONTEXT)
    adapted = family == "lora"
    mixed = not adapted and family != "full8b"
    return Task("train", *sizes, checkpointing=adapted or "vbrt" not in way, mixed=mixed)


def typed(known: Rates) -> Iterator[Row]:
    """Yield times of training of transformers' models: scripts/typed_training.py. Left out are other libraries' ways,
    compiled blocks, passes without an update, and adapters on experts, which no task has."""
    models: dict[str, Model] = {}
    for run in ("models", "gpt2", "8b", "lora", "peers"):
        committed = _committed(f"typed-training-{run}")
        found = ((family, way) for family in committed if family != "machine" for way in committed[family])
        for family, way in found:
            if not way.startswith(("Trainer", "resident", "vbrt", "bf16")) or "compiled" in way:
                continue
            if family not in models:
                models[family] = Model(_trainee(family), known, MUCH)
            for tokens, one in committed[family][way].items():
                if tokens.isdigit():
                    task = _typed_task(family, way, int(tokens))
                    config = _typed_config(family, way, models[family].bare(task))
                    case = f"{_TYPED[family]}, {int(tokens):,} tokens: {way}{', run of peers' * (run == 'peers')}"
                    yield models[family].row(case, task, config, 1e3 * one["seconds"])


def config_of(row: dict[str, Any]) -> VBConfig | None:
    """Return the config that a setting of scripts/advice.py ran under: all of it, or, as older rows have it, the preset
    and the GPU's budget; None: unwrapped."""
    if "config" in row:
        if row["config"] is None:
            return None
        config = VBConfig.from_save(row["config"], source="row")
        older = {"fine_coding": row["config"]["weights"].get("fine_coding", "plain")}
        where = {"where": row["config"]["compute"].get("where", "device")}
        return vbrt.load_config(config, weights=older, compute=where)
    return row["preset"] and _config(row["preset"], row["budget"])


def followed(committed: dict[str, Any]) -> Iterator[tuple[dict[str, Any], Estimate, Speed]]:
    """Yield the settings that scripts/advice.py has followed, each with today's estimate, and with what is predicted
    from the rates of its run and the hit rate that its experts had."""
    models: dict[str, Model] = {}
    known = {case.name: case for case in cases(committed["layers"])}
    for row in committed["rows"]:
        task = Task(**row["task"])
        if row["model"] not in models:
            with torch.device("meta"):
                models[row["model"]] = Model(known[row["case"]].build(), rates())
        model = models[row["model"]]
        found, own = model.found(task, config_of(row)), Rates(**row["rates"])
        yield row, found, predict(model.bare(task), found, own, hit_rate=row.get("hit_rate"))


def _trained_otherwise(row: dict[str, Any]) -> bool:
    """True for a setting that trained from the tiers before recorded blocks, updates ahead and losses in chunks."""
    return row["task"]["kind"] == "train" and row["config"] is not None and "ahead" not in row["config"]["training"]


def advice() -> Iterator[Row]:
    """Yield the times of these settings, but those of steps that are recorded now and were not."""
    for row, found, speed in followed(_committed("advice")):
        if row.get("ms") is not None and not (row["eager"] and found.recorded) and not _trained_otherwise(row):
            yield Row(f"{row['case']}: {row['name']}", speed.ms, row["ms"], speed.bound)


def advice_table(committed: dict[str, Any]) -> list[str]:
    """Return the documentation's table of what was followed; in bold what had been the first answer."""
    lines = ["| case | GPU | setting | estimated | measured | predicted | measured |", "| --- " * 7 + "|"]
    for row, found, speed in followed(committed):
        name = f"**{row['name']}**" if row["first"] else row["name"]
        start = f"| {row['case']} | {row['gpu'] / (1 << 30):.0f} GiB | {name} | {found.again_bytes / 1e9:.2f} GB | "
        if row.get("ms") is None:
            lines.append(f"{start}{'out of memory' if row['oom'] else row['error']} | | |")
        else:
            ms = f"{speed.ms:.1f} ms | {row['ms']:.1f} ms{', eager' if row['eager'] else ''} |"
            lines.append(f"{start}{row['peak_bytes'] / 1e9:.2f} GB | {ms}")
    return lines


def every() -> Iterator[Row]:
    """Yield all rows."""
    known = rates()
    model = Model(llama_8b_meta(), known)
    yield from generating(model)
    yield from streaming(model)
    yield from experts(known)
    yield from missed_experts(known)
    yield from advice()
    yield from training(known)
    yield from typed(known)


def on_cpu() -> Iterator[Row]:
    """Yield times of two cores: scripts/cpu_bench.py and scripts/advice_cpu.py."""
    mine, peers = (json.loads((_RESULTS / f"{name}.json").read_text()) for name in ("advice-cpu", "cpu-peers"))
    known = Rates(**mine["rates"])
    models = {}
    for shape in ("1b", "moe"):
        with torch.device("meta"):
            models[shape] = Model(random_model(SHAPES[shape], torch.bfloat16), known, HOST)
    decode, prefill = TASKS
    for part, shape, task in (("decode", "1b", decode), ("prefill", "1b", prefill), ("moe", "moe", decode)):
        for name, row in peers["parts"][part]["rows"].items():
            if not name.startswith("llama.cpp"):
                ms = 1e3 * statistics.median(row["seconds"])
                yield models[shape].row(f"{shape}, {task.kind}, beside others: {name}", task, _of_peer(name), ms)
    for row in mine["rows"]:
        task = decode if row["task"] == "decode" else prefill
        yield models[row["shape"]].row(
            f"{row['shape']}, {row['task']}: {row['case']}", task, CANDIDATES[row["case"]], row["ms"]
        )


def _of_peer(name: str) -> VBConfig | None:
    """Return the config of a contender of scripts/cpu_bench.py, whose head is encoded, too."""
    kind, _, rest = name.partition(" ")
    if kind == "torch":
        return None
    weights, compute = {"keep_head": False}, {"int8": rest.endswith("int8")}
    return vbrt.load_config(rest.partition(",")[0], weights=weights, compute=compute)


def times_table(rows: Iterable[Row]) -> list[str]:
    """Return a table of the documentation."""
    lines = ["| case | predicted | measured | off | limit |", "| --- " * 5 + "|"]
    for row in rows:
        figures = f"{row.predicted_ms:.1f} ms | {row.ms:.1f} ms | {100 * row.off:+.0f} %"
        lines.append(f"| {row.case} | {figures} | {row.bound} |")
    return lines


def write_tables() -> None:
    """Put the tables between the marks of the page."""
    text = _PAGE.read_text()
    tables = {"times": times_table(every()), "cpu": times_table(on_cpu()), "advice": advice_table(_committed("advice"))}
    for mark, table in tables.items():
        before, begin, rest = text.partition(f"<!-- {mark}:begin -->\n")
        _, end, after = rest.partition(f"<!-- {mark}:end -->")
        text = before + begin + "\n" + "\n".join(table) + "\n\n" + end + after
    _PAGE.write_text(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--table", action="store_true", help="write the tables of the docs")
    parser.add_argument("--cpu", action="store_true", help="times on a CPU only")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.table:
        write_tables()
        return
    for row in chain(() if args.cpu else every(), on_cpu()):
        mark = " " if row.near else "!"
        print(f"{mark} {row.case:<72}{row.predicted_ms:9.1f}{row.ms:9.1f} {100 * row.off:+7.1f} %  {row.bound}")


if __name__ == "__main__":
    main()
