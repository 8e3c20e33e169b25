"""Damaged and hostile files, from a fixed seed: each must be refused by a `VBError` that names the file, or load just
what was saved. Never another value, another exception, a hang, or more memory than a small file can need.

Where a file has no digest, or the fuzzer has made one that is right ("sealed"), other content may load: then it must be
content that is whole, and loading it must raise nothing. Such inputs are counted as "loads". Prints a line for each
part, the outcomes counted, and each input that did what none may; exits 1 if there was one.
"""

import argparse
import copy
import faulthandler
import json
import os
import random
import re
import resource
import shutil
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import torch  # after the checkout is on the path
from safetensors.torch import load_file, save_file
from torch import nn

import vbrt
from scripts.toml_text import toml_text
from scripts.train_files import Checkpoint, write_checkpoint
from vbrt.config import preset_names
from vbrt.errors import VBError
from vbrt.saves.manifest import content_digest
from vbrt.saves.tensorfile import TensorFile, digest
from vbrt.tiers import MemoryTier, SsdTier

HANGS_SECONDS = 20
ROOM_BYTES = 256 << 20  # of address space, beyond what the process has: no input is larger than a MiB
HOSTILE = (
    None,
    True,
    False,
    0,
    1,
    -1,
    2,
    1.5,
    -0.0,
    float("inf"),
    float("nan"),
    1 << 31,
    1 << 63,
    1 << 64,
    10**400,
    "",
    "x",
    "load",
    "..",
    "../x",
    "a\0b",
    "\ud800",
    "é" * 50,
    "y" * 5000,
    "float16",
    "int8",
    "dense",
    "nf4",
    "parameter",
    "tensor",
    [],
    {},
    [[]],
    {"a": 1},
    [0] * 50,
    [None],
    ["coarse"],
    [1 << 62, 1 << 62],
)

OUTCOMES = ("refused", "same", "loads", "WRONG")

Damage = tuple[str, Callable[[], None]]
"""What is done to the files, in words, and the call that does it."""


@dataclass(frozen=True, slots=True)
class Part:
    """Files of one kind. `damages` are endless; `load` gives what can be compared with `expected`; `may_differ` says of
    an input whether other content may load."""

    name: str
    where: Path
    restore: Callable[[], None]
    damages: Iterator[Damage]
    load: Callable[[], Any]
    expected: Any
    may_differ: Callable[[str], bool] = lambda what: False


# -- damage -----------------------------------------------------------------------------------------------------------


def bent(data: bytes, dice: random.Random) -> tuple[str, bytes]:
    """Bytes with one thing wrong."""
    at, kind = dice.randrange(len(data)), dice.choice(("bit", "bit", "bit", "byte", "cut", "drop", "insert", "grow"))
    if kind == "bit":
        bit = dice.randrange(8)
        return f"bit {bit} of byte {at}", data[:at] + bytes([data[at] ^ 1 << bit]) + data[at + 1 :]
    if kind == "byte":
        return f"byte {at}", data[:at] + bytes([dice.randrange(256)]) + data[at + 1 :]
    if kind == "cut":
        return f"cut at {at}", data[:at]
    if kind == "drop":
        return f"without bytes from {at}", data[:at] + data[at + dice.randint(1, 40) :]
    if kind == "insert":
        return f"bytes put in at {at}", data[:at] + dice.randbytes(dice.randint(1, 40)) + data[at:]
    return "bytes at the end", data + dice.randbytes(dice.randint(1, 5000))


