"""From a drive to a first token: seconds of loading beside those of the drive and of the encoder, on one machine. Write
benchmarks/results/load-<device>.json.

Two checkpoints of a Llama of the 8B shape are made from random weights, where there are none: one in bf16, one in NVFP4
as ModelOpt writes it. Then, with the files out of the page cache, each in a process of its own:

    drive      the same files, read with O_DIRECT by one thread and by four; the better one counts
    encoder    weights in host memory into pages, nothing read: pageable and, beside a GPU, page-locked
    load       `from_pretrained` to a first token; after imports, and after a context of the GPU
    first      the same in the first process of all, in which kernels are compiled
    unread     the same, with nothing read ahead

    python3 scripts/load_bench.py [--layers 32] [--directory DIR] [--parts make,drive,...] [--out results.json]
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
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

SIZES = {
    "8b": {
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "vocab_size": 128256,
    },
    "1b": {
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "vocab_size": 32000,
    },
}
FILE_BYTES = 4 << 30  # of a shard
READ_BYTES = 16 << 20
KINDS = ("bf16", "nvfp4")


# -- checkpoints ------------------------------------------------------------------------------------------------------


def config_of(args: argparse.Namespace):
    from transformers import LlamaConfig

    config = LlamaConfig(**SIZES[args.size], num_hidden_layers=args.layers, dtype="bfloat16", tie_word_embeddings=False)
    config.architectures = ["LlamaForCausalLM"]
    return config


def make(args: argparse.Namespace) -> dict:
    """Write both checkpoints, weight by weight, and sync them."""
    import torch
    from transformers import LlamaForCausalLM

    from vbrt.saves.tensorfile import TensorInfo

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = config_of(args)
    with torch.device("meta"):
        infos = [TensorInfo(n, torch.bfloat16, tuple(p.shape)) for n, p in LlamaForCausalLM(config).named_parameters()]
    found = {}
    for kind in KINDS:
        directory = args.directory / kind
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
    """Read the files of each checkpoint with O_DIRECT; seconds and rate of the better of one thread and four."""
    found = {}
    for kind in KINDS:
        files = sorted((args.directory / kind).glob("*.safetensors"))
        nbytes = sum(file.stat().st_size for file in files)
        found[f"{kind}_cached_before"] = drop(args.directory / kind)
        rates = {threads: _read_rate(files, threads) for threads in (1, 4)}
        found[f"{kind}_gb"] = nbytes / 1e9
        found[f"{kind}_gb_per_s"] = {str(threads): rate / 1e9 for threads, rate in rates.items()}
        found[f"{kind}_seconds"] = nbytes / max(rates.values())
    return found


def _read_rate(files: list[Path], threads: int) -> float:
    """Return bytes a second."""
    opened = [os.open(file, os.O_RDONLY | os.O_DIRECT) for file in files]
    pieces = iter(
        [(fd, at) for fd, file in zip(opened, files, strict=True) for at in range(0, file.stat().st_size, READ_BYTES)]
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
        model = LlamaForCausalLM(config_of(args)).to(torch.bfloat16).eval()
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
    """Load one checkpoint to a first token in this fresh process; see `main` for what is told apart."""
    marks = {"start": args.began, "process": time.time()}
    import torch
    import transformers

    import vbrt
    import vbrt.integrations.pretrained  # what is imported late

    _ = vbrt.QuantizationConfig
    transformers.logging.disable_progress_bar()
    _ = transformers.LlamaForCausalLM, transformers.AutoModelForCausalLM
    marks["imports"] = time.time()
    if torch.cuda.is_available():
        torch.ones(1, device="cuda").item()
    marks["device"] = time.time()
    if args.unread:
        from vbrt.host import read_ahead

        read_ahead._WINDOW_BYTES = (0, 0)
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
        "token": token,
        "held_gb": {tier: info.held_bytes / 1e9 for tier, info in stats.tiers.items()},
        "fallbacks": list(stats.fallbacks),
    }


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


def alone(part: str, args: argparse.Namespace, **given: object) -> dict:
    """Run one part in a process of its own; what it raises is its result."""
    flags = ["--work", part, "--size", args.size, "--layers", str(args.layers), "--format", args.format]
    flags += ["--directory", str(args.directory), "--began", repr(time.time())]
    for name, value in given.items():
        flags += [f"--{name}"] if value is True else [f"--{name}", str(value)]
    done = subprocess.run([sys.executable, __file__, *flags], capture_output=True, text=True, check=False)
    if done.returncode:
        return {"error": done.stderr[-3000:]}
    return json.loads(done.stdout.splitlines()[-1])


def loads(args: argparse.Namespace, parts: set[str]) -> dict:
    """Load each checkpoint as often as the parts say."""
    found = {}
    for kind in KINDS:
        for turn in (t for t in ("first", "load", "unread", "profile") if t in parts):
            cached = drop(args.directory / kind)
            given = {"unread": True} if turn == "unread" else {}
            if turn == "profile":
                given = {"profile": args.out.with_name(f"{args.out.stem}-{kind}.profile")}
            found[f"{kind}_{turn}"] = made = alone("load", args, kind=kind, **given)
            made["cached_before"] = cached
            print(f"{kind} {turn}: {json.dumps(made)}", flush=True)
    return found


def table(found: dict) -> Iterator[str]:
    """Yield lines for people."""
    limits, encoded = found.get("drive", {}), found.get("encoder", {})
    for kind in KINDS:
        read = limits.get(f"{kind}_seconds", math.nan)
        encode = encoded.get("pageable_seconds", math.nan) if kind == "bf16" else 0.0
        for turn in ("first", "load", "unread"):
            made = found.get("loads", {}).get(f"{kind}_{turn}", {})
            if "seconds" in made:
                ratio = made["seconds"] / max(read, encode)
                yield (
                    f"{kind:6s}{turn:8s}drive {read:6.2f} s  encoder {encode:6.2f} s  "
                    f"loaded {made['loaded_seconds']:6.2f} s  token {made['token_seconds']:5.2f} s  "
                    f"in all {made['seconds']:6.2f} s = {ratio:.2f} of the larger"
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--size", choices=list(SIZES), default="8b")
    parser.add_argument("--format", default="fp4", help="a preset, for the bf16 checkpoint")
    parser.add_argument("--parts", default="make,drive,encoder,first,load,unread")
    parser.add_argument("--directory", type=Path, help="for the checkpoints; by default one that is removed")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--work", choices=("make", "encoder", "load"), help=argparse.SUPPRESS)
    parser.add_argument("--kind", choices=KINDS, help=argparse.SUPPRESS)
    parser.add_argument("--began", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--profile", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--unread", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.work:
        print(json.dumps({"make": make, "encoder": encoder, "load": load}[args.work](args)))
        return
    from scripts.measuring import machine

    about = machine()
    name = re.sub(r"[^a-z0-9]+", "-", (about["gpu"] or "cpu").lower()).strip("-")
    args.out = args.out or ROOT / "benchmarks" / "results" / f"load-{name}.json"
    parts = set(args.parts.split(","))
    found: dict = {"machine": about, "layers": args.layers, "size": args.size, "format": args.format}
    with tempfile.TemporaryDirectory(dir=args.directory) as temporary:
        args.directory = args.directory or Path(temporary)
        for part in ("make", "drive", "encoder", "loads"):
            if part != "loads" and part not in parts:
                continue
            start = time.perf_counter()
            try:
                found[part] = {
                    "make": lambda: alone("make", args),
                    "drive": lambda: drive(args),
                    "encoder": lambda: alone("encoder", args),
                    "loads": lambda: loads(args, parts),
                }[part]()
            except Exception:  # noqa: BLE001 - a figure less, and the others all the same
                found[part] = {"error": traceback.format_exc()}
            print(f"{part} ({time.perf_counter() - start:.1f} s): {json.dumps(found[part])}", flush=True)
            args.out.write_text(json.dumps(found, indent=1) + "\n")
    print("\n".join(table(found)))


if __name__ == "__main__":
    main()
