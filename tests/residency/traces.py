"""Random traces for policies: passes over a model that skip, repeat, reorder and stop early."""

from dataclasses import dataclass
from itertools import chain

from hypothesis import strategies as st

from vbrt.residency.expert_room import largest_pages
from vbrt.residency.policy import Policy
from vbrt.residency.simulate import PASS, Announce, Pass, make_policy


@dataclass(frozen=True)
class Workload:
    """Pages by size in units, leases of one or two of them in passes, and room for them in units."""

    sizes: dict[str, int]
    passes: tuple[tuple[tuple[str, ...], ...], ...]
    marks: tuple[str, ...]  # the phase of each pass; "" for one that is not marked
    room: int
    kind: str
    prefetch: int
    scope: str = "layer"

    @property
    def trace(self) -> list:
        """What `simulate` takes: leases, with `Pass` before each pass that is marked."""
        marked = zip(self.passes, self.marks, strict=True)
        return [item for leases, mark in marked for item in ([Pass(mark)] if mark else []) + list(leases)]

    @property
    def group(self) -> int:
        """Pages that one lease takes, at most."""
        return max(len(keys) for leases in self.passes for keys in leases)


@dataclass(frozen=True)
class ExpertLoad:
    """Leases of experts and of other layers in passes, scans with their announcements, and room for them in units."""

    sizes: dict[str, int]
    trace: tuple
    room: int
    scope: str
    prefetch: int
    kind: str = "experts"
    group: int = 1


def policy_of(load: "Workload | ExpertLoad", unit: int = 1, *, kind: str = "", room: int | None = None) -> Policy:
    """The policy of a load, or another one, for pages whose sizes are in units of so many bytes."""
    layers = {layer: size * unit for layer, size in largest_pages(load.sizes).items()}
    options = {"prefetch": load.prefetch, "group": load.group, "scope": load.scope, "layers": layers}
    return make_policy(kind or load.kind, (load.room if room is None else room) * unit, **options)


@st.composite
def expert_loads(draw: st.DrawFn) -> ExpertLoad:
    """Loads whose every lease fits, of one or two layers of experts in one or two planes, and some others."""
    sizes: dict[str, int] = {}
    layers: list[tuple[str, int]] = []  # by name and number of experts; 0 for other layers
    for i in range(draw(st.integers(1, 3))):
        layers.append((f"layer{i}.experts", draw(st.integers(1, 6))) if not i or draw(st.booleans()) else (f"l{i}", 0))
    planes = draw(st.sampled_from([("coarse",), ("coarse", "fine")]))
    for layer, experts in layers:
        for plane in planes:
            same = draw(st.integers(1, 3))
            for e in range(experts):
                sizes[f"{layer}#{plane}.{e}"] = same if draw(st.booleans()) else draw(st.integers(1, 3))
            if not experts:
                sizes[f"{layer}#{plane}"] = same
    trace: list = []
    for _ in range(draw(st.integers(1, 6))):
        trace += [PASS] * draw(st.booleans())
        for layer, experts in layers:
            trace += draw(_leases(layer, experts, planes))
    leases = [item for item in trace if isinstance(item, tuple)]
    largest = max((sum(sizes[key] for key in keys) for keys in leases), default=1)
    room = draw(st.integers(largest, sum(sizes.values()) + 2))
    return ExpertLoad(sizes, tuple(trace), room, draw(st.sampled_from(["layer", "model"])), draw(st.integers(0, 3)))


@st.composite
def _leases(draw: st.DrawFn, layer: str, experts: int, planes: tuple[str, ...]) -> list:
    """One lease of a layer or of some of its experts, or an announced scan of many."""
    if not experts:
        return [tuple(f"{layer}#{plane}" for plane in planes)]
    touched = sorted(draw(st.sets(st.integers(0, experts - 1), min_size=1, max_size=experts)))
    if draw(st.integers(0, 3)):
        return [tuple(f"{layer}#{plane}.{e}" for e in touched[:3] for plane in planes)]
    leases = [tuple(f"{layer}#{plane}.{e}" for plane in planes) for e in touched]
    return [Announce(tuple(chain(*leases))), *leases[: draw(st.integers(0, len(leases)))]]


@st.composite
def workloads(draw: st.DrawFn, *, most_pages: int = 8, most_passes: int = 7) -> Workload:
    """Workloads whose every lease fits."""
    sizes = {f"page{i}": draw(st.integers(1, 4)) for i in range(draw(st.integers(1, most_pages)))}
    keys, layers = list(sizes), []
    while keys:
        take = draw(st.integers(1, 2))
        layers.append(tuple(keys[:take]))
        keys = keys[take:]
    passes: list[tuple] = []
    while len(passes) < most_passes and (not passes or draw(st.booleans())):
        passes += [tuple(draw(_passes(layers)))] * draw(st.integers(1, 4))
    passes = tuple(passes[:most_passes])
    largest = max(sum(sizes[key] for key in layer) for layer in layers)
    return Workload(
        sizes,
        passes,
        marks=draw(_marks(len(passes))),
        kind=draw(st.sampled_from(["lru", "scheduled"])),
        room=draw(st.integers(largest, sum(sizes.values()) + 2)),
        prefetch=draw(st.integers(0, 3)),
    )


def _marks(passes: int) -> st.SearchStrategy:
    """All, none, the first few (a model that is compiled then), or any; of one phase or of several."""
    first = st.integers(0, passes).map(lambda n: ("forward",) * n + ("",) * (passes - n))
    one, several = st.sampled_from(["forward", ""]), st.sampled_from(["prompt", "decode", "mine", ""])
    phases = [st.tuples(*[each] * passes) for each in (one, several)]
    return st.one_of(st.just(("forward",) * passes), first, *phases)


def _passes(layers: list) -> st.SearchStrategy:
    some = st.lists(st.sampled_from(layers), min_size=1, max_size=len(layers) + 3)
    return st.one_of(
        st.just(layers),
        st.just(layers),
        st.permutations(layers),
        some,
        st.integers(1, len(layers)).map(lambda stop: layers[:stop]),
        st.just(layers + layers[::-1]),
    )


def checkpointed(blocks: int, layers: int) -> list[str]:
    """Forward, then block after block from the end: forward again and backward."""
    block = [[f"block{b}.{i}" for i in range(layers)] for b in range(blocks)]
    return [*chain(*block), *(key for b in reversed(block) for key in (*b, *reversed(b)))]


def misses_of_pass(policy: Policy, order: list[str]) -> int:
    """Begin a pass over pages of one byte and run it."""
    policy.begin_pass()
    misses = 0
    for key in order:
        misses += not policy.access(key, 1, (key,)).hit
        policy.ahead((key,))
    return misses
