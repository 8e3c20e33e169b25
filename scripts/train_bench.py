"""Memory and time of training and inference at GPT-2-medium's shape, beside the same model in torch alone.

One process, one case after the other, each a new model on an empty GPU: the peak that torch's allocator saw and the
median of some steps. "torch" rows call torch's own attention, with all scores as the definition has it or fused, in
the same modules. Writes benchmarks/results/training-<gpu>.json; `scripts/bench --tables` makes the table of it.
"""

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # after the checkout is on the path

import vbrt
from scripts.lm import LanguageModel, Options, Shape
from scripts.measuring import machine
from scripts.train_memory import Case, measure

GPT2_MEDIUM = Shape(layers=24, width=1024, heads=16, context=2048, vocabulary=50257)
BATCH = 4

TRAINING = {
    "torch, fp32": Options("plain"),
    "torch, bf16 autocast": Options("plain", mixed_precision=True),
    "torch, bf16, fused attention": Options("sdpa", mixed_precision=True),
    "torch, bf16, fused attention, checkpointing": Options("sdpa", mixed_precision=True, checkpointing=True),
    "vbrt, fp32, flash": Options("vbrt"),
    "vbrt, bf16, flash": Options("vbrt", mixed_precision=True),
    "vbrt, bf16, flash, checkpointing": Options("vbrt", mixed_precision=True, checkpointing=True),
    "vbrt, bf16, flash, checkpointing, all state in the tiers": Options(
        "vbrt", mixed_precision=True, checkpointing=True, full=True
    ),
    "vbrt, FP4 (QAT), bf16, flash": Options("vbrt", mixed_precision=True, fp4=True),
    "vbrt, FP4 (QAT), bf16, flash, checkpointing": Options("vbrt", mixed_precision=True, checkpointing=True, fp4=True),
}
#: attention, dtype, what becomes of the model
INFERENCE = {
    "torch, fp32": ("plain", torch.float32, None),
    "torch, bf16": ("plain", torch.bfloat16, None),
    "torch, bf16, fused attention": ("sdpa", torch.bfloat16, None),
    "vbrt, bf16, flash": ("vbrt", torch.bfloat16, None),
    "vbrt, FP4, flash": ("vbrt", torch.bfloat16, 1.0),
    "vbrt, FP4, flash, a quarter of the pages on the GPU": ("vbrt", torch.bfloat16, 0.25),
}


def infer(attention: str, dtype: torch.dtype, pages_on_gpu: float | None, shape: Shape, batch: int) -> dict:
    """The peak and the median milliseconds of a forward, logits of the last position."""
    gc.collect()
    torch.cuda.empty_cache()
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = LanguageModel(shape, attention=attention).to(dtype).eval()
    ids = torch.randint(shape.vocabulary, (batch, shape.context), device="cuda")
    if pages_on_gpu is not None:
        pages = vbrt.make_plan(model, vbrt.load_config("fp4")).page_bytes
        tiers = {"gpu": {"budget": int(pages_on_gpu * pages) + (1 << 20)}}
        model = vbrt.wrap(model, "fp4", tiers=tiers).materialize()
        gc.collect()
        torch.cuda.empty_cache()
    spans = []
    with torch.no_grad():
        for turn in range(9):
            torch.cuda.synchronize()
            if turn == 4:
                torch.cuda.reset_peak_memory_stats()
            start = time.perf_counter()
            model(ids, last=True)
            torch.cuda.synchronize()
            spans.append(time.perf_counter() - start)
    result = {
        "peak_bytes": torch.cuda.max_memory_allocated() - ids.nbytes,
        "ms": 1e3 * statistics.median(spans[4:]),
        "held_bytes": torch.cuda.memory_allocated() - ids.nbytes,
    }
    if pages_on_gpu is not None:
        model.close()
    return result


def rows(cases: dict[str, object], measured: Callable[[str], dict]) -> list[dict]:
    """Each case's row, with its share of the first that fitted; printed as they come."""
    found: list[dict] = []
    for name in cases:
        row = {"case": name, **measured(name)}
        first = next((r["peak_bytes"] for r in found if r["peak_bytes"]), row["peak_bytes"])
        row["of_first"] = row["peak_bytes"] / first if row["peak_bytes"] else None
        found.append(row)
        print(json.dumps(row), flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--layers", type=int, default=GPT2_MEDIUM.layers)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("error: scripts/train_bench.py measures a GPU's memory, and torch finds no CUDA device here")
    shape = Shape(options.layers, *(getattr(GPT2_MEDIUM, k) for k in ("width", "heads", "context", "vocabulary")))

    def train(name: str) -> dict:
        rung = measure(name, Case(shape, BATCH, TRAINING[name], device="cuda"))
        return {"peak_bytes": rung.peak_bytes, "ms": rung.step_ms, "estimated_bytes": rung.estimated_bytes}

    result = {
        "machine": machine(),
        "shape": asdict(shape),
        "parameters": shape.parameters,
        "batch": BATCH,
        "training": rows(TRAINING, train),
        "inference": rows(INFERENCE, lambda name: infer(*INFERENCE[name], shape, BATCH)),
    }
    device = torch.cuda.get_device_name().lower().replace(" ", "-")
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / f"training-{device}.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
