"""Estimates beside what a GPU measures: whole families of models, each task; benchmarks/results/estimates-<gpu>.json.

    python scripts/estimates.py                     on a GPU
    python scripts/estimates.py --committed         the estimates of what other scripts have measured and committed
    python scripts/estimates.py --table             the same and the GPU's, as the table of docs/predictions.md

Models are random, of their families' classes, with a billion or so parameters. Each case starts with an empty
allocator; the figure is `torch.cuda.max_memory_allocated()`, cuBLAS's workspace with it.
"""

import argparse
import gc
import json
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # after the checkout is on the path
import transformers
from torch import nn

import vbrt
from scripts.lm import LanguageModel, Shape
from scripts.measuring import machine
from vbrt.config import Machine
from vbrt.estimation.memory.example_inputs import inputs_of
from vbrt.estimation.memory.planned_estimate import lora_model
from vbrt.estimation.memory.task import Task

_H200 = Machine(140 << 30, 139 << 30, 128 << 30, 120 << 30)
_RESULTS = ROOT / "benchmarks" / "results"
_MEASURED = _RESULTS / "estimates-nvidia-h200.json"


# -- models -----------------------------------------------------------------------------------------------------------


def _causal(config: Any, dtype: torch.dtype) -> nn.Module:
    return transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)


def _llama(dtype: torch.dtype) -> nn.Module:
    config = transformers.LlamaConfig(
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
        tie_word_embeddings=True,
    )
    return _causal(config, dtype)


def _gpt2(dtype: torch.dtype) -> nn.Module:
    return _causal(transformers.GPT2Config(n_embd=1280, n_layer=36, n_head=20), dtype)  # GPT-2 large


def _t5(dtype: torch.dtype) -> nn.Module:
    config = transformers.T5Config(d_model=1024, d_ff=4096, num_layers=24, num_heads=16, d_kv=64)  # T5 large
    return transformers.T5ForConditionalGeneration._from_config(config, dtype=dtype)


def _vit(dtype: torch.dtype) -> nn.Module:
    config = transformers.ViTConfig(
        hidden_size=1280, num_hidden_layers=32, num_attention_heads=16, intermediate_size=5120, patch_size=14
    )
    return transformers.ViTForImageClassification._from_config(config, dtype=dtype)


def _mamba(dtype: torch.dtype) -> nn.Module:
    return _causal(transformers.MambaConfig(hidden_size=1536, num_hidden_layers=24), dtype)


def _gemma(dtype: torch.dtype) -> nn.Module:
    config = transformers.Gemma3TextConfig(  # Gemma 3 1B: five layers in six see 512 tokens
        hidden_size=1152,
        intermediate_size=6912,
        num_hidden_layers=26,
        num_attention_heads=4,
        num_key_value_heads=1,
        head_dim=256,
        sliding_window=512,
        vocab_size=262144,
    )
    return _causal(config, dtype)


def _qwen_moe(dtype: torch.dtype) -> nn.Module:
    config = transformers.Qwen3MoeConfig(
        hidden_size=1024,
        intermediate_size=2048,
        moe_intermediate_size=512,
        num_hidden_layers=12,
        num_attention_heads=16,
        num_key_value_heads=4,
        num_experts=64,
        num_experts_per_tok=8,
        vocab_size=32000,
    )
    return _causal(config, dtype)


def _unet(dtype: torch.dtype) -> nn.Module:
    from diffusers import UNet2DConditionModel

    return UNet2DConditionModel(sample_size=64, cross_attention_dim=768).to(dtype)  # Stable Diffusion 1.5


_FAMILIES: dict[str, Callable[[torch.dtype], nn.Module]] = {
    "Llama 1B": _llama,
    "GPT-2 large": _gpt2,
    "T5 large": _t5,
    "ViT huge": _vit,
    "Mamba": _mamba,
    "Gemma 3 1B": _gemma,
    "Qwen3-MoE": _qwen_moe,
    "UNet of SD 1.5": _unet,
}


