"""Milliseconds a token against GPU memory, an 8B-shaped model: bf16, accelerate, bitsandbytes and vbrt; writes JSON.

Random weights, made on the GPU; `generate` as a user types it: greedy, a prompt of 128 tokens. Each case is warmed by
one call. `docs/memory.svg`, which the README shows, is drawn by `--plot` from committed results.

    python3 scripts/memory_bench.py [--parts bf16 fp4 exact bitsandbytes accelerate] [--out results.json]
    python3 scripts/memory_bench.py --plot
"""

import argparse
import gc
import json
import re
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # after the checkout is on the path
from torch import nn

import vbrt
from scripts.generate_bench import Clock, prompt
from scripts.measuring import llama_8b, machine

RESULTS = ROOT / "benchmarks" / "results"
PICTURE = ROOT / "docs" / "memory.svg"
#: GB of the GPU's memory for pages of vbrt, and for weights of accelerate
BUDGETS = {"fp4": (0.12, 2, 5), "exact": (0.6, 5), "accelerate": (4, 8)}
NEW = {"bf16": 12, "fp4": 12, "exact": 8, "bitsandbytes": 12, "accelerate": 3}


def measured(model: nn.Module, new: int, *, warm: int | None = None) -> dict[str, float]:
    """Return the milliseconds of a token after the first, and the peak of the GPU's memory in GB."""
    for count in (new if warm is None else warm, new):
        clock = Clock()
        torch.cuda.reset_peak_memory_stats()
        model.generate(
            prompt(1),
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            pad_token_id=0,
            stopping_criteria=[clock],
        )
    return {"ms": clock.ms, "peak_gb": torch.cuda.max_memory_allocated() / 1e9}


def bf16(layers: int) -> Iterator[dict[str, object]]:
    """The plain model, all on the GPU."""
    yield measured(llama_8b(layers), NEW["bf16"])


def _vbrt(layers: int, preset: str) -> Iterator[dict[str, object]]:
    budgets = BUDGETS[preset]
    tiers = {"gpu": {"budget": int(budgets[0] * 1e9)}}
    with vbrt.wrap(llama_8b(layers), preset, tiers=tiers) as vb:
        vb.materialize(progress=False)
        for budget in budgets:
            vb.set_budget("gpu", int(budget * 1e9))
            gc.collect()
            torch.cuda.empty_cache()
            before = vb.stats().steps
            row = {"budget_gb": budget} | measured(vb, NEW[preset])
            after = vb.stats()
            yield row | {
                "captured": after.steps.captured - before.captured,
                "eager": after.steps.eager - before.eager,
                "fallbacks": list(after.fallbacks),
            }


def fp4(layers: int) -> Iterator[dict[str, object]]:
    """4-bit pages, of which some wait in host memory."""
    yield from _vbrt(layers, "fp4")


def exact(layers: int) -> Iterator[dict[str, object]]:
    """Coarse and fine pages, of which some wait in host memory; every bit of the weights."""
    yield from _vbrt(layers, "exact")


def bitsandbytes(layers: int) -> Iterator[dict[str, object]]:
    """NF4 in all layers but the head, as `load_in_4bit` makes it."""
    import bitsandbytes as bnb

    model = llama_8b(layers)
    for name, module in list(model.named_modules()):
        if not isinstance(module, nn.Linear) or name == "lm_head":
            continue
        layer = bnb.nn.Linear4bit(
            module.in_features, module.out_features, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4"
        )
        layer.weight = bnb.nn.Params4bit(module.weight.data, requires_grad=False, quant_type="nf4")
        path, _, own = name.rpartition(".")
        setattr(model.get_submodule(path), own, layer.to("cuda"))
        del module
    gc.collect()
    torch.cuda.empty_cache()
    yield measured(model, NEW["bitsandbytes"])


def accelerate(layers: int) -> Iterator[dict[str, object]]:
    """bf16 under `max_memory`, the rest in host memory."""
    from accelerate import dispatch_model, infer_auto_device_map

    for budget in BUDGETS["accelerate"]:
        model = llama_8b(layers)
        places = infer_auto_device_map(
            model, max_memory={0: int(budget * 1e9), "cpu": 1 << 40}, no_split_module_classes=model._no_split_modules
        )
        model = dispatch_model(model.to("cpu"), places)  # or what is offloaded stays on the GPU
        gc.collect()
        torch.cuda.empty_cache()
        yield {"budget_gb": budget} | measured(model, NEW["accelerate"], warm=1)
        del model
        gc.collect()
        torch.cuda.empty_cache()


PARTS: dict[str, Callable[[int], Iterator[dict[str, object]]]] = {
    part.__name__: part for part in (bf16, fp4, exact, bitsandbytes, accelerate)
}