def nodes(tree: Any, path: tuple = ()) -> Iterator[tuple]:
    """The paths of all nodes below the root."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in items:
        yield (*path, key)
        yield from nodes(value, (*path, key))


def with_other_node(tree: Any, dice: random.Random) -> tuple[str, Any]:
    """A copy with one node changed."""
    tree, values = copy.deepcopy(tree), list(nodes(tree))
    path = dice.choice(values)
    parent = tree
    for key in path[:-1]:
        parent = parent[key]
    key, kind = path[-1], dice.choice(("value", "value", "value", "delete", "name", "other", "twice", "number"))
    where = ".".join(map(str, path))
    if kind == "delete":
        del parent[key]
    elif kind == "name" and isinstance(parent, dict):
        parent[str(dice.choice(HOSTILE))] = parent.pop(key)
    elif kind == "twice" and isinstance(parent, list):
        parent.insert(key, copy.deepcopy(parent[key]))
    elif kind == "other":
        other = tree
        for step in dice.choice(values):
            other = other[step]
        parent[key] = copy.deepcopy(other)
    elif kind == "number" and type(parent[key]) is int:
        parent[key] += dice.choice((-1, 1, 1 << 10, 1 << 40, 1 << 70))
    else:
        parent[key] = dice.choice(HOSTILE)
        return f"{where} = {parent[key]!r:.60}", tree
    return f"{where}: {kind}", tree


def planted(path: Path, dice: random.Random) -> tuple[str, Callable[[], None]]:
    """Something else in the place of a file."""
    kind = dice.choice(("FIFO", "directory", "link to itself", "link to nothing", "nothing", "empty", "64 GiB long"))

    def plant() -> None:
        path.unlink()
        if kind == "FIFO":
            os.mkfifo(path)
        elif kind == "directory":
            path.mkdir()
        elif kind.startswith("link"):
            path.symlink_to(path.name if kind == "link to itself" else "nowhere")
        elif kind != "nothing":
            path.touch()
            os.truncate(path, (64 << 30) if kind != "empty" else 0)

    return f"{path.name}: {kind}", plant


def writing(path: Path, what: str, data: bytes) -> Damage:
    """A file with other bytes."""
    return f"{path.name}: {what}", lambda: path.write_bytes(data) and None


def encoded(tree: Any) -> bytes:
    """JSON, whatever the tree holds."""
    return json.dumps(tree).encode("utf-8", "surrogatepass")


def mixed(path: Path, dice: random.Random, tree: Any, seal: Callable[[Any], Any] | None) -> Iterator[Damage]:
    """Bits, nodes, sealed nodes and planted things, for a file of JSON."""
    data = path.read_bytes()
    while True:
        kind = dice.random()
        if kind < 0.02:
            yield planted(path, dice)
        elif kind < 0.5:
            yield writing(path, *bent(data, dice))
        else:
            what, other = with_other_node(tree, dice)
            if seal is not None and kind > 0.75:
                what, other = f"sealed, {what}", seal(other)
            yield writing(path, what, encoded(other))


def is_still(path: Path, data: bytes) -> bool:
    """Whether a file holds these bytes."""
    return path.is_file() and path.stat().st_size == len(data) and path.read_bytes() == data


def read(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a file, which the library would leave mapped from a file that will be cut."""
    return {name: tensor.clone() for name, tensor in load_file(path).items()}


def keeping(directory: Path) -> Callable[[], None]:
    """The call that puts the files of a directory back."""
    kept = {path.name: path.read_bytes() for path in directory.iterdir()}

    def restore() -> None:
        for path in directory.iterdir():
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            elif path.name not in kept or path.is_symlink() or not is_still(path, kept[path.name]):
                path.unlink()
        for name, data in kept.items():
            if not (directory / name).exists():
                (directory / name).write_bytes(data)

    return restore


# -- saves and checkpoints of models ----------------------------------------------------------------------------------


class Net(nn.Module):
    """A layer in 4 bits, one held exactly, a tie, a norm with buffers, one of them not in state dicts."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.again, self.down = nn.Linear(32, 32), nn.Linear(32, 32, bias=False), nn.Linear(32, 24)
        self.again.weight = self.up.weight
        self.norm = nn.BatchNorm1d(24)
        self.register_buffer("scale", torch.full((3,), 2.0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Of a batch."""
        return self.norm(self.down(self.again(self.up(x)))) * self.scale.sum()


def on_meta() -> nn.Module:
    """The architecture, and values of its own for what a checkpoint does not hold."""
    with torch.device("meta"):
        model = Net().eval()
    model.scale = torch.zeros(3)
    return model


