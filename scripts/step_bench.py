"""What joins make of a decode step: milliseconds a token as a CUDA graph, as it is and joined.

An 8B Llama shape (or a Qwen3-30B-A3B shape) with random weights and transformers' static cache; the step is recorded by
`vbrt.generation.fusion.fuse_step` and captured by hand. Each row is a graph; all of them are of one run.

    python3 scripts/step_bench.py --parts bits llama moe [--moe-layers 48] [--out results.json]
"""

import argparse
import functools
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
from torch import nn

import vbrt
from scripts.experts_decode import build as build_moe
from scripts.full_models import drawn_in
from scripts.measuring import machine
from vbrt.generation.fusion.fuse_step import PATTERNS, Joined, joined
from vbrt.kernels.operator_trace import StepRecorder

CACHE_TOKENS, PROMPT = 1024, 128
LLAMA = {
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
}


def build_llama(layers: int) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(**LLAMA, num_hidden_layers=layers, tie_word_embeddings=False)
    with torch.device("cuda"), drawn_in(torch.bfloat16):
        return LlamaForCausalLM(config).eval().requires_grad_(False)


class Decoding:
    """Steps of one token on a static cache, from the end of a prompt on."""

    def __init__(self, model: nn.Module, config: Any, batch: int) -> None:
        from transformers import StaticCache

        self._model, self._cache = model, StaticCache(config=config, max_cache_len=CACHE_TOKENS)
        torch.manual_seed(0)
        prompt = torch.randint(0, config.vocab_size, (batch, PROMPT), device="cuda")
        self._token = prompt[:, :1].clone()
        self._position = torch.tensor([PROMPT], device="cuda")
        with torch.no_grad():
            model(input_ids=prompt, past_key_values=self._cache, use_cache=True, logits_to_keep=1)

    @torch.no_grad()
    def step(self) -> torch.Tensor:
        """One token; the static cache counts on by itself."""
        return self._model(
            input_ids=self._token,
            position_ids=self._position[None],
            cache_position=self._position,
            past_key_values=self._cache,
            use_cache=True,
        ).logits

    def rewind(self) -> None:
        """Have the cache go on behind the prompt again."""
        for layer in self._cache.layers:
            if isinstance(getattr(layer, "cumulative_length", None), torch.Tensor):
                layer.cumulative_length.fill_(PROMPT)


