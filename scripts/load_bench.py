"""From a drive to a first token: seconds of loading beside those of the drive and of the encoder, on one machine. Write
benchmarks/results/load-<device>.json.

Two checkpoints of a Llama of the 8B shape are made from random weights, where there are none: one in bf16, one in NVFP4
as ModelOpt writes it. Then, with the files out of the page cache, each in a process forked from one that has imported
everything and knows nothing of the GPU yet:

    drive      the same files, read with O_DIRECT by four threads
    encoder    weights in host memory into pages, nothing read: pageable and, beside a GPU, page-locked
    first      `from_pretrained` to a first token, where kernels have yet to be compiled
    load       the same in a process that finds them compiled; the GPU's context is there when the clock starts
    unread     the same, with nothing read ahead
    heap       the same (of NVFP4), with weights on their way to the GPU in fresh host memory
    cached     the same with the files in the page cache: what is left is the loader's own time
    convert    `vbrt convert` of the files into a save, on the GPU where there is one
    profile    the same under cProfile, whose report lies beside the results

    python3 scripts/load_bench.py [--layers 32 32] [--directory DIR] [--parts make,drive,...] [--out results.json]
"""

import argparse
import contextlib
import itertools
import json
import math
import os
import re
import shutil
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from scripts.load_files import KINDS, SIZES, cached_share, config_of, drop, make, read_rate, warm

# -- limits -----------------------------------------------------------------------------------------------------------


def drive(args: argparse.Namespace) -> dict:
    """Read the files of each checkpoint with O_DIRECT; return seconds and rate."""
    found = {}
    for kind in KINDS:
        files = sorted((args.directory / kind).glob("*.safetensors"))
        nbytes = sum(file.stat().st_size for file in files)
        found[f"{kind}_cached_before"] = drop(args.directory / kind)
        rate = read_rate(files, 4)
        found |= {f"{kind}_gb": nbytes / 1e9, f"{kind}_gb_per_s": rate / 1e9, f"{kind}_seconds": nbytes / rate}
    return found


def encoder(args: argparse.Namespace) -> dict:
    """Encode all weights of the model into pages from host memory, where they are."""
    import torch
    from transformers import LlamaForCausalLM

    import vbrt
    from vbrt.saves.load.fill_while_reading import Filling

    with torch.device("meta"):
        model = LlamaForCausalLM(config_of(args, "bf16")).to(torch.bfloat16).eval()
    filling = Filling(model, vbrt.load_config(args.format))
    names = [swap.site.tensor for swap in filling.plan.swaps]
    shapes = {name: tuple(model.get_parameter(name).shape) for name in names}
    weights = {shape: torch.empty(shape, dtype=torch.bfloat16).normal_(0, 0.02) for shape in set(shapes.values())}
    gpu = torch.cuda.is_available()
    sync = torch.cuda.synchronize if gpu else (lambda: None)
    found = {"gb": sum(weights[shape].nbytes for shape in shapes.values()) / 1e9}
    for shape in weights if gpu else ():  # compile
        filling.take(next(name for name in names if shapes[name] == shape), weights[shape])
    places = {"pageable": weights}
    if gpu:
        places |= {"pinned": {shape: weight.pin_memory() for shape, weight in weights.items()}}
    for place, given in places.items():
        sync()
        start = time.perf_counter()
        for name in names:
            filling.take(name, given[shapes[name]])
        sync()
        found[f"{place}_seconds"] = time.perf_counter() - start
    if gpu:
        found["steps_ms"] = _steps(filling, max(shapes, key=lambda name: math.prod(shapes[name])), weights, shapes)
    filling.close()
    return found


def _steps(filling, name: str, weights: dict, shapes: dict) -> dict:
    """Return milliseconds of what is done to one weight."""
    import torch

    handle, weight = filling.handle_of(name), weights[shapes[name]]
    there = weight.cuda()
    planes = handle.split(there)

    def relayed() -> None:
        level, target = handle.stack.levels[0], torch.empty_like(there)
        level.relay.copy(target.view(-1).view(torch.uint8), weight.view(-1).view(torch.uint8), level.stream)

    from vbrt.model.machine_memory import release_host_memory

    steps = {
        "copy_pageable": lambda: weight.to("cuda"),
        "copy_relayed": relayed,
        "split": lambda: handle.split(there),
        "store": lambda: handle.store(planes),
        "trim": release_host_memory,
    }
    found = {}
    for step, act in steps.items():
        for _ in range(3):
            torch.cuda.synchronize()
            start = time.perf_counter()
            act()
            torch.cuda.synchronize()
            found[step] = (time.perf_counter() - start) * 1e3
    return found


# -- loading ----------------------------------------------------------------------------------------------------------