@dataclass(frozen=True, slots=True)
class Case:
    """A family, a task, and how the model is wrapped: None: not at all."""

    family: str
    task: Task
    config: str | None = None
    gpu: str | None = None  # tiers.gpu.budget
    dtype: torch.dtype = torch.bfloat16
    mode: str = "infer"

    @property
    def name(self) -> str:
        how = f"{self.config}{'' if self.mode == 'infer' else ' ' + self.mode}{', gpu ' + self.gpu if self.gpu else ''}"
        extras = [f"LoRA {self.task.lora}"] if self.task.lora else []
        extras += [self.task.optimizer] if self.task.optimizer != "AdamW" else []
        extras += [name for name in ("checkpointing", "mixed") if getattr(self.task, name)]
        sizes = f"{self.task.batch} × {self.task.context}"
        return ", ".join([self.family, self.task.kind, sizes, how if self.config else "unwrapped", *extras])

    def vbconfig(self) -> Any:
        if self.config is None:
            return None
        tiers = {"gpu": {"budget": self.gpu}} if self.gpu else {}
        return vbrt.load_config(self.config, tiers=tiers, mode=self.mode)


def cases() -> Iterator[Case]:
    """What is measured, the tellings first."""
    decode, prefill, train = "decode", "prefill", "train"
    yield Case("Llama 1B", Task(decode, 8, 4096, 64))
    yield Case("Llama 1B", Task(decode, 8, 4096, 64), "fp4")
    yield Case("Llama 1B", Task(decode, 1, 1024, 64), "fp4", "300MiB")
    yield Case("Llama 1B", Task(prefill, 1, 2048), "exact", "1GiB")
    yield Case("Llama 1B", Task(prefill, 4, 2048), "fp4")
    yield Case("Llama 1B", Task(train, 2, 1024))
    yield Case("Llama 1B", Task(train, 2, 1024, mixed=True, checkpointing=True), dtype=torch.float32)
    yield Case("Llama 1B", Task(train, 2, 1024, lora=16), "fp4")
    yield Case("Llama 1B", Task(train, 2, 1024, optimizer="SGD"))
    yield Case("GPT-2 large", Task(decode, 4, 768, 64))
    yield Case("GPT-2 large", Task(prefill, 4, 1024), "fp4")
    yield Case("GPT-2 large", Task(train, 2, 1024, mixed=True), dtype=torch.float32)
    yield Case("T5 large", Task(prefill, 8, 512))
    yield Case("T5 large", Task(prefill, 8, 512), "fp4")
    yield Case("T5 large", Task(train, 4, 256))
    yield Case("ViT huge", Task(prefill, 64))
    yield Case("ViT huge", Task(prefill, 64), "fp4")
    yield Case("ViT huge", Task(train, 16))
    yield Case("UNet of SD 1.5", Task(prefill, 4))
    yield Case("UNet of SD 1.5", Task(prefill, 4), "fp4")
    yield Case("Mamba", Task(prefill, 2, 64))
    yield Case("Mamba", Task(prefill, 2, 64), "fp4")
    yield Case("Qwen3-MoE", Task(prefill, 1, 1024))
    yield Case("Qwen3-MoE", Task(decode, 4, 512, 64), "fp4")
    yield Case("Gemma 3 1B", Task(decode, 4, 2048, 64))
    yield from _further()


