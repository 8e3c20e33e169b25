"""Routed experts that do not fit into memory, on a CPU: one token at a time, half of the pages on the ssd.

`scripts/bench experts` runs it beside the others. By itself it prints, and can leave formats out:

    python scripts/experts_ssd.py --formats exact,fp4 --layers 2
"""

import argparse
import itertools
import json
import os
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))  # scripts are no package

from scripts.full_models import drawn_in
from scripts.measuring import drop_page_cache, interleaved, seconds

#: preset by the name of its row
PRESETS = {"exact": "exact", "dense": "dense", "fp4": "fp4"}
VOCABULARY = 8192


def moe(layers: int = 6):
    """A random bf16 Qwen3-MoE: with 6 layers 906 MB of routed experts (64 of 2.4 MB in a layer, 4 a token), 80 MB of
    the rest."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        hidden_size=1024,
        moe_intermediate_size=384,
        num_experts=64,
        num_experts_per_tok=4,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=64,
        vocab_size=VOCABULARY,
        tie_word_embeddings=False,
        dtype=torch.bfloat16,
    )
    torch.manual_seed(0)
    with drawn_in(torch.bfloat16):
        return Qwen3MoeForCausalLM(config).eval()


def decoding(model) -> Callable[[], object]:
    """Return a function that computes the logits of the next of a row of random tokens, the same for all models.

    Tokens do not repeat, so neither do experts, but by chance: the least that a cache can hit.
    """
    import torch

    generator = torch.Generator().manual_seed(1)
    ids = itertools.cycle(torch.randperm(VOCABULARY, generator=generator).split(1))

    def step():
        with torch.no_grad():
            return model(input_ids=next(ids).unsqueeze(0), use_cache=False).logits

    return step


def half_on_ssd(preset: str, layers: int, folder: str):
    """The model wrapped with room for half of its pages in memory, the others in page files."""
    import vbrt

    model = moe(layers)
    page_bytes = vbrt.make_plan(model, vbrt.load_config(preset)).page_bytes
    tiers = {"cpu": {"budget": page_bytes // 2}, "ssd": {"enabled": True, "path": folder}}
    return vbrt.wrap(model, preset, tiers=tiers).materialize()


def experts(formats: tuple[str, ...] = tuple(PRESETS), layers: int = 6) -> dict:
    """A Qwen3-MoE of 1 GB, one token with half of the pages in memory, beside accelerate's disk_offload.

    Tokens are random: no expert comes again but by chance. OMP_WAIT_POLICY is passive. Cold: nothing of any file is in
    the page cache as a token begins.
    """
    import torch
    from accelerate import disk_offload

    plain = moe(layers)
    with tempfile.TemporaryDirectory(dir=os.environ.get("VBRT_BENCH_DIR")) as scratch:
        peer = disk_offload(moe(layers), offload_dir=f"{scratch}/accelerate", execution_device=torch.device("cpu"))
        models, ready = {"all in memory": plain, "accelerate": peer}, {}
        for name in formats:

            def wrap(name=name):
                models[name] = half_on_ssd(PRESETS[name], layers, f"{scratch}/{name}")

            ready[name] = seconds(wrap)
        first = {name: decoding(model)() for name, model in models.items()}
        steps = {name: decoding(model) for name, model in models.items()}
        warm = interleaved(steps, times=25, warm=8)
        cold = interleaved(steps, times=7, warm=1, before=drop_page_cache)
        rows = [
            {
                "model": name,
                "ms a token": warm[name] * 1e3,
                "accelerate / it": warm["accelerate"] / warm[name],
                "cold ms": cold[name] * 1e3,
                "cold, accelerate / it": cold["accelerate"] / cold[name],
                "same bits": torch.equal(first[name], first["all in memory"]),
                **wrapped_figures(models[name] if name in formats else None, ready.get(name)),
            }
            for name in models
        ]
        for name in formats:
            models[name].close()
    return {
        "parameters": sum(p.numel() for p in plain.parameters()),
        "threads": torch.get_num_threads(),
        "load average of the machine": os.getloadavg()[0],
        "rows": rows,
    }


def wrapped_figures(vb, ready_s: float | None) -> dict:
    """What the statistics of a wrapped model say of its pages."""
    if vb is None:
        return {"hits": "–", "pages MB": "–", "memory for pages MB": "–", "ready s": "–"}
    stats = vb.stats()
    return {
        "hits": stats.hits / max(1, stats.hits + stats.misses),
        "pages MB": vb.plan.page_bytes / 1e6,
        "memory for pages MB": stats.tiers["cpu"].peak_bytes / 1e6,
        "ready s": ready_s,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--formats", default=",".join(PRESETS), help="of " + ", ".join(PRESETS))
    parser.add_argument("--layers", type=int, default=6)
    args = parser.parse_args()
    print(json.dumps(experts(tuple(filter(None, args.formats.split(","))), args.layers), indent=1))


if __name__ == "__main__":
    main()
