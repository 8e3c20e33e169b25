"""Large dense models on a small GPU, in four and three bits; writes benchmarks/results/large-models-<gpu>.json.

Models of published shapes, random weights, with a few of their layers and that share of the room that a GPU of so much
memory has for pages, beside what stays dense, the KV cache and CUDA. `generate` of one sequence and of many, prompts
and answers of 32 tokens, by vbrt and by accelerate, which holds bf16 layers in host memory. A row, of one token of all
sequences:

- ms: as measured; whole_ms and tokens_s: of all layers, in proportion, which counts the head, and what `generate` does
  between steps, several times;
- link_ms: of all layers, pages without room on the GPU over the link, at the rate measured here.

    python3 scripts/large_models.py [--shapes qwen3-32b ...] [--batches 1 64 256] [--only t3] [--out FILE]
"""

import argparse
import gc
import json
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # after the checkout is on the path
from torch import nn

import vbrt
from scripts.generate_bench import add_rows
from scripts.measuring import machine, markdown_table, moved_bytes, named_machine
from scripts.story_models import SHAPES
from vbrt.estimation.advice.machine_rates import link_gb_s
from vbrt.host import accelerator
from vbrt.integrations.token_times import Clock

TOKENS = 32  # of a prompt, and of an answer
BESIDE = 700_000_000 + 1_000_000_000  # CUDA's own, and activations
WAYS = ("nvfp4", "t3", "accelerate")
PEER_TOKENS = 5  # of an answer by accelerate
_WARM = 8  # tokens of a first call, in which steps are recorded
_FEWEST_PAGES = 4  # of the largest size, through which the others stream


class Held(NamedTuple):
    """A model of `story_models.SHAPES`: layers to build, and the GPU's bytes."""

    layers: int
    memory: float


MODELS = {"qwen3-32b": Held(8, 12e9), "llama-3-70b": Held(4, 24e9)}


def build(shape: str, layers: int) -> nn.Module:
    """Return a random bf16 model of so many layers."""
    from transformers import AutoConfig, AutoModelForCausalLM

    kind, sizes = SHAPES[shape]
    config = AutoConfig.for_model(kind, **sizes | {"num_hidden_layers": layers}, tie_word_embeddings=False)
    torch.manual_seed(0)
    with torch.device(accelerator.TYPE if _on_gpu() else "cpu"):  # a CPU takes minutes
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def room(model: nn.Module, whole: int, batch: int, memory: float) -> float:
    """Bytes that a GPU has for the pages of all layers."""
    config = model.config
    kept = sum(module.weight.nbytes for module in (model.get_input_embeddings(), model.get_output_embeddings()))
    cache = 2 * whole * config.num_key_value_heads * config.head_dim * 2 * batch * 2 * TOKENS
    return memory - BESIDE - kept - cache


def token_ms(model: Any, batch: int, new: int, warm: int) -> float:
    """Milliseconds of a later token of all sequences, in a second call of `generate`."""
    torch.manual_seed(3)
    vocabulary = model.config.vocab_size
    ids = torch.randint(10, min(vocabulary, 30000), (batch, TOKENS), device=accelerator.TYPE if _on_gpu() else "cpu")
    for tokens in (warm, new):
        clock = Clock()
        lengths = {"max_new_tokens": tokens, "min_new_tokens": tokens}
        model.generate(ids, **lengths, do_sample=False, pad_token_id=0, stopping_criteria=[clock])
    return clock.ms


def _on_gpu() -> bool:
    return accelerator.is_available()