def _further() -> Iterator[Case]:
    """What was measured after the estimates of the families had been mended: other sizes, options and budgets."""
    decode, prefill, train = "decode", "prefill", "train"
    yield Case("Gemma 3 1B", Task(prefill, 1, 2048), "fp4")
    yield Case("Gemma 3 1B", Task(train, 1, 1024))
    yield Case("Gemma 3 1B", Task(decode, 8, 1024, 16), "fp4")
    yield Case("T5 large", Task(prefill, 2, 1024))
    yield Case("T5 large", Task(prefill, 2, 1024), "fp4")
    yield Case("T5 large", Task(train, 8, 128))
    yield Case("Mamba", Task(decode, 4, 64, 8))
    yield Case("Mamba", Task(train, 1, 64))
    # experts: prompts are one token over and over here, which goes to the same experts wherever it stands
    yield Case("Qwen3-MoE", Task(prefill, 2, 1024, experts=8), "exact", "1GiB")
    yield Case("Qwen3-MoE", Task(decode, 1, 512, 16, experts=8), "dense", "300MiB")
    yield Case("Qwen3-MoE", Task(train, 1, 512))
    yield Case("GPT-2 large", Task(train, 2, 1024, checkpointing=True))
    yield Case("GPT-2 large", Task(decode, 8, 512, 16), "fp4")
    yield Case("ViT huge", Task(train, 16, mixed=True, checkpointing=True), dtype=torch.float32)
    yield Case("ViT huge", Task(prefill, 16), "exact", "500MiB")
    yield Case("UNet of SD 1.5", Task(train, 2))
    yield Case("UNet of SD 1.5", Task(prefill, 1), "exact", "200MiB")
    yield Case("Llama 1B", Task(decode, 1, 1024, 16), "exact", "1GiB")
    yield Case("Llama 1B", Task(train, 1, 512, lora=16), "exact")
    yield Case("Llama 1B", Task(train, 1, 512), "fp4", mode="train")


# -- measuring --------------------------------------------------------------------------------------------------------


def measure(case: Case) -> dict[str, int]:
    """Run a case on the GPU; return the most bytes that torch's allocator had given out, in further calls of `generate`
    too."""
    torch._C._cuda_clearCublasWorkspaces()
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = _FAMILIES[case.family](case.dtype)
    if case.task.lora:
        model = lora_model(model, case.task.lora, device="cuda")
    model = model.train() if case.task.trains else model.eval()
    config = case.vbconfig()
    if config is not None:
        model = vbrt.wrap(model, config).materialize()
    peaks = {}
    for name in ("peak_bytes", *(["further_bytes"] if case.task.kind == "decode" and config is not None else [])):
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        _run(model, case.task)
        torch.cuda.synchronize()
        peaks[name] = torch.cuda.max_memory_allocated() - before
    return peaks


def _run(model: Any, task: Task) -> None:
    plain = model.module if isinstance(model, vbrt.VBModelWrapper) else model
    inputs = inputs_of(plain, task, device="cuda")
    if task.kind == "decode":
        more = {"max_new_tokens": task.new, "min_new_tokens": task.new, "do_sample": False, "pad_token_id": 0}
        model.generate(**inputs, **more)
    elif task.kind == "prefill":
        how = {"use_cache": False} if "input_ids" in inputs else {}
        with torch.no_grad():
            model(**inputs, **how)
    else:
        _train(model, inputs, task)


def _train(model: Any, inputs: dict[str, Any], task: Task) -> None:
    if task.checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    optimizer = getattr(torch.optim, task.optimizer)((p for p in model.parameters() if p.requires_grad), lr=1e-4)
    labels = inputs.get("decoder_input_ids", inputs.get("input_ids"))
    for _ in range(2):
        with torch.autocast("cuda", torch.bfloat16, enabled=task.mixed):
            if labels is None:
                loss = next(iter(model(**inputs).values())).float().sum()  # logits, or what diffusers calls a sample
            else:
                loss = model(**inputs, labels=labels, use_cache=False).loss
        loss.backward()
        del loss
        optimizer.step()
        optimizer.zero_grad()


def estimated(case: Case, on: Machine) -> Any:
    """Return the estimate of a case."""
    with torch.device("meta"):
        model = _FAMILIES[case.family](case.dtype)
    return vbrt.estimate(model, case.task, case.vbconfig(), machine=on)


