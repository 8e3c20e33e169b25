"""Host time of a product in training: a frozen layer's forward and backward, nn.Linear's and an fp4 one's in turns.

    python scripts/product_cost.py [chain] [step] [experts] [--device cuda] [--dtype bfloat16] [--layers 8]
        [--tokens 64 2048]

- chain: frozen square layers in a row. Microseconds of the host a product, in a forward without gradients, a recorded
  one, a backward, and in the kernels that an fp4 layer calls; the fastest of some rounds.
- step: LoRA by PEFT, r = 16 on q and v, gradient checkpointing, of a Llama; 8B's shape on a GPU, a tiny one on a CPU.
  Milliseconds of the host (the fastest step), by the clock (median), and on the GPU (sum of its kernels). What a
  product adds to the host is the difference between both models over the products of a step. On a GPU take few tokens
  for that: with many the host waits, because the queue of launches is full.
- experts: the same on all routed experts, 128 a layer of which a token takes 8, in small matrices: plain, with all
  pages on the computing device, and with a quarter of the experts there. What a pass of a layer's experts adds, of
  which a step has three: the forward, that of the checkpoint, and the backward.

`--profile` prints where the host's time goes in a step.
"""

import argparse
import cProfile
import gc
import json
import pstats
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # after the checkout is on the path
from torch import nn

import vbrt
from scripts import experts_decode
from scripts.measuring import machine, markdown_table
from vbrt.integrations.token_times import llama_8b
from vbrt.layers import VBLinear

