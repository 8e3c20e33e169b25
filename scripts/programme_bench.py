"""Streamed passes of a Llama-3-8B-shaped model: decided lease by lease, by a programme, and as one CUDA graph.

    python scripts/programme_bench.py [check] [decode] [lease] [generate] [exact] [lora] [dense] [--out FILE]

- check: a small model's logits are the same bits whichever way it runs, budgets and prompts in between.
- decode: `fp4`, one token, with 10 to 90 % of the pages' bytes for tiers.gpu, beside the link and the resident step;
  the host's microseconds a lease.
- lease: the host's microseconds of one by a programme, with torch's calls and with the CUDA runtime's own.
- generate: `vb.generate` with all pages on the GPU, and with half of them.
- exact: one token, fine planes streamed.
- lora: a step of adapters on 2,048 tokens, planes on the GPU, or in host memory.
- dense: one token, eager, all weights resident, beside the model that nobody wrapped.
"""

import argparse
import copy
import gc
import json
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # after the checkout is on the path
import torch.nn.functional as F
from torch import nn

import vbrt
from scripts.measuring import llama_8b, machine, moved_bytes
from scripts.stream import training_step
from vbrt.estimation.advice.machine_rates import link_gb_s
from vbrt.layers import VBLinear
from vbrt.tiers import Lease

DEVICE, CACHE = "cuda", 256


def decoder(model: nn.Module) -> tuple[Callable[[], torch.Tensor], Callable[[], None]]:
    """One decode step after a short prompt, on inputs that stay where they are; and what takes the cache back."""
    from transformers import StaticCache

    cache = StaticCache(config=model.config, max_cache_len=CACHE)
    ids = torch.randint(0, 1000, (1, 64), generator=torch.Generator().manual_seed(0)).to(DEVICE)
    token, position = ids[:, :1].clone(), torch.tensor([64], device=DEVICE)
    with torch.no_grad():
        model(input_ids=ids, past_key_values=cache, use_cache=True, cache_position=torch.arange(64, device=DEVICE))

    def step() -> torch.Tensor:
        with torch.no_grad():
            return model(
                input_ids=token,
                cache_position=position,
                position_ids=position[None],
                past_key_values=cache,
                use_cache=True,
            ).logits

    def rewind() -> None:
        for layer in cache.layers:
            layer.cumulative_length.fill_(64)

    return step, rewind


def median_ms(call: Callable[[], object], times: int, warm: int = 2) -> tuple[float, float]:
    """Milliseconds of a call among others, one queued behind the other, and the host's part of one by itself."""
    for _ in range(warm):
        call()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(times):
        call()
    torch.cuda.synchronize()
    queued, host = (time.perf_counter() - start) / times, []
    for _ in range(3):
        start = time.perf_counter()
        call()
        host.append(time.perf_counter() - start)
        torch.cuda.synchronize()
    return queued * 1e3, statistics.median(host) * 1e3


def lease_us(call: Callable[[], object]) -> float:
    """The host's microseconds in asking for a lease and releasing it, median over the leases of some calls."""
    spans: list[float] = []
    enter, leave = Lease.__enter__, Lease.__exit__

    def timed_enter(self: Lease) -> object:
        start = time.perf_counter()
        try:
            return enter(self)
        finally:
            spans.append(time.perf_counter() - start)

    def timed_leave(self: Lease, *exc_info: object) -> None:
        start = time.perf_counter()
        leave(self, *exc_info)
        spans[-1] += time.perf_counter() - start

    Lease.__enter__, Lease.__exit__ = timed_enter, timed_leave
    try:
        for _ in range(3):
            call()
            torch.cuda.synchronize()
    finally:
        Lease.__enter__, Lease.__exit__ = enter, leave
    return sum(spans) / max(1, len(spans)) * 1e6


