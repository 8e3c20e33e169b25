"""What scripts/fuzz does to files: bytes, values of JSON, links and FIFOs in their place."""

import copy
import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

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
