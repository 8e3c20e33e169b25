"""The files of models that scripts/fuzz damages: saves, their manifests and shards, and checkpoints."""

import copy
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

import vbrt
from scripts.fuzz_damage import Damage, Part, bent, encoded, keeping, mixed, planted, read, with_other_node, writing
from vbrt.saves.common.manifest import content_digest
from vbrt.saves.files.safetensors_file import digest
from vbrt.saves.saved.embedded_planes import embedded_tensors
from vbrt.wrapper.wrapper_of import attachment_of


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


class Routed(nn.Module):
    """Routed experts of transformers, and their router."""

    def __init__(self) -> None:
        from transformers import Qwen3MoeConfig
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

        super().__init__()
        torch.manual_seed(0)
        config = Qwen3MoeConfig(hidden_size=32, moe_intermediate_size=32, num_experts=3, num_experts_per_tok=2)
        self.router, self.experts = nn.Linear(32, 3, bias=False), Qwen3MoeExperts(config)
        for parameter in self.experts.parameters():
            nn.init.normal_(parameter, std=0.02)
        self.register_buffer("scale", torch.full((3,), 2.0), persistent=False)


Makes = Callable[[], nn.Module]


def on_meta(make: Makes = Net) -> nn.Module:
    """The architecture, and values of its own for what a checkpoint does not hold."""
    with torch.device("meta"):
        model = make().eval()
    model.scale = torch.zeros(3)
    return model


def of_experts(part: Callable[..., Part]) -> Callable[..., Part | None]:
    """The same part of a model with routed experts; none without transformers."""

    def make(directory: Path, dice: random.Random) -> Part | None:
        try:
            Routed()
        except ImportError:
            return None
        made = part(directory, dice, Routed)
        return replace(made, name=f"{made.name}, routed experts")

    return make


def bits(tensor: torch.Tensor) -> tuple:
    """What must not change: dtype, shape and bytes."""
    return tensor.dtype, tuple(tensor.shape), tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()


def content(vb: Any) -> dict[str, Any]:
    """All values of a loaded model, and what of it trains."""
    with vb:
        values = {name: bits(tensor) for name, tensor in vb.module.state_dict().items()}
        values |= {f"{name} (buffer)": bits(tensor) for name, tensor in vb.module.named_buffers()}
        values["trains"] = sorted(name for name, p in vb.module.named_parameters() if p.requires_grad)
        values["layers"] = {
            name: (layer.handle.spec.format, layer.handle.spec.fine, layer.handle.trainable)
            for name, layer in vb.registry.items()
        }
        values["config"] = vb.settings.to_dict()
        return values


def loading(directory: Path, make: Makes = Net, **overrides: Any) -> Callable[[], dict[str, Any]]:
    """The call that loads it."""
    return lambda: content(vbrt.load(directory, on_meta(make), **overrides))


def saved(directory: Path, make: Makes = Net) -> None:
    """A save of the model."""
    weights = {"format": "nvfp4", "fine": "exact", "min_parameters": 0, "keep_head": False}
    with vbrt.wrap(make().bfloat16().eval(), weights=weights, tiers={"cpu": {"budget": "64MiB"}}) as vb:
        vb.save(directory)


def sealed_manifest(tree: Any) -> Any:
    """With the digest of its content."""
    if isinstance(tree, dict) and "digest" in tree:
        tree["digest"] = content_digest(json.loads(json.dumps(tree)))
    return tree


def manifest_part(directory: Path, dice: random.Random, make: Makes = Net) -> Part:
    """vbrt.json of a save."""
    saved(directory, make)
    path = directory / "vbrt.json"
    return Part(
        "manifest",
        directory,
        keeping(directory),
        mixed(path, dice, json.loads(path.read_bytes()), sealed_manifest),
        loading(directory, make),
        loading(directory, make)(),
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


def header_part(directory: Path, dice: random.Random, make: Makes = Net) -> Part:
    """The header of a checkpoint of the dense model, which has no digests."""
    directory.mkdir()
    state = make().state_dict()
    state.pop("again.weight", None)
    save_file(state, directory / "model.safetensors", {"format": "pt"})
    load = loading(directory, make, config="dense", weights={"min_parameters": 0, "keep_head": False})
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


def fine_part(directory: Path, dice: random.Random, make: Makes = Net) -> Part:
    """Planes of a save with other bytes under digests that are right."""
    saved(directory, make)
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
        "planes",
        directory,
        keeping(directory),
        damages(),
        loading(directory, make),
        loading(directory, make)(),
        lambda what: True,
    )


def embedded_part(directory: Path, dice: random.Random) -> Part:
    """Planes as `save_pretrained` writes them: the manifest is in the header, and only planes have digests."""
    directory.mkdir()
    path = directory / "model.safetensors"
    weights = {"format": "nvfp4", "fine": "exact", "min_parameters": 0, "keep_head": False}
    with vbrt.wrap(Net().bfloat16().eval(), weights=weights, tiers={"cpu": {"budget": "64MiB"}}) as vb:
        tensors, metadata = embedded_tensors(attachment_of(vb.materialize().module))
        save_file(tensors, path, metadata)
    load = loading(directory)
    return Part(
        "planes of another library's files", directory, keeping(directory), header_damages(path, dice), load, load()
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
