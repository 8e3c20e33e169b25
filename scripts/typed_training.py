"""Training as people type it: transformers' and PEFT's own models, `loss.backward()`, `optimizer.step()`, beside peers.

    python scripts/typed_training.py [lora] [full] [--tokens 2048 8192] [--layers 32] [--profile] [--out FILE]
    python scripts/typed_training.py --table     # the table of docs/training.md, from benchmarks/results

- lora: adapters by PEFT, r = 16 on q and v, gradient checkpointing, of a Llama of the 8B shape: in bf16, in 4 bits with
  all pages on the GPU and with 1 GiB of them, and with bitsandbytes' NF4 where it is installed.
- full: AdamW over LlamaForCausalLM of 1.2 B fp32 parameters under autocast: resident, from the tiers with activations
  kept, computed again and offloaded, torchao's CPUOffloadOptimizer and FSDP2's CPUOffloadPolicy.

Ways take turns in one process, each with the memory of the others freed. A row: milliseconds a step (median), tokens a
second, the allocator's peak, the first losses; `--profile` adds what the GPU did in one step. Link, update and both
passes by themselves stand beside "full".
"""

import argparse
import gc
import json
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # after the checkout is on the path
from torch import Tensor, nn

import vbrt
from scripts.full_models import DEVICE, Llama, draw_, emptied, llama_of, measured, no_init_weights, waited
from scripts.full_profile import profiled
from scripts.full_runs import link_rate
from scripts.measuring import between, machine, markdown_table
from vbrt.integrations.token_times import llama_8b

CONTEXT, LR = 2048, 1e-4
SHAPE = Llama(layers=24, width=2048, inner=5632, heads=32, kv_heads=4, vocabulary=32000)
SMALL = Llama(layers=2, width=128, inner=256, heads=4, kv_heads=2, vocabulary=256)  # to try the script on a CPU
_SLOTS = 10  # of the largest page, on the GPU

PAGE = ROOT / "docs" / "training.md"
RESULTS = [ROOT / "benchmarks" / "results" / f"typed-training-{run}nvidia-h200.json" for run in ("", "peers-")]
MARKS = "<!-- typed: scripts/typed_training.py --table -->", "<!-- end of typed -->"
_TITLES = {
    "lora": "LoRA by PEFT, r = 16 on q and v, gradient checkpointing, Llama of the 8B shape",
    "full": "AdamW, LlamaForCausalLM of 1.2 B fp32 parameters under autocast",
}

Step = Callable[[Tensor], Tensor]


def typed(model: Any, optimizer: Any, *, autocast: bool = False) -> Step:
    """The loop of a tutorial."""

    def step(ids: Tensor) -> Tensor:
        with torch.autocast(DEVICE, torch.bfloat16, enabled=autocast):
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


# -- LoRA --------------------------------------------------------------------------------------------------------------


def adapted(model: nn.Module) -> Step:
    """A model with adapters, as PEFT's documentation has it."""
    from peft import LoraConfig, get_peft_model

    model.gradient_checkpointing_enable()
    model.enable_input_require_grads()
    adapters = get_peft_model(model, LoraConfig(r=16, target_modules=["q_proj", "v_proj"])).train()
    return typed(adapters, torch.optim.AdamW([weight for weight in adapters.parameters() if weight.requires_grad], LR))


def base(options: argparse.Namespace, device: str = DEVICE) -> nn.Module:
    return llama_8b(options.layers, device) if DEVICE == "cuda" else llama(SMALL, torch.bfloat16)


def bf16(options: argparse.Namespace) -> Step:
    return adapted(base(options))


def fp4(options: argparse.Namespace) -> Step:
    return adapted(vbrt.wrap(base(options), "fp4").materialize())


def fp4_streamed(options: argparse.Namespace) -> Step:
    vb = vbrt.wrap(base(options), "fp4", budget="1GiB").materialize()
    step = adapted(vb)
    step.streams = vb  # type: ignore[attr-defined]
    return step


