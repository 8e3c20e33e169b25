"""Routed experts in GGUF: per layer, stacks [E, N, K] of gate, up and down projections, and biases.

transformers fuses gate and up into one parameter, laid out by `is_transposed` and `is_concatenated`: most classes have
[E, 2 N, K], gate first; gpt-oss has it transposed, gate and up interleaved. transformers' own GGUF reader knows some
architectures of the first kind.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["expert_sources"]

_NAME = re.compile(r"blk\.(\d+)\.ffn_(gate|up|down)_exps\.(weight|bias)$")
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")

Run = Callable[[Mapping[str, Tensor]], Tensor]


def expert_sources(model: nn.Module, names: Iterable[str]) -> Iterator[tuple[str, tuple[str, ...], Run]]:
    """Yield per expert parameter: model name, file names, and the function that makes its value of theirs."""
    found: dict[tuple[str, str, str], str] = {}
    for name in names:
        if match := _NAME.match(name):
            found[match.groups()] = name
    for path, module in model.named_modules() if found else ():
        layer = _LAYER.search(path)
        if layer is not None and hasattr(module, "is_transposed"):
            yield from _of_module(path, module, layer[1], found)


def _of_module(
    path: str, module: Any, layer: str, found: Mapping[tuple[str, str, str], str]
) -> Iterator[tuple[str, tuple[str, ...], Run]]:
    for kind, ending in (("weight", ""), ("bias", "_bias")):
        gate, up, down = (found.get((layer, part, kind)) for part in ("gate", "up", "down"))
        turn = module.is_transposed and kind == "weight"
        if gate and up:
            join = partial(_joined, gate, up, concatenated=module.is_concatenated, turn=turn)
            yield f"{path}.gate_up_proj{ending}", (gate, up), join
        if down:
            yield f"{path}.down_proj{ending}", (down,), partial(_turned, down, turn=turn)


def _turned(name: str, values: Mapping[str, Tensor], *, turn: bool) -> Tensor:
    return values[name].transpose(1, 2) if turn else values[name]


def _joined(gate: str, up: str, values: Mapping[str, Tensor], *, concatenated: bool, turn: bool) -> Tensor:
    parts = values[gate], values[up]
    rows = torch.cat(parts, dim=1) if concatenated else torch.stack(parts, dim=2).flatten(1, 2)
    return rows.transpose(1, 2) if turn else rows