def bits(tensor: torch.Tensor) -> tuple:
    """What must not change: dtype, shape and bytes."""
    return tensor.dtype, tuple(tensor.shape), tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def content(vb: Any) -> dict[str, Any]:
    """All values of a loaded model, and what of it trains."""
    with vb:
        values = {name: bits(tensor) for name, tensor in vb.model.state_dict().items()}
        values |= {f"{name} (buffer)": bits(tensor) for name, tensor in vb.model.named_buffers()}
        values["trains"] = sorted(name for name, p in vb.model.named_parameters() if p.requires_grad)
        values["layers"] = {
            name: (layer.handle.spec.format, layer.handle.spec.fine, layer.handle.trainable)
            for name, layer in vb.registry.items()
        }
        values["config"] = vb.settings.to_dict()
        return values


def loading(directory: Path, **overrides: Any) -> Callable[[], dict[str, Any]]:
    """The call that loads it."""
    return lambda: content(vbrt.load(directory, on_meta(), **overrides))


def saved(directory: Path) -> None:
    """A save of the model."""
    weights = {"format": "nvfp4", "fine": "exact", "min_parameters": 0, "keep_head": False}
    with vbrt.wrap(Net().bfloat16().eval(), weights=weights, tiers={"cpu": {"budget": "64MiB"}}) as vb:
        vb.save(directory)


def sealed_manifest(tree: Any) -> Any:
    """With the digest of its content."""
    if isinstance(tree, dict) and "digest" in tree:
        tree["digest"] = content_digest(json.loads(json.dumps(tree)))
    return tree


def manifest_part(directory: Path, dice: random.Random) -> Part:
    """vbrt.json of a save."""
    saved(directory)
    path = directory / "vbrt.json"
    return Part(
        "manifest",
        directory,
        keeping(directory),
        mixed(path, dice, json.loads(path.read_bytes()), sealed_manifest),
        loading(directory),
        loading(directory)(),
        lambda what: "sealed" in what,
    )


def old_manifest_part(directory: Path, dice: random.Random) -> Part:
    """vbrt.json of version 1, which has no digest: what is not repeated elsewhere may change unseen."""
    saved(directory)
    path = directory / "vbrt.json"
    tree = json.loads(path.read_bytes())
    tree |= {"version": 1, "tensors": {name: [entry[0], entry[-1]] for name, entry in tree["tensors"].items()}}
    for layer in tree["layers"]:
        layer |= {"name": layer["sites"][0][0], "aliases": [m for m, *_ in layer["sites"][1:]]}
        layer["kind"] = layer["sites"][0][2]
        del layer["sites"], layer["matrices"]
    del tree["digest"]
    path.write_bytes(encoded(tree))
    return Part(
        "manifest of version 1",
        directory,
        keeping(directory),
        mixed(path, dice, tree, None),
        loading(directory),
        loading(directory)(),
        lambda what: True,
    )


def sealed_header(tree: Any, size: int) -> bytes:
    """A file of this header, as long as it was."""
    text = encoded(tree)
    return len(text).to_bytes(8, "little") + text + bytes(size)


def header_damages(path: Path, dice: random.Random) -> Iterator[Damage]:
    """Bits of the header and its length, its nodes, and the file's length."""
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    tree = json.loads(data[8:end])
    while True:
        kind = dice.random()
        if kind < 0.02:
            yield planted(path, dice)
        elif kind < 0.6:
            what, head = bent(data[:end], dice)
            yield writing(path, what, head + (b"" if what.startswith("cut") else data[end:]))
        else:
            what, other = with_other_node(tree, dice)
            text = encoded(other)
            yield writing(path, what, len(text).to_bytes(8, "little") + text + data[end:])


def header_part(directory: Path, dice: random.Random) -> Part:
    """The header of a checkpoint of the dense model, which has no digests."""
    directory.mkdir()
    state = Net().state_dict()
    del state["again.weight"]
    save_file(state, directory / "model.safetensors", {"format": "pt"})
    load = loading(directory, config="dense", weights={"min_parameters": 0, "keep_head": False})
    return Part(
        "header", directory, keeping(directory), header_damages(directory / "model.safetensors", dice), load, load()
    )


