"""Expert routing traces: the experts of each token, pass by pass, recorded or generated.

    routing = generate_routing(qwen, tokens=256)             # or read_routing("trace.routing")
    simulate("experts", routing, capacity_bytes)

`routing_file` has the format of files. Records are in the order in which layers ran.
"""

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from vbrt.config.argument_checks import check_instance, check_whole
from vbrt.residency.access_trace import Announce, Pass
from vbrt.residency.plan import Plan
from vbrt.residency.policy import FORWARD

__all__ = ["Routed", "RoutedLayer", "Routing", "generate_routing", "plan_layers"]

#: share of a generated trace's selections by reuse distance in tokens (1, 2, ... 8): 45 % at 1, half within 2, 80 %
#: within 8, as published for Qwen3-30B-A3B
_REUSE = (0.45, 0.12, 0.08, 0.05, 0.04, 0.025, 0.02, 0.015)
_SKEW = 0.6  # Zipf exponent of selections without reuse


@dataclass(frozen=True, slots=True)
class RoutedLayer:
    """Layer of routed experts: module name, experts in all and per token, bytes of an expert's page by plane."""

    name: str
    experts: int
    top_k: int
    page_bytes: Mapping[str, int] = field(default_factory=lambda: {"coarse": 1})

    def keys(self, expert: int) -> tuple[str, ...]:
        """Return the keys of an expert's pages."""
        return tuple(f"{self.name}#{plane}.{expert}" for plane in self.page_bytes)

    @property
    def expert_bytes(self) -> int:
        """Bytes of an expert's pages."""
        return sum(self.page_bytes.values())


def plan_layers(plan: Plan) -> tuple[RoutedLayer, ...]:
    """Return the layers of routed experts of a plan."""
    layers = []
    for swap in plan.routed:
        largest: dict[str, int] = {}
        for page in swap.pages:
            largest[page.plane] = max(page.nbytes, largest.get(page.plane, 0))
        layers.append(RoutedLayer(swap.name, swap.experts, swap.top_k, largest))
    return tuple(layers)


@dataclass(frozen=True, slots=True)
class Routed:
    """Routing of one layer in one pass: the experts of each token, ascending."""

    layer: int
    tokens: tuple[tuple[int, ...], ...]

    @property
    def touched(self) -> list[int]:
        """Experts of all tokens, ascending, each once."""
        return sorted({expert for token in self.tokens for expert in token})


@dataclass(frozen=True)
class Routing:
    """Routing trace: passes over layers of routed experts.

    Attributes:
        layers: in model order.
        records: in execution order, with a `Pass` before each pass.
    """

    layers: tuple[RoutedLayer, ...]
    records: tuple[Pass | Routed, ...]

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes of each page by key."""
        return {
            f"{layer.name}#{plane}.{expert}": nbytes
            for layer in self.layers
            for plane, nbytes in layer.page_bytes.items()
            for expert in range(layer.experts)
        }

    @property
    def page_bytes(self) -> int:
        """Bytes of all experts' pages."""
        return sum(layer.experts * layer.expert_bytes for layer in self.layers)

    @property
    def tokens(self) -> int:
        """Tokens routed by the first layer."""
        return sum(len(record.tokens) for record in self.records if isinstance(record, Routed) and not record.layer)

    def only(self, layer: str | int) -> "Routing":
        """Return the routing of one layer, by name or number. Raises ValueError: unknown name."""
        names = [each.name for each in self.layers]
        if isinstance(layer, str):
            if layer not in names:
                raise ValueError(f"{layer}: not among the layers of this routing, {', '.join(names[:3])}, ...")
            layer = names.index(layer)
        kept = (r for r in self.records if isinstance(r, Pass) or r.layer == layer)
        own = tuple(r if isinstance(r, Pass) else replace(r, layer=0) for r in kept)
        return Routing((self.layers[layer],), own)

    def leases(self, room_bytes: int = 0, *, at_once: int = 1) -> Iterator[Pass | Announce | tuple[str, ...]]:
        """Yield a trace for `simulate`: the leases of VB expert layers.

        One lease takes all touched experts of a pass. A pass with at least as many selections as experts is a scan:
        announced, and leased `at_once` pages at a time. Experts that exceed `room_bytes` (0: unlimited) are announced,
        too, and leased in chunks that fit.
        """
        for record in self.records:
            if isinstance(record, Pass):
                yield record
                continue
            layer, experts = self.layers[record.layer], record.touched
            most = room_bytes // layer.expert_bytes if room_bytes else layer.experts
            if sum(map(len, record.tokens)) >= layer.experts:
                most = at_once // len(layer.page_bytes)
            elif len(experts) <= most:
                yield tuple(key for expert in experts for key in layer.keys(expert))
                continue
            yield Announce(tuple(key for expert in experts for key in layer.keys(expert)))
            for first in range(0, len(experts), max(1, most)):
                yield tuple(key for expert in experts[first : first + max(1, most)] for key in layer.keys(expert))


def generate_routing(layers: Sequence[RoutedLayer], *, tokens: int, seed: int = 0, phase: str = FORWARD) -> Routing:
    """Return a synthetic routing of `tokens` passes of one token each, with published reuse rates.

    45 % of the selections repeat an expert of the previous token, 80 % one of the last eight tokens; the rest is drawn
    from a Zipf distribution. Layers with few experts reuse more. The same arguments give the same routing on every
    machine.
    """
    check_instance(layers, Sequence, "generate_routing(): layers", "a list of RoutedLayer")
    for layer in layers:
        check_instance(layer, RoutedLayer, "generate_routing(): a layer", "a RoutedLayer, as plan_layers() has them")
    check_whole(tokens, "generate_routing(): tokens", most=1 << 24)
    check_whole(seed, "generate_routing(): seed", least=-(1 << 64), most=1 << 64)
    check_instance(phase, str, "generate_routing(): phase", "the name of a phase")
    selections = [_layer_routing(layer, tokens, random.Random(f"{seed} {n}")) for n, layer in enumerate(layers)]
    records: list[Pass | Routed] = []
    for token in range(tokens):
        records.append(Pass(phase))
        records += [Routed(n, (chosen[token],)) for n, chosen in enumerate(selections)]
    return Routing(tuple(layers), tuple(records))


def _layer_routing(layer: RoutedLayer, tokens: int, rng: random.Random) -> list[tuple[int, ...]]:
    favour = list(range(layer.experts))
    rng.shuffle(favour)
    weights = {expert: (rank + 1) ** -_SKEW for rank, expert in enumerate(favour)}
    by_age: list[list[int]] = [[] for _ in _REUSE]  # experts that were last used 1, 2, ... tokens ago
    others = dict.fromkeys(favour)  # not used within the last len(_REUSE) tokens
    selections: list[tuple[int, ...]] = []
    for _ in range(tokens):
        chosen = []
        while len(chosen) < layer.top_k:
            pools = [*by_age, list(others)]
            shares = [share if pool else 0.0 for share, pool in zip((*_REUSE, 1 - sum(_REUSE)), pools, strict=True)]
            pool = pools[rng.choices(range(len(pools)), shares)[0]]
            expert = rng.choice(pool) if pool is not pools[-1] else rng.choices(pool, [weights[e] for e in pool])[0]
            pool.remove(expert)
            others.pop(expert, None)
            chosen.append(expert)
        by_age.insert(0, chosen)
        others.update(dict.fromkeys(by_age.pop()))
        selections.append(tuple(sorted(chosen)))
    return selections
