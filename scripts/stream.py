"""Time streamed forwards of a Llama-3-8B-shaped model against the raw link; write benchmarks/results/stream-<gpu>.json.

Random bf16 weights, one forward without a KV cache, embedding and head resident. The raw limit is the bytes of the
swapped bf16 weights over what pinned host-to-device copies reach in the same run. Medians of passes after two.
"""

import argparse
import copy
import gc
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # after the checkout is on the path
import xxhash
from torch import nn

import vbrt
from scripts.measuring import llama_8b, machine
from vbrt.estimation.advice.machine_rates import link_gb_s

TOKENS = (1, 2048)
DEVICE = "cuda"


def drive_bytes_s(directory: str) -> float:
    """Sequential O_DIRECT read of a 4 GiB file, 16 MiB at a time, four in flight."""
    import mmap
    from concurrent.futures import ThreadPoolExecutor

    path, size, step = f"{directory}/sequential", 4 << 30, 16 << 20
    block = mmap.mmap(-1, step)
    block.write(os.urandom(1 << 20) * 16)
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT)
    buffers = [mmap.mmap(-1, step) for _ in range(4)]
    try:
        for at in range(0, size, step):
            os.pwrite(fd, block, at)
        os.fsync(fd)

        def read(worker: int) -> None:
            for at in range(worker * step, size, 4 * step):
                os.preadv(fd, [buffers[worker]], at)

        with ThreadPoolExecutor(4) as pool:
            start = time.perf_counter()
            list(pool.map(read, range(4)))
            return size / (time.perf_counter() - start)
    finally:
        os.close(fd)
        os.unlink(path)


def digest_bytes_s() -> float:
    """Bytes a second that one core checks, as the ssd tier does: XXH3-64 of segments of 512 KiB just read."""
    segment, times = memoryview(os.urandom(512 << 10)), 2048
    start = time.perf_counter()
    for _ in range(times):
        xxhash.xxh3_64_digest(segment)
    return times * len(segment) / (time.perf_counter() - start)


def forward(model: nn.Module, tokens: int) -> Callable[[], torch.Tensor]:
    ids = torch.randint(0, 1000, (1, tokens), generator=torch.Generator().manual_seed(tokens)).to(DEVICE)

    def step() -> torch.Tensor:
        with torch.no_grad():
            return model(input_ids=ids, use_cache=False, logits_to_keep=1).logits

    return step


def time_ms(step: Callable[[], torch.Tensor], times: int, warm: int = 2) -> tuple[float, torch.Tensor]:
    spans = []
    for turn in range(times + warm):
        torch.cuda.synchronize()
        start = time.perf_counter()
        out = step()
        torch.cuda.synchronize()
        if turn >= warm:
            spans.append(time.perf_counter() - start)
    return 1e3 * statistics.median(spans), out.float().cpu()


def training_step(model: nn.Module, tokens: int = 2048) -> Callable[[], torch.Tensor]:
    ids = torch.randint(0, 1000, (1, tokens), generator=torch.Generator().manual_seed(tokens)).to(DEVICE)
    optimizer = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=1e-4)

    def step() -> torch.Tensor:
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step


def share(model: nn.Module) -> nn.Module:
    """A copy whose parameters are the model's own."""
    return copy.deepcopy(model, {id(p): p for p in model.parameters()})