def shard_part(directory: Path, dice: random.Random) -> Part:
    """A file of a save: all of it, header and tensors."""
    saved(directory)
    (path,) = directory.glob("*.safetensors")
    data, damages = path.read_bytes(), header_damages(path, dice)

    def both() -> Iterator[Damage]:
        while True:
            yield next(damages) if dice.random() < 0.5 else writing(path, *bent(data, dice))

    return Part("file of a save", directory, keeping(directory), both(), loading(directory), loading(directory)())


def fine_part(directory: Path, dice: random.Random) -> Part:
    """Planes of a save with other bytes under digests that are right."""
    saved(directory)
    (path,) = directory.glob("*.safetensors")
    tensors, tree = read(path), json.loads((directory / "vbrt.json").read_bytes())
    names = [name for name in tensors if tensors[name].numel()]

    def damages() -> Iterator[Damage]:
        while True:
            name = dice.choice(names)
            what, data = bent(tensors[name].contiguous().view(-1).view(torch.uint8).numpy().tobytes(), dice)
            size = tensors[name].dtype.itemsize
            data = bytearray(data[: len(data) // size * size])
            other = torch.frombuffer(data, dtype=tensors[name].dtype) if data else tensors[name].new_empty(0)
            if other.numel() == tensors[name].numel():
                other = other.view(tensors[name].shape)
            sealed = copy.deepcopy(tree)
            sealed["tensors"][name][2:] = [list(other.shape), digest(other)]

            def write(name: str = name, other: torch.Tensor = other, sealed: Any = sealed) -> None:
                save_file(tensors | {name: other}, path)
                (directory / "vbrt.json").write_bytes(encoded(sealed_manifest(sealed)))

            yield f"sealed, {name}: {what}", write

    return Part(
        "planes", directory, keeping(directory), damages(), loading(directory), loading(directory)(), lambda what: True
    )


def index_part(directory: Path, dice: random.Random) -> Part:
    """The index of a checkpoint in shards. It only names files, whose headers say what is in them."""
    directory.mkdir()
    state = list(Net().state_dict().items())
    files = {"model-1.safetensors": dict(state[:4]), "model-2.safetensors": dict(state[4:])}
    for name, tensors in files.items():
        tensors.pop("again.weight", None)
        save_file(tensors, directory / name, {"format": "pt"})
    tree = {"metadata": {"total_size": 1}, "weight_map": {key: name for name, part in files.items() for key in part}}
    path = directory / "model.safetensors.index.json"
    path.write_bytes(encoded(tree))
    load = loading(directory, config="dense", weights={"min_parameters": 0, "keep_head": False})
    return Part("index", directory, keeping(directory), mixed(path, dice, tree, None), load, load())


# -- page files, training checkpoints, configs ------------------------------------------------------------------------


def page_part(directory: Path, dice: random.Random) -> Part:
    """A page file of the ssd tier."""
    tier = SsdTier(directory, 1 << 30, io="buffered")
    page = torch.randint(0, 256, (3 * 4096,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    room = tier.reserve(page.numel() + tier.overhead_bytes)
    tier.put(room, page, key="layers.0#coarse", layout={"format": "nvfp4"})
    (path,) = tier.directory.glob("*.page")
    data, memory = path.read_bytes(), MemoryTier("cpu", torch.device("cpu"), 1 << 30)
    out = memory.reserve(page.numel()).tensor

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

        from vbrt.integrations.huggingface import load_causal_lm
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
    (directory / "tokenizer.json").write_text(
        '{"version": "1.0", "model": {"type": "WordLevel", "vocab": {"a": 0, '
        '"[UNK]": 1}, "unk_token": "[UNK]"}, "added_tokens": []}'
    )
    (directory / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    path = directory / "pytorch_model.bin"
    torch.save(model.state_dict(), path)
    data = path.read_bytes()

    def load() -> list[str]:
        return sorted(load_causal_lm(directory, warn=lambda line: None)[0].state_dict())

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
    "index": (6, index_part),
    "page": (10, page_part),
    "checkpoint": (14, checkpoint_part),
    "config": (10, config_part),
    "pickle": (1, pickle_part),
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