def load(args: argparse.Namespace) -> dict:
    """Load one checkpoint to a first token in this process; see `main` for what is told apart."""
    import torch

    import vbrt

    marks = {"start": time.time()}
    if torch.cuda.is_available():
        torch.ones(1, device="cuda").item()
    marks["device"] = time.time()
    if args.unread:
        from vbrt.host import file_prefetch

        file_prefetch._WINDOW_BYTES = (0, 0)
    if args.heap:
        from vbrt.saves.files import read_target
        from vbrt.saves.load import load_model

        read_target.on_device = load_model.on_device = lambda stack: read_target.Landing(
            stack.device, read_target.fresh
        )
    phases: dict[str, float] = {}
    _time_phases(phases)
    with _profiled(args.profile):
        directory = args.directory / args.kind
        if args.kind == "bf16":
            from transformers import AutoModelForCausalLM

            config = vbrt.QuantizationConfig(args.format)
            model = AutoModelForCausalLM.from_pretrained(directory, quantization_config=config)
        else:
            model = vbrt.from_pretrained(directory).module
        marks["loaded"] = time.time()
        device = vbrt.of(model).stack.device
        with torch.no_grad():
            token = model(torch.arange(1, 9, device=device)[None]).logits[0, -1].argmax().item()
        marks["token"] = time.time()
    names = list(marks)
    spans = {b: marks[b] - marks[a] for a, b in itertools.pairwise(names)}
    stats = vbrt.of(model).stats()
    return {
        **{f"{name}_seconds": seconds for name, seconds in spans.items()},
        "seconds": marks["token"] - marks["device"],
        "phases": phases,
        "token": token,
        "held_gb": {tier: info.held_bytes / 1e9 for tier, info in stats.tiers.items()},
        "fallbacks": list(stats.fallbacks),
    }


def _time_phases(into: dict[str, float]) -> None:
    """Have the seconds of what loading consists of be added up, those within others in both."""
    from vbrt.integrations import pretrained
    from vbrt.saves.load import fill_while_reading as filling
    from vbrt.saves.load import load_model as load
    from vbrt.saves.published import dense_checkpoint, published_checkpoint
    from vbrt.wrapper import load as wrapper_load

    def timed(where: object, name: str) -> None:
        act = getattr(where, name)

        def run(*given: object, **named: object) -> object:
            start = time.perf_counter()
            try:
                return act(*given, **named)
            finally:
                into[name] = into.get(name, 0.0) + time.perf_counter() - start

        setattr(where, name, run)

    for where, names in (
        (filling.Filling, ("__init__", "take", "finish")),
        (pretrained, ("meta_model", "open_source")),
        (wrapper_load, ("load_attached",)),
        (load, ("attach", "_fill_")),
        (published_checkpoint.PublishedCheckpoint, ("plan", "planes_of")),
        (dense_checkpoint.DenseCheckpoint, ("outline_", "fill_kept_")),
    ):
        for name in names:
            timed(where, name)


@contextlib.contextmanager
def _profiled(path: Path | None) -> Iterator[None]:
    if path is None:
        yield
        return
    import cProfile
    import pstats

    profile = cProfile.Profile()
    with profile:
        yield
    with path.open("w") as file:
        stats = pstats.Stats(profile, stream=file)
        stats.sort_stats("cumulative").print_stats(60)
        stats.sort_stats("tottime").print_stats(40)


# -- all of it --------------------------------------------------------------------------------------------------------


def import_all() -> float:
    """Import what loading needs, but wake no GPU; return seconds."""
    start = time.perf_counter()
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # that does not wake it
    import transformers

    import vbrt.integrations.pretrained  # what is imported late
    from vbrt.saves.load import fill_while_reading as filling

    transformers.logging.disable_progress_bar()
    _ = transformers.LlamaForCausalLM, transformers.AutoModelForCausalLM, vbrt.QuantizationConfig, filling
    return time.perf_counter() - start


def alone(part: str, args: argparse.Namespace, **given: object) -> dict:
    """Run one part in a forked process; what it raises is its result."""
    there, here = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            made = PARTS[part](argparse.Namespace(**{**vars(args), **given}))
        except BaseException:  # noqa: BLE001 - the parent prints it
            made = {"error": traceback.format_exc()}
        with open(here, "w") as file:
            json.dump(made, file)
        sys.stderr.flush()
        os._exit(0)
    os.close(here)
    with open(there) as file:
        text = file.read()
    os.waitpid(pid, 0)
    return json.loads(text) if text else {"error": "the process died"}


def about(args: argparse.Namespace) -> dict:
    """Return what machine this is."""
    from scripts.measuring import machine

    return machine()