class Bench:
    """The dense model in host memory, what it gives, and the rows."""

    def __init__(self, layers: int, times: int, prefetch: int | None) -> None:
        self.times, self.prefetch = times, prefetch
        self.rows: list[dict] = []
        self.curve: list[dict] = []
        self.training: list[dict] = []
        model = llama_8b(layers)
        self.reference, self.resident_ms = {}, {}
        for tokens in TOKENS:
            self.resident_ms[tokens], self.reference[tokens] = time_ms(forward(model, tokens), times)
        self.model = model.to("cpu")
        gc.collect()
        torch.cuda.empty_cache()
        plan = self.plan("dense")
        self.swapped_bytes, self.page_bytes = plan.swapped_bytes, plan.page_bytes
        self.link_bytes_s = 1e9 * link_gb_s()
        self.limit_ms = 1e3 * self.swapped_bytes / self.link_bytes_s

    def plan(self, preset: str) -> vbrt.Plan:
        return vbrt.make_plan(self.model, vbrt.load_config(preset, weights={"keep_head": True}))

    def case(
        self,
        name: str,
        preset: str,
        *,
        gpu_bytes: int | None,
        limit_share: float = 1.0,
        fine_coding: str = "auto",
        **overrides,
    ) -> None:
        """One row: `limit_share` of the raw bytes must come over the link."""
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        tiers = {"gpu": {"budget": gpu_bytes} if gpu_bytes else {}, **overrides.pop("tiers", {})}
        if self.prefetch is not None:
            overrides["policy"] = {"prefetch": self.prefetch}
        start = time.perf_counter()
        weights = {"keep_head": True, "fine_coding": fine_coding}
        vb = vbrt.wrap(share(self.model), preset, weights=weights, tiers=tiers, **overrides).materialize()
        torch.cuda.synchronize()
        row = {"case": name, "ready_s": time.perf_counter() - start, "gpu_budget_bytes": gpu_bytes}
        torch.cuda.reset_peak_memory_stats()
        for tokens in TOKENS:
            span, out = time_ms(forward(vb, tokens), self.times)
            row |= {
                f"T{tokens}_ms": span,
                f"T{tokens}_of_raw_limit": limit_share * self.limit_ms / span,
                f"T{tokens}_over_resident": span / self.resident_ms[tokens],
                f"T{tokens}_identical": torch.equal(out, self.reference[tokens]),
            }
        stats = vb.stats()
        row |= {
            "gpu_peak_bytes": torch.cuda.max_memory_allocated(),
            "hit_rate": stats.hit_rate,
            "tier_peak_bytes": {name: tier.peak_bytes for name, tier in stats.tiers.items()},
            "fallbacks": list(stats.fallbacks),
        }
        self.rows.append(row)
        print(json.dumps({k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()}), flush=True)
        vb.close()

    def run(self, wanted: list[str]) -> None:
        fp4 = self.plan("fp4").page_bytes
        ring, half = 480 << 20, self.page_bytes // 2
        cases = {
            "dense-ring": lambda: self.case("dense-ring", "dense", gpu_bytes=ring),
            "dense-pageable": lambda: self.case(
                "dense-pageable", "dense", gpu_bytes=ring, tiers={"cpu": {"pinned": False}}
            ),
            "dense-half": lambda: self.case("dense-half", "dense", gpu_bytes=half, limit_share=0.5),
            "exact": lambda: self.case("exact", "exact", gpu_bytes=fp4 + (900 << 20)),
            "exact-plain": lambda: self.case("exact-plain", "exact", gpu_bytes=fp4 + (900 << 20), fine_coding="plain"),
            "fp4-ring": lambda: self.case("fp4-ring", "fp4", gpu_bytes=110 << 20),
            "fp4-half": lambda: self.case("fp4-half", "fp4", gpu_bytes=fp4 // 2),
            "fp4-resident": lambda: self.case("fp4-resident", "fp4", gpu_bytes=None),
            "dense-resident": self.resident,
            "fp4-ssd": self.ssd,
            "peers": self.peers,
            "lora": self.lora,
            "sweep": self.sweep,
        }
        for name, case in cases.items():
            if not wanted or name in wanted:
                case()

    def sweep(self) -> None:
        """Time of one token against the gpu budget, for both policies; the budget changes while the model lives."""
        for preset, policy in (("fp4", "scheduled"), ("fp4", "lru"), ("dense", "scheduled")):
            pages = self.plan(preset).page_bytes
            vb = vbrt.wrap(
                share(self.model),
                preset,
                weights={"keep_head": True},
                policy={"kind": policy},
                tiers={"gpu": {"budget": pages // 10}},
            ).materialize()
            for percent in range(10, 101, 10):
                budget = vb.set_budget("gpu", pages * percent // 100)
                span, _ = time_ms(forward(vb, 1), self.times)
                stats = vb.stats()
                self.curve.append(
                    {
                        "preset": preset,
                        "policy": policy,
                        "percent": percent,
                        "gpu_budget_bytes": budget,
                        "gpu_peak_bytes": stats.tiers["gpu"].peak_bytes,
                        "T1_ms": span,
                    }
                )
                print(json.dumps(self.curve[-1]), flush=True)
            vb.close()
            del vb

    def resident(self) -> None:
        """`dense`, all resident, beside the unwrapped model, taking turns."""
        plain = copy.deepcopy(self.model).to(DEVICE)  # to() moves the very parameters
        vb = vbrt.wrap(share(self.model), "dense", weights={"keep_head": True}).materialize()
        row = {"case": "dense-resident"}
        for tokens in TOKENS:
            steps = {"unwrapped": forward(plain, tokens), "wrapped": forward(vb, tokens)}
            spans: dict[str, list[float]] = {name: [] for name in steps}
            for turn in range(12):
                for name, step in steps.items():
                    span, _ = time_ms(step, 3, warm=1 if turn else 3)
                    spans[name].append(span)
            row |= {f"T{tokens}_{name}_ms": statistics.median(taken) for name, taken in spans.items()}
            row[f"T{tokens}_over_resident"] = row[f"T{tokens}_wrapped_ms"] / row[f"T{tokens}_unwrapped_ms"]
        self.rows.append(row)
        print(json.dumps(row), flush=True)
        vb.close()

    def lora(self) -> None:
        """A training step of adapters on 2,048 tokens, through `fp4` planes that live on the GPU and in host memory."""
        from peft import LoraConfig, get_peft_model

        pages = self.plan("fp4").page_bytes
        for name, gpu in (("resident", {}), ("host memory", {"budget": 240 << 20})):
            gc.collect()
            torch.cuda.empty_cache()
            vb = vbrt.wrap(share(self.model), "fp4", weights={"keep_head": True}, tiers={"gpu": gpu}).materialize()
            model = get_peft_model(vb.module, LoraConfig(r=16, target_modules=["q_proj", "v_proj"])).train()
            step = training_step(model)
            torch.cuda.reset_peak_memory_stats()
            span, _ = time_ms(step, self.times)
            self.training.append(
                {
                    "planes": name,
                    "step_ms": span,
                    "gpu_peak_bytes": torch.cuda.max_memory_allocated(),
                    "two_reads_ms": 2e3 * pages / self.link_bytes_s,
                }
            )
            print(json.dumps(self.training[-1]), flush=True)
            vb.close()
            del vb, model, step
            self.model.requires_grad_()  # peft froze the shared parameters

    def peers(self) -> None:
        """What accelerate does with the same model."""
        from accelerate import cpu_offload, disk_offload, dispatch_model, infer_auto_device_map

        nbytes = sum(p.numel() * p.element_size() for p in self.model.parameters())

        def half(model: nn.Module) -> nn.Module:
            places = infer_auto_device_map(
                model, max_memory={0: nbytes // 2, "cpu": 1 << 40}, no_split_module_classes=["LlamaDecoderLayer"]
            )
            return dispatch_model(model, places)

        with tempfile.TemporaryDirectory(dir=os.environ.get("VBRT_BENCH_DIR")) as scratch:
            self.peer("accelerate cpu_offload", lambda model: cpu_offload(model, execution_device=0))
            self.peer("accelerate dispatch_model, half on the GPU", half)
            self.peer("accelerate disk_offload", lambda model: disk_offload(model, scratch, execution_device=0))

    def peer(self, name: str, offload: Callable[[nn.Module], nn.Module]) -> None:
        gc.collect()
        torch.cuda.empty_cache()
        model, row = offload(share(self.model)), {"case": name, "peer": True}
        torch.cuda.reset_peak_memory_stats()
        for tokens in TOKENS:
            span, out = time_ms(forward(model, tokens), 2, warm=1)
            row |= {
                f"T{tokens}_ms": span,
                f"T{tokens}_of_raw_limit": self.limit_ms / span,
                f"T{tokens}_identical": torch.equal(out, self.reference[tokens]),
            }
        self.rows.append(row | {"gpu_peak_bytes": torch.cuda.max_memory_allocated()})
        print(json.dumps(self.rows[-1]), flush=True)

    def ssd(self) -> None:
        with tempfile.TemporaryDirectory(dir=os.environ.get("VBRT_BENCH_DIR")) as scratch:
            drive = drive_bytes_s(scratch)
            tiers = {"cpu": {"budget": 400 << 20}, "ssd": {"enabled": True, "path": scratch, "io": "direct"}}
            self.case("fp4-ssd", "fp4", gpu_bytes=110 << 20, tiers=tiers)
            row = self.rows[-1]
            pages = self.plan("fp4").page_bytes
            row |= {"drive_bytes_s": drive, "digest_bytes_s": digest_bytes_s()}
            row |= {f"T{t}_of_drive": pages / (row[f"T{t}_ms"] / 1e3) / drive for t in TOKENS}
            print({k: v for k, v in row.items() if "drive" in k}, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("cases", nargs="*")
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--prefetch", type=int, help="policy.prefetch (default: the presets' own)")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("no CUDA device")
    bench = Bench(options.layers, options.times, options.prefetch)
    head = {
        "link_gb_s": bench.link_bytes_s / 1e9,
        "swapped_bytes": bench.swapped_bytes,
        "limit_ms": bench.limit_ms,
        "resident_ms": bench.resident_ms,
    }
    print(json.dumps(head), flush=True)
    bench.run(options.cases)
    name = torch.cuda.get_device_name().lower().replace(" ", "-")
    options.out.mkdir(parents=True, exist_ok=True)
    path = options.out / f"stream-{name}.json"
    path.write_text(
        json.dumps(
            {"machine": machine(), **head, "rows": bench.rows, "sweep": bench.curve, "training": bench.training},
            indent=1,
        )
        + "\n"
    )
    print(path)


if __name__ == "__main__":
    main()