def on_gpu(wanted: Iterable[Case], seconds: float) -> Iterator[dict]:
    """Measure case after case until the time is over; a case that fails is a row that says so."""
    end = time.monotonic() + seconds
    for case in wanted:
        if time.monotonic() > end:
            print(f"not reached: {case.name}")
            continue
        start = time.perf_counter()
        try:
            row = {**measure(case), "error": None}
        except Exception as error:  # noqa: BLE001 - one case does not lose the others; it is printed and in the results
            traceback.print_exc()
            row = {"error": f"{type(error).__name__}: {error}"[:300]}
        row = {"case": case.name, **row, "seconds": time.perf_counter() - start, "commit": machine()["commit"]}
        print(f"{case.name:<70}{row.get('peak_bytes', 0) / 1e9:8.3f} GB  {row['seconds']:.1f} s", flush=True)
        yield row


# -- what is committed ------------------------------------------------------------------------------------------------


def llama_8b_meta() -> nn.Module:
    config = transformers.LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=32,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=128256,
    )
    with torch.device("meta"):
        return _causal(config, torch.bfloat16)


def last_logits(model: nn.Module) -> Any:
    return model(input_ids=torch.zeros(1, 2048, dtype=torch.long), use_cache=False, logits_to_keep=1)


def streaming() -> Iterator[dict]:
    """Yield the estimate of each committed row of streaming, beside it."""
    model, task = llama_8b_meta(), Task("prefill", 1, 2048, step=last_logits)
    for row in json.loads((_RESULTS / "stream-nvidia-h200.json").read_text())["rows"]:
        preset = row["case"].partition("-")[0]
        if "gpu_peak_bytes" not in row or preset not in ("dense", "exact", "fp4"):
            continue
        tiers = {"gpu": {"budget": row["gpu_budget_bytes"]}} if row["gpu_budget_bytes"] else {}
        config = vbrt.load_config(preset, weights={"keep_head": True}, tiers=tiers)
        found = vbrt.estimate(model, task, config, machine=_H200).peak_bytes
        yield _row(f"8B, 2048 tokens: {row['case']}", found, row["gpu_peak_bytes"])


def training() -> Iterator[dict]:
    """Yield the estimate of each committed row of training and inference of the 355 M model, beside it.

    What is committed for training leaves out what was there before, cuBLAS's workspaces; inference came after it in the
    same process, and has that of the thread of backward passes beside its own.
    """
    committed = json.loads((_RESULTS / "training-nvidia-h200.json").read_text())
    shape = Shape(**committed["shape"])
    for kind in ("training", "inference"):
        for row in committed[kind]:
            name = row["case"]
            fused = "fused" in name or "flash" in name
            with torch.device("meta"):
                model = LanguageModel(
                    shape, attention="sdpa" if fused else "plain", checkpointing="checkpointing" in name
                )
            found = estimated_355m(model, name, kind, shape)
            workspace = sum(r.nbytes for r in found.rows if r.name == "workspace")
            estimated = found.peak_bytes + (-workspace if kind == "training" else workspace)
            yield _row(f"355M, {kind}: {name}", estimated, row["peak_bytes"])


def estimated_355m(model: nn.Module, name: str, kind: str, shape: Shape) -> Any:
    if kind == "training":
        config = vbrt.load_config("fp4", mode="train") if "FP4" in name else None

        def step(model: nn.Module) -> torch.Tensor:
            ids = torch.zeros(4, shape.context + 1, dtype=torch.long)
            return model(ids[:, :-1], ids[:, 1:])

        return vbrt.estimate(model, Task("train", mixed="bf16" in name, step=step), config, machine=_H200)
    model = model if "fp32" in name else model.bfloat16()
    budget = {"gpu": {"budget": _quarter(model)}} if "quarter" in name else {}
    config = vbrt.load_config("fp4", tiers=budget) if "FP4" in name else None

    def forward(model: nn.Module) -> torch.Tensor:
        return model(torch.zeros(4, shape.context, dtype=torch.long), last=True)

    return vbrt.estimate(model, Task("prefill", step=forward), config, machine=_H200)