def loads(args: argparse.Namespace, parts: set[str]) -> Iterator[tuple[str, dict]]:
    """Load each checkpoint as often as the parts say."""
    for turn in (t for t in ("first", "cached", "load", "convert", "heap", "unread", "profile") if t in parts):
        for kind in KINDS[turn == "heap" :] if time.perf_counter() < args.until else ():
            files = sorted((args.directory / kind).glob("*.safetensors"))
            gigabytes = sum(file.stat().st_size for file in files) / 1e9
            whole = math.inf if turn == "load" else 1.0
            if turn == "cached":
                warm(files)
                before = {"cached_before": cached_share(args.directory / kind)}
            else:
                before = {
                    "cached_before": drop(args.directory / kind),
                    "drive_gb_per_s": read_rate(files, 4, whole) / 1e9,
                }
            profile = args.out.with_name(f"{args.out.stem}-{kind}.profile") if turn == "profile" else None
            part = "convert" if turn == "convert" else "load"
            made = alone(part, args, kind=kind, unread=turn == "unread", heap=turn == "heap", profile=profile)
            yield f"{kind}_{turn}", made | before | {"gb": gigabytes}


def convert(args: argparse.Namespace) -> dict:
    """Write a checkpoint's planes as a save, without the model."""
    import torch

    from vbrt.cli.main import main as command

    if torch.cuda.is_available():
        torch.ones(1, device="cuda").item()
    out = args.directory / f"{args.kind}-converted"
    start = time.perf_counter()
    with contextlib.redirect_stdout(sys.stderr):
        status = command(["convert", str(args.directory / args.kind), str(out), "--config", args.format])
    seconds = time.perf_counter() - start
    if status:
        raise RuntimeError(f"vbrt convert ended with {status}")
    written = sum(file.stat().st_size for file in out.rglob("*") if file.is_file())
    shutil.rmtree(out)
    return {"seconds": seconds, "written_gb": written / 1e9}


def results(args: argparse.Namespace, parts: set[str]) -> Iterator[tuple[str, dict]]:
    """Yield the name and the result of each part."""
    for part in ("make", "drive"):
        if part in parts:
            yield part, alone(part, args)
    if "encoder" in parts:
        yield "encoder", alone("encoder", args)
    yield from loads(args, parts)


def table(found: dict) -> Iterator[str]:
    """Yield lines for people."""
    limits, encoded = found.get("drive", {}), found.get("encoder", {})
    for kind in KINDS:
        read = limits.get(f"{kind}_seconds", math.nan)
        encode = encoded.get("pageable_seconds", math.nan) if kind == "bf16" else 0.0
        for turn in ("first", "load", "heap", "unread", "cached"):
            made = found.get(f"{kind}_{turn}", {})
            if "seconds" not in made:
                continue
            now = made["gb"] / made["drive_gb_per_s"] if "drive_gb_per_s" in made else math.nan
            yield (
                f"{kind:6s}{turn:8s}drive {read:6.2f} s, just before {now:6.2f}  encoder {encode:6.2f} s  "
                f"loaded {made['loaded_seconds']:6.2f} s  token {made['token_seconds']:5.2f} s  in all "
                f"{made['seconds']:6.2f} s = {made['seconds'] / max(read, encode):.2f} of the larger, "
                f"{made['loaded_seconds'] / made['gb']:.3f} s/GB"
            )
        if "seconds" in found.get(f"{kind}_convert", {}):
            made = found[f"{kind}_convert"]
            yield f"{kind:6s}convert {made['seconds']:6.2f} s for {made['gb']:.2f} GB, {made['written_gb']:.2f} written"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--layers", type=int, nargs=2, default=(32, 32), help="of the checkpoint in bf16, and in NVFP4")
    parser.add_argument("--size", choices=list(SIZES), default="8b")
    parser.add_argument("--format", default="fp4", help="a preset, for the bf16 checkpoint")
    parser.add_argument("--parts", default="make,drive,encoder,first,load,unread")
    parser.add_argument("--directory", type=Path, help="for the checkpoints; by default one that is removed")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=float, default=math.inf, help="begin no further load after so many")
    args = parser.parse_args()
    args.until = time.perf_counter() + args.seconds
    imports = import_all()
    machine = alone("about", args)
    name = re.sub(r"[^a-z0-9]+", "-", (machine.get("gpu") or "cpu").lower()).strip("-")
    args.out = args.out or ROOT / "benchmarks" / "results" / f"load-{name}.json"
    parts = set(args.parts.split(","))
    found: dict = {"machine": machine, "layers": args.layers, "size": args.size, "format": args.format}
    found["imports_seconds"] = imports
    with tempfile.TemporaryDirectory(dir=args.directory) as temporary:
        args.directory = args.directory or Path(temporary)
        for name, made in results(args, parts):
            print(f"{name}: {json.dumps(made)}", flush=True)
            found[name] = made
            args.out.write_text(json.dumps(found, indent=1) + "\n")
    print("\n".join(table(found)))


PARTS = {"about": about, "make": make, "drive": drive, "encoder": encoder, "load": load, "convert": convert}

if __name__ == "__main__":
    main()
