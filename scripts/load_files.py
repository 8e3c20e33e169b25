"""Checkpoints for scripts/load_bench.py, made of random weights, and the drive that they lie on."""

import argparse
import contextlib
import ctypes
import json
import math
import mmap
import os
import threading
import time
from pathlib import Path

__all__ = ["KINDS", "SIZES", "cached_share", "config_of", "drop", "make", "read_rate", "warm"]

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

    from vbrt.saves.files.safetensors_file import TensorInfo

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
    from vbrt.saves.files.safetensors_file import TensorInfo, TensorWriter, in_order

    directory.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator(device).manual_seed(0)
    groups = in_order(infos, FILE_BYTES)

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


def read_rate(files: list[Path], threads: int, gigabytes: float = math.inf) -> float:
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


def warm(files: list[Path]) -> None:
    """Read files into the page cache."""
    scratch = bytearray(READ_BYTES)
    for path in files:
        with path.open("rb", buffering=0) as file:
            while file.readinto(scratch):
                pass
