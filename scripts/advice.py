"""Advice followed: on a GPU made small, the first answer and its neighbours, beside what was predicted of them.

    python3 scripts/advice.py [--seconds 80] [--cases llama-6 moe-4] [--out results.json]      on a GPU
    python3 scripts/advice.py --ask settings.json      no GPU: what would run on an H200; --run settings.json runs it

A case is a model of random weights, a task, a goal and the memory that torch may reserve of the GPU
(`set_per_process_memory_fraction`). `vbrt.advise` answers for a machine of that memory, with rates measured here; then
its first answer runs, the front, and some of what it passed over: most bytes, milliseconds, out of memory or not.
Each setting has a model of its own, in host memory where it is wrapped: its pages come to a GPU that is small already.
"""

import argparse
import gc
import json
import os
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")  # as advice says

import torch  # after the checkout is on the path
import transformers
from torch import nn

import vbrt
from scripts.experts_decode import counts_of
from scripts.generate_bench import Clock
from scripts.measuring import interleaved, machine
from vbrt.config import Machine
from vbrt.config.toml_text import toml_text
from vbrt.estimation.advice.choices import Choice
from vbrt.estimation.advice.machine_rates import Rates, measure_rates
from vbrt.estimation.memory.example_inputs import inputs_of
from vbrt.estimation.memory.planned_estimate import lora_model
from vbrt.estimation.memory.task import Task
from vbrt.wrapper.full_wrapper import VBFullWrapper

_RESULTS = ROOT / "benchmarks" / "results" / "advice-nvidia-h200.json"
GiB = 1 << 30
_HOST = 96 * GiB  # of the machine whose advice is asked


# -- cases ------------------------------------------------------------------------------------------------------------


def _built(kind: str, dtype: torch.dtype = torch.bfloat16, **sizes: Any) -> nn.Module:
    """Return a model of random weights on the default device."""
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **sizes)
    return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype).eval()


def _llama(layers: int) -> nn.Module:
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8}
    sizes = {"hidden_size": 4096, "intermediate_size": 14336, "vocab_size": 128256, "max_position_embeddings": 8192}
    return _built("llama", num_hidden_layers=layers, **heads, **sizes)


