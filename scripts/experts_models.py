"""Published mixtures of experts by a share of their experts; write benchmarks/results/experts-models-<gpu>.json.

Models of published shapes (the defaults of transformers' configs) with random weights, in 4 bits, with as many of their
layers as 80 GB hold in bf16, in which a GPU has them until they are encoded. First with all pages on the GPU, then with
a share of the experts' there, the others page-locked in host memory: decoding along a generated trace with published
reuse, and prompts whose tokens go to experts at random, so that they read them all. A step is a CUDA graph, "joined" by
vbrt's fused kernels or "eager", where the model's code can be recorded; otherwise the host launches it ("steps"), over
fewer tokens, and `plain_ms` is the step of the same model in bf16 before vbrt has wrapped it: what transformers takes.

The limit of a prompt is the larger of the resident one's time and that of the experts' bytes once over the link; of a
step, the resident one's and that of the missed experts' bytes over the link, of which the CPU computes some where they
lie (`experts.miss`), so that less may be taken. `whole` is what all layers take: a step's or prompt's time in
proportion, which counts the head several times, and memory with pages in proportion.

    python3 scripts/experts_models.py [--models gpt-oss-120b ...] [--shares 25 10]
"""

import argparse
import json
import re
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # after the checkout is on the path
from torch import nn

import vbrt
from scripts.experts_decode import (
    CACHE_TOKENS,
    Run,
    Trace,
    Turns,
    budget_of,
    decode,
    expert_handles,
    forget_graphs,
    host_decides,
    note,
    put_below,
    routing_of,
    say,
    traced_tokens,
    usual_turns,
    weights_of,
)
from scripts.experts_prompt import route_at_random, seconds
from scripts.full_models import drawn_in
from scripts.measuring import machine
from vbrt.estimation.advice.machine_rates import link_gb_s


class Published(NamedTuple):
    """A model as transformers' config of this name describes it, the layers to build, its 4-bit format, and its steps.

    Recurrent layers change their state, so that joined steps cannot be compared; Qwen3.8's indexer asks the host.
    """

    kind: str
    config: str
    layers: int
    format: str = "nvfp4"
    how: str = "joined"
    turns: Turns | None = None  # of a run; None: as `experts_decode.py` has them
    sizes: dict[str, object] = {}  # noqa: RUF012  # of the published config, where transformers has no defaults


#: Qwen3.8's n-gram table has a fiftieth of its rows, 1.5 GiB instead of 76: a lookup reads as many
QWEN4 = {"ple_layer_ids": [1], "eos_token_id": 1, "indexer_kv_heads": 1, "indexer_compress_ratio": 4}
QWEN4 |= {"indexer_n_heads": 16, "indexer_head_dim": 256, "indexer_budget": 2048, "ngram_vocab_size_base": 400_000}
MODELS = {
    "gpt-oss-120b": Published("GptOss", "GptOss", 12, "mxfp4", sizes={"sliding_window": CACHE_TOKENS}),
    "Qwen3.6-35B-A3B": Published("Qwen3_5Moe", "Qwen3_5MoeText", 40, how="eager"),
    "GLM-4.5-Air": Published("Glm4Moe", "Glm4Moe", 16),
    "Qwen3.8-Flash-Next": Published("Qwen4Exp", "Qwen4ExpText", 16, how="steps", turns=Turns(24, 24), sizes=QWEN4),
}
TOKENS = (512, 2048, 4096)


def build(published: Published, layers: int, device: torch.device, **sizes: object) -> tuple[nn.Module, int]:
    """Return a random bf16 model of so many layers, and how many the published one has."""
    import transformers

    config = getattr(transformers, f"{published.config}Config")()
    whole = config.num_hidden_layers
    config = getattr(transformers, f"{published.config}Config")(
        **published.sizes | {"num_hidden_layers": layers} | sizes
    )
    torch.manual_seed(0)
    with torch.device(device), drawn_in(torch.bfloat16):
        model = getattr(transformers, f"{published.kind}ForCausalLM")(config)
    return model.eval().requires_grad_(False), whole


