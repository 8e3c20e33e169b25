"""How long a GPU takes to choose the precision of a model's layers and to calibrate it, and in how much memory.

The model has a published shape and random weights, so that nothing is downloaded; its losses mean nothing, the times
and bytes do. benchmarks/results/precision-<gpu>.json has the figures, docs/howto/precision.md what they say.
"""

import argparse
import json
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # after the checkout is on the path
from torch import nn
from transformers import AutoModelForCausalLM, Qwen3Config

import vbrt
from scripts.measuring import machine
from vbrt.errors import VBError

#: Qwen3-0.6B with 12 of its 28 layers
SHAPE = {"vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072, "num_hidden_layers": 12}
SHAPE |= {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128, "tie_word_embeddings": True}


def network() -> nn.Module:
    """Random weights, made on the GPU."""
    with torch.device("cuda"):
        return AutoModelForCausalLM.from_config(Qwen3Config(**SHAPE), dtype=torch.bfloat16).eval()


@contextmanager
def measured(rows: list[dict], what: str) -> Iterator[dict]:
    """Add a row with the seconds and the largest bytes of the GPU, beyond those that were taken before."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    before, start, row = torch.cuda.memory_allocated(), time.perf_counter(), {"what": what}
    yield row
    torch.cuda.synchronize()
    row |= {"seconds": round(time.perf_counter() - start, 2), "bytes": torch.cuda.max_memory_allocated() - before}
    rows.append(row)
    print(json.dumps(row), flush=True)


def chosen(rows: list[dict], model: nn.Module, ids: torch.Tensor) -> None:
    """By both methods on the GPU, then from host memory with room for a quarter of the dense weights."""
    with measured(rows, "KL of each layer, model on the GPU") as row:
        choice = vbrt.choose_precision(model, ids, "6 bits")
        row |= {"layers": len(choice.layers), "lossless": sum(layer.lossless for layer in choice.layers)}
    with measured(rows, "diagonal Hessian, model on the GPU"):
        vbrt.choose_precision(model, ids, "6 bits", method="hessian")
    model.cpu()
    swapped = sum(layer.swap.dense_bytes for layer in choice.layers)
    budget = swapped // 4
    with measured(rows, "KL of each layer, model in host memory, budget a quarter of its weights") as row:
        again = vbrt.choose_precision(model, ids, "6 bits", "fp4", tiers={"gpu": {"budget": budget}})
        same = {layer.name for layer in again.layers if layer.lossless}
        both = same & {layer.name for layer in choice.layers if layer.lossless}
        row |= {"budget": budget, "kept": kept_bytes(model, swapped), "same_choice": len(both) / max(1, len(same))}


def kept_bytes(model: nn.Module, swapped: int) -> int:
    """Bytes of what is in no page."""
    return sum(parameter.nbytes for parameter in model.parameters()) - swapped


def wrapped(rows: list[dict], model: nn.Module, ids: torch.Tensor) -> None:
    """Calibrated and with automatic precision, then calibrated alone, within 256 MiB of the GPU, from host memory. The
    second time the weights are what the first has made of them."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "ids.json"
        path.write_text(json.dumps(ids.tolist()))
        tiers = {"gpu": {"budget": "256MiB"}}
        for weights in ({"calibrate": str(path), "format": "auto", "budget": "6 bits"}, {"calibrate": str(path)}):
            with measured(rows, f"wrap with {', '.join(weights)}, 256 MiB of the GPU"):
                vb = vbrt.wrap(model, "fp4", weights=weights, tiers=tiers)
            with measured(rows, "encode and one forward") as row:
                with torch.no_grad():
                    logits = vb(ids[:1].cuda()).logits
                row["finite"] = bool(logits.isfinite().all())
                row["formats"] = sorted({layer.format for layer in vb.stats().layers.values()})
            model = vb.unwrap().cpu()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=None, help="where the JSON goes (benchmarks/results)")
    parser.add_argument("--sequences", type=int, default=2, help="of 512 tokens")
    args = parser.parse_args()
    model, rows = network(), []
    ids = torch.randint(SHAPE["vocab_size"], (args.sequences, 512), generator=torch.Generator().manual_seed(0))
    parts: tuple[Callable, ...] = (chosen, wrapped)
    name = torch.cuda.get_device_name().lower().replace(" ", "-")
    path = (args.out or ROOT / "benchmarks" / "results") / f"precision-{name}.json"
    weights = sum(parameter.numel() for parameter in model.parameters())
    result = {"machine": machine(), "shape": "Qwen3-0.6B, 12 layers", "parameters": weights, "tokens": ids.numel()}
    for part in parts:
        try:
            part(rows, model, ids)
        except (RuntimeError, VBError):  # the other part has its figures all the same
            traceback.print_exc()
        path.write_text(json.dumps({**result, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