def _moe(layers: int) -> nn.Module:
    """Layers of Qwen3-30B-A3B."""
    heads = {"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128}
    experts = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": True}
    sizes = {"hidden_size": 2048, "intermediate_size": 6144, "vocab_size": 151936}
    return _built("qwen3_moe", num_hidden_layers=layers, **heads, **experts, **sizes)


def _gpt2() -> nn.Module:
    return _built("gpt2", torch.float32, n_embd=1024, n_layer=24, n_head=16)  # GPT-2 medium


@dataclass(frozen=True, slots=True)
class Case:
    """A model and its name, a task, a goal, the GPU's memory, how many candidates run beside the first answer, and
    the host's memory."""

    name: str
    model: str
    build: Callable[[], nn.Module]
    goal: str
    task: Task
    gpu: int
    others: int = 4
    host: int = _HOST


def cases(layers: int) -> Iterator[Case]:
    """Yield what is measured; `layers` of the 32 that the 8B shape has, whose memory scales with it."""

    def llama() -> nn.Module:
        return _llama(layers)

    def part(gib: float) -> int:
        return int(gib * GiB * layers / 32) + (0 if layers == 32 else 2 * GiB)  # embeddings and head do not scale

    one, passed, routed = Task("decode", 1, 1024, 16), Task("prefill", 1, 2048), Task("decode", 1, 512, 16)
    yield Case("llama-6", "llama", llama, "fastest", one, part(6), 3)
    yield Case("llama-12-exact", "llama", llama, "exact", one, part(12), 2)
    yield Case("llama-24", "llama", llama, "fastest", one, part(24), 3)
    yield Case("llama-24-exact", "llama", llama, "exact", one, part(24), 2)
    yield Case("llama-12-throughput", "llama", llama, "throughput", one, part(12), 2)
    yield Case("llama-6-prefill", "llama", llama, "fastest", passed, part(6), 1)
    yield Case("llama-12-prefill", "llama", llama, "exact", passed, part(12), 2)
    yield Case("moe-4", "moe", lambda: _moe(12), "fastest", routed, 4 * GiB, 3)
    yield Case("moe-4-exact", "moe", lambda: _moe(12), "exact", routed, 4 * GiB, 2)
    half = lambda: _llama(layers // 2)  # noqa: E731
    yield Case("llama-lora-12", "half a llama", half, "train", Task("train", 1, 1024), 12 * GiB, 2, 12 * GiB)
    yield Case("gpt2-train-6", "gpt2", _gpt2, "train", Task("train", 4, 1024), 6 * GiB, 0)
    yield Case("gpt2-train-16", "gpt2", _gpt2, "train", Task("train", 4, 1024), 16 * GiB, 3)


# -- what runs --------------------------------------------------------------------------------------------------------

#: of an H200, where advice is asked without one: as `vbrt tune --machine` measures them there
_H200 = Rates("NVIDIA H200", 55.0, 4260.0, 790.0, 4.5, 1.7, "measured here", 52.0)


@dataclass(frozen=True, slots=True)
class Setting:
    """One candidate of an advice, as data: how it runs, and what was predicted.

    Attributes:
        config: as `vbrt advise --write` writes it; None: unwrapped.
        task: the attributes of a Task.
        first: it is the first answer.
        rival: it could have been: with the bits, the batch and what trains of the first answer.
    """

    case: str
    model: str
    goal: str
    gpu: int
    name: str
    task: dict[str, Any]
    config: dict[str, Any] | None
    first: bool
    rival: bool
    lossless: bool
    tokens: int
    predicted_ms: float
    bound: str
    estimated_bytes: int


def settings_of(case: Case, rates: Rates) -> Iterator[Setting]:
    """Ask for advice; yield its first answer and what comes next, of what could have been the answer first."""
    with torch.device("meta"):
        model = case.build()
    advice = vbrt.advise(
        model, case.goal, case.task, machine=Machine(case.gpu, case.gpu, case.host, case.host), rates=rates
    )
    print(f"\n{case.name}, {case.gpu / GiB:.1f} GiB\n{advice}", flush=True)
    best = advice.best

    def rank(choice: Choice) -> tuple[bool, float]:
        worse = best.speed.tokens_s / choice.speed.tokens_s if case.goal == "throughput" else choice.speed.ms
        return not _rival(choice, best, case), worse

    near = sorted((choice for choice in advice.fitting if choice is not best), key=rank)
    for choice in (best, *near[: case.others]):
        yield _setting(case, choice, first=choice is best, rival=_rival(choice, best, case))


def _rival(choice: Choice, best: Choice, case: Case) -> bool:
    """True if a choice that fits could have been the answer."""
    if case.goal == "train":
        return choice.given_up == best.given_up and choice.task.batch == best.task.batch
    return case.goal == "throughput" or choice.task.batch == case.task.batch


def _setting(case: Case, choice: Choice, *, first: bool, rival: bool) -> Setting:
    task = {key: value for key, value in asdict(choice.task).items() if key != "step"}
    config = None if choice.found.config is None else choice.found.config.to_dict()
    what = (case.name, case.model, case.goal, case.gpu, choice.name, task, config, first, rival, choice.lossless)
    return Setting(*what, choice.speed.tokens, choice.speed.ms, choice.speed.bound, choice.found.again_bytes)


class Subject:
    """A model of a case, for one setting."""

    def __init__(self, case: Case, setting: Setting) -> None:
        with torch.device("cuda"):  # where random weights are quick
            model = case.build()
        if setting.task["lora"]:
            model = lora_model(model, setting.task["lora"], device="cuda")
        self.model, self.vb = model, None
        if setting.config is not None:
            self.model = model.cpu()
        free()

    def wrap(self, setting: Setting) -> None:
        """Wrap it as the setting says, and encode its weights."""
        if setting.config is None:
            return
        with tempfile.NamedTemporaryFile("w", suffix=".toml") as file:  # as `vbrt advise --write` writes it
            file.write(toml_text(vbrt.VBConfig.from_dict(setting.config)))
            file.flush()
            trains = {"optimizer": torch.optim.AdamW} if setting.config["mode"] == "full" else {}
            self.model = self.vb = vbrt.wrap(self.model, file.name, **trains)
        if not trains:
            self.vb.materialize(progress=False)

    def close(self) -> None:
        if self.vb is not None:
            self.vb.close()
        self.model = self.vb = None
        torch._C._cuda_clearCublasWorkspaces()
        free()

    def run(self, task: Task) -> dict[str, float | None]:
        """Return the milliseconds of a step, and the hit rate of routed experts."""
        inputs = inputs_of(self.vb.module if self.vb is not None else self.model, task, device="cuda")
        if task.kind == "decode":
            return _decode(self.model, task, inputs["input_ids"])
        return {"ms": _prefill(self.model, inputs) if task.kind == "prefill" else _train(self.model, inputs, task)}


def free() -> None:
    gc.collect()
    torch.cuda.empty_cache()


class _Counting(Clock):
    """A clock that counts hits and misses of routed experts while it goes."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._model, self._early = model, (0, 0)

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        if len(self.moments) == 1:
            self._early = counts_of(self._model)[:2]
        return super().__call__(*args, **kwargs)

    @property
    def hit_rate(self) -> float | None:
        hits, misses = (now - early for now, early in zip(counts_of(self._model), self._early, strict=False))
        return hits / (hits + misses) if hits + misses else None


def _decode(model: Any, task: Task, ids: torch.Tensor) -> dict[str, float | None]:
    torch.manual_seed(3)
    ids = torch.randint(10, 30000, ids.shape, device="cuda")
    for new in (6, task.new):  # the first call records its step
        clock = _Counting(model)
        lengths = {"max_new_tokens": new, "min_new_tokens": new}
        model.generate(ids, **lengths, do_sample=False, pad_token_id=0, stopping_criteria=[clock])
    return {"ms": clock.ms, "hit_rate": clock.hit_rate}


def _prefill(model: Any, inputs: dict[str, Any]) -> float:
    def run() -> None:
        with torch.no_grad():
            model(**inputs, use_cache=False)
        torch.cuda.synchronize()

    return 1e3 * interleaved({"pass": run}, times=3, warm=4)["pass"]


def _train(model: Any, inputs: dict[str, Any], task: Task) -> float:
    model.train()
    if task.checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    elif hasattr(model, "gradient_checkpointing_disable"):
        model.gradient_checkpointing_disable()
    if isinstance(model, VBFullWrapper):
        optimizer = model  # whose step and zero_grad are those of the optimizer that it took
    else:
        optimizer = getattr(torch.optim, task.optimizer)((p for p in model.parameters() if p.requires_grad), lr=1e-4)

    def run() -> None:
        with torch.autocast("cuda", torch.bfloat16, enabled=task.mixed):
            loss = model(**inputs, labels=inputs["input_ids"], use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()

    return 1e3 * interleaved({"step": run}, times=3)["step"]


def measured(case: Case, setting: Setting) -> dict[str, Any]:
    """Wrap and run a model within its case's memory; return its row."""
    total = torch.cuda.get_device_properties(0).total_memory
    row = asdict(setting) | {"error": None, "oom": False}
    subject = Subject(case, setting)
    try:
        torch.cuda.set_per_process_memory_fraction(setting.gpu / total)
        torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        subject.wrap(setting)
        row["ready_s"] = time.perf_counter() - start
        row["held_bytes"] = torch.cuda.memory_allocated()
        row |= subject.run(Task(**setting.task))
        row |= {"peak_bytes": torch.cuda.max_memory_allocated(), "reserved_bytes": torch.cuda.max_memory_reserved()}
        row["seconds"] = time.perf_counter() - start
        row["eager"] = dict(subject.vb.stats().steps.reasons) if subject.vb is not None else {}
    except torch.OutOfMemoryError as error:
        row |= {"oom": True, "error": str(error)[:600]}
    except Exception as error:  # noqa: BLE001 - one setting does not lose the others; it is printed and in the results
        traceback.print_exc()
        row["error"] = f"{type(error).__name__}: {error}"[:300]
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        subject.close()
    _say(row)
    if row["oom"]:
        print(row["error"], flush=True)
    return row


def _say(row: dict[str, Any]) -> None:
    said = "out of memory" if row["oom"] else row["error"]
    if said is None:
        off = [100 * (predicted / found - 1) for predicted, found in _pairs(row)]
        said = f"{row['ms']:8.2f} ms ({off[0]:+.0f} %)  {row['peak_bytes'] / 1e9:7.3f} GB ({off[1]:+.1f} %)"
    print(f"{'*' if row['first'] else ' '} {row['case']:<22}{row['name']:<44}{said}", flush=True)


def _pairs(row: dict[str, Any]) -> tuple[tuple[float, float], tuple[float, float]]:
    """Return what was predicted and what was measured: milliseconds, and bytes."""
    return (row["predicted_ms"], row["ms"]), (row["estimated_bytes"], row["peak_bytes"])


def run(known: dict[str, Case], settings: list[Setting], end: float) -> Iterator[dict[str, Any]]:
    """Yield the rows of settings, first answers first, until the time is over."""
    for setting in sorted(settings, key=lambda each: not each.first):
        if time.monotonic() > end:
            print("not reached:", setting.case, setting.name)
        else:
            yield measured(known[setting.case], setting)


# -- verdicts ---------------------------------------------------------------------------------------------------------


def verdicts(rows: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield each case: its first answer beside the best of those that could have been the answer to its goal."""
    for case in dict.fromkeys(row["case"] for row in rows):
        mine = [row for row in rows if row["case"] == case]
        first = next((row for row in mine if row["first"]), None)
        if first is None:
            continue
        rivals = [row for row in mine if not row["oom"] and not row["error"] and row["rival"]]
        best = max(rivals, key=_merit, default=None)
        ran = not first["oom"] and not first["error"]
        gap = _merit(best) / _merit(first) - 1 if ran and best else None
        yield {"case": case, "first": first, "best": best, "gap": gap, "oom": first["oom"]}


def _merit(row: dict[str, Any]) -> float:
    return row["tokens"] / row["ms"] if row["goal"] == "throughput" else 1 / row["ms"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ask", type=Path, metavar="FILE", help="no GPU: write the settings that would run")
    parser.add_argument("--run", type=Path, metavar="FILE", help="run these settings")
    parser.add_argument("--seconds", type=float, default=80.0, help="begin nothing after this")
    parser.add_argument("--layers", type=int, default=32, help="of the 8B shape (32)")
    parser.add_argument("--cases", nargs="*", default=None, help="some of the cases")
    parser.add_argument("--out", type=Path, default=_RESULTS)
    args = parser.parse_args()
    start, known = time.monotonic(), {case.name: case for case in cases(args.layers)}
    wanted = [case for case in known.values() if args.cases is None or case.name in args.cases]
    rates = measure_rates() if args.ask is None else _H200
    print(f"{rates}, in {time.monotonic() - start:.1f} s")
    if args.run is None:
        settings = [setting for case in wanted for setting in settings_of(case, rates)]
    else:
        settings = [Setting(**each) for each in json.loads(args.run.read_text())]
    if args.ask is not None:
        args.ask.write_text(json.dumps([asdict(setting) for setting in settings], indent=1) + "\n")
        return
    settings = [setting for setting in settings if args.cases is None or setting.case in args.cases]
    rows = []
    try:
        rows.extend(row | {"rates": asdict(rates)} for row in run(known, settings, start + args.seconds))
    finally:
        about = {"machine": machine(), "layers": args.layers, "rates": asdict(rates)}
        args.out.write_text(json.dumps(about | {"rows": rows}, indent=1) + "\n")
    report(rows)


def report(rows: list[dict[str, Any]]) -> None:
    print()
    for row in rows:
        _say(row)
    for verdict in verdicts(rows):
        gap = "-" if verdict["gap"] is None else f"{100 * verdict['gap']:.1f} % behind {verdict['best']['name']}"
        print(f"{verdict['case']:<24}{verdict['first']['name']:<44}{'OUT OF MEMORY' if verdict['oom'] else gap}")


if __name__ == "__main__":
    main()