def captured(
    vb: vbrt.VBModelWrapper, step: Callable[[], torch.Tensor]
) -> tuple[Callable[[], bool], torch.Tensor, float]:
    """Replay a step as one CUDA graph; what it computes; seconds to prepare and capture."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    recording, graph = vb.runtime.recording("decode"), torch.cuda.CUDAGraph()
    prepared = time.perf_counter()
    with torch.cuda.graph(graph), recording:
        out = step()
    torch.cuda.synchronize()
    print(f"# prepared in {prepared - start:.3f} s, captured in {time.perf_counter() - prepared:.3f} s", flush=True)
    return lambda: recording.replay(graph), out, time.perf_counter() - start


# -- parts ------------------------------------------------------------------------------------------------------------


def check(options: argparse.Namespace) -> dict:
    """Raise AssertionError where bits differ."""
    model = llama_8b(4)
    vb = vbrt.wrap(model, "fp4", weights={"keep_head": True}, compute={"where": "device"}).materialize()
    step, rewind = decoder(vb.module)
    want, done, pages = step().clone(), [], vb.plan.page_bytes

    def same(what: str, got: torch.Tensor) -> None:
        torch.cuda.synchronize()
        assert torch.equal(got, want), f"{what}: other logits"
        done.append(what)
        rewind()

    rewind()
    for percent in (60, 30, 45):
        vb.set_budget("gpu", max(pages * percent // 100, 110 << 20))
        for turn in range(8):
            same(f"eager {percent} {turn}", step())
        replay, out, _ = captured(vb, step)
        for turn in range(6):
            rewind()
            out.zero_()
            assert replay(), "the recording has ended"
            same(f"graph {percent} {turn}", out)
            if turn == 2:  # other passes between replays
                vb.module(input_ids=torch.zeros(1, 40, dtype=torch.long, device=DEVICE), use_cache=False)
                same(f"eager between {percent}", step())
            if turn == 3:  # leases in another order
                for handle in [layer.handle for layer in list(vb.runtime.attachments[0].layers.values())[5:9]]:
                    handle.weight()
        before = replay
    vb.set_budget("gpu", pages + (64 << 20))
    assert not before(), "a replay after pages have moved"
    same("resident", step())
    replay, out, _ = captured(vb, step)
    out.zero_()
    assert replay()
    same("resident graph", out)
    vb.set_budget("gpu", max(pages // 2, 110 << 20))
    assert not replay()
    same("eager at last", step())
    vb.close()
    return {"checked": len(done)}


def wrapped(options: argparse.Namespace) -> vbrt.VBModelWrapper:
    """The wrapped model that parts share."""
    if options.shared is None:
        settings = {"weights": {"keep_head": True}, "compute": {"where": "device"}}  # what it is about
        options.shared = vbrt.wrap(llama_8b(options.layers), "fp4", **settings).materialize()
        gc.collect()
        torch.cuda.empty_cache()
    return options.shared


def decode(options: argparse.Namespace) -> dict:
    """A table over the budget."""
    link, vb = 1e9 * link_gb_s(), wrapped(options)
    pages, (step, rewind) = vb.plan.page_bytes, decoder(vb.module)
    vb.set_budget("gpu", int(pages * 1.1))
    eager, _ = median_ms(step, 4)
    replay, _, _ = captured(vb, step)
    resident, _ = median_ms(replay, 20)
    result = {"link_gb_s": link / 1e9, "page_bytes": pages, "resident_ms": resident, "resident_eager_ms": eager}
    result["rows"] = []
    print(f"link {link / 1e9:.1f} GB/s, resident: graph {resident:.2f} ms, eager {eager:.2f}", flush=True)
    for percent in range(90, 0, -10):
        rewind()
        vb.set_budget("gpu", pages * percent // 100)
        row = {"percent": percent}
        programmes = vb.stack.ledger.programmes
        for name, enabled in (("policy", False), ("programme", True)) if percent in (90, 50, 10) else ():
            programmes.enabled = enabled
            rewind()
            row[f"{name}_ms"], row[f"{name}_host_ms"] = median_ms(step, 3, warm=5)
            row[f"{name}_lease_us"] = lease_us(step)
        step()
        row["reason"] = programmes.reason
        replay, _, row["prepare_s"] = captured(vb, step)
        replay()
        before = moved_bytes(vb)
        replay()
        row["bytes"] = moved_bytes(vb) - before
        rewind()
        row["graph_ms"], row["graph_host_ms"] = median_ms(replay, 10)
        row["link_ms"] = row["bytes"] / link * 1e3
        row["strict_link_ms"] = pages * (100 - percent) / 100 / link * 1e3
        row["limit_ms"] = 1.1 * max(row["link_ms"], resident) + 1
        result["rows"].append(row)
        print(json.dumps({k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()}), flush=True)
    return result


def lease(options: argparse.Namespace) -> dict:
    """Half of the pages, eager; all of the host's time for a lease, and for one of a page that stays."""
    vb, result = wrapped(options), {}
    step, rewind = decoder(vb.module)
    for turn, name in enumerate(("torch", "direct", "torch", "direct")):
        with (
            mock.patch("vbrt.tiers.schedule.stream_link.cuda_runtime", lambda: None)
            if name == "torch"
            else nullcontext()
        ):
            vb.set_budget("gpu", vb.plan.page_bytes * (49 + turn) // 100)  # another programme, and so another link
            for _ in range(6):
                rewind()
                step()
        result[f"{name}_{turn}_us"] = lease_us(step)
        result[f"{name}_{turn}_ms"], result[f"{name}_{turn}_host_ms"] = median_ms(step, 3, warm=1)
        result |= {f"{name}_{turn}_{call}_us": us for call, us in link_calls_us(vb).items()}
    result["measuring_us"] = call_us(lambda: (time.perf_counter(), time.perf_counter()), 2000) * 2
    return result


def call_us(call: Callable[[], object], times: int) -> float:
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - start) / times * 1e6


