"""The measurements behind README and docs/benchmarks.md, one part a function, each in a process of its own.

Peers run in the same process, interleaved with ours; ratios are of medians. Results go to
benchmarks/results/<part>-<cpu|cuda device>.json with machine, commit and versions; docs/benchmarks.md is generated
from those files and from nothing else.
"""

import argparse
import copy
import functools
import gc
import importlib.metadata
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
DOCS = ROOT / "docs" / "benchmarks.md"
PARTS: dict[str, Callable[[], dict]] = {}


def part(function: Callable[[], dict]) -> Callable[[], dict]:
    PARTS[function.__name__.replace("_", "-")] = function
    return function


def seconds(function: Callable[[], object]) -> float:
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def interleaved(
    functions: dict[str, Callable[[], object]], *, times: int, before: Callable[[], None] | None = None, warm: int = 2
) -> dict[str, float]:
    """Median seconds of each function, taking turns, so that drift hits all alike."""
    taken: dict[str, list[float]] = {name: [] for name in functions}
    for turn in range(times + warm):
        for name, function in functions.items():
            if before is not None:
                before()
            span = seconds(function)
            if turn >= warm:
                taken[name].append(span)
    return {name: statistics.median(spans) for name, spans in taken.items()}


# -- models -----------------------------------------------------------------------------------------------------------


