"""Damaged and hostile files, from a fixed seed: each must be refused by a `VBError` that names the file, or load just
what was saved. Never another value, another exception, a hang, or more memory than a small file can need.

Where a file has no digest, or the fuzzer has made one that is right ("sealed"), other content may load: then it must be
content that is whole, and loading it must raise nothing. Such inputs are counted as "loads". Prints a line for each
part, the outcomes counted, and each input that did what none may; exits 1 if there was one.
"""

import argparse
import faulthandler
import json
import random
import re
import resource
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # after the checkout is on the path
from safetensors.torch import save_file

import vbrt
from scripts.fuzz_damage import HOSTILE, Damage, Part, bent, encoded, keeping, planted, read, with_other_node, writing
from scripts.fuzz_gguf import gguf_part
from scripts.fuzz_models import (
    bits,
    embedded_part,
    fine_part,
    header_damages,
    header_part,
    index_part,
    manifest_part,
    of_experts,
    old_manifest_part,
    sealed_manifest,
    shard_part,
)
from scripts.fuzz_published import published_part
from scripts.train_files import Checkpoint, write_checkpoint
from vbrt.config import preset_names
from vbrt.config.toml_text import toml_text
from vbrt.errors import VBError
from vbrt.saves.files.safetensors_file import TensorFile
from vbrt.tiers import MemoryTier, SsdTier
from vbrt.tiers.protocols.tier import Reservation

HANGS_SECONDS = 20
ROOM_BYTES = 256 << 20  # of address space, beyond what the process has: no input is larger than a MiB
OUTCOMES = ("refused", "same", "loads", "WRONG")


# -- page files, training checkpoints, configs ------------------------------------------------------------------------