def link_calls_us(vb: vbrt.VBModelWrapper) -> dict[str, float]:
    """The host's microseconds of what a page that passes through costs; the ring's contents are not to be used then."""
    run = vb.stack.ledger.running
    if run is None:
        raise RuntimeError(f"no programme runs: {vb.stack.ledger.programmes.reason}")
    link, copies = run.ring.link, next(step.loads for step in run.steps if step is not None and step.loads)
    slot = copies[0].load.slot
    calls = {"wait": lambda: link.wait(slot), "computed": link.computed, "copy": copies[0].start}
    return {type(link).__name__: 0.0} | {name: call_us(call, 64) for name, call in calls.items()}


def generate(options: argparse.Namespace) -> dict:
    """Tokens and milliseconds a token of `vb.generate`, with all pages on the GPU and with half of them."""
    vb = wrapped(options)
    ids, result, tokens = torch.randint(0, 1000, (1, 128), device=DEVICE), {}, {}
    for name, share in (("resident", 1.1), ("half", 0.5)):
        vb.set_budget("gpu", int(vb.plan.page_bytes * share))
        options_ = {"max_new_tokens": 48, "min_new_tokens": 48, "do_sample": False}
        for turn in range(2):
            torch.cuda.synchronize()
            start = time.perf_counter()
            tokens[name] = vb.generate(ids, **options_)
            torch.cuda.synchronize()
            result[f"{name}_{turn}_ms_a_token"] = (time.perf_counter() - start) / 48 * 1e3
        result[f"{name}_steps"] = str(vb.stats().steps)
        result[f"{name}_reason"] = vb.stack.ledger.programmes.reason
    result["same_tokens"] = torch.equal(tokens["resident"], tokens["half"])
    return result


def exact(options: argparse.Namespace) -> dict:
    """Coarse planes on the GPU, fine ones through 900 MiB."""
    link, model = 1e9 * link_gb_s(), llama_8b(options.layers)
    coarse = vbrt.make_plan(model, vbrt.load_config("fp4", weights={"keep_head": True})).page_bytes
    tiers = {"gpu": {"budget": coarse + (900 << 20)}}
    vb = vbrt.wrap(model, "exact", weights={"keep_head": True}, tiers=tiers).materialize()
    step, rewind = decoder(vb.module)
    result: dict[str, float] = {}
    for name, enabled in (("policy", False), ("programme", True)):
        vb.stack.ledger.programmes.enabled = enabled
        result[f"{name}_ms"], result[f"{name}_host_ms"] = median_ms(step, 3, warm=4)
        result[f"{name}_lease_us"] = lease_us(step)
    replay, _, result["prepare_s"] = captured(vb, step)
    rewind()
    before = moved_bytes(vb)
    replay()
    result["link_ms"] = (moved_bytes(vb) - before) / link * 1e3
    result["graph_ms"], result["graph_host_ms"] = median_ms(replay, 6)
    vb.close()
    return result