def rows(
    name: str, layers: int, shares: Sequence[float], tokens: Sequence[int], device: torch.device, **sizes: object
) -> Iterator[dict[str, object]]:
    """A row of the resident model, and one for each share."""
    start = time.perf_counter()
    published = MODELS[name]
    model, whole = build(published, layers, device, **sizes)
    note(f"{name}: built", start)
    plain = {"plain_ms": plain_ms(model, published, device)} if published.how == "steps" else {}
    top = "gpu" if device.type == "cuda" else "cpu"
    config = vbrt.load_config("fp4", policy={"kind": "experts"}, weights=weights_of(published.format))
    room = vbrt.make_plan(model, config).page_bytes * 9 // 8
    vb = vbrt.wrap(model, config, tiers={tier: {"budget": room} for tier in dict.fromkeys((top, "cpu"))})
    vb.materialize()
    note("encoded", start)
    head = {"model": name, "format": published.format, "layers": layers, "of": whole, "routing": "generated"} | plain
    experts = sum(page.nbytes for handle in expert_handles(vb) for page in handle.pages)
    link = link_gb_s() * 1e9 if top == "gpu" else 50e9
    resident = measured(vb, published, tokens, device)
    yield head | {"share": 1.0, **resident} | in_all(vb, resident, layers, whole, tokens)
    note("resident", start)
    forget_graphs(vb)
    if top == "gpu":
        put_below(vb)
    for share in shares:
        forget_graphs(vb)
        vb._attachment.expert_cache.reset()
        vb.set_budget("gpu", budget_of(vb, share))
        found = measured(vb, published, tokens, device)
        limits = {t: max(resident[f"prompt_{t}_ms"], experts / link * 1e3) for t in tokens}
        step = resident["ms"] + found["missed_mb"] / link * 1e9
        yield {
            **head,
            "share": share,
            "link_gb_s": link / 1e9,
            **found,
            **{f"prompt_{t}_of_limit": found[f"prompt_{t}_ms"] / limits[t] for t in tokens},
            "of_limit": found["ms"] / step,
            **in_all(vb, found, layers, whole, tokens),
        }
        note(f"{share:.0%}", start)
    vb.close()


@torch.no_grad()
def plain_ms(model: nn.Module, published: Published, device: torch.device) -> float:
    """Milliseconds of a step of the model as it is built, its experts by transformers' batched_mm."""
    before = model.config._experts_implementation
    model.config._experts_implementation = "batched_mm"
    run = led(model, model, published, device)
    model.config._experts_implementation = before
    return run.seconds * 1e3


def led(model: nn.Module, module: nn.Module, published: Published, device: torch.device) -> Run:
    """Decode along a generated trace.

    Args:
        module: that has the model's routers.
    """
    trace = Trace(routing_of(module, traced_tokens(published.turns)), device)
    hooks = trace.lead(module)
    run = decode(model, trace, how=published.how, turns=published.turns)
    for hook in hooks:
        hook.remove()
    return run


@torch.no_grad()
def measured(
    vb: vbrt.VBModelWrapper, published: Published, tokens: Sequence[int], device: torch.device
) -> dict[str, object]:
    """Milliseconds of a step and of prompts, and the peak of GPU memory in each."""
    run, counted = led(vb, vb.module, published, device), (published.turns or usual_turns()).counted
    found: dict[str, object] = {"how": published.how, "counted_tokens": counted, "ms": run.seconds * 1e3}
    found |= {"hit_rate": run.hits / max(1e-9, run.hits + run.misses)}
    page = expert_handles(vb)[0].pages[0].nbytes
    found |= {"missed_mb": run.misses * page / 1e6, "fetched_mb": run.bytes_in / 1e6}
    found |= {"decides": "host" if host_decides(vb) else "gpu"}
    hooks = route_at_random(vb.module)
    for t in tokens:
        if device.type == "cuda":
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
        ids = torch.randint(0, 1000, (1, t), device=device)
        found[f"prompt_{t}_ms"] = seconds(vb, ids) * 1e3
        if device.type == "cuda":
            found[f"prompt_{t}_peak_gb"] = torch.cuda.max_memory_allocated() / 1e9
    for hook in hooks:
        hook.remove()
    return found | {"fallbacks": list(vb.stats().fallbacks)}


def in_all(
    vb: vbrt.VBModelWrapper, found: dict[str, object], layers: int, whole: int, tokens: Sequence[int]
) -> dict[str, object]:
    """What all layers would take: times and pages in proportion, parameters and activations once."""
    times = whole / layers
    row = {"whole_tokens_s": 1e3 / (found["ms"] * times)}
    row |= {f"whole_prompt_{t}_tokens_s": t * 1e3 / (found[f"prompt_{t}_ms"] * times) for t in tokens}
    pages = vb.stats().tiers[vb.stack.names[0]].held_bytes / 1e9
    peaks = {t: found.get(f"prompt_{t}_peak_gb") for t in tokens}
    return row | {f"whole_{t}_gb": peak + pages * (times - 1) for t, peak in peaks.items() if peak is not None}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--layers", type=int, help="instead of those that fit")
    parser.add_argument("--shares", type=float, nargs="+", default=[25, 10], help="percent of the expert pages")
    parser.add_argument("--tokens", type=int, nargs="+", default=TOKENS)
    parser.add_argument("--out", type=Path)
    asked = parser.parse_args()
    slug = re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name().lower()).strip("-")
    out = asked.out or ROOT / "benchmarks" / "results" / f"experts-models-{slug}.json"
    result: dict[str, object] = {"machine": machine(), "rows": []}
    for name in asked.models:
        layers, shares = asked.layers or MODELS[name].layers, [share / 100 for share in asked.shares]
        for row in rows(name, layers, shares, asked.tokens, torch.device("cuda", 0)):
            say(row)
            result["rows"].append(row)
            out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