def captured(step: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, float]:
    """A graph of a step that has run before, and the seconds that the capture took."""
    torch.cuda.synchronize()
    start, graph = time.perf_counter(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    torch.cuda.synchronize()
    return graph, time.perf_counter() - start


def replay_ms(graph: torch.cuda.CUDAGraph, decoding: Decoding, times: int = 60) -> float:
    """Milliseconds of a replay."""
    decoding.rewind()
    for _ in range(5):
        graph.replay()
    first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    first.record()
    for _ in range(times):
        graph.replay()
    last.record()
    torch.cuda.synchronize()
    return first.elapsed_time(last) / times


def top_kernels(graph: torch.cuda.CUDAGraph, decoding: Decoding, count: int = 18) -> list[tuple[str, int, float]]:
    """(kernel, launches a step, microseconds a step) of the longest."""
    decoding.rewind()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(3):
            graph.replay()
        torch.cuda.synchronize()
    events = sorted(profiler.key_averages(), key=lambda e: -e.self_device_time_total)
    rows = [(e.key[:90], e.count // 3, e.self_device_time_total / 3) for e in events if e.self_device_time_total]
    total = ("all", sum(row[1] for row in rows), sum(row[2] for row in rows))
    return [total, *rows[:count]]


def say(row: dict[str, Any]) -> dict[str, Any]:
    print(json.dumps({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}), flush=True)
    return row


def joined_row(name: str, decoding: Decoding, **options: Any) -> tuple[dict[str, Any], torch.cuda.CUDAGraph]:
    decoding.rewind()
    step: Joined = joined(decoding.step, **options)
    graph, seconds = captured(step)
    report = step.report
    row = {"case": name, "ms": replay_ms(graph, decoding), "join_s": report.seconds, "capture_s": seconds}
    calls = getattr(step.run, "calls", dict)()
    row |= {"calls": {name: count for name, count in calls.items() if count >= 8}}
    row |= {"error": report.error, "joined": report.joined, "kept": report.kept, "operators": report.operators}
    return row | {"refused": report.refused}, graph


def compared(name: str, decoding: Decoding, *, each: bool, profile: bool) -> Iterator[dict[str, Any]]:
    """Rows of a step as it is, joined, and joined but for each pattern."""
    decoding.rewind()
    for _ in range(2):
        decoding.step()
    graph, seconds = captured(decoding.step)
    plain = replay_ms(graph, decoding)
    yield {"case": f"{name}: as it is", "ms": plain, "capture_s": seconds}
    if profile:
        yield {"case": f"{name}: kernels as it is", "top": top_kernels(graph, decoding)}
    joined_row(name, decoding, same_bits=False)  # compiles kernels
    row, graph = joined_row(f"{name}: joined", decoding, same_bits=False)
    yield row | {"speedup": plain / row["ms"]}
    if profile:
        yield {"case": f"{name}: kernels joined", "top": top_kernels(graph, decoding)}
    del graph
    if each:
        for pattern in PATTERNS:
            without, _ = joined_row(
                f"{name}: without {pattern.name}", decoding, same_bits=False, without={pattern.name}
            )
            keep = ("case", "ms", "error", "refused")
            yield {k: without[k] for k in keep} | {"cost_ms": without["ms"] - row["ms"]}


def truth(layers: int) -> Iterator[dict[str, Any]]:
    """How far eager and joined steps in bf16 are from the same step in fp32."""
    model = build_llama(layers)
    decoding = Decoding(model, model.config, 1)
    with torch.no_grad():
        eager = decoding.step().float()
    decoding.rewind()
    run = joined(decoding.step, same_bits=False)
    decoding.rewind()
    own = run().float()
    del run, decoding
    model.float()
    with torch.no_grad():
        exact = Decoding(model, model.config, 1).step()
    errors = {name: float((y - exact).norm() / exact.norm()) for name, y in (("eager", eager), ("joined", own))}
    yield {"case": f"8B shape, {layers} layers, bf16 against fp32", **errors}


def seconds_of(decoding: Decoding) -> dict[str, float]:
    """Seconds of a joined step's parts, after kernels have been compiled: the eager step, its record, joins, check."""
    found = {}
    for name, options in (("all", {}), ("without check", {"check": False})):
        decoding.rewind()
        torch.cuda.synchronize()
        found[name] = joined(decoding.step, same_bits=False, **options).report.seconds
    decoding.rewind()
    torch.cuda.synchronize()
    start = time.perf_counter()
    with torch.no_grad(), StepRecorder():
        decoding.step()
    found["record"] = time.perf_counter() - start
    start = time.perf_counter()
    decoding.step()
    return found | {"step": time.perf_counter() - start}


def llama(layers: int) -> Iterator[dict[str, Any]]:
    model = build_llama(layers)
    decoding = Decoding(model, model.config, 1)
    yield from compared("8B bf16, batch 1", decoding, each=False, profile=False)
    same, _ = joined_row("8B bf16, batch 1: joined, same bits", decoding, same_bits=True)
    yield same
    vb = vbrt.wrap(model, "fp4").materialize()
    decoding = Decoding(vb, model.config, 1)
    yield from compared("8B fp4, batch 1", decoding, each=True, profile=True)
    yield {"case": "8B fp4, batch 1: seconds of joining", **seconds_of(decoding)}
    yield from compared("8B fp4, batch 16", Decoding(vb, model.config, 16), each=False, profile=True)
    vb.close()


def moe(layers: int, *, brief: bool) -> Iterator[dict[str, Any]]:
    model = build_moe(layers, torch.device("cuda"))
    model.config._experts_implementation = "batched_mm"
    config, name = model.config, f"Qwen3-30B-A3B, {layers} layers"
    rows = list(compared(f"{name}, bf16", Decoding(model, config, 1), each=False, profile=not brief))
    yield from rows
    vb = vbrt.wrap(model, "fp4", policy={"kind": "experts"}, tiers={"gpu": {"budget": "24GiB"}}).materialize()
    own = list(compared(f"{name}, fp4", Decoding(vb, config, 1), each=not brief, profile=not brief))
    yield from own
    ms = {row["case"].partition(": ")[2]: row["ms"] for row in rows if "ms" in row}
    joined_ms = next(row["ms"] for row in own if row["case"].endswith(": joined"))
    ratios = {"bf16 as it is / fp4 joined": ms["as it is"] / joined_ms, "both joined": ms["joined"] / joined_ms}
    yield {"case": f"{name}: ratios", **ratios}
    vb.close()


def bits() -> Iterator[dict[str, Any]]:
    """What replaces kernels bit for bit, on a small model of each dtype."""
    from transformers import LlamaConfig, LlamaForCausalLM

    small = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 2, "num_attention_heads": 8}
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        config = LlamaConfig(**small, num_key_value_heads=2, vocab_size=1000)
        model = LlamaForCausalLM(config).to("cuda", dtype).eval()
        for same in (True, False):
            row, _ = joined_row(f"bits {dtype}, same_bits={same}", Decoding(model, config, 2), same_bits=same)
            yield {k: row[k] for k in ("case", "error", "joined", "kept", "refused")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--parts", nargs="+", default=["bits", "llama", "moe"])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--moe-layers", type=int, default=48)
    parser.add_argument("--brief", action="store_true", help="routed experts without profiles and single patterns")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    parts = {
        "truth": functools.partial(truth, args.layers),
        "bits": bits,
        "llama": functools.partial(llama, args.layers),
        "moe": functools.partial(moe, args.moe_layers, brief=args.brief),
    }
    rows, failed, start = [], [], time.perf_counter()
    for name in args.parts:
        try:
            for row in parts[name]():
                rows.append(say(row))
                args.out.write_text(json.dumps({"machine": machine(), "rows": rows}, indent=1) + "\n")
        except Exception:  # noqa: BLE001  # the other parts' figures are kept, and it is said at the end
            traceback.print_exc()
            failed.append(name)
        torch.cuda.empty_cache()
        print(f"# {name}: {time.perf_counter() - start:.0f} s", flush=True)
    sys.exit(f"failed: {failed}" if failed else 0)


if __name__ == "__main__":
    main()