def bitsandbytes_nf4(options: argparse.Namespace) -> Step:
    """bitsandbytes' NF4 with bf16 arithmetic, as transformers' BitsAndBytesConfig makes it."""
    import bitsandbytes as bnb

    model = base(options)
    for name, layer in list(model.named_modules()):
        if isinstance(layer, nn.Linear) and name != "lm_head":
            four = bnb.nn.Linear4bit(
                layer.in_features, layer.out_features, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4"
            )
            four.weight = bnb.nn.Params4bit(layer.weight.detach().cpu(), requires_grad=False, quant_type="nf4")
            model.set_submodule(name, four.to(DEVICE))
    return adapted(model)


# -- full --------------------------------------------------------------------------------------------------------------


def llama(shape: Llama, dtype: torch.dtype = torch.float32) -> nn.Module:
    """transformers' class, of random weights."""
    with torch.device(DEVICE), no_init_weights():
        return draw_(llama_of(shape).to(dtype)).train()


def trainee() -> nn.Module:
    return llama(SHAPE if DEVICE == "cuda" else SMALL)


def recomputing() -> nn.Module:
    model = trainee()
    model.gradient_checkpointing_enable()
    return model


def resident(options: argparse.Namespace) -> Step:
    model = recomputing()
    return typed(model, torch.optim.AdamW(model.parameters(), LR, fused=True), autocast=True)


def from_tiers(activations: str) -> Callable[[argparse.Namespace], Step]:
    def make(options: argparse.Namespace) -> Step:
        model = trainee()
        optimizer = torch.optim.AdamW(model.parameters(), LR, fused=True)
        page = 2 * max(weight.numel() for name, weight in model.named_parameters() if "layers." in name)
        tiers = {"gpu": {"budget": _SLOTS * page}} if DEVICE == "cuda" else {"gpu": {"enabled": False}}
        vb = vbrt.wrap(model, "full", optimizer=optimizer, tiers=tiers, training={"activations": activations})
        step = typed(vb, optimizer, autocast=True)
        step.vb = vb  # type: ignore[attr-defined]
        return step

    return make


def torchao(options: argparse.Namespace) -> Step:
    from torchao.optim import CPUOffloadOptimizer

    model = recomputing()
    optimizer = CPUOffloadOptimizer(model.parameters(), torch.optim.AdamW, offload_gradients=True, lr=LR, fused=True)
    return typed(model, optimizer, autocast=True)


def fsdp2(options: argparse.Namespace) -> Step:
    import torch.distributed as dist
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    if not dist.is_initialized():
        dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
    model = recomputing()
    how = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32), "offload_policy": CPUOffloadPolicy()}
    for block in model.model.layers:
        fully_shard(block, **how)
    fully_shard(model, **how)
    return typed(model, torch.optim.AdamW(model.parameters(), LR, fused=True))


LORA = {"bf16": bf16, "vbrt fp4": fp4, "vbrt fp4, 1 GiB of pages": fp4_streamed, "bitsandbytes NF4": bitsandbytes_nf4}
FULL = {
    "resident, recomputed": resident,
    "vbrt, recomputed": from_tiers("recompute"),
    "vbrt, kept": from_tiers("keep"),
    "vbrt, offloaded": from_tiers("offload"),
    "torchao CPUOffloadOptimizer": torchao,
    "FSDP2, CPUOffloadPolicy": fsdp2,
}
SIZES = {"lora": (2048, 8192), "full": (16384, 8192)}


def moved_by(vb: Any, run: Callable[[], object]) -> dict:
    """Seconds of a run, bytes that it moves between tiers, the link's time for them, and what falls back."""
    before = vb.stats().bytes_moved
    waited()
    start = time.perf_counter()
    run()
    waited()
    seconds = time.perf_counter() - start
    moved = {link: nbytes - before.get(link, 0) for link, nbytes in vb.stats().bytes_moved.items()}
    link_s = moved.get("cpu>gpu", 0) / link_rate()
    return {"passes_s": seconds, "moved_bytes": moved, "link_s": link_s, "fallbacks": list(vb.stats().fallbacks)}


