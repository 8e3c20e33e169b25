"""One token of a Llama-8B-shaped model, bf16 against FP4, everything resident, static KV cache, one torch.compile.

Random weights, made on the GPU. Both models are compiled with `vbrt.compile_options("reduce-overhead")`, which changes
nothing for bf16, and timed by the host's clock around a synchronized call, median of the second half of the calls, and
over these calls queued one behind the other; a profiler then says which kernels a step spent its time in. Writes what
it measures as JSON.
"""

import argparse
import json
import re
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402  # after the checkout is on the path

import vbrt  # noqa: E402

PROMPT, CALLS, CACHE, ROWS = 64, 40, 512, 24
#: group -> what its kernels' names have, the first that matches
GROUPS = {
    "attention": r"fmha|flash|sdpa|attention|softmax",
    "linear": r"^(linear|residual|siblings|gated|order|wgmma|reduce|pad|clear|persistent)_kernel|"
              r"gemv|gemm|nvjet|cutlass|splitK|cublas",
    "the rest": r"",
}


def build(layers: int) -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(hidden_size=4096, intermediate_size=14336, num_hidden_layers=layers, num_attention_heads=32,
                         num_key_value_heads=8, vocab_size=128256, max_position_embeddings=8192,
                         tie_word_embeddings=False)
    torch.manual_seed(0)
    default = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda"):
            return LlamaForCausalLM(config).eval()
    finally:
        torch.set_default_dtype(default)


