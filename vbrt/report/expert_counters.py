"""Counters of routed experts: one record per layer and, with `stats(experts=True)`, columns by expert.

stats = vb.stats(experts=True)
print(stats.layers["model.layers.0.mlp.experts"].experts.reuse)
print(stats.experts("model.layers.0.mlp.experts"))       # a row for each expert
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

from vbrt.residency.plan import format_bytes

__all__ = ["ExpertCounts", "ExpertRow", "ExpertsStats"]


@dataclass(frozen=True, slots=True)
class ExpertRow:
    """One expert. `passes_ago`: passes of the layer since a token was last routed to it; None: never."""

    expert: int
    hits: int
    misses: int
    bytes_moved: int
    passes_ago: int | None


@dataclass(frozen=True, slots=True)
class ExpertCounts:
    """The experts of one layer, a tuple for each counter, by expert.

    Attributes:
        hits, misses: of the expert's page leases.
        bytes_moved: over all links.
        last: the number of the last pass of the layer that touched it, from 1; 0: none has.
        passes: of the layer.
    """

    hits: tuple[int, ...]
    misses: tuple[int, ...]
    bytes_moved: tuple[int, ...]
    last: tuple[int, ...]
    passes: int

    def rows(self) -> Iterator[ExpertRow]:
        """Yield the experts in the order of their ids."""
        columns = zip(self.hits, self.misses, self.bytes_moved, self.last, strict=True)
        for expert, (hits, misses, moved, last) in enumerate(columns):
            yield ExpertRow(expert, hits, misses, moved, self.passes - last if last else None)

    def __str__(self) -> str:
        lines = [f"{'expert':>6}  {'hits':>8}  {'misses':>8}  {'hit rate':>8}  {'moved':>10}  last use"]
        for row in self.rows():
            leases = row.hits + row.misses
            rate = f"{100 * row.hits / leases:.1f} %" if leases else "-"
            lines.append(
                f"{row.expert:>6}  {row.hits:>8}  {row.misses:>8}  {rate:>8}  {format_bytes(row.bytes_moved):>10}  "
                f"{_ago(row.passes_ago)}"
            )
        return "\n".join(lines)

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Read `dataclasses.asdict`. Raises KeyError, TypeError or ValueError for anything else."""
        columns = [_whole_numbers(data[name]) for name in ("hits", "misses", "bytes_moved", "last")]
        if len({len(column) for column in columns}) > 1:
            raise ValueError("columns of different lengths")
        return cls(*columns, int(data["passes"]))


@dataclass(frozen=True, slots=True)
class ExpertsStats:
    """The routed experts of one layer, over all its forwards.

    Attributes:
        experts: how many there are.
        resident: how many of them have all their pages on the computing device now.
        decides: owner of residency: "host" or "gpu".
        scans, cached: passes that stream all pages in order, as long prompts do; passes that lease the touched experts'
            pages from the cache, as decoding does.
        unleased: passes with all pages resident on a GPU: no lease, and touched experts are not counted.
        tokens, touched: of cached passes: their tokens, and touched experts, each once per pass.
        compared, reused: experts touched by a cached pass that directly follows another one; of these, experts that the
            previous pass touched, too.
        computed: missed experts of cached passes that the CPU computed in host memory, each once per pass. Their pages
            count as misses and moved no bytes.
        each: counters by expert, if requested.
    """

    experts: int
    resident: int
    decides: str
    scans: int
    cached: int
    tokens: int
    touched: int
    compared: int
    reused: int
    unleased: int = 0
    computed: int = 0
    each: ExpertCounts | None = None

    @property
    def touched_a_token(self) -> float | None:
        """Experts that a cached pass touches, over its tokens; None before the first."""
        return self.touched / self.tokens if self.tokens else None

    @property
    def reuse(self) -> float | None:
        """Share of the touched experts that the previous pass touched, too; None before two passes in a row."""
        return self.reused / self.compared if self.compared else None

    def to_dict(self) -> dict[str, Any]:
        """Return plain data; `each` is left out if it was not requested."""
        data = asdict(self) | {"touched_a_token": self.touched_a_token, "reuse": self.reuse}
        if self.each is None:
            del data["each"]
        return data

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Self:
        """Read what `to_dict` returned. Raises KeyError, TypeError or ValueError for anything else."""
        names = ("scans", "cached", "tokens", "touched", "compared", "reused")
        each = data.get("each")
        return cls(
            int(data["experts"]),
            int(data["resident"]),
            str(data["decides"]),
            *(int(data[name]) for name in names),
            int(data["unleased"]),
            int(data.get("computed", 0)),  # older snapshots have none
            None if each is None else ExpertCounts.from_dict(each),
        )


def _whole_numbers(column: Sequence[Any]) -> tuple[int, ...]:
    return tuple(int(value) for value in column)


def _ago(passes: int | None) -> str:
    if passes is None:
        return "never"
    return "last pass" if passes == 0 else f"{passes} passes before" if passes > 1 else "the pass before"
