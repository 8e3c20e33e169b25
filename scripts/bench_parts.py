"""The parts of `scripts/bench`: what each measures on a CPU, beside its peers in the same process."""

import copy
import functools
import gc
import os
import statistics
import tempfile
from collections.abc import Callable

from scripts.bench_curves import train_curves
from scripts.experts_ssd import experts
from scripts.measuring import drop_page_cache, interleaved, seconds


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


def wrap() -> dict:
    """Time of wrap, materialize and stats with 62 Linears, and of stats with 10,000 more unwrapped modules."""
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


def resident() -> dict:
    """One token of a Llama of 205 M parameters: unwrapped, and `dense` with all pages resident."""
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


def ssd() -> dict:
    """One token with half of the pages in memory and half on the SSD, against accelerate's disk_offload."""
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
            "io": wraps["scheduled"].stack.levels[-1].tier.mode,
            "cpu_budget_bytes": stats.tiers["cpu"].budget_bytes,
            "cpu_peak_bytes": stats.tiers["cpu"].peak_bytes,
            "page_bytes": plan.page_bytes,
        }
        for vb in wraps.values():
            vb.close()
    return figures


def ssd_passive() -> dict:
    """The same with OMP_WAIT_POLICY=passive: OpenMP threads sleep instead of spinning while pages are read."""
    return ssd()


ENVIRONMENT = {name: {"OMP_WAIT_POLICY": "passive"} for name in ("ssd-passive", "experts")}


def memory() -> dict:
    """Resident memory (RSS) of the process before and after encoding the Llama to nvfp4."""
    import psutil

    import vbrt
    from vbrt.model.machine_memory import release_host_memory

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


def hits() -> dict:
    """Steady-state hit rates of 32 equal layers (20 passes after 2): measured, simulated, in closed form."""
    import torch
    from torch import nn

    import vbrt
    from vbrt.residency.simulate import PASS, simulate

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


def formats() -> dict:
    """Signal-to-quantization-noise ratio of each format on N(0, 1), bits a weight, encoding and decoding speed."""
    import torch

    from vbrt.config import FORMATS, chosen_formats
    from vbrt.formats import get_format
    from vbrt.formats.fitted_codebook import Separation

    torch.manual_seed(0)
    weight = torch.randn(2048, 4096)
    rows = []
    for name in chosen_formats():
        if FORMATS[name].lossless:
            continue
        format = get_format(name)
        encode = Separation().encode if FORMATS[name].fitted else format.encode
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


def cpu_linear() -> dict:
    """One Linear of 4096 x 4096 on a CPU: compiled, reference and dense, against bitsandbytes NF4 if installed.

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
    from vbrt.kernels import resolve

    layers: dict[str, Callable] = {"dense": functools.partial(F.linear, weight=weight)}
    for format in ("nvfp4", "nf4"):
        planes = WeightPlanes(format, tuple(weight.shape), weight.dtype, get_format(format).encode(weight))
        for backend in ("auto", "reference"):
            op = resolve("linear", backend, weight.device, format)
            layers[f"{format} {op.backend}"] = functools.partial(op.run, planes=planes)
    if bitsandbytes:
        n, k = weight.shape
        peer = bitsandbytes.nn.Linear4bit(k, n, bias=False, quant_type="nf4", compute_dtype=weight.dtype)
        peer.weight = bitsandbytes.nn.Params4bit(weight.clone(), requires_grad=False, quant_type="nf4")
        layers["bitsandbytes nf4"] = peer.to("cpu")
    return layers


def cpu_exact() -> dict:
    """An `exact` Linear on a CPU against the plain one: planes merged by the compiled kernels, and in plain torch.

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


#: by name, in the order of docs/measurements.md
PARTS: dict[str, Callable[[], dict]] = {
    part.__name__.replace("_", "-"): part
    for part in (wrap, resident, ssd, ssd_passive, experts, memory, hits, formats, cpu_linear, cpu_exact, train_curves)
}
