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
import ctypes
import itertools
import json
import math
import mmap
import os
import re
import shutil
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

_8B = {"hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32, "num_key_value_heads": 8}
_1B = {"hidden_size": 2048, "intermediate_size": 5632, "num_attention_heads": 16, "num_key_value_heads": 8}
_TINY = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
SIZES = {
    "8b": _8B | {"vocab_size": 128256},
    "8b-32k": _8B | {"vocab_size": 32000},
    "1b": _1B | {"vocab_size": 32000},
    "tiny": _TINY | {"vocab_size": 1024},
}
FILE_BYTES = 4 << 30  # of a shard
READ_BYTES = 16 << 20
KINDS = ("bf16", "nvfp4")


# -- checkpoints ------------------------------------------------------------------------------------------------------


def config_of(args: argparse.Namespace, kind: str):
    from transformers import LlamaConfig

    layers = args.layers[KINDS.index(kind)]
    config = LlamaConfig(**SIZES[args.size], num_hidden_layers=layers, dtype="bfloat16", tie_word_embeddings=False)
    config.architectures = ["LlamaForCausalLM"]
    return config


def make(args: argparse.Namespace) -> dict:
    """Write both checkpoints, weight by weight, and sync them."""
    import torch
    from transformers import LlamaForCausalLM

    from vbrt.saves.tensorfile import TensorInfo

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    found = {}
    for kind in KINDS:
        directory, config = args.directory / kind, config_of(args, kind)
        with torch.device("meta"):
            shapes = {name: tuple(p.shape) for name, p in LlamaForCausalLM(config).named_parameters()}
        infos = [TensorInfo(name, torch.bfloat16, shape) for name, shape in shapes.items()]
        if not (directory / "config.json").exists():
            start = time.perf_counter()
            nbytes = _write(directory, infos, kind, device)
            config.save_pretrained(directory)
            if kind == "nvfp4":
                about = {"quantization": {"quant_algo": "NVFP4", "group_size": 16}}
                (directory / "hf_quant_config.json").write_text(json.dumps(about))
            found[f"{kind}_write_gb_per_s"] = nbytes / 1e9 / (time.perf_counter() - start)
    return found


def _write(directory: Path, infos: list, kind: str, device) -> int:
    import torch

    from vbrt.formats import get_format
    from vbrt.saves.tensorfile import TensorInfo, TensorWriter

    directory.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator(device).manual_seed(0)
    groups, room = [], 0
    for info in infos:
        if not groups or info.nbytes > room:
            groups.append([])
            room = FILE_BYTES
        groups[-1].append(info)
        room -= info.nbytes

    def packed(info: TensorInfo) -> bool:
        return kind == "nvfp4" and info.name.endswith("_proj.weight")

    def announced(info: TensorInfo) -> list[TensorInfo]:
        if not packed(info):
            return [info]
        (n, k), base = info.shape, info.name
        return [
            TensorInfo(base, torch.uint8, (n, k // 2)),
            TensorInfo(base + "_scale", torch.float8_e4m3fn, (n, k // 16)),
            TensorInfo(base + "_scale_2", torch.float32, (1,)),
        ]

    weight_map, total = {}, 0
    for number, group in enumerate(groups, 1):
        file = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        with TensorWriter(directory / file, [one for info in group for one in announced(info)]) as writer:
            for info in group:
                weight = torch.empty(info.shape, dtype=torch.bfloat16, device=device)
                weight.normal_(0, 0.02, generator=generator) if len(info.shape) > 1 else weight.fill_(1)
                made = {info.name: weight}
                if packed(info):
                    plane = get_format("nvfp4").encode(weight)
                    fields = ("codes", "scales", "tensor_scale")
                    made = {one.name: plane[f] for one, f in zip(announced(info), fields, strict=True)}
                for name, tensor in made.items():
                    writer.write(name, tensor)
                    weight_map[name] = file
                    total += tensor.nbytes
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return total


def drop(directory: Path) -> float:
    """Take a checkpoint out of the page cache; return the share that is still there."""
    for file in directory.glob("*.safetensors"):
        fd = os.open(file, os.O_RDONLY)
        os.fsync(fd)
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(fd)
    return cached_share(directory)


def cached_share(directory: Path) -> float:
    """Return the share of a checkpoint that is in the page cache."""
    mincore = ctypes.CDLL(None, use_errno=True).mincore
    mincore.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p)
    there = pages = 0
    for file in directory.glob("*.safetensors"):
        with open(file, "rb") as opened, contextlib.closing(_mapping(opened.fileno())) as mapped:
            vector = (ctypes.c_ubyte * math.ceil(len(mapped) / mmap.PAGESIZE))()
            address = ctypes.c_char.from_buffer(mapped)
            try:
                if mincore(ctypes.addressof(address), len(mapped), vector):
                    return math.nan  # this system does not say
            finally:
                del address
            there += sum(byte & 1 for byte in bytes(vector))
            pages += len(vector)
    return there / max(1, pages)


def _mapping(fd: int) -> mmap.mmap:
    return mmap.mmap(fd, 0, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE)


# -- limits -----------------------------------------------------------------------------------------------------------


def drive(args: argparse.Namespace) -> dict:
    """Read the files of each checkpoint with O_DIRECT; return seconds and rate."""
    found = {}
    for kind in KINDS:
        files = sorted((args.directory / kind).glob("*.safetensors"))
        nbytes = sum(file.stat().st_size for file in files)
        found[f"{kind}_cached_before"] = drop(args.directory / kind)
        rate = _read_rate(files, 4)
        found |= {f"{kind}_gb": nbytes / 1e9, f"{kind}_gb_per_s": rate / 1e9, f"{kind}_seconds": nbytes / rate}
    return found


def _read_rate(files: list[Path], threads: int, gigabytes: float = math.inf) -> float:
    """Return bytes a second, of about so many gigabytes."""
    opened = [os.open(file, os.O_RDONLY | os.O_DIRECT) for file in files]
    pieces = iter(
        [(fd, at) for fd, file in zip(opened, files, strict=True) for at in range(0, file.stat().st_size, READ_BYTES)][
            : math.ceil(min(gigabytes * 1e9, 1e15) / READ_BYTES)
        ]
    )
    lock, got = threading.Lock(), [0] * threads

    def read(number: int) -> None:
        memory = mmap.mmap(-1, READ_BYTES)
        while True:
            with lock:
                piece = next(pieces, None)
            if piece is None:
                return
            got[number] += os.preadv(piece[0], [memory], piece[1])

    start = time.perf_counter()
    running = [threading.Thread(target=read, args=(number,)) for number in range(threads)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join()
    seconds = time.perf_counter() - start
    for fd in opened:
        os.close(fd)
    return sum(got) / seconds


def encoder(args: argparse.Namespace) -> dict:
    """Encode all weights of the model into pages from host memory, where they are."""
    import torch
    from transformers import LlamaForCausalLM

    import vbrt
    from vbrt.saves.filling import Filling

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

    from vbrt.model.machine import release_host_memory

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
        from vbrt.host import read_ahead

        read_ahead._WINDOW_BYTES = (0, 0)
    if args.heap:
        from vbrt.saves import landing
        from vbrt.saves import load as loading

        landing.on_device = loading.on_device = lambda stack: landing.Landing(stack.device, landing.fresh)
    phases: dict[str, float] = {}
    _time_phases(phases)
    with _profiled(args.profile):
        directory = args.directory / args.kind
        if args.kind == "bf16":
            from transformers import AutoModelForCausalLM

            config = vbrt.QuantizationConfig(args.format)
            model = AutoModelForCausalLM.from_pretrained(directory, quantization_config=config)
        else:
            model = vbrt.from_pretrained(directory).model
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
    from vbrt.saves import dense, filling, load, published
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
        (published.PublishedCheckpoint, ("plan", "planes_of")),
        (dense.DenseCheckpoint, ("outline_", "fill_kept_")),
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
    from vbrt.saves import filling

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
    for turn in (t for t in ("first", "load", "cached", "convert", "heap", "unread", "profile") if t in parts):
        for kind in KINDS[turn == "heap" :] if time.perf_counter() < args.until else ():
            files = sorted((args.directory / kind).glob("*.safetensors"))
            gigabytes = sum(file.stat().st_size for file in files) / 1e9
            whole = math.inf if turn == "load" else 1.0
            if turn == "cached":
                _warm(files)
                before = {"cached_before": cached_share(args.directory / kind)}
            else:
                before = {
                    "cached_before": drop(args.directory / kind),
                    "drive_gb_per_s": _read_rate(files, 4, whole) / 1e9,
                }
            profile = args.out.with_name(f"{args.out.stem}-{kind}.profile") if turn == "profile" else None
            part = "convert" if turn == "convert" else "load"
            made = alone(part, args, kind=kind, unread=turn == "unread", heap=turn == "heap", profile=profile)
            yield f"{kind}_{turn}", made | before | {"gb": gigabytes}


def _warm(files: list[Path]) -> None:
    """Read files into the page cache."""
    scratch = bytearray(READ_BYTES)
    for path in files:
        with path.open("rb", buffering=0) as file:
            while file.readinto(scratch):
                pass


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
    yield from loads(args, parts)
    if "encoder" in parts:
        yield "encoder", alone("encoder", args)


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