def rows(parts: list[str], layers: int) -> Iterator[dict[str, object]]:
    """Yield the rows of each part; one that fails leaves its traceback, and the others run."""
    start = time.perf_counter()
    for part in parts:
        try:
            for row in PARTS[part](layers):
                yield {"case": part} | row | {"at_s": time.perf_counter() - start}
        except Exception as error:  # noqa: BLE001  the other parts run
            traceback.print_exc()
            yield {"case": part, "error": f"{type(error).__name__}: {error}"[:300]}
        gc.collect()
        torch.cuda.empty_cache()


# -- the picture ------------------------------------------------------------------------------------------------------


#: what the picture calls a line, and its marker
DRAWN = {
    "accelerate, bf16 (one forward)": "s",
    "vbrt exact: every bit of the weights": "o",
    "bf16 on the GPU, eager transformers": "D",
    "bitsandbytes NF4, eager transformers": "^",
    "bf16 on the GPU, captured (vbrt dense)": "D",
    "vbrt fp4": "o",
}
_LAYERS_8B = 16.06  # GB of the bf16 model beside bitsandbytes' and `dense`'s in scripts/generate_bench.py


def points(results: Path = RESULTS) -> dict[str, list[tuple[float, float]]]:
    """Return (GB of GPU memory, ms a token) of each line, from what is committed of three benches on an H200.

    accelerate: `scripts/stream.py`, one forward of one token (its peak has one of 2048 tokens in it); bf16 on a static
    cache, captured bf16 and bitsandbytes: `scripts/generate_bench.py`, the latter two without the other bf16 model in
    memory; vbrt: this script.
    """
    own, peers, streamed = (
        json.loads((results / f"{name}-nvidia-h200.json").read_text())["rows"]
        for name in ("memory", "generate", "stream")
    )
    one = {row["case"]: row for row in peers if row.get("batch") == 1 and row.get("peak_gb")}
    plain, nf4, dense = (one[case] for case in ("bf16, static cache, eager", "bitsandbytes NF4, eager", "dense"))
    offloaded = [row for row in streamed if row["case"] in _OFFLOADED]
    lines = (
        [(row["gpu_peak_bytes"] / 1e9, row["T1_ms"]) for row in offloaded],
        [(row["peak_gb"], row["ms"]) for row in own if row["case"] == "exact"],
        [(plain["peak_gb"], plain["ms"])],
        [(nf4["peak_gb"] - _LAYERS_8B, nf4["ms"])],
        [(dense["peak_gb"] - _LAYERS_8B, dense["ms"])],
        [(row["peak_gb"], row["ms"]) for row in own if row["case"] == "fp4"],
    )
    return {name: sorted(line) for name, line in zip(DRAWN, lines, strict=True)}


_OFFLOADED = ("accelerate cpu_offload", "accelerate dispatch_model, half on the GPU")


def draw(lines: dict[str, list[tuple[float, float]]], path: Path) -> None:
    """Draw time against memory."""
    import matplotlib
    from matplotlib.figure import Figure
    from matplotlib.ticker import FixedLocator, FuncFormatter

    from scripts.plots import STYLE

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(7.2, 4.2), layout="constrained")
        axes = figure.subplots()
        for name, line in lines.items():
            axes.plot(*zip(*line, strict=True), marker=DRAWN[name], label=name)
        axes.set(
            title="Llama-3-8B's shape, one token at a time: NVIDIA H200, link 55 GB/s",
            xlabel="GPU memory, GB (peak)",
            ylabel="ms a token",
            xlim=(0, 18),
            yscale="log",
        )
        axes.yaxis.set_major_locator(FixedLocator([2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000]))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axes.yaxis.set_minor_locator(FixedLocator([]))
        axes.legend(frameon=False, loc="upper right", fontsize="small")
        figure.savefig(path, metadata={"Date": None})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--parts", nargs="*", default=list(PARTS), choices=list(PARTS))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--plot", action="store_true", help="draw the picture from committed results, no more")
    args = parser.parse_args()
    if args.plot:
        draw(points(), PICTURE)
        return
    name = re.sub(r"[^a-z0-9]+", "-", torch.cuda.get_device_name().lower()).strip("-")
    out = args.out or RESULTS / f"memory-{name}.json"
    done = json.loads(out.read_text())["rows"] if out.exists() else []
    done = [row for row in done if row["case"] not in args.parts]
    about = {"machine": machine(), "layers": args.layers}
    for row in rows(args.parts, args.layers):
        print(json.dumps({k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()}), flush=True)
        done.append(row)
        out.write_text(json.dumps(about | {"rows": done}, indent=1) + "\n")


if __name__ == "__main__":
    main()
