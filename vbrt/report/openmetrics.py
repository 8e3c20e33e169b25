"""OpenMetrics text of a snapshot, for Prometheus and other scrapers.

    @app.get("/metrics")
    def metrics():
        return Response(vb.metrics(), media_type=vbrt.report.openmetrics.CONTENT_TYPE)

Names, units and the order of lines are those of OpenMetrics 1.0: a counter's samples end with `_total`, units are bytes
and seconds, and the text ends with `# EOF`. Counters begin at zero with the model.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from vbrt.report.stats_data import StatsData

__all__ = ["CONTENT_TYPE", "Scraped", "metrics_lines"]

CONTENT_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"

Labels = tuple[tuple[str, str], ...]


class Family(NamedTuple):
    """A metric.

    Attributes:
        name: without the unit and `_total`, which the lines add.
        kind: "counter" or "gauge".
        unit: "bytes", "seconds" or "".
        samples: by labels.
    """

    name: str
    kind: str
    unit: str
    help: str
    samples: Mapping[Labels, float]


class Scraped:
    """Mixin for classes with a `vbrt.stats()`."""

    vbrt: Any

    def metrics(self) -> str:
        """Return `stats()` as OpenMetrics text, for Prometheus and other scrapers."""
        return self.vbrt.stats().metrics()


def metrics_lines(stats: StatsData) -> Iterator[str]:
    """Yield the lines of a snapshot."""
    for family in (*_of_layers(stats), *_of_model(stats), *_of_generation(stats)):
        if family.samples:
            yield from _lines(family)
    yield "# EOF"


def _lines(family: Family) -> Iterator[str]:
    name = "_".join(filter(None, ("vbrt", family.name, family.unit)))
    yield f"# TYPE {name} {family.kind}"
    if family.unit:
        yield f"# UNIT {name} {family.unit}"
    yield f"# HELP {name} {family.help}"
    sample = f"{name}_total" if family.kind == "counter" else name
    for labels, value in family.samples.items():
        named = ",".join(f'{key}="{_escaped(text)}"' for key, text in labels)
        yield f"{sample}{{{named}}} {value}" if named else f"{sample} {value}"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _by(label: str, values: Mapping[str, float]) -> dict[Labels, float]:
    return {((label, name),): value for name, value in values.items()}


def _of_layers(stats: StatsData) -> Iterator[Family]:
    layers = stats.layers
    for name, attribute, help in (
        ("page_hits", "hits", "Page leases that moved nothing."),
        ("page_misses", "misses", "Page leases for which bytes moved, or that were computed where they lie."),
        ("page_prefetched", "prefetched", "Misses whose pages were staged ahead of their use."),
        ("page_computed", "computed", "Products that the CPU has computed where the page lies, without a lease."),
        ("forwards", "forwards", "Forwards of the layer."),
    ):
        yield Family(name, "counter", "", help, _by("layer", {n: getattr(of, attribute) for n, of in layers.items()}))
    waits = {name: of.wait_us / 1e6 for name, of in layers.items()}
    yield Family("wait", "counter", "seconds", "Time that forwards have waited for pages.", _by("layer", waits))
    experts = {name: of.experts for name, of in layers.items() if of.experts is not None}
    for name, attribute, help in (
        ("experts_touched", "touched", "Routed experts touched by passes from the cache, each once a pass."),
        ("experts_reused", "reused", "Of those, the ones that the pass before had touched too."),
        ("experts_computed", "computed", "Of those, missing ones that the CPU has computed where they lie."),
    ):
        yield Family(name, "counter", "", help, _by("layer", {n: getattr(of, attribute) for n, of in experts.items()}))
    resident = {name: of.resident for name, of in experts.items()}
    yield Family("experts_resident", "gauge", "", "Routed experts on the computing device.", _by("layer", resident))


def _of_model(stats: StatsData) -> Iterator[Family]:
    tiers = stats.tiers
    for name, attribute, help in (
        ("tier_held", "held_bytes", "Bytes that a tier holds."),
        ("tier_budget", "budget_bytes", "The budget of a tier."),
        ("tier_peak", "peak_bytes", "The most that a tier has held."),
    ):
        yield Family(name, "gauge", "bytes", help, _by("tier", {n: getattr(of, attribute) for n, of in tiers.items()}))
    pages = {name: of.resident_pages for name, of in tiers.items()}
    yield Family("tier_pages", "gauge", "", "Pages whose bytes are in a tier.", _by("tier", pages))
    yield Family("moved", "counter", "bytes", "Bytes moved between tiers.", _by("link", stats.bytes_moved))
    sizes = {"dense": stats.dense_bytes, "device": stats.device_bytes, "kept": stats.kept_bytes}
    help = "The model as it came, what the computing device holds of it, and what was not swapped."
    yield Family("model", "gauge", "bytes", help, _by("what", sizes))
    passes = {phase: of.passes for phase, of in stats.phases.items()} or {"": stats.passes}
    yield Family("passes", "counter", "", "Passes of the model.", _by("phase", passes))
    yield Family(
        "fallbacks", "gauge", "", "What is not as it was asked for; stats() says why.", {(): len(stats.fallbacks)}
    )


def _of_generation(stats: StatsData) -> Iterator[Family]:
    steps, help = stats.steps, "Decode steps of generate: replayed from a recording, or run by the model's Python."
    yield Family("decode_steps", "counter", "", help, _by("how", {"captured": steps.captured, "eager": steps.eager}))
    held = {
        (("cache", name), ("tier", tier)): nbytes
        for name, of in stats.caches.items()
        for tier, nbytes in of.tier_bytes.items()
    }
    yield Family("kv_cache", "gauge", "bytes", "Bytes of keys and values in a tier.", held)
