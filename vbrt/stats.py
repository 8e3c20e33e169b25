"""What a wrapped model has done: a frozen snapshot of integer counters.

    print(vb.stats())                  # a table
    vb.stats().to_dict()               # plain data, for JSON
    vb.stats().layers["fc1"].hit_rate

A hit is a lease of a page that moved no bytes. A page staged ahead of its use is a miss that was `prefetched`.
"""

import io
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from vbrt.plan import format_bytes

__all__ = ["LayerStats", "Stats", "TierStats"]


@dataclass(frozen=True, slots=True)
class LayerStats:
    """One VB layer. Bytes are by plane or by link ("ssd>cpu"); times in microseconds; the rest are counts."""

    format: str
    kernel: str
    materialized: bool
    home: str
    resident: bool
    plane_bytes: Mapping[str, int]
    forwards: int
    weight_reads: int
    hits: int
    misses: int
    prefetched: int
    bytes_moved: Mapping[str, int]
    wait_us: int
    separation_hits: int = 0
    separation_refreshes: int = 0
    clipped_share: float = 0.0

    @property
    def hit_rate(self) -> float | None:
        """Hits over page leases; None before the first."""
        leases = self.hits + self.misses
        return self.hits / leases if leases else None


@dataclass(frozen=True, slots=True)
class TierStats:
    """One tier, in bytes and pages. `resident_pages` counts pages whose bytes are there now, homes included."""

    budget_bytes: int
    held_bytes: int
    peak_bytes: int
    home_pages: int
    resident_pages: int


@dataclass(frozen=True, slots=True)
class Stats:
    """A snapshot of a wrapped model; building it costs time in the number of VB layers only.

    `dense_bytes` is the model as it came, `kept_bytes` what was not swapped; `device_bytes` is what the computing
    device holds now of both (budgeted pages, shells that still hold their dense weight, kept parameters).
    """

    policy: str
    compute_tier: str
    passes: int
    layers: Mapping[str, LayerStats]
    tiers: Mapping[str, TierStats]
    dense_bytes: int
    kept_bytes: int
    device_bytes: int
    fallbacks: tuple[str, ...] = field(default=())

    @property
    def hits(self) -> int:
        """Page leases that moved nothing."""
        return sum(layer.hits for layer in self.layers.values())

    @property
    def misses(self) -> int:
        """Page leases for which bytes moved."""
        return sum(layer.misses for layer in self.layers.values())

    @property
    def hit_rate(self) -> float | None:
        """Hits over page leases of all layers; None before the first."""
        leases = self.hits + self.misses
        return self.hits / leases if leases else None

    @property
    def wait_us(self) -> int:
        """Time that forwards have waited for pages, in microseconds."""
        return sum(layer.wait_us for layer in self.layers.values())

    @property
    def bytes_moved(self) -> dict[str, int]:
        """Bytes by link, such as {"ssd>cpu": 123}."""
        total: dict[str, int] = {}
        for layer in self.layers.values():
            for link, nbytes in layer.bytes_moved.items():
                total[link] = total.get(link, 0) + nbytes
        return total

    @property
    def virtual_capacity(self) -> float:
        """Bytes of the dense model over bytes held on the computing device; 2.0 is a device twice as large."""
        return self.dense_bytes / self.device_bytes if self.device_bytes else float("inf")

    def to_dict(self) -> dict:
        """Plain data with the totals; `json.dumps` takes it."""
        layers = {name: {**asdict(layer), "hit_rate": layer.hit_rate} for name, layer in self.layers.items()}
        totals = {name: getattr(self, name) for name in ("hits", "misses", "hit_rate", "wait_us", "bytes_moved",
                                                         "virtual_capacity")}
        return {"policy": self.policy, "compute_tier": self.compute_tier, "passes": self.passes, **totals,
                "dense_bytes": self.dense_bytes, "kept_bytes": self.kept_bytes, "device_bytes": self.device_bytes,
                "tiers": {name: asdict(tier) for name, tier in self.tiers.items()},
                "fallbacks": list(self.fallbacks), "layers": layers}

    def __rich__(self):
        """The table that rich prints."""
        from rich.console import Group
        from rich.table import Table

        table = Table(title=f"vbrt · policy {self.policy} · {self.passes} passes", title_justify="left")
        table.add_column("layer", overflow="fold", min_width=16)
        for head in ("format", "home", "size", "fwd", "hits", "misses", "hit rate", "ahead", "moved", "wait ms"):
            table.add_column(head, justify="left" if head in ("format", "home") else "right", no_wrap=True)
        for name, layer in self.layers.items():
            table.add_row(name, *_row(layer))
        table.add_section()
        table.add_row(f"{len(self.layers)} layers", "", "", format_bytes(_size(self)), "", str(self.hits), str(self.misses),
                      _percent(self.hit_rate), _share(sum(x.prefetched for x in self.layers.values()), self.misses),
                      format_bytes(sum(self.bytes_moved.values())), f"{self.wait_us / 1e3:.1f}")
        return Group(table, *self._summary())

    def _summary(self) -> list[str]:
        lines = []
        for name, tier in self.tiers.items():
            lines.append(f"tier {name:4} {format_bytes(tier.held_bytes)} held of {format_bytes(tier.budget_bytes)}, "
                         f"peak {format_bytes(tier.peak_bytes)}; {tier.resident_pages} pages, {tier.home_pages} at home")
        for link, nbytes in self.bytes_moved.items():
            lines.append(f"link {link}  {format_bytes(nbytes)}")
        lines.append(f"virtual capacity {self.virtual_capacity:.2f}x: a model of {format_bytes(self.dense_bytes)} with "
                     f"{format_bytes(self.device_bytes)} on the computing device ({format_bytes(self.kept_bytes)} not "
                     "swapped)")
        return lines + [f"fallback: {reason}" for reason in self.fallbacks]

    def __str__(self) -> str:
        from rich.console import Console

        out = io.StringIO()
        Console(file=out, width=132, color_system=None).print(self.__rich__())
        return out.getvalue().rstrip()


def _row(layer: LayerStats) -> list[str]:
    return [layer.format, layer.home if layer.materialized else "(dense)", format_bytes(sum(layer.plane_bytes.values())),
            str(layer.forwards), str(layer.hits), str(layer.misses), _percent(layer.hit_rate),
            _share(layer.prefetched, layer.misses), format_bytes(sum(layer.bytes_moved.values())),
            f"{layer.wait_us / 1e3:.1f}"]


def _size(stats: Stats) -> int:
    return sum(sum(layer.plane_bytes.values()) for layer in stats.layers.values())


def _percent(rate: float | None) -> str:
    return "-" if rate is None else f"{100 * rate:.1f} %"


def _share(part: int, whole: int) -> str:
    return f"{part}/{whole}" if whole else "-"