def wrapped_rows(way: str, shape: str, held: Held, batches: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Rows of vbrt with a format of this name."""
    whole = SHAPES[shape][1]["num_hidden_layers"]
    model = build(shape, held.layers)
    weights = {"format": way, "keep_head": True, "embeddings": False}
    vb = vbrt.wrap(model, "fp4", weights=weights).materialize(progress=False)
    pages = sum(page.nbytes for page in vb.stack.pages.values())
    for batch in batches:
        budget = room(model, whole, batch, held.memory) * held.layers / whole
        if budget < _FEWEST_PAGES * max(page.nbytes for page in vb.stack.pages.values()):
            yield {"batch": batch, "refused": "the KV cache leaves no room for pages to pass through"}
            continue
        vb.set_budget("gpu" if _on_gpu() else "cpu", int(min(budget, pages)))
        ms, before = token_ms(vb, batch, TOKENS, _WARM), moved_bytes(vb)
        token_ms(vb, batch, TOKENS, _WARM)
        steps = vb.stats().steps
        yield {
            "batch": batch,
            "ms": ms,
            "pages_gb": pages * whole / held.layers / 1e9,
            "on_gpu": min(1.0, budget / pages),
            "moved_mb": (moved_bytes(vb) - before) / (TOKENS + _WARM) / 1e6,
            "reasons": dict(steps.reasons),
            "fallbacks": list(vb.stats().fallbacks),
        }
    vb.close()


def accelerate_rows(shape: str, held: Held, batches: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Rows of accelerate's `dispatch_model`, with as many layers on the GPU as have room."""
    from accelerate import dispatch_model
    from accelerate.hooks import remove_hook_from_submodules

    whole = SHAPES[shape][1]["num_hidden_layers"]
    model = build(shape, held.layers).to("cpu")
    layer = sum(parameter.nbytes for parameter in model.model.layers[0].parameters())
    for batch in batches:
        share = min(1.0, max(0.0, room(model, whole, batch, held.memory) / (layer * whole)))
        here = int(share * held.layers)
        places = {"model.embed_tokens": 0, "model.norm": 0, "model.rotary_emb": 0, "lm_head": 0}
        places |= {f"model.layers.{n}": 0 if n < here else "cpu" for n in range(held.layers)}
        if _on_gpu():
            dispatch_model(model, places, main_device=0)
        ms = token_ms(model, batch, PEER_TOKENS, 2)
        yield {"batch": batch, "ms": ms, "pages_gb": layer * whole / 1e9, "on_gpu": here / held.layers}
        remove_hook_from_submodules(model)


def rows(way: str, shape: str, held: Held, batches: Sequence[int]) -> Iterator[dict[str, Any]]:
    """A row for each number of sequences."""
    whole = SHAPES[shape][1]["num_hidden_layers"]
    head = {"shape": shape, "memory_gb": held.memory / 1e9, "way": way, "layers": held.layers, "of": whole}
    link = link_gb_s() if _on_gpu() else 50.0
    found = accelerate_rows(shape, held, batches) if way == "accelerate" else wrapped_rows(way, shape, held, batches)
    for row in found:
        if "ms" in row:
            whole_ms = row["ms"] * whole / held.layers
            row |= {"whole_ms": whole_ms, "tokens_s": row["batch"] * 1e3 / whole_ms, "link_gb_s": link}
            row["link_ms"] = row["pages_gb"] * (1 - row["on_gpu"]) / link * 1e3
        yield {"case": f"{shape}, {way}, {row['batch']}", **head, **row}


def large_table(path: Path) -> list[str]:
    """Lines of docs/measurements.md of a results file."""
    result = json.loads(path.read_text())
    lines = []
    for row in result["rows"]:
        name = f"{row['shape']}, {row['memory_gb']:.0f} GB, {row['layers']} of {row['of']} layers"
        way = "accelerate, bf16" if row["way"] == "accelerate" else row["way"]
        if "refused" in row:
            lines.append([name, way, str(row["batch"]), "–", "–", "–", "–", row["refused"]])
            continue
        cells = f"{row['pages_gb']:.1f}", f"{row['on_gpu']:.0%}", f"{row['link_ms']:.0f}", f"{row['whole_ms']:.0f}"
        lines.append([name, way, str(row["batch"]), *cells, f"{row['tokens_s']:,.1f}"])
    heads = ("model", "weights", "sequences", "layers, GB", "on the GPU", "link, ms", "ms a token of each", "tokens/s")
    said = (
        "`generate` with random weights of published shapes, greedy, prompts and answers of 32 tokens. A GPU's memory "
        "is divided as a GPU of that size has it: heads and tables in bf16, the KV cache of all sequences, 1.7 GB for "
        "CUDA and activations, the rest for layers. Times are of all layers, in proportion to those that were there: "
        "the head, and what `generate` does between steps, count several times, so that whole models are faster. "
        "Link: what the layers without room take at its measured rate, "
        f"{result['rows'][0]['link_gb_s']:.0f} GB/s. `scripts/large_models.py`."
    )
    head = f"## large dense models on small GPUs, {result['machine']['gpu']}"
    others = sorted({row["commit"] for row in result["rows"] if "commit" in row})
    named = " ".join([named_machine(result["machine"]), *(f"Some rows: another host, commit {c}." for c in others)])
    return [head, "", said, "", *markdown_table(heads, lines), "", named, ""]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--shapes", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 64, 256])
    parser.add_argument("--only", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if not _on_gpu():
        raise SystemExit("no GPU")
    name = re.sub(r"[^a-z0-9]+", "-", accelerator.get_device_name().lower()).strip("-")
    out, found = options.out or ROOT / "benchmarks" / "results" / f"large-models-{name}.json", list[dict[str, Any]]()
    for shape in options.shapes:
        for way in options.only:
            for row in rows(way, shape, MODELS[shape], options.batches):
                found.append(row)
                print(json.dumps({k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()}), flush=True)
                add_rows(out, {"machine": machine()}, found)
            gc.collect()
            accelerator.empty_cache()


if __name__ == "__main__":
    main()