CHAIN, WARM = 48, 3  # layers in a row: their launches fit into the queue of a GPU
TINY = {"hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2}


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def host_us(call: Callable[[], object], device: str) -> float:
    synchronize(device)
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e6


# -- a layer ----------------------------------------------------------------------------------------------------------


def chains(width: int, options: argparse.Namespace) -> dict[str, nn.Sequential]:
    """Frozen layers in a row, as torch has them and wrapped."""
    torch.manual_seed(0)
    made = {}
    for name in ("plain", "fp4"):
        with torch.device(options.device):
            layers = [nn.Linear(width, width, bias=False, dtype=options.dtype) for _ in range(CHAIN)]
        made[name] = nn.Sequential(*layers).requires_grad_(False).train()
    made["fp4"] = vbrt.wrap(made["fp4"], "fp4", weights={"min_parameters": 1}).materialize().module
    return made


def timed(model: nn.Sequential, x: torch.Tensor, device: str) -> dict[str, float]:
    """Microseconds of the host a product, by part."""
    with torch.no_grad():
        found = {"no_grad": host_us(lambda: model(x), device)}
    kept: list[torch.Tensor] = []
    ones = torch.ones_like(x)
    found["recorded"] = host_us(lambda: kept.append(model(x)), device)
    found["backward"] = host_us(lambda: kept.pop().backward(ones), device)
    x.grad = None
    synchronize(device)
    return {part: us / CHAIN for part, us in found.items()}


def kernels_alone(model: nn.Sequential, x: torch.Tensor, device: str) -> dict[str, float]:
    """Microseconds of the host in the kernels that products call, on resident planes."""
    weights = [layer.handle for layer in model.modules() if isinstance(layer, VBLinear)]
    operands = [(weight.kernels, weight.held.planes) for weight in weights]

    def forward() -> None:
        y = x
        for kernels, planes in operands:
            y = kernels.linear(y, planes, None)

    def backward() -> None:
        dy = x
        for kernels, planes in operands:
            dy = dy.matmul(kernels.decode(planes))

    with torch.no_grad():
        forward_us = host_us(forward, device) / CHAIN
        synchronize(device)
        return {"no_grad": forward_us, "recorded": forward_us, "backward": host_us(backward, device) / CHAIN}


def chain(options: argparse.Namespace, tokens: int) -> dict:
    """Print a table by part."""
    width = 4096 if options.device == "cuda" else TINY["hidden_size"]
    x = torch.randn(1, tokens, width, device=options.device, dtype=options.dtype, requires_grad=True)
    models, best = chains(width, options), dict[str, dict[str, float]]()
    for turn in range(options.rounds + WARM):
        found = {name: timed(model, x, options.device) for name, model in models.items()}
        found["kernels of fp4"] = kernels_alone(models["fp4"], x, options.device)
        for name, parts in found.items() if turn >= WARM else ():
            for part, us in parts.items():
                row = best.setdefault(part, {})
                row[name] = min(us, row.get(name, us))
    rows = [[part, *(f"{row[name]:.1f}" for name in found)] for part, row in best.items()]
    print(*markdown_table([f"host us a product, {tokens} tokens", *found], rows), sep="\n", flush=True)
    return best


# -- a model ----------------------------------------------------------------------------------------------------------


def llama(options: argparse.Namespace) -> nn.Module:
    if options.device == "cuda":
        return llama_8b(options.layers, "cuda")
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(**TINY, num_hidden_layers=options.layers, vocab_size=256, tie_word_embeddings=False)
    return LlamaForCausalLM(config).to(options.dtype)


def adapted(model: nn.Module, **targets: list[str]) -> nn.Module:
    """A model with adapters that train, on q and v or other targets, as PEFT's documentation has it."""
    from peft import LoraConfig, get_peft_model

    model.gradient_checkpointing_enable()
    model.enable_input_require_grads()
    return get_peft_model(model, LoraConfig(r=16, **(targets or {"target_modules": ["q_proj", "v_proj"]}))).train()


def stepping(model: nn.Module, tokens: int, device: str) -> Callable[[], None]:
    ids = torch.randint(0, 256, (1, tokens), generator=torch.Generator().manual_seed(0)).to(device)
    optimizer = torch.optim.AdamW([weight for weight in model.parameters() if weight.requires_grad])

    def step() -> None:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def device_ms(call: Callable[[], object]) -> float:
    """Milliseconds of a call's kernels and copies on the GPU."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        call()
        torch.cuda.synchronize()
    return sum(each.self_device_time_total for each in profiler.key_averages()) / 1e3


def profiled(call: Callable[[], object]) -> None:
    """Print where the host's time goes, backward included."""
    profile = cProfile.Profile()
    with torch.autograd.set_multithreading_enabled(False):  # or a GPU's backward runs in a thread of its own
        profile.runcall(call)
    pstats.Stats(profile).sort_stats("tottime").print_stats(40)


def times_of(steps: dict[str, Callable[[], None]], options: argparse.Namespace, tokens: int) -> dict[str, Any]:
    """Milliseconds of steps, taken in turns; print a table."""
    gc.collect()
    host, clock = ({name: list[float]() for name in steps} for _ in range(2))
    for turn in range(options.rounds + WARM):
        for name, call in steps.items():
            start = time.perf_counter()
            took = host_us(call, options.device) / 1e3
            synchronize(options.device)
            if turn >= WARM:
                host[name].append(took)
                clock[name].append((time.perf_counter() - start) * 1e3)
    result: dict[str, Any] = {
        name: {"host_ms": min(host[name]), "ms": statistics.median(clock[name])} for name in steps
    }
    if options.device == "cuda":
        for name, call in steps.items():
            result[name]["device_ms"] = device_ms(call)
    head = [f"{options.layers} layers, {tokens} tokens", *next(iter(result.values()))]
    print(*markdown_table(head, [[n, *(f"{v:.1f}" for v in row.values())] for n, row in result.items()]), sep="\n")
    return result


def step(options: argparse.Namespace, tokens: int) -> dict:
    """Print milliseconds of a step, and what a product adds."""
    plain, wrapped = llama(options), vbrt.wrap(llama(options), "fp4", weights={"keep_head": True, "min_parameters": 1})
    products = sum(isinstance(layer, VBLinear) for layer in wrapped.materialize().modules())
    products = 3 * products - options.layers  # a checkpoint's second forward stops before its last product
    steps = {
        name: stepping(adapted(model), tokens, options.device)
        for name, model in {"plain": plain, "fp4": wrapped}.items()
    }
    result = times_of(steps, options, tokens)
    added = (result["fp4"]["host_ms"] - result["plain"]["host_ms"]) * 1e3 / products
    print(f"{added:.1f} us of the host a product more, of {products} products", flush=True)
    for name, call in steps.items() if options.profile else ():
        print(name)
        profiled(call)
    return result | {"products": products, "added_us": added}


# -- routed experts ----------------------------------------------------------------------------------------------------


def mixture(options: argparse.Namespace) -> nn.Module:
    """Qwen3-30B-A3B's experts in number, with small matrices."""
    sizes = {"hidden_size": 64, "moe_intermediate_size": 32, "head_dim": 16, "vocab_size": 256}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    model = experts_decode.build(options.layers, torch.device(options.device), **sizes, **heads).to(options.dtype)
    model.config.use_cache = False
    return model


def quarter(options: argparse.Namespace, folder: str) -> nn.Module:
    """With room for a quarter of the experts, the others in the tier below: on a CPU a drive."""
    below, near = ("cpu", "gpu") if options.device == "cuda" else ("ssd", "cpu")
    tiers = {"ssd": {"enabled": True, "path": folder}, "gpu": {"enabled": options.device == "cuda"}}
    how = {"weights": {"min_parameters": 1}, "policy": {"kind": "experts"}, "tiers": tiers}
    vb = vbrt.wrap(mixture(options), "fp4", **how).materialize()
    vb.runtime.open_stores()
    experts = {key for handle in experts_decode.expert_handles(vb) for key in handle.keys}
    vb.stack.rehome({key: below if key in experts else near for key in vb.stack.pages})
    vb.set_budget(near, experts_decode.budget_of(vb, 0.25))
    return vb


def experts(options: argparse.Namespace, tokens: int) -> dict:
    """Print milliseconds of a step, and what a pass of a layer's experts adds."""
    targets = {"target_modules": [], "target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}
    with tempfile.TemporaryDirectory() as folder:
        models = {
            "plain": mixture(options),
            "fp4": vbrt.wrap(mixture(options), "fp4", weights={"min_parameters": 1}).materialize(),
            "fp4, a quarter": quarter(options, folder),
        }
        steps = {n: stepping(adapted(model, **targets), tokens, options.device) for n, model in models.items()}
        result, passes = times_of(steps, options, tokens), 3 * options.layers
        for name in list(result)[1:]:
            result[name]["added_us"] = (result[name]["host_ms"] - result["plain"]["host_ms"]) * 1e3 / passes
            print(f"{name}: {result[name]['added_us']:.0f} us of the host a pass of experts more, of {passes}")
            if options.profile:
                profiled(steps[name])
        for model in list(models.values())[1:]:
            model.close()
    return result


def main() -> None:
    parts = {"chain": chain, "step": step, "experts": experts}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", choices=[*parts, []], default=[])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--tokens", type=int, nargs="+")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    options.dtype = getattr(torch, options.dtype)
    if options.device == "cpu":
        torch.set_num_threads(1)
    result: dict[str, Any] = {"machine": machine(), "dtype": str(options.dtype)}
    for name in options.parts or parts:
        for tokens in options.tokens or ([64, 2048] if options.device == "cuda" else [16]):
            result[f"{name} {tokens}"] = parts[name](options, tokens)
            gc.collect()
    if options.out is not None:
        options.out.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