def page_part(directory: Path, dice: random.Random) -> Part:
    """A page file of the ssd tier."""
    tier = SsdTier(directory, 1 << 30, io="buffered")
    page = torch.randint(0, 256, (3 * 4096,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    stored, read = Reservation(), Reservation()
    tier.reserve(page.numel() + tier.overhead_bytes, stored)
    room = stored.room
    tier.put(room, page, key="layers.0#coarse", layout={"format": "nvfp4"})
    (path,) = tier.directory.glob("*.page")
    data, memory = path.read_bytes(), MemoryTier("cpu", torch.device("cpu"), 1 << 30)
    memory.reserve(page.numel(), read)
    out = read.room.tensor

    def load() -> tuple:
        out.zero_()
        tier.get(room, out, key="layers.0#coarse")
        return bits(out)

    def damages() -> Iterator[Damage]:
        while True:
            yield planted(path, dice) if dice.random() < 0.05 else writing(path, *bent(data, dice))

    return Part("page", tier.directory, keeping_one(path), damages(), load, bits(page))


def keeping_one(path: Path) -> Callable[[], None]:
    """The call that puts one file back, in a directory that is in use."""
    data = path.read_bytes()

    def restore() -> None:
        if path.is_dir() and not path.is_symlink():
            path.rmdir()
        path.unlink(missing_ok=True)
        path.write_bytes(data)

    return restore


def comparable(state: Any) -> Any:
    """A nested state without tensors, which do not compare as a whole."""
    if isinstance(state, torch.Tensor):
        return bits(state)
    if isinstance(state, dict):
        return {key: comparable(item) for key, item in state.items()}
    return [comparable(item) for item in state] if isinstance(state, list) else (type(state), state)


def checkpoint_part(directory: Path, dice: random.Random) -> Part:
    """A checkpoint of scripts/train."""
    directory.mkdir()
    path = directory / "checkpoint.safetensors"
    moments = {0: {"step": torch.tensor(4.0), "exp_avg": torch.randn(2, 3, generator=torch.Generator().manual_seed(0))}}
    write_checkpoint(
        path,
        {
            "config": {"lr": 1e-3, "init": None, "shape": {"layers": 2}},
            "step": 4,
            "losses": [2.5, 1.0],
            "log_bytes": 7,
            "model": {"weight": torch.arange(6.0).reshape(2, 3)},
            "optimizer": {"state": moments, "param_groups": [{"lr": 1e-3, "betas": [0.9, 0.95], "params": [0]}]},
            "random": {"cpu": torch.get_rng_state()},
        },
    )
    data, tensors, damages = path.read_bytes(), read(path), header_damages(path, dice)
    tree = json.loads(TensorFile(path).read("state").numpy().tobytes())

    def all_of_it() -> Iterator[Damage]:
        while True:
            kind = dice.random()
            if kind < 0.2:
                yield next(damages)
            elif kind < 0.6:
                yield writing(path, *bent(data, dice))
            else:
                what, other = with_other_node(tree, dice)
                if kind > 0.8:
                    what, other = f"sealed, {what}", sealed_manifest(other)
                text = torch.frombuffer(bytearray(encoded(other)), dtype=torch.uint8)
                yield f"state: {what}", lambda text=text: save_file(tensors | {"state": text}, path)

    def load() -> Any:
        return comparable(Checkpoint(path).read())

    return Part("checkpoint", directory, keeping(directory), all_of_it(), load, load(), lambda what: "sealed" in what)


def config_part(directory: Path, dice: random.Random) -> Part:
    """TOML: each preset, damaged. Other values may be as good; what is accepted must be a config that is valid."""
    directory.mkdir()
    presets = [vbrt.load_config(name) for name in preset_names()]
    path = directory / "own.toml"
    path.write_bytes(toml_text(presets[0]).encode())

    def damages() -> Iterator[Damage]:
        while True:
            config = dice.choice(presets)
            if dice.random() < 0.02:
                yield planted(path, dice)
            elif dice.random() < 0.5:
                yield writing(path, *bent(toml_text(config).encode(), dice))
            else:
                key = dice.choice(re.findall(r"^\w+ = .*$", toml_text(config), re.M))
                value = json.dumps(dice.choice(HOSTILE)).replace("NaN", "nan").replace("Infinity", "inf")
                text = toml_text(config).replace(key, f"{key.split(' = ')[0]} = {value}", 1)
                yield writing(path, f"{key} -> {value:.60}", text.encode("utf-8", "replace"))

    def load() -> Any:
        config = vbrt.load_config(path)
        assert type(config).from_dict(config.to_dict(), source=config.source) == config
        return config.to_dict()

    return Part("config", directory, keeping(directory), damages(), load, load(), lambda what: True)


def pickle_part(directory: Path, dice: random.Random) -> Part | None:
    """pytorch_model.bin of a model directory; the format has no digest of values, so names are compared."""
    try:
        from transformers import LlamaConfig, LlamaForCausalLM
    except ImportError:
        return None
    model = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=16,
            intermediate_size=16,
            num_hidden_layers=1,
            vocab_size=8,
            num_attention_heads=2,
            num_key_value_heads=2,
        )
    )
    model.config.save_pretrained(directory)
    path = directory / "pytorch_model.bin"
    torch.save(model.state_dict(), path)
    data = path.read_bytes()

    def load() -> list[str]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with vbrt.from_pretrained(directory, "dense") as vb:
                return sorted(vb.state_dict())

    def damages() -> Iterator[Damage]:
        while True:
            yield planted(path, dice) if dice.random() < 0.03 else writing(path, *bent(data, dice))

    return Part("pytorch_model.bin", directory, keeping(directory), damages(), load, load(), lambda what: True)


