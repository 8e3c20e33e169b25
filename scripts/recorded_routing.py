"""Recorded routing for a benchmark's shape: layers side by side, repeated, with shuffled ids.

A recording of a small model drives a larger shape: as many of its layers side by side stand for one layer as the
shape's experts a token need, and all are repeated until there are enough layers. Each use of a recorded layer has its
ids shuffled anew, within its own part of the experts. Reuse and skew are the recording's; experts beyond the parts are
never routed to.
"""

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from vbrt import ArgumentError
from vbrt.model.phase import DECODE
from vbrt.residency.access_trace import Pass
from vbrt.residency.routing_file import read_routing
from vbrt.residency.routing_trace import Routed, RoutedLayer, Routing


@dataclass(frozen=True)
class Recorded:
    """A recording on a benchmark's layers.

    Attributes:
        about: the file, its shape, and how it was mapped, for results.
    """

    routing: Routing
    about: dict[str, object]


def mapped(path: Path, layers: Sequence[RoutedLayer], tokens: int) -> Recorded:
    """Map the first decoded tokens of a recording onto other layers.

    Raises:
        ArgumentError: the file cannot be read, or its layers, experts or tokens cannot be mapped.
    """
    recording = read_routing(path)
    experts, top_k = _one_shape(path, recording.layers)
    chosen = _decoded(path, recording, tokens)
    width, parts = len(recording.layers), _parts(path, experts, top_k, layers)
    places = [
        [_Place(number * parts + part, width, experts, first=part * experts) for part in range(parts)]
        for number in range(len(layers))
    ]
    records: list[Pass | Routed] = []
    for token in chosen:
        records.append(Pass(DECODE))
        records += [
            Routed(number, (tuple(sorted(id for place in group for id in place.ids(token))),))
            for number, group in enumerate(places)
        ]
    about = {"file": path.name, "layers": width, "experts": experts, "top_k": top_k, "side_by_side": parts}
    about |= {"repeated": len(layers) * parts / width, "of_experts": layers[0].experts}
    return Recorded(Routing(tuple(layers), tuple(records)), about)


class _Place:
    """Use of a recorded layer: its experts, shuffled, from the id `first` on."""

    def __init__(self, use: int, width: int, experts: int, *, first: int) -> None:
        self._layer, self._ids = use % width, list(range(first, first + experts))
        if use >= width or first:  # the first use of a layer at its own ids is the recording itself
            random.Random(f"place {use}").shuffle(self._ids)

    def ids(self, token: list[tuple[int, ...]]) -> list[int]:
        return [self._ids[expert] for expert in token[self._layer]]


def _one_shape(path: Path, layers: Sequence[RoutedLayer]) -> tuple[int, int]:
    """The experts of each recorded layer, in all and per token. Raises ArgumentError: layers differ."""
    shapes = {(layer.experts, layer.top_k): layer.name for layer in layers}
    if len(shapes) != 1:
        different = ", ".join(f"{name} {top_k} of {experts}" for (experts, top_k), name in shapes.items())
        raise ArgumentError(f"{path}: its layers differ ({different}); expected layers of one shape")
    return next(iter(shapes))


def _parts(path: Path, experts: int, top_k: int, layers: Sequence[RoutedLayer]) -> int:
    """How many recorded layers stand for one layer. Raises ArgumentError: no number does."""
    for layer in layers:
        parts, rest = divmod(layer.top_k, top_k)
        if rest:
            raise ArgumentError(
                f"{path}: {top_k} experts a token; {layer.name} has {layer.top_k}, expected a divisor of that"
            )
        if parts * experts > layer.experts:
            raise ArgumentError(
                f"{path}: {parts} layers of {experts} experts side by side, {top_k} a token each; {layer.name} has "
                f"{layer.experts} experts, expected at least {parts * experts}"
            )
    return layers[0].top_k // top_k


def _decoded(path: Path, recording: Routing, tokens: int) -> list[list[tuple[int, ...]]]:
    """The experts by token and layer of the passes with one token. Raises ArgumentError: too few."""
    passes: list[list[Routed]] = []
    for item in recording.records:
        if isinstance(item, Pass):
            passes.append([])
        elif passes:
            passes[-1].append(item)
    order = list(range(len(recording.layers)))
    found = [
        [item.tokens[0] for item in items]
        for items in passes
        if [item.layer for item in items] == order
        and all([len(token) for token in item.tokens] == [recording.layers[item.layer].top_k] for item in items)
    ]
    if len(found) < tokens:
        raise ArgumentError(f"{path}: {len(found)} tokens decoded one by one; expected at least {tokens}")
    return found[:tokens]
