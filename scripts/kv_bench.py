"""Decoding with a KV cache that is three times its room on the GPU, beside what the link and the GPU allow.

An 8B-shaped model with resident 4-bit weights (eager kernels) has a context of which a third fits into the room that
`vbrt.KVCache` is given; the rest comes over the link for every token. Beside it: the same cache whole in GPU memory
(transformers' DynamicCache), transformers' own offloading cache, and the bytes over the link at 55 GB/s. Keys and
values are random, and the same for all; logits are compared, with 16 bits bit for bit. Writes kv-<gpu>.json.
"""

import argparse
import gc
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # after the checkout is on the path
from transformers import DynamicCache

import vbrt
from scripts.measuring import llama_8b, machine

LINK_GB_PER_S = 55
CHUNK = 16384
HEADS, DIM, BATCH = 8, 128, 1


def pair(layer: int, begin: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The keys and values of a chunk of a layer, the same for every cache; channels of keys have offsets."""
    generator = torch.Generator("cuda").manual_seed(layer * 1000 + begin // CHUNK)
    shape = (2, BATCH, HEADS, min(CHUNK, tokens - begin), DIM)
    keys, values = torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16).unbind(0)
    offsets = torch.randn(DIM, generator=torch.Generator("cuda").manual_seed(layer), device="cuda")
    return keys + offsets.to(keys.dtype), values


def fill(cache: Any, layers: int, tokens: int) -> float:
    """Give a cache its context, as a prompt in chunks does; return the seconds."""
    torch.cuda.synchronize()
    start = time.perf_counter()
    for begin in range(0, tokens, CHUNK):
        for layer in range(layers):
            cache.update(*pair(layer, begin, tokens), layer)
    torch.cuda.synchronize()
    return time.perf_counter() - start


def steps(run: Callable[[], Any], times: int, warm: int = 3) -> dict[str, float]:
    """Milliseconds a step: each by itself, and on average over steps that follow each other without a wait."""
    for _ in range(warm):
        run()
    spans = []
    for _ in range(times):
        torch.cuda.synchronize()
        start = time.perf_counter()
        run()
        torch.cuda.synchronize()
        spans.append(1e3 * (time.perf_counter() - start))
    start = time.perf_counter()
    for _ in range(times):
        run()
    host = 1e3 * (time.perf_counter() - start) / times
    torch.cuda.synchronize()
    mean = 1e3 * (time.perf_counter() - start) / times
    return {"ms": mean, "median_ms": statistics.median(spans), "host_ms": host}


class Bench:
    """One model, and caches of one context after the other."""

    def __init__(self, layers: int, tokens: int, times: int, profile: bool) -> None:
        self.layers, self.tokens, self.times, self.profile = layers, tokens, times, profile
        self.wanted: torch.Tensor | None = None
        start = time.perf_counter()
        model = llama_8b(layers)
        tiers = {"gpu": {"budget": "60GiB"}, "cpu": {"budget": "40GiB"}}
        self.vb = vbrt.wrap(model, "fp4", tiers=tiers).materialize(progress=False)
        gc.collect()
        torch.cuda.empty_cache()
        self.ids = torch.full((BATCH, 1), 11, device="cuda")
        print(f"model ready in {time.perf_counter() - start:.1f} s", flush=True)

    def measure(self, name: str, make: Callable[[], Any]) -> dict[str, Any]:
        """Fill a cache, decode with it; what fails is in the log and in the row."""
        gc.collect()
        self.vb.stack.retire_unowned()  # pages of the cache before
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        row: dict[str, Any] = {"cache": name}
        try:
            before = torch.cuda.memory_allocated()
            cache = make()
            row["fill_s"] = fill(cache, self.layers, self.tokens)
            row["held_bytes"] = torch.cuda.memory_allocated() - before
            logits = torch.cat([self._step(cache) for _ in range(4)])
            row |= steps(lambda: self._step(cache), self.times)
            row["peak_bytes"] = torch.cuda.max_memory_allocated() - before
            row |= self._compared(logits) | self._streamed(cache)
            if self.profile:
                self._profiled(name, cache)
        except Exception as error:  # noqa: BLE001 - one row less
            traceback.print_exc()
            row["failed"] = f"{type(error).__name__}: {error}"
        print(json.dumps(row), flush=True)
        return row

    def _step(self, cache: Any) -> torch.Tensor:
        with torch.no_grad():
            return self.vb(input_ids=self.ids, past_key_values=cache, use_cache=True).logits

    def _profiled(self, name: str, cache: Any) -> None:
        kinds = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
        with torch.profiler.profile(activities=kinds) as profile:
            self._step(cache)
            torch.cuda.synchronize()
        print(f"{name}, one step:")
        table = profile.key_averages().table(sort_by="self_device_time_total", row_limit=9, max_name_column_width=60)
        print("\n".join(line[:250] for line in table.splitlines()), flush=True)

    def _compared(self, logits: torch.Tensor) -> dict[str, Any]:
        if self.wanted is None:
            self.wanted = logits
        wanted = self.wanted.float()
        return {
            "equal": torch.equal(logits, self.wanted),
            "equal_steps": [torch.equal(a, b) for a, b in zip(logits, self.wanted, strict=True)],
            "same_token": bool((logits.argmax(-1) == self.wanted.argmax(-1)).all()),
            "error": float((logits.float() - wanted).norm() / wanted.norm()),
        }

    def _streamed(self, cache: Any) -> dict[str, Any]:
        if not isinstance(cache, vbrt.KVCache):
            return {}
        before = dict(cache.stats().bytes_moved)
        for _ in range(2):
            self._step(cache)
        torch.cuda.synchronize()
        of = cache.stats()
        moved = (of.bytes_moved.get("cpu>gpu", 0) - before.get("cpu>gpu", 0)) / 2
        start = time.perf_counter()
        for layer in cache.layers:  # what gathering takes without a model around it
            layer.tokens.read()
        torch.cuda.synchronize()
        read_ms = 1e3 * (time.perf_counter() - start)
        errors = [self._errors(cache, layer) for layer in range(self.layers)]
        return {
            "key_error": max(error for error, _ in errors),
            "value_error": max(error for _, error in errors),
            "streamed_bytes": moved,
            "link_ms": moved / LINK_GB_PER_S / 1e6,
            "read_ms": read_ms,
            "tier_bytes": dict(of.tier_bytes),
            "ahead": [of.prefetched, of.misses],
        }

    def _errors(self, cache: Any, layer: int) -> list[float]:
        """Relative errors of all keys and values of a layer's context."""
        found, errors = cache.layers[layer].tokens.read(), []
        for place in range(2):
            exact = [pair(layer, begin, self.tokens)[place] for begin in range(0, self.tokens, CHUNK)]
            wanted = torch.cat(exact, 2).float()
            errors.append(float((found[place][:, :, : self.tokens].float() - wanted).norm() / wanted.norm()))
        return errors


def kv_bytes(layers: int, tokens: int, bits: float) -> int:
    return int(layers * 2 * HEADS * DIM * BATCH * tokens * bits / 8)


def rows_of(bench: Bench) -> list[dict[str, Any]]:
    """Measure one cache after the other."""
    rows = [bench.measure("DynamicCache in GPU memory", DynamicCache)]
    resident = rows[0].get("ms", 0.0)
    for bits in (16, 8, 4):
        room = kv_bytes(bench.layers, bench.tokens, bits + (0.5 if bits < 16 else 0)) // 3
        row = bench.measure(f"KVCache, {bits} bits", lambda b=bits, r=room: vbrt.KVCache(bench.vb, bits=b, room=r))
        limit = max(row.get("link_ms", 0.0), resident)
        rows.append(row | {"bits": bits, "room_bytes": room, "limit_ms": limit, "of_limit": limit / row.get("ms", 1e9)})
    rows.append(bench.measure("KVCache, 16 bits, all in GPU memory", lambda: vbrt.KVCache(bench.vb)))
    config = bench.vb.config
    rows.append(bench.measure("transformers' offloading cache", lambda: DynamicCache(config=config, offloading=True)))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=49152)
    parser.add_argument("--times", type=int, default=12)
    parser.add_argument("--profile", action="store_true", help="print the kernels of one step of each cache")
    parser.add_argument("--no-cudnn", action="store_true", help="attention by torch's other kernels, for all caches")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("error: scripts/kv_bench.py measures a GPU, and torch finds no CUDA device here")
    layers, tokens = options.layers, options.tokens
    torch.backends.cuda.enable_cudnn_sdp(not options.no_cudnn)
    bench = Bench(layers, tokens, options.times, options.profile)
    shape = {"layers": layers, "tokens": tokens, "heads": HEADS, "dim": DIM, "batch": BATCH}
    result = {"machine": machine(), **shape, "link_gb_per_s": LINK_GB_PER_S, "rows": rows_of(bench)}
    result["cudnn"] = not options.no_cudnn
    device = torch.cuda.get_device_name().lower().replace(" ", "-")
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / f"kv-{device}.json").write_text(json.dumps(result, indent=1) + "\n")
    rows = result["rows"]
    for row in rows:
        print(
            f"{row['cache']:38} {row.get('ms', 0):8.1f} ms a token, host {row.get('host_ms', 0):6.1f}, limit "
            f"{row.get('limit_ms', 0):6.1f} ({row.get('of_limit', 0):.2f}), read {row.get('read_ms', 0):6.1f}, "
            f"equal {row.get('equal')}, keys {row.get('key_error', 0):.1e}, values {row.get('value_error', 0):.1e}"
            f"{row.get('failed', '')}"
        )


if __name__ == "__main__":
    main()