PARTS = {
    "manifest": (30, manifest_part),
    "old-manifest": (6, old_manifest_part),
    "header": (20, header_part),
    "shard": (14, shard_part),
    "planes": (6, fine_part),
    "embedded": (8, embedded_part),
    "index": (6, index_part),
    "page": (10, page_part),
    "checkpoint": (14, checkpoint_part),
    "config": (10, config_part),
    "pickle": (1, pickle_part),
    "gguf": (8, gguf_part),
    "awq": (4, published_part("awq")),
    "gptq": (4, published_part("asymmetric gptq")),
    "gptq-act-order": (3, published_part("act-order gptq")),
    "compressed-tensors": (4, published_part("asymmetric compressed")),
    "mlx": (4, published_part("mlx")),
    "fp8": (3, published_part("fp8 blocks")),
    "int8": (3, published_part("asymmetric int8")),
    "llm-int8": (3, published_part("llm.int8")),
    "torchao-int8": (2, published_part("torchao int8")),
    "torchao-int4": (2, published_part("torchao int4")),
    "torchao-tiles": (2, published_part("torchao int4 in tiles")),
    "gptq-8": (2, published_part("asymmetric gptq 8")),
    "compressed-8": (2, published_part("asymmetric packed int8")),
    "experts-manifest": (8, of_experts(manifest_part)),
    "experts-header": (6, of_experts(header_part)),
    "experts-planes": (4, of_experts(fine_part)),
}
#: by name: the weight of its share in all inputs, and what makes it


# -- the loop ---------------------------------------------------------------------------------------------------------


def outcome(part: Part, what: str) -> str:
    """What became of an input; "WRONG" begins what may not be."""
    try:
        got = part.load()
    except VBError as error:
        return "refused" if str(part.where) in str(error) else f"WRONG: does not name the file: {error}"
    except Exception as error:  # noqa: BLE001 - finding these is what this is for
        return f"WRONG: {type(error).__name__}: {error}"
    if got == part.expected:
        return "same"
    return "loads" if part.may_differ(what) else "WRONG: another value"


def run(part: Part, count: int) -> Counter[str]:
    """The outcomes of so many inputs; what may not be is printed."""
    outcomes: Counter[str] = Counter()
    for _ in range(count):
        what, damage = next(part.damages)
        damage()
        faulthandler.dump_traceback_later(HANGS_SECONDS, exit=True)
        result = outcome(part, what)
        faulthandler.cancel_dump_traceback_later()
        if result.startswith("WRONG"):
            print(f"{part.name}: {what}: {result:.300}", flush=True)
        outcomes[result if not result.startswith("WRONG") else "WRONG"] += 1
        part.restore()
    return outcomes


def bounded(nbytes: int) -> tuple[int, int]:
    """Let the process have so much more address space than now; returns the limits before."""
    limits = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + nbytes, limits[1]))
    return limits


def fuzz(count: int, seed: int, only: list[str]) -> int:
    """Run the parts, `count` inputs over all; returns how many did what none may."""
    wrong = total = 0
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name in only:
            weight, make = PARTS[name]
            part = make(Path(folder) / name, random.Random(f"{seed} {name}"))
            if part is None:
                print(f"{name}: left out, it needs transformers", flush=True)
                continue
            share = weight / sum(PARTS[each][0] for each in only)
            limits, start = bounded(ROOM_BYTES), time.monotonic()
            try:
                outcomes = run(part, max(1, round(count * share)))
            finally:
                resource.setrlimit(resource.RLIMIT_AS, limits)
            wrong, total = wrong + outcomes["WRONG"], total + outcomes.total()
            counted = ", ".join(f"{outcomes[key]} {key}" for key in OUTCOMES if outcomes[key])
            print(f"{part.name}: {outcomes.total()} inputs: {counted}; {time.monotonic() - start:.0f} s", flush=True)
    print(f"{total} inputs, {wrong} wrong")
    return wrong


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="scripts/fuzz", description=__doc__.split("\n\n")[0])
    parser.add_argument("--count", type=int, default=60_000, help="inputs over all parts (default: 60000)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", choices=list(PARTS), default=list(PARTS), help="(default: all parts)")
    args = parser.parse_args(arguments)
    torch.set_num_threads(1)
    return 1 if fuzz(args.count, args.seed, args.only) else 0


if __name__ == "__main__":
    sys.exit(main())