def note(what: str, start: float) -> None:
    """Minutes go by before the first figure."""
    torch.cuda.synchronize()
    print(f"# {what}: {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)


@torch.no_grad()
def decoder(model: torch.nn.Module, compiled: bool) -> Callable[[int], None]:
    """What runs one step after a prompt; called CALLS / 2 times."""
    from transformers import StaticCache

    cache = StaticCache(config=model.config, max_cache_len=CACHE)

    def step(ids: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        return model(input_ids=ids, cache_position=position, position_ids=position[None], past_key_values=cache,
                     use_cache=True).logits

    ids = torch.randint(0, 1000, (1, PROMPT), device="cuda")
    start = time.perf_counter()
    model(input_ids=ids, past_key_values=cache, use_cache=True, cache_position=torch.arange(PROMPT, device="cuda"))
    note("prompt", start)
    run = torch.compile(step, options=vbrt.compile_options("reduce-overhead")) if compiled else step
    token = ids[:, :1].clone()
    positions = [torch.tensor([PROMPT + index], device="cuda") for index in range(CALLS)]

    @torch.no_grad()
    def call(index: int) -> None:
        run(token, positions[index])

    start = time.perf_counter()
    for index in range(CALLS // 2):
        call(index)
    note("first steps", start)
    return call


def decode_ms(call: Callable[[int], None]) -> tuple[float, float, float]:
    """Milliseconds by the host's clock: of a token, of the host's part before the GPU has all its work, and of a token
    among others that the GPU gets without anybody waiting for one before the next is issued."""
    times, issued = [], []
    for index in range(CALLS // 2, CALLS):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call(index)
        issued.append((time.perf_counter() - start) * 1e3)
        torch.cuda.synchronize()
        times.append((time.perf_counter() - start) * 1e3)
    queued = []
    for _ in range(3):
        start = time.perf_counter()
        for index in range(CALLS // 2, CALLS):
            call(index)
        torch.cuda.synchronize()
        queued.append((time.perf_counter() - start) * 1e3 / (CALLS - CALLS // 2))
    return sorted(times)[len(times) // 2], sorted(issued)[len(issued) // 2], min(queued)


def traced(call: Callable[[int], None], steps: int = 3) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """What a profiler notes of the middle one of some steps, by start: kernels, and what the host does."""
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        for index in range(CALLS - steps, CALLS):
            torch.cuda.synchronize()
            with torch.profiler.record_function(f"step {index}"):
                call(index)
                torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    wanted = f"step {CALLS - steps // 2 - 1}"
    step = next(e for e in events if e.get("name") == wanted and e.get("cat") == "user_annotation")
    inside = [e for e in events if "dur" in e and step["ts"] < e["ts"] < step["ts"] + step["dur"]]
    inside.sort(key=lambda e: e["ts"])
    parts = ("kernel", "gpu_memcpy", "gpu_memset"), ("cpu_op", "cuda_runtime", "user_annotation")
    device, host = ([e for e in inside if e.get("cat") in part] for part in parts)
    return device, host


def group_of(name: str) -> str:
    return next(group for group, pattern in GROUPS.items() if re.search(pattern, name))


def profile(call: Callable[[int], None]) -> dict[str, Any]:
    """Where the microseconds of one step go: by group, and by kernel and grid; `gaps` is time without any kernel.

    The profiler makes gaps longer. Of the host, what took longest; its parts may lie within each other.
    """
    events, host = traced(call)
    groups, rows, busy, until = dict.fromkeys(GROUPS, 0.0), {}, 0.0, 0.0
    for event in events:
        start, end = event["ts"], event["ts"] + event["dur"]
        added = max(0.0, end - max(start, until))  # two kernels that overlap share their time
        until = max(until, end)
        busy += added
        groups[group_of(event["name"])] += added
        grid = event.get("args", {}).get("grid")
        row = rows.setdefault((event["name"][:100], str(grid)), [0, 0.0])
        row[0] += 1
        row[1] += event["dur"]
    span = until - events[0]["ts"]
    listed = sorted(({"kernel": name, "grid": grid, "calls": count, "us": round(us, 1)}
                     for (name, grid), (count, us) in rows.items()), key=lambda row: -row["us"])
    longest = sorted(((e["name"][:60], round(e["dur"], 1)) for e in host), key=lambda pair: -pair[1])[:12]
    return {"host": longest, "span_us": round(span, 1), "gaps_us": round(span - busy, 1), "kernels": len(events),
            "groups_us": {name: round(us, 1) for name, us in groups.items()}, "rows": listed[:ROWS]}


def measure(layers: int, *, eager: bool = False) -> dict[str, object]:
    model = build(layers)
    result: dict[str, object] = {"layers": layers, "weights_gb": torch.cuda.memory_allocated() / 1e9}
    if eager:
        result["bf16_eager_ms"], *_ = decode_ms(decoder(model, compiled=False))
    call = decoder(model, compiled=True)
    result["bf16_ms"], result["bf16_host_ms"], result["bf16_queued_ms"] = decode_ms(call)
    result["bf16_profile"] = profile(call)
    del call
    torch.compiler.reset()
    result |= measure_fp4(model, eager=eager)
    result["speedup"] = result["bf16_ms"] / result["fp4_ms"]
    result["speedup_queued"] = result["bf16_queued_ms"] / result["fp4_queued_ms"]
    del model
    torch.cuda.empty_cache()
    small = measure_fp4(build(layers), eager=False, weights={"keep_head": False})
    result["fp4_head_too"] = small
    result["speedup_head_too"] = result["bf16_ms"] / small["fp4_ms"]
    return result


def measure_fp4(model: torch.nn.Module, *, eager: bool, **config: dict[str, object]) -> dict[str, Any]:
    """Of a model that is wrapped for it; its output layer stays as it is unless the config says otherwise."""
    start = time.perf_counter()
    vb = vbrt.wrap(model, "fp4", **config).materialize()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    result: dict[str, Any] = {
        "encode_s": time.perf_counter() - start, "fp4_weights_gb": torch.cuda.memory_allocated() / 1e9
    }
    if eager:
        result["fp4_eager_ms"], *_ = decode_ms(decoder(model, compiled=False))
    call = decoder(model, compiled=True)
    swapped = {swap.name for swap in vb.plan.swaps}
    head = 0 if "lm_head" in swapped else sum(p.numel() * p.element_size() for p in model.lm_head.parameters())
    result["fp4_linear_bytes"] = sum(swap.page_bytes for swap in vb.plan.swaps) + head
    result["fp4_ms"], result["fp4_host_ms"], result["fp4_queued_ms"] = decode_ms(call)
    result["fp4_profile"] = profile(call)
    result["fallbacks"] = list(vb.stats().fallbacks)
    del call
    vb.close()
    torch.compiler.reset()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--eager", action="store_true", help="also without torch.compile")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device")
    print(json.dumps(measure(options.layers, eager=options.eager), indent=1))


if __name__ == "__main__":
    main()
