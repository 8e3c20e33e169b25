"""One token of a Llama-8B-shaped model, bf16 against FP4, everything resident, static KV cache, one torch.compile.

Random weights, made on the GPU. All models are compiled with `vbrt.compile_options("reduce-overhead")`, which changes
nothing for bf16, and timed in turns, so that they meet the same host, whose part of a step can be 0.2 ms one second and
0.4 ms the next: by the host's clock around synchronized calls, median, and over calls queued one behind the other,
the fastest round. A profiler then says which kernels a step spent its time in. Writes what it measures as JSON.
"""

import argparse
import json
import re
import sys
import tempfile
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # after the checkout is on the path

import vbrt
from scripts.measuring import llama_8b

PROMPT, CALLS, ROUNDS, CACHE, ROWS = 64, 40, 7, 512, 24
#: group -> what its kernels' names have, the first that matches
GROUPS = {
    "attention": r"fmha|flash|sdpa|attention|softmax",
    "linear": r"^(linear|residual|siblings|gated|order|wgmma|reduce|pad|persistent)_kernel|"
    r"gemv|gemm|nvjet|cutlass|splitK|cublas",
    "the rest": r"",
}


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
        return model(
            input_ids=ids, cache_position=position, position_ids=position[None], past_key_values=cache, use_cache=True
        ).logits

    ids = torch.randint(0, 1000, (1, PROMPT), device="cuda")
    start = time.perf_counter()
    model(input_ids=ids, past_key_values=cache, use_cache=True, cache_position=torch.arange(PROMPT, device="cuda"))
    note("prompt", start)
    if compiled:  # code of its own, for which dynamo keeps nothing but this model's graph
        code = step.__code__.replace(co_name=f"step_{id(model)}")
        own = types.FunctionType(code, globals(), closure=step.__closure__)
        step = torch.compile(own, options=vbrt.compile_options("reduce-overhead"))
    token = ids[:, :1].clone()
    positions = [torch.tensor([PROMPT + index], device="cuda") for index in range(CALLS)]

    @torch.no_grad()
    def call(index: int) -> None:
        step(token, positions[index])

    start = time.perf_counter()
    for index in range(CALLS // 2):
        call(index)
    note("first steps", start)
    return call


def decode_ms(calls: dict[str, Callable[[int], None]]) -> dict[str, float]:
    """Milliseconds of a token by the host's clock, in turns: NAME_ms; NAME_host_ms, of the host's part before the GPU
    has all its work; and NAME_queued_ms, of a token among others, nobody waiting for one before the next is issued."""
    times: dict[str, list[float]] = {f"{name}{what}_ms": [] for name in calls for what in ("", "_host", "_queued")}
    for name, call in [pair for _ in range(ROUNDS) for pair in calls.items()]:
        for index in range(CALLS // 2, CALLS):
            torch.cuda.synchronize()
            start = time.perf_counter()
            call(index)
            times[f"{name}_host_ms"].append((time.perf_counter() - start) * 1e3)
            torch.cuda.synchronize()
            times[f"{name}_ms"].append((time.perf_counter() - start) * 1e3)
        start = time.perf_counter()
        for index in range(CALLS // 2, CALLS):
            call(index)
        torch.cuda.synchronize()
        times[f"{name}_queued_ms"].append((time.perf_counter() - start) * 1e3 / (CALLS - CALLS // 2))
    return {name: min(own) if "queued" in name else sorted(own)[len(own) // 2] for name, own in times.items()}


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
    listed = sorted(
        (
            {"kernel": name, "grid": grid, "calls": count, "us": round(us, 1)}
            for (name, grid), (count, us) in rows.items()
        ),
        key=lambda row: -row["us"],
    )
    longest = sorted(((e["name"][:60], round(e["dur"], 1)) for e in host), key=lambda pair: -pair[1])[:12]
    return {
        "host": longest,
        "span_us": round(span, 1),
        "gaps_us": round(span - busy, 1),
        "kernels": len(events),
        "groups_us": {name: round(us, 1) for name, us in groups.items()},
        "rows": listed[:ROWS],
    }


def measure(layers: int, *, eager: bool = False) -> dict[str, object]:
    """The model in bf16, in FP4, and in FP4 with its output layer, side by side."""
    calls: dict[str, Callable[[int], None]] = {}
    dense = llama_8b(layers)
    result: dict[str, Any] = {"layers": layers, "weights_gb": torch.cuda.memory_allocated() / 1e9}
    if eager:
        result |= decode_ms({"bf16_eager": decoder(dense, compiled=False)})
    calls["bf16"] = decoder(dense, compiled=True)
    wrapped = []
    for name, config in (("fp4", {}), ("fp4_head_too", {"weights": {"keep_head": False}})):
        vb, figures = encoded(layers, config)
        wrapped.append(vb)
        result |= {f"{name}_{what}": value for what, value in figures.items()}
        if eager:
            result |= decode_ms({f"{name}_eager": decoder(vb.module, compiled=False)})
        calls[name] = decoder(vb.module, compiled=True)
    result |= decode_ms(calls)
    result |= {f"{name}_profile": profile(call) for name, call in calls.items()}
    result["fallbacks"] = [reason for vb in wrapped for reason in vb.stats().fallbacks]
    result["speedup"] = result["bf16_ms"] / result["fp4_ms"]
    result["speedup_queued"] = result["bf16_queued_ms"] / result["fp4_queued_ms"]
    result["speedup_head_too"] = result["bf16_ms"] / result["fp4_head_too_ms"]
    calls.clear()
    for vb in wrapped:
        vb.close()
    torch.compiler.reset()
    return result


def encoded(layers: int, config: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """A model of 4-bit layers, and what it takes: seconds, GB, and the bytes of all its linear layers."""
    before = torch.cuda.memory_allocated()
    model = llama_8b(layers)
    start = time.perf_counter()
    vb = vbrt.wrap(model, "fp4", **config).materialize()
    torch.cuda.synchronize()
    seconds = time.perf_counter() - start
    torch.cuda.empty_cache()
    swapped = {swap.name for swap in vb.plan.swaps}
    head = 0 if "lm_head" in swapped else sum(p.numel() * p.element_size() for p in model.lm_head.parameters())
    return vb, {
        "encode_s": seconds,
        "weights_gb": (torch.cuda.memory_allocated() - before) / 1e9,
        "linear_bytes": sum(swap.page_bytes for swap in vb.plan.swaps) + head,
    }


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