def apart(vb: Any, ids: Tensor) -> dict:
    """Seconds of both passes, and of the update by itself; bytes moved, and the link's time for them."""
    vb.settle()

    def both() -> None:
        with torch.autocast(DEVICE, torch.bfloat16):
            loss = vb(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()

    passes = moved_by(vb, both)
    start = time.perf_counter()
    vb.step()
    vb.settle()
    update = time.perf_counter() - start
    vb.zero_grad()
    return {**passes, "update_s": update}


def row_of(make: Callable[[argparse.Namespace], Step], tokens: list[int], options: argparse.Namespace) -> dict:
    """Make one way, and measure it with each number of tokens."""
    start = time.perf_counter()
    step = make(options)
    waited()
    found: dict[str, Any] = {"ready_s": round(time.perf_counter() - start, 1)}
    for number in tokens:
        torch.manual_seed(0)
        ids = torch.randint(0, 256, (max(1, number // CONTEXT), min(number, CONTEXT)), device=DEVICE)
        losses = [step(ids).item() for _ in range(2)]
        one = measured(lambda ids=ids: step(ids), steps=options.steps, warm=1)
        one |= {"losses": losses, "tokens_per_s": number / one["seconds"]}
        one |= {"profile": profiled(lambda ids=ids: step(ids))} if options.profile else {}
        one |= apart(step.vb, ids) if hasattr(step, "vb") else {}
        one |= moved_by(step.streams, lambda ids=ids: step(ids)) if hasattr(step, "streams") else {}
        found[str(number)] = one
    return found


def measured_ways(family: str, options: argparse.Namespace) -> dict:
    """Measure all ways of a family in turn, and print a table."""
    ways = {name: way for name, way in {"lora": LORA, "full": FULL}[family].items() if name in (options.only or [name])}
    tokens = options.tokens or (SIZES[family] if DEVICE == "cuda" else (64,))
    rows = {}
    for name, make in ways.items():
        gc.collect()
        emptied()
        try:
            rows[name] = row_of(make, list(tokens), options)
        except Exception as error:  # noqa: BLE001  # a peer that is not installed, say: the row says so
            traceback.print_exc()
            rows[name] = {"failed": f"{type(error).__name__}: {error}"[:300]}
        print(name, json.dumps(rows[name])[: 6000 if options.profile else 1200], flush=True)
    lines = [
        [
            name,
            number,
            f"{one['seconds'] * 1e3:.0f}",
            f"{one['tokens_per_s']:.0f}",
            f"{one.get('peak_bytes', 0) / 1e9:.1f}",
        ]
        for name, row in rows.items()
        for number, one in row.items()
        if isinstance(one, dict)
    ]
    print(*markdown_table([family, "tokens", "ms", "tokens/s", "GB"], lines), sep="\n", flush=True)
    return rows


def tables() -> str:
    """What was measured, a table for each family; a run's rows stand beside its first one."""
    results = [json.loads(path.read_text()) for path in RESULTS]
    heads = "by", "tokens a step", "ms a step", "tokens/s", "speed, of the run's first row", "GPU memory, GB"
    parts = []
    for family, title in _TITLES.items():
        rows = [row for run, result in enumerate(results, 1) for row in _rows(result[family], run)]
        parts.append("\n".join([f"{title}:", "", *markdown_table(heads, rows)]))
    files = " and ".join(f"`{path.relative_to(ROOT)}`" for path in RESULTS)
    return "\n\n".join([*parts, f"Two runs, on hosts of their own, {results[0]['machine']['gpu']}: {files}."])


def _rows(ways: dict, run: int) -> Iterator[tuple[str, ...]]:
    first = next(iter(ways.values()))
    for name, found in ways.items():
        for tokens in (key for key in found if key.isdigit()):
            one, beside = found[tokens], first[tokens]["seconds"] / found[tokens]["seconds"]
            cells = f"{one['seconds'] * 1e3:,.0f}", f"{one['tokens_per_s']:,.0f}", f"{beside:.2f}"
            yield f"{name} (run {run})", f"{int(tokens):,}", *cells, f"{one['peak_bytes'] / 1e9:.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("families", nargs="*", choices=["lora", "full", []], default=[])
    parser.add_argument("--tokens", type=int, nargs="+")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--only", action="append")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--table", action="store_true", help="write the table of docs/training.md, measure nothing")
    options = parser.parse_args()
    if options.table:
        text = PAGE.read_text()
        PAGE.write_text(between(text, MARKS, tables()))
        return
    result: dict[str, Any] = {"machine": machine()}
    for family in options.families or ("lora", "full"):
        result[family] = measured_ways(family, options)
        if options.out is not None:
            options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
