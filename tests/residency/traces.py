"""Random traces for policies: passes over a model that skip, repeat, reorder and stop early."""

from dataclasses import dataclass
from itertools import chain

from hypothesis import strategies as st

from vbrt.residency.policy import Policy
from vbrt.residency.simulate import Pass


@dataclass(frozen=True)
class Workload:
    """Pages by size in units, leases of one or two of them in passes, and room for them in units."""

    sizes: dict[str, int]
    passes: tuple[tuple[tuple[str, ...], ...], ...]
    marks: tuple[str, ...]  # the phase of each pass; "" for one that is not marked
    room: int
    kind: str
    prefetch: int

    @property
    def trace(self) -> list:
        """What `simulate` takes: leases, with `Pass` before each pass that is marked."""
        marked = zip(self.passes, self.marks, strict=True)
        return [item for leases, mark in marked for item in ([Pass(mark)] if mark else []) + list(leases)]

    @property
    def group(self) -> int:
        """Pages that one lease takes, at most."""
        return max(len(keys) for leases in self.passes for keys in leases)


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