def small_model():
    """62 Linears, 35.8 M parameters: ten transformer-like blocks of width 544 and two heads."""
    from torch import nn

    width, layers = 544, []
    for _ in range(10):
        layers += [nn.Linear(width, width) for _ in range(4)]
        layers += [nn.Linear(width, 4 * width), nn.Linear(4 * width, width)]
    layers += [nn.Linear(width, width // 2), nn.Linear(width // 2, width)]
    return nn.Sequential(*layers).eval()


def llama():
    """A random fp32 Llama of 205 M parameters: 84 Linears in 12 layers, and an untied head."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=1024,
            intermediate_size=2816,
            num_hidden_layers=12,
            num_attention_heads=16,
            vocab_size=25_000,
            tie_word_embeddings=False,
        )
    ).eval()


def one_token(model) -> Callable[[], object]:
    import torch

    ids = torch.tensor([[17]])

    def step():
        with torch.no_grad():
            return model(input_ids=ids, use_cache=False).logits

    return step


# -- parts ------------------------------------------------------------------------------------------------------------


@part
def wrap() -> dict:
    """Wrap, materialize and stats of the 62-Linear model, and stats beside 10,000 unwrapped modules."""
    from torch import nn

    import vbrt

    model = small_model()
    figures = {"parameters": sum(p.numel() for p in model.parameters()), "linears": 62}
    vbrt.wrap(nn.Linear(64, 64)).materialize()  # imports and tables are not what is measured
    vb = None

    def do_wrap():
        nonlocal vb
        vb = vbrt.wrap(model, "fp4")

    figures["wrap_s"] = seconds(do_wrap)
    figures["materialize_s"] = seconds(vb.materialize)
    figures["stats_ms"] = 1e3 * statistics.median(seconds(vb.stats) for _ in range(50))
    large = nn.ModuleList([model, *(nn.Identity() for _ in range(10_000))])
    vb.unwrap()
    vb = vbrt.wrap(large, "fp4").materialize()
    figures["stats_beside_10000_modules_ms"] = 1e3 * statistics.median(seconds(vb.stats) for _ in range(50))
    return figures


@part
def resident() -> dict:
    """One token of the 205 M-parameter Llama: unwrapped against `dense` with everything resident."""
    import vbrt

    plain = llama()
    wrapped = copy.deepcopy(plain)
    vb = vbrt.wrap(wrapped, "dense").materialize()
    times = interleaved({"unwrapped": one_token(plain), "dense": one_token(vb)}, times=60, warm=5)
    return {
        "unwrapped_ms": times["unwrapped"] * 1e3,
        "dense_resident_ms": times["dense"] * 1e3,
        "ratio": times["dense"] / times["unwrapped"],
    }


@part
def ssd() -> dict:
    """One token with half of the pages in memory and the rest on the ssd, beside accelerate's disk_offload."""
    import torch
    from accelerate import disk_offload

    import vbrt

    reference = one_token(llama())()
    figures: dict = {}
    with tempfile.TemporaryDirectory(dir=os.environ.get("VBRT_BENCH_DIR")) as scratch:
        peer = disk_offload(llama(), offload_dir=f"{scratch}/accelerate", execution_device=torch.device("cpu"))
        runs = {"accelerate": one_token(peer)}
        wraps = {}
        for policy in ("scheduled", "lru"):
            plan = vbrt.make_plan(llama(), vbrt.load_config("dense"))
            tiers = {"cpu": {"budget": plan.page_bytes // 2}, "ssd": {"enabled": True, "path": f"{scratch}/{policy}"}}
            wraps[policy] = vbrt.wrap(llama(), "dense", policy={"kind": policy}, tiers=tiers).materialize()
            runs[policy] = one_token(wraps[policy])
        for name, run in runs.items():
            figures[f"{name}_equals_unwrapped"] = torch.equal(run(), reference)
        warm = interleaved(runs, times=9)
        cold = interleaved(runs, times=5, warm=1, before=drop_page_cache)
        stats = wraps["scheduled"].stats()
        figures |= {f"{name}_warm_ms": span * 1e3 for name, span in warm.items()}
        figures |= {f"{name}_cold_ms": span * 1e3 for name, span in cold.items()}
        figures |= {
            f"speedup_{kind}": times["accelerate"] / times["scheduled"]
            for kind, times in (("warm", warm), ("cold", cold))
        }
        figures |= {
            "io": wraps["scheduled"].stack.ssd.mode,
            "cpu_budget_bytes": stats.tiers["cpu"].budget_bytes,
            "cpu_peak_bytes": stats.tiers["cpu"].peak_bytes,
            "page_bytes": plan.page_bytes,
        }
        for vb in wraps.values():
            vb.close()
    return figures


@part
def ssd_passive() -> dict:
    """The same under OMP_WAIT_POLICY=passive: OpenMP's threads sleep while pages are read, instead of spinning."""
    return ssd()


ENVIRONMENT = {"ssd-passive": {"OMP_WAIT_POLICY": "passive"}}


def drop_page_cache() -> None:
    """As root only: what fadvise leaves of mapped files would favour the peer."""
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("1\n")


@part
def memory() -> dict:
    """Resident memory of the process before and after materializing the Llama to nvfp4."""
    import psutil

    import vbrt
    from vbrt.wrapper.wrapper import release_host_memory

    model = llama()
    vb = vbrt.wrap(model, "fp4", weights={"keep_head": False})
    swapped = vb.plan.swapped_bytes
    release_host_memory()
    before = psutil.Process().memory_info().rss
    vb.materialize()
    after = psutil.Process().memory_info().rss
    gc.collect()
    return {
        "swapped_dense_bytes": swapped,
        "page_bytes": vb.plan.page_bytes,
        "rss_before_bytes": before,
        "rss_after_bytes": after,
        "fall_over_swapped": (before - after) / swapped,
    }


@part
def hits() -> dict:
    """Hit rates in the steady state (20 passes after 2) of 32 equal layers: live, simulated, closed form."""
    import torch
    from torch import nn

    import vbrt
    from vbrt.residency.policy import PASS, simulate

    layers, passes, learning, prefetch = 32, 20, 2, 2
    rows = []
    x = torch.randn(1, 64)
    for policy in ("lru", "scheduled"):
        for percent in (25, 50, 75, 100):
            room = layers * percent // 100
            model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(layers))).eval()
            with tempfile.TemporaryDirectory() as scratch:
                page = vbrt.make_plan(model, vbrt.load_config("dense")).swaps[0].page_bytes
                tiers = {"cpu": {"budget": room * page}, "ssd": {"enabled": True, "path": scratch}}
                with vbrt.wrap(model, "dense", policy={"kind": policy, "prefetch": prefetch}, tiers=tiers) as vb:
                    vb.materialize()
                    for _ in range(learning):
                        vb(x)
                    first = vb.stats().hits
                    for _ in range(passes):
                        vb(x)
                    live = (vb.stats().hits - first) / (passes * layers)
            one_pass = [PASS, *(f"layer{i}" for i in range(layers))]
            counted = simulate(policy, one_pass * (passes + learning), room, prefetch=prefetch).hits.total()
            counted -= simulate(policy, one_pass * learning, room, prefetch=prefetch).hits.total()
            closed = 1.0 if room >= layers else 0.0 if policy == "lru" else max(0, room - 1 - prefetch) / layers
            rows.append(
                {
                    "policy": policy,
                    "resident_percent": percent,
                    "live": live,
                    "simulated": counted / (passes * layers),
                    "closed_form": closed,
                }
            )
    return {"layers": layers, "passes": passes, "prefetch": prefetch, "rows": rows}


@part
def formats() -> dict:
    """Signal-to-noise of each coarse plane on N(0, 1), its bits, and its speed on this machine."""
    import torch

    from vbrt.formats import FORMATS, get_format
    from vbrt.formats.separation import Separation

    torch.manual_seed(0)
    weight = torch.randn(2048, 4096)
    rows = []
    for name in FORMATS:
        if name == "dense":
            continue
        format = get_format(name)
        encode = Separation().encode if name == "quantile" else format.encode
        encode(weight[:256])
        encoded = None

        def run(encode=encode):
            nonlocal encoded
            encoded = encode(weight)

        encode_s = seconds(run)
        decoded = format.decode(encoded, tuple(weight.shape), torch.float32)
        decode_s = statistics.median(
            seconds(lambda f=format, e=encoded: f.decode(e, tuple(weight.shape), torch.float32)) for _ in range(5)
        )
        noise = (decoded - weight).double().pow(2).mean() / weight.double().pow(2).mean()
        rows.append(
            {
                "format": name,
                "block": format.block,
                "sqnr_db": -10 * noise.log10().item(),
                "bits": 8 * format.layout(tuple(weight.shape), weight.dtype).nbytes / weight.numel(),
                "encode_mweights_s": weight.numel() / encode_s / 1e6,
                "decode_mweights_s": weight.numel() / decode_s / 1e6,
            }
        )
    return {"shape": list(weight.shape), "rows": rows}


@part
def cpu_linear() -> dict:
    """One Linear of 4096 x 4096 on a CPU: compiled, reference and dense, beside bitsandbytes NF4 where importable.

    bitsandbytes multiplies nothing but decodes first where the CPU has no AVX512-BF16.
    """
    import torch

    try:
        import bitsandbytes
    except ImportError:
        bitsandbytes = None
    torch.manual_seed(0)
    rows = []
    for dtype in (torch.float32, torch.bfloat16):
        weight = (torch.randn(4096, 4096) * 0.02).to(dtype)
        layers = cpu_layers(weight, bitsandbytes)
        for tokens in (1, 16, 64):
            x = torch.randn(tokens, 4096).to(dtype)
            with torch.inference_mode():
                times = interleaved({name: functools.partial(run, x) for name, run in layers.items()}, times=7)
            rows.append(
                {
                    "dtype": str(dtype).removeprefix("torch."),
                    "tokens": tokens,
                    **{f"{name} ms": span * 1e3 for name, span in times.items()},
                }
            )
    version = bitsandbytes.__version__ if bitsandbytes else "not importable, not measured"
    return {"shape": [4096, 4096], "threads": torch.get_num_threads(), "bitsandbytes": version, "rows": rows}


def cpu_layers(weight, bitsandbytes) -> dict[str, Callable]:
    """What multiplies by one weight, by name."""
    import torch.nn.functional as F

    from vbrt.formats import WeightPlanes, get_format
    from vbrt.kernels import kernel_name, resolve

    layers: dict[str, Callable] = {"dense": functools.partial(F.linear, weight=weight)}
    for format in ("nvfp4", "nf4"):
        planes = WeightPlanes(format, tuple(weight.shape), weight.dtype, get_format(format).encode(weight))
        for backend in ("auto", "reference"):
            op = resolve("linear", backend, weight.device, format)
            layers[f"{format} {kernel_name(op)}"] = functools.partial(op, planes=planes)
    if bitsandbytes:
        n, k = weight.shape
        peer = bitsandbytes.nn.Linear4bit(k, n, bias=False, quant_type="nf4", compute_dtype=weight.dtype)
        peer.weight = bitsandbytes.nn.Params4bit(weight.clone(), requires_grad=False, quant_type="nf4")
        layers["bitsandbytes nf4"] = peer.to("cpu")
    return layers


@part
def cpu_exact() -> dict:
    """An exact Linear on a CPU beside the plain one: weights merged by the compiled kernels, and in plain torch.

    The latter is the reference, which is what every exact layer on a CPU ran until commit b7f7c43.
    """
    import torch

    torch.manual_seed(0)
    rows = []
    for dtype in (torch.bfloat16, torch.float16):
        for n, k in ((1024, 1024), (4096, 4096), (14336, 4096)):
            plain = torch.nn.Linear(k, n, bias=False).to(dtype).eval()
            layers = exact_layers(plain)
            for tokens in (1, 2, 8, 16):
                x = torch.randn(tokens, k).to(dtype)
                assert all(torch.equal(layer(x), plain(x)) for layer in layers.values())
                with torch.no_grad():
                    times = interleaved({name: functools.partial(layer, x) for name, layer in layers.items()}, times=7)
                rows.append(
                    {
                        "dtype": str(dtype).removeprefix("torch."),
                        "shape": f"{n} x {k}",
                        "tokens": tokens,
                        **{f"{name} ms": span * 1e3 for name, span in times.items()},
                        "reference / plain": times["reference"] / times["plain"],
                        "compiled / plain": times["compiled"] / times["plain"],
                    }
                )
    return {"threads": torch.get_num_threads(), "rows": rows}


def exact_layers(plain) -> dict[str, Callable]:
    """The layer itself, and wrapped, by what merges its planes."""
    from torch import nn

    import vbrt

    layers: dict[str, Callable] = {"plain": plain}
    for name, backend in (("reference", "reference"), ("compiled", "auto")):
        model = nn.Sequential(copy.deepcopy(plain))
        layers[name] = vbrt.wrap(model, "exact", weights={"keep_head": False}, compute={"backend": backend})
        layers[name].materialize()
    return layers


CURVES_STEPS, CURVES_REFRESH = 300, 100


@part
def train_curves() -> dict:
    """Byte-level Llamas of 1.6 M swapped weights on Python's standard library, from one seed and on the same batches.

    The runs take turns step by step. `fresh` searches scales (and, for quantile, fits the table) in each step, `cached`
    every 100 steps. `separation` is what the engine does in a forward, `again` what the backward pass rounds anew.
    """
    import torch

    data = library_bytes()
    held_out = data[-len(data) // 20 :]
    torch.manual_seed(0)
    model, runs = byte_llama(), {}
    for name, format, every in (
        ("dense", "dense", 1),
        ("nvfp4 fresh", "nvfp4", 1),
        ("nvfp4 cached", "nvfp4", CURVES_REFRESH),
        ("quantile fresh", "quantile", 1),
        ("quantile cached", "quantile", CURVES_REFRESH),
    ):
        runs[name] = TrainingRun(copy.deepcopy(model), format, every)
    draw = torch.Generator().manual_seed(1)
    for _ in range(CURVES_STEPS):
        batch = draw_batch(data[: -len(held_out)], draw)
        for run in runs.values():
            run.step(batch)
    draw.manual_seed(2)
    batches = [draw_batch(held_out, draw) for _ in range(20)]
    rows = [{"run": name, **run.figures(batches)} for name, run in runs.items()]
    return {
        **curve_figures({row["run"]: row for row in rows}),
        "rows": rows,
        "curves": {name: run.curve() for name, run in runs.items()},
    }


def library_bytes():
    """uint8 [bytes]: the sources of the standard library's top level, in the order of their names."""
    import torch

    files = sorted(Path(os.__file__).parent.glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)


def byte_llama():
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=256,
            intermediate_size=704,
            num_hidden_layers=2,
            vocab_size=256,
            num_attention_heads=4,
            max_position_embeddings=128,
        )
    ).train()


def draw_batch(data, generator):
    """int64 [8, 128]."""
    import torch

    starts = torch.randint(len(data) - 128, (8,), generator=generator)
    return torch.stack([data[start : start + 128] for start in starts.tolist()]).long()


class TrainingRun:
    """One model in training: its losses, the time of its steps, and what of that the engine has taken."""

    def __init__(self, model, format: str, every: int) -> None:
        import torch

        import vbrt

        self.vb = vbrt.wrap(
            model,
            mode="train",
            weights={"format": format},
            separation={"refresh_every": every},
            tiers={"gpu": {"enabled": False}},
        )
        self.optimizer = torch.optim.AdamW(self.vb.parameters(), lr=1e-3)
        self.losses: list[float] = []
        self.spans: dict[str, list[float]] = {"step": [], "separation": [], "again": []}
        engines = [layer.handle.separation for layer in self.vb.registry.values() if layer.handle.separation]
        for engine in engines:
            engine.forward = self.timed("separation", engine.forward)
            engine.again = self.timed("again", engine.again)

    def timed(self, name: str, function: Callable) -> Callable:
        def run(*args, **kwargs):
            start = time.perf_counter()
            result = function(*args, **kwargs)
            self.spans[name][-1] += time.perf_counter() - start
            return result

        return run

    def step(self, batch) -> None:
        for spans in self.spans.values():
            spans.append(0.0)
        self.spans["step"][-1] = seconds(lambda: self._step(batch))

    def _step(self, batch) -> None:
        loss = self.vb(input_ids=batch, labels=batch, use_cache=False).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.losses.append(loss.item())

    def curve(self) -> dict[str, float]:
        """Mean loss of each ten steps, by the last of them."""
        return {str(end): statistics.mean(self.losses[end - 10 : end]) for end in range(10, len(self.losses) + 1, 10)}

    def figures(self, held_out: list) -> dict:
        """Losses in nats a byte, milliseconds a step: means, so that refreshes count."""
        import torch

        self.vb.eval()
        separation, again = (1e3 * statistics.mean(self.spans[name]) for name in ("separation", "again"))
        step, stats = 1e3 * statistics.mean(self.spans["step"]), self.vb.stats()
        with torch.no_grad():
            held = statistics.mean(self.vb(input_ids=b, labels=b, use_cache=False).loss.item() for b in held_out)
        layers = stats.layers.values()
        return {
            "held-out loss": held,
            "last 20 steps": statistics.mean(self.losses[-20:]),
            "searches a layer": sum(layer.separation_refreshes for layer in layers) / len(layers),
            "step ms": step,
            "separation ms": separation,
            "again ms": again,
            "engine's share, %": 100 * (separation + again) / step,
        }


def curve_figures(rows: dict[str, dict]) -> dict:
    """Cached against fresh, for each format."""
    figures = {"steps": CURVES_STEPS, "refresh every": CURVES_REFRESH}
    for format in ("nvfp4", "quantile"):
        fresh, cached = rows[f"{format} fresh"], rows[f"{format} cached"]
        for loss in ("held-out loss", "last 20 steps"):
            figures[f"{format}, {loss}, cached / fresh"] = cached[loss] / fresh[loss]
        figures[f"{format}, separation, fresh / cached"] = fresh["separation ms"] / cached["separation ms"]
        both = [row["separation ms"] + row["again ms"] for row in (fresh, cached)]
        figures[f"{format}, with the backward pass, fresh / cached"] = both[0] / both[1]
        figures[f"{format}, whole step, fresh / cached"] = fresh["step ms"] / cached["step ms"]
    return figures


# -- running and writing ----------------------------------------------------------------------------------------------


def machine() -> dict:
    import psutil
    import torch

    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    versions = {}
    for package in ("torch", "transformers", "accelerate"):
        try:
            versions[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            versions[package] = None
    return {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "gpu": gpu,
        "python": platform.python_version(),
        "commit": commit.stdout.strip() or None,
        "versions": versions,
    }


def cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


def measure(name: str) -> None:
    """One part in a fresh process: memory and caches of one do not touch the next."""
    print(f"{name}: {PARTS[name].__doc__.splitlines()[0]}", flush=True)
    done = subprocess.run(
        [sys.executable, __file__, "--here", name],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
        env=os.environ | ENVIRONMENT.get(name, {}),
    )
    if done.returncode:
        raise SystemExit(f"bench: part {name} failed")
    result = json.loads(done.stdout.splitlines()[-1])
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / f"{name}-cpu.json").write_text(json.dumps(result, indent=1) + "\n")
    for key, value in result["figures"].items():
        print(f"  {key}: {value:.4g}" if isinstance(value, float) else f"  {key}: {value}")


def tables() -> str:
    """docs/benchmarks.md from the results, word for word reproducible."""
    out = [
        "# Benchmarks",
        "",
        "Generated by `scripts/bench --tables` from `benchmarks/results/*.json`; do not edit.",
        "",
    ]
    for name, function in PARTS.items():
        path = RESULTS / f"{name}-cpu.json"
        if not path.exists():
            continue
        result = json.loads(path.read_text())
        figures, where = dict(result["figures"]), result["machine"]
        out += [f"## {name}", "", function.__doc__.splitlines()[0], ""]
        rows, curves = figures.pop("rows", None), figures.pop("curves", None)
        if figures:
            out += ["| figure | value |", "| --- | --- |", *(f"| {k} | {show(v)} |" for k, v in figures.items()), ""]
        if rows:
            out += [
                f"| {' | '.join(rows[0])} |",
                "| " + " | ".join("---" for _ in rows[0]) + " |",
                *(f"| {' | '.join(show(v) for v in row.values())} |" for row in rows),
                "",
            ]
        if curves:
            out += curves_drawing(name, curves)
        versions = ", ".join(f"{k} {v}" for k, v in where["versions"].items() if v)
        named = f"{where['cpu']}, {where['cores']} cores, {versions}, Python {where['python']}, commit"
        out += [f"{named} {where['commit']}.", ""]
    for path in sorted(RESULTS.glob("kernels-*.json")):
        out += kernel_table(path)
    for path in sorted(RESULTS.glob("stream-*.json"), key=lambda path: len(path.name)):
        out += stream_table(path)
    for path in sorted(RESULTS.glob("training-*.json")):
        out += train_table(path)
    return "\n".join(out)


def stream_table(path: Path) -> list[str]:
    """Streamed forwards on one GPU, from `scripts/stream`, and time against budget as a drawing beside the docs."""
    result = json.loads(path.read_text())
    where, versions = result["machine"], result["machine"]["versions"]
    what = (
        f"A Llama-3-8B-shaped bf16 model, one forward without a KV cache, embedding and head resident. Raw limit: "
        f"the {result['swapped_bytes'] / 1e9:.2f} GB of swapped bf16 weights over {result['link_gb_s']:.1f} GB/s "
        f"of pinned host-to-device copies in the same run, {result['limit_ms']:.0f} ms; half for `dense-half`. "
        "Resident: the unwrapped model. Ready: from bf16 in host memory to encoded."
    )
    resident = ", ".join(f"T={t} {ms:.1f} ms" for t, ms in result["resident_ms"].items())
    note = result.get("note")
    title = f"## streaming, {where['gpu']}{', another run' if note else ''}"
    out = [
        title,
        "",
        what,
        "",
        *([note, ""] if note else []),
        f"Unwrapped, all resident: {resident}.",
        "",
        "| case | T=1 ms | of raw limit | T=2048 ms | of raw limit | same bits | GPU peak GB | hits | ready s |",
        "| --- " * 9 + "|",
    ]
    for row in result["rows"]:
        if "gpu_peak_bytes" in row:
            coarse = "no" if row.get("peer") else "no (4 bits)"
            same = "yes" if row["T1_identical"] and row["T2048_identical"] else coarse
            out.append(
                f"| {row['case']} | {row['T1_ms']:.1f} | {row['T1_of_raw_limit']:.2f} | {row['T2048_ms']:.1f} | "
                f"{row['T2048_of_raw_limit']:.2f} | {same} | {row['gpu_peak_bytes'] / 1e9:.2f} | "
                + ("– | – |" if row.get("peer") else f"{row['hit_rate']:.3f} | {row['ready_s']:.1f} |")
            )
    for row in result["rows"]:
        if "drive_bytes_s" in row:
            drive = f"the drive's sequential {row['drive_bytes_s'] / 1e9:.2f} GB/s in the same run"
            digest = row.get("digest_bytes_s")
            cost = (
                (
                    f" Verifying takes {100 * row['drive_bytes_s'] / digest:.0f} % of one core at that rate "
                    f"({digest / 1e9:.0f} GB/s)."
                )
                if digest
                else ""
            )
            out += ["", f"`fp4-ssd`, O_DIRECT: {row['T1_of_drive']:.2f}, {row['T2048_of_drive']:.2f} of {drive}.{cost}"]
        if "T1_unwrapped_ms" in row:
            pairs = ", ".join(
                f"T={t} {row[f'T{t}_wrapped_ms']:.2f} ms against {row[f'T{t}_unwrapped_ms']:.2f} "
                f"({row[f'T{t}_over_resident']:.3f}×)"
                for t in (1, 2048)
            )
            out += ["", f"`dense`, all resident, taking turns with the unwrapped model: {pairs}."]
    if result["sweep"]:
        drawing = f"{path.stem}.svg"
        (DOCS.parent / drawing).write_text(sweep_svg(result["sweep"]))
        out += [
            "",
            "One token against the GPU budget (`set_budget` while the model lives):",
            "",
            f"![time against budget]({drawing})",
            "",
            *sweep_rows(result["sweep"]),
        ]
    out += lora_rows(result.get("training", []))
    named = ", ".join(f"{k} {v}" for k, v in versions.items() if v)
    return [*out, "", f"{named}, Python {where['python']}, commit {where['commit']}.", ""]


def lora_rows(rows: list[dict]) -> list[str]:
    """Training steps of adapters; the limit is the larger of the resident step and two reads of the pages."""
    if not rows:
        return []
    limit = max(rows[0]["step_ms"], rows[0]["two_reads_ms"])
    what = (
        "A LoRA step (r = 16 on q and v, AdamW, 2,048 tokens) through `fp4` planes. Two reads of the pages take "
        f"{rows[0]['two_reads_ms']:.0f} ms at the link's speed."
    )
    return [
        "",
        what,
        "",
        "| planes | step ms | over the larger of resident and two reads | GPU peak GB |",
        "| --- " * 4 + "|",
        *(
            f"| {row['planes']} | {row['step_ms']:.0f} | {row['step_ms'] / limit:.2f} | "
            f"{row['gpu_peak_bytes'] / 1e9:.2f} |"
            for row in rows
        ),
    ]


def train_table(path: Path) -> list[str]:
    """Memory and time of training and inference on one GPU, from `scripts/train_bench.py`."""
    result = json.loads(path.read_text())
    where, shape = result["machine"], result["shape"]
    what = (
        f"GPT-2-medium's shape ({result['parameters'] / 1e6:.0f} M parameters, {shape['layers']} layers of width "
        f"{shape['width']}, vocabulary {shape['vocabulary']:,}), sequence {shape['context']:,}, batch "
        f'{result["batch"]}, random weights; peak bytes of torch\'s allocator, weights included. "torch" '
        "rows are the same modules with torch's own attention: all scores, as the definition has it, or fused."
    )
    parts = {
        "training": ("Training: forward, backward, clipping and AdamW (fused), fp32 weights and moments.", "step"),
        "inference": ("Inference: one forward, logits of the last position.", "forward"),
    }
    out = [f"## training, {where['gpu']}", "", what, ""]
    for part, (title, unit) in parts.items():
        first = result[part][0]["case"]
        out += [title, "", f"| {part} | peak GB | of {first} | {unit} ms |", "| --- | --- | --- | --- |"]
        for row in result[part]:
            peak = f"{row['peak_bytes'] / 1e9:.2f} | {row['of_first']:.3f}×" if row["peak_bytes"] else "does not fit |"
            spent = f"{row['ms']:.1f}" if row["ms"] else ""
            out.append(f"| {row['case']} | {peak} | {spent} |")
        out.append("")
    versions = ", ".join(f"{k} {v}" for k, v in where["versions"].items() if v)
    return [*out, f"{versions}, Python {where['python']}, commit {where['commit']}.", ""]


def sweep_rows(points: list[dict]) -> list[str]:
    curves = curves_of(points)
    return [
        "| budget, % of pages | " + " | ".join(curves) + " |",
        "| --- " * (len(curves) + 1) + "|",
        *(
            f"| {percent} | " + " | ".join(f"{curve[percent]:.1f} ms" for curve in curves.values()) + " |"
            for percent in sorted(next(iter(curves.values())))
        ),
    ]


def curves_of(points: list[dict]) -> dict[str, dict[int, float]]:
    curves: dict[str, dict[int, float]] = {}
    for point in points:
        curves.setdefault(f"{point['preset']}, {point['policy']}", {})[point["percent"]] = point["T1_ms"]
    return curves


def curves_drawing(name: str, curves: dict[str, dict[str, float]]) -> list[str]:
    """Loss against steps, beside the docs."""
    numbers = {run: {int(step): loss for step, loss in curve.items()} for run, curve in curves.items()}
    last = max(max(curve) for curve in numbers.values())
    marks = [last * share // 5 for share in range(6)]
    (DOCS.parent / f"{name}.svg").write_text(line_svg(numbers, [(mark, f"{mark}") for mark in marks], "{:.1f}"))
    return ["Nats a byte against steps, means of ten steps:", "", f"![loss against steps]({name}.svg)", ""]


def sweep_svg(points: list[dict]) -> str:
    """Milliseconds against percent of the pages, a line for each preset and policy."""
    return line_svg(curves_of(points), [(percent, f"{percent} %") for percent in range(0, 101, 20)], "{:.0f} ms")


def line_svg(curves: dict[str, dict[int, float]], marks: list[tuple[int, str]], unit: str) -> str:
    """A line for each curve of x -> y; `marks` are (x, what stands below it), the last one is where x ends."""
    width, height, left, top = 640, 360, 60, 20
    most, end = max(max(curve.values()) for curve in curves.values()), marks[-1][0]
    colours = ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#ff7f0e")

    def at(x: float, y: float) -> str:
        return f"{left + x / end * (width - left - 20):.1f},{top + (1 - y / most) * (height - top - 50):.1f}"

    size = f'width="{width}" height="{height}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">',
        f'<rect {size} fill="white"/>',
    ]
    for mark, text in marks:
        x = at(mark, 0).split(",")[0]
        parts.append(f'<text x="{x}" y="{height - 32}" text-anchor="middle">{text}</text>')
    for share in (0, 0.25, 0.5, 0.75, 1):
        y = at(0, most * share).split(",")[1]
        parts.append(
            f'<line x1="{left}" x2="{width - 20}" y1="{y}" y2="{y}" stroke="#ddd"/>'
            f'<text x="{left - 6}" y="{y}" text-anchor="end" dy="4">{unit.format(most * share)}</text>'
        )
    room = 180 if len(curves) <= 3 else (width - left - 20) // len(curves)
    for index, (name, curve) in enumerate(curves.items()):
        line, colour = " ".join(at(x, y) for x, y in sorted(curve.items())), colours[index % len(colours)]
        parts.append(
            f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"/>'
            f'<text x="{left + 20 + room * index}" y="{height - 10}" fill="{colour}">{name}</text>'
        )
    return "\n".join([*parts, "</svg>"]) + "\n"


def kernel_table(path: Path) -> list[str]:
    """Times of the GPU kernels, from `scripts/gpu-check`; parts that were not measured are left out."""
    result = json.loads(path.read_text())
    what = (
        "A linear layer on 4-bit weights, CUDA-graph replay, weights rotated past L2, random normal data: "
        "microseconds, and bf16 cuBLAS time over ours in the same run."
    )
    rows, odd = result["rows"], result.get("odd", [])
    out = [f"## kernels, {result['gpu']}", "", what, "", *grid(rows, "format", "fp4_us", "ratio")]
    rounded = [row for row in (*rows, *odd) if "fp8_us" in row]
    if rounded:
        errors = {f: max(r["fp8_error"] for r in rounded if r["format"] == f) for f in {r["format"] for r in rounded}}
        measured = ", ".join(f"{f} {100 * e:.1f} %" for f, e in sorted(errors.items()))
        out += [
            f"With `compute.fp8 = true`; relative error of a layer at most {measured}.",
            "",
            *grid(rounded, "format", "fp8_us", "fp8_ratio"),
        ]
    if result.get("peers") or result.get("absent"):
        out += ["What else is installed with pip, in the same run.", ""]
        out += grid(result.get("peers", []), "peer", "us", "ratio")
        searches = {row["peer"]: row["tuned"] for row in result.get("peers", []) if "tuned" in row}
        out += [f"{name}: configurations of {how}, made before the timing." for name, how in searches.items()]
        out += [f"{name}: {why}." for name, why in result.get("absent", {}).items()] + [""]
    if result.get("fused"):
        what = (
            "One launch against several: a norm and a linear, or silu(x W1ᵀ) · (x W2ᵀ) against its two linears "
            "(`gated`; the product is in ours only). Microseconds, and the several over the one."
        )
        out += [what, "", *grid(result["fused"], "what", "fused_us", "ratio")]
    if odd:
        out += ["Other shapes.", "", *grid(odd, "format", "fp4_us", "ratio")]
    if result.get("epilogue"):
        out += [
            "What a bias and an activation add, in percent.",
            "",
            *grid(result["epilogue"], "activation", "full_us", "added_percent"),
        ]
    titles = {"dispatch": "Host time of an eager call.", "e2e": "One token of a Llama-8B-shaped model, compiled."}
    for part, title in titles.items():
        if result.get(part):
            figures = {k: v for k, v in result[part].items() if not isinstance(v, dict)}
            lines = (f"| {k} | {show(v)} |" for k, v in figures.items())
            out += [title, "", "| figure | value |", "| --- | --- |", *lines, ""]
    if "fp4_profile" in result.get("e2e", {}):
        out += step_table(result["e2e"], result["copy_tb_s"])
    versions = ", ".join(f"{k} {v}" for k, v in result.get("versions", {"torch": result["torch"]}).items() if v)
    commit = f", commit {result['commit']}" if result.get("commit") else ""
    return [*out, f"{versions}, CUDA {result['cuda']}{commit}.", ""]


def step_table(e2e: dict, copy_tb_s: float) -> list[str]:
    """Where a step goes, and how fast it would be if 4-bit linears took no longer than reading their weights."""
    profiles = {name: e2e[f"{name}_profile"] for name in ("bf16", "fp4")}
    out = [
        "Where the microseconds of that step go, by a profiler, which makes the gaps between kernels longer.",
        "",
        "| weights | linear | attention | the rest | gaps | kernels |",
        "| --- " * 6 + "|",
    ]
    for name, profile in profiles.items():
        groups = profile["groups_us"]
        cells = [*(groups[group] for group in ("linear", "attention", "the rest")), profile["gaps_us"]]
        out.append(f"| {name} | {' | '.join(f'{us:.0f}' for us in cells)} | {profile['kernels']} |")
    floor_ms = e2e["fp4_linear_bytes"] / copy_tb_s / 1e9
    least_ms = e2e["fp4_ms"] - profiles["fp4"]["groups_us"]["linear"] / 1e3 + floor_ms
    read_gb = e2e["fp4_linear_bytes"] / 1e9
    limit = (
        f"The weights that the fp4 step reads, {read_gb:.2f} GB with the bf16 head, take {floor_ms:.2f} ms at the "
        f"{copy_tb_s} TB/s of a copy. With linears that fast, and all else as it is, a step would take "
        f"{least_ms:.2f} ms: {e2e['bf16_ms'] / least_ms:.2f}× of bf16. That is the limit for any kernel of these "
        f"layers; {e2e['speedup']:.2f}× is measured. Until the GPU has all its work the host takes "
        f"{e2e['bf16_host_ms']:.2f} ms of a bf16 step and {e2e['fp4_host_ms']:.2f} ms of an fp4 step, most of it in "
        f"torch.compile's guards and the graph's launch: were these alike, the limit would be "
        f"{e2e['bf16_ms'] / (least_ms - e2e['fp4_host_ms'] + e2e['bf16_host_ms']):.2f}×."
    )
    if "speedup_queued" in e2e:
        limit += (
            f" With steps queued one behind the other, none waited for, a bf16 step takes "
            f"{e2e['bf16_queued_ms']:.2f} ms and an fp4 step {e2e['fp4_queued_ms']:.2f} ms: "
            f"{e2e['speedup_queued']:.2f}×."
        )
    if "fp4_head_too_ms" in e2e:
        limit += (
            f" With the output layer in 4 bits too (`weights.keep_head = false`) a step takes "
            f"{e2e['fp4_head_too_ms']:.2f} ms, {e2e['speedup_head_too']:.2f}×."
        )
    return [*out, "", limit, ""]


def grid(rows: list[dict], name: str, value: str, ratio: str) -> list[str]:
    """Rows by name and shape, a column a number of tokens."""
    tokens = sorted({row["m"] for row in rows})
    cells: dict[str, dict[int, str]] = {}
    for row in rows:
        sign = " %" if "percent" in ratio else "×"
        cell = f"{row[value]:.1f} ({row[ratio]:.{1 if sign == ' %' else 2}f}{sign})"
        cells.setdefault(f"{row[name]}, {row['k']}→{row['n']}", {})[row["m"]] = cell
    return [
        f"| {name}, K→N | {' | '.join(f'M={m}' for m in tokens)} |",
        "| --- " * (len(tokens) + 1) + "|",
        *(f"| {key} | {' | '.join(line.get(m, '–') for m in tokens)} |" for key, line in cells.items()),
        "",
    ]


def show(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else f"{value:,}" if type(value) is int else str(value)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", choices=[[], *PARTS], help="parts to measure (default: all)")
    parser.add_argument("--tables", action="store_true", help="write docs/benchmarks.md again, measure nothing")
    parser.add_argument("--here", metavar="PART", choices=PARTS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.here:
        figures = PARTS[args.here]()
        print(json.dumps({"machine": machine(), "figures": figures}))
        return
    if not args.tables:
        for name in args.parts or PARTS:
            measure(name)
    DOCS.parent.mkdir(exist_ok=True)
    DOCS.write_text(tables())


if __name__ == "__main__":
    main()