class Adapted(nn.Module):
    """A frozen layer with an adapter of rank 16."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Parameter(torch.randn(16, base.in_features, device=DEVICE, dtype=torch.bfloat16) * 0.01)
        self.up = nn.Parameter(torch.zeros(base.out_features, 16, device=DEVICE, dtype=torch.bfloat16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + F.linear(F.linear(x, self.down), self.up)


def lora(options: argparse.Namespace) -> dict:
    """Steps with planes on the GPU, and in host memory: decided lease by lease, and by a programme."""
    link, vb = 1e9 * link_gb_s(), wrapped(options)
    options.shared = None  # changed from here on
    model, pages = vb.module.requires_grad_(False).train(), vb.plan.page_bytes
    vb.set_budget("gpu", int(pages * 1.1))
    for layer in model.model.layers:
        layer.self_attn.q_proj = Adapted(layer.self_attn.q_proj)
        layer.self_attn.v_proj = Adapted(layer.self_attn.v_proj)
    step = training_step(model)
    result = {"two_reads_ms": 2e3 * pages / link}
    result["resident_ms"], result["resident_host_ms"] = median_ms(step, 3)
    print(json.dumps(result), flush=True)
    for budget in (240, 480):
        vb.set_budget("gpu", budget << 20)
        for name, enabled in (("policy", False), ("programme", True)):
            vb.stack.ledger.programmes.enabled = enabled
            key = f"{name}_{budget}"
            result[f"{key}_ms"], result[f"{key}_host_ms"] = median_ms(step, 3, warm=5 if enabled else 2)
            print(json.dumps({key: result[f"{key}_ms"], "host": result[f"{key}_host_ms"]}), flush=True)
        result[f"lease_us_{budget}"] = lease_us(step)
        result[f"reason_{budget}"] = vb.stack.ledger.programmes.reason
        if options.profile:
            profiled(step, Path(options.out).with_suffix(f".lora-{budget}.txt"))
    vb.close()
    return result


def profiled(step: Callable[[], object], path: Path) -> None:
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        step()
        torch.cuda.synchronize()
    path.write_text(profiler.key_averages().table(sort_by="self_cpu_time_total", row_limit=40))


def dense(options: argparse.Namespace) -> dict:
    """Take turns, so that drift hits both alike."""
    plain = llama_8b(options.layers)
    vb = vbrt.wrap(copy.deepcopy(plain), "dense", weights={"keep_head": True}).materialize()
    ids = torch.zeros(1, 1, dtype=torch.long, device=DEVICE)
    models = {"unwrapped": plain, "wrapped": vb.module, "unhooked": vb.module, "bare": vb.module}
    spans: dict[str, list[float]] = {f"{name}{part}": [] for name in models for part in ("_ms", "_host_ms")}
    hooks = vb.module._forward_pre_hooks
    with torch.no_grad():
        for turn in range(40):
            for name, model in models.items():
                kept = dict(hooks)
                if name in ("unhooked", "bare"):
                    hooks.clear()
                with mock.patch.object(VBLinear, "forward", bare) if name == "bare" else nullcontext():
                    torch.cuda.synchronize()
                    start = time.perf_counter()
                    model(input_ids=ids, use_cache=False)
                    host = time.perf_counter()
                    torch.cuda.synchronize()
                if turn >= 4:
                    spans[f"{name}_ms"].append((time.perf_counter() - start) * 1e3)
                    spans[f"{name}_host_ms"].append((host - start) * 1e3)
                hooks.update(kept)
        layers = {name: model.model.layers[0].self_attn.k_proj for name, model in list(models.items())[:2]}
        calls = layer_us(layers)
    result = {name: statistics.median(taken) for name, taken in spans.items()} | calls
    vb.close()
    return result | {"ratio": result["wrapped_ms"] / result["unwrapped_ms"]}


def bare(layer: nn.Module, input: torch.Tensor) -> torch.Tensor:
    """A layer's product on its page, and nothing else: the least that a layer of ours could do."""
    return F.linear(input, layer._vb_handle.held.planes.coarse["weight"], None)


def layer_us(layers: dict[str, nn.Module]) -> dict[str, float]:
    """The host's microseconds in one call of a layer, the fastest of some rounds."""
    x, best = torch.zeros(1, 1, 4096, device=DEVICE, dtype=torch.bfloat16), {}
    for _ in range(12):
        for name, layer in layers.items():
            torch.cuda.synchronize()
            start = time.perf_counter()
            for _ in range(200):
                layer(x)
            best.setdefault(f"{name}_layer_us", []).append((time.perf_counter() - start) / 200 * 1e6)
    return {name: min(taken) for name, taken in best.items()}


def main() -> None:
    parts = {"check": check, "decode": decode, "lease": lease, "generate": generate, "exact": exact, "lora": lora}
    parts["dense"] = dense
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", choices=[*parts, []], default=[])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--out", default=os.path.join(os.environ.get("OUT", "."), "programme.json"))
    options = parser.parse_args()
    options.shared = None
    result, failed = {"machine": machine()}, []
    for name in options.parts or parts:
        if name in ("check", "exact", "dense") and options.shared is not None:
            options.shared.close()
            options.shared = None
        start = time.perf_counter()
        try:
            result[name] = parts[name](options)
        except Exception:  # noqa: BLE001 - one part's failure is shown, and loses no other part
            traceback.print_exc()
            failed.append(name)
        result.setdefault("seconds", {})[name] = time.perf_counter() - start
        gc.collect()
        torch.cuda.empty_cache()
        Path(options.out).write_text(json.dumps(result, indent=1))
    for name in result:
        print(name, json.dumps(result[name])[:1500], flush=True)
    raise SystemExit(f"failed: {', '.join(failed)}" if failed else 0)


if __name__ == "__main__":
    main()