def _quarter(model: nn.Module) -> int:
    return vbrt.make_plan(model, vbrt.load_config("fp4"), _H200).page_bytes // 4


def _row(name: str, estimated: int, peak: int) -> dict:
    return {"case": name, "estimated_bytes": estimated, "peak_bytes": peak, "off": estimated / peak - 1, "error": None}


def families() -> Iterator[dict]:
    """Yield today's estimate of each case that a GPU measured, beside it; what needs a library that is not installed
    is skipped, and said."""
    known = {case.name: case for case in cases()}
    for row in json.loads(_MEASURED.read_text())["rows"]:
        case = known.get(row["case"])
        if row["error"] or case is None:
            continue
        try:
            found = estimated(case, _H200)
            yield _row(row["case"], found.peak_bytes, row["peak_bytes"])
            if "further_bytes" in row:
                yield _row(f"{row['case']}, further calls", found.again_bytes, row["further_bytes"])
        except ModuleNotFoundError as error:
            print(f"skipped: {row['case']} ({error})", file=sys.stderr)


_PAGE = ROOT / "docs" / "predictions.md"


def write_table() -> None:
    """Put the tables of all that is measured between the marks of the page; what is skipped keeps its line."""
    text = _PAGE.read_text()
    before, begin, rest = text.partition("<!-- estimates:begin -->\n")
    old, end, after = rest.partition("<!-- estimates:end -->")
    measured = {row["case"] for row in json.loads(_MEASURED.read_text())["rows"] if not row["error"]}
    measured |= {f"{name}, further calls" for name in measured}
    lines = {line.split("|")[1].strip(): line for line in old.splitlines() if line.startswith("| ")}
    lines = {name: line for name, line in lines.items() if name in measured}  # in the page's order
    for row in (*families(), *streaming(), *training()):
        figures = (
            f"{row['estimated_bytes'] / 1e9:.3f} GB | {row['peak_bytes'] / 1e9:.3f} GB | {100 * row['off']:+.1f} %"
        )
        lines[row["case"]] = f"| {row['case']} | {figures} |"
    table = ["| case | estimated | measured | off |", "| --- | --- | --- | --- |", *lines.values()]
    _PAGE.write_text(before + begin + "\n" + "\n".join(table) + "\n\n" + end + after)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--committed", action="store_true", help="no GPU: beside what other scripts have committed")
    parser.add_argument("--table", action="store_true", help="no GPU: write the table of the docs")
    parser.add_argument("--seconds", type=float, default=600.0, help="begin no case after this")
    parser.add_argument("--further", action="store_true", help="only the cases that are not in the results yet")
    parser.add_argument(
        "--named", metavar="TEXT", nargs="+", help="only the cases whose names have one of these, again"
    )
    parser.add_argument("--out", type=Path, default=_MEASURED)
    args = parser.parse_args()
    if args.committed:
        for row in (*families(), *streaming(), *training()):
            print(
                f"{row['case']:<76}{row['estimated_bytes'] / 1e9:8.3f}{row['peak_bytes'] / 1e9:8.3f}"
                f" {100 * row['off']:+6.2f} %"
            )
        return
    if args.table:
        write_table()
        return
    known = json.loads(_MEASURED.read_text())["rows"] if args.further or args.named else []
    if args.named:
        wanted = [case for case in cases() if any(text in case.name for text in args.named)]
    else:
        wanted = [case for case in cases() if case.name not in {row["case"] for row in known}]
    rows: list[dict] = []
    try:
        rows.extend(on_gpu(wanted, args.seconds))
    finally:
        new = {row["case"]: row for row in rows}
        rows = [new.pop(row["case"], row) for row in known] + list(new.values())
        args.out.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
