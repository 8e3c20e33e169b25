"""Live samples of a running process: plain counters, and rates between two samples.

    vbrt top                # another process's, on a terminal
    with vb.live():         # this one's
        vb.generate(...)

A sample is taken by another thread while the model runs. So it reads only counters that need neither a lock nor the
device: a CUDA graph may be in capture, which a device synchronization would break.
"""

from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Self

from vbrt.errors import FormatError

__all__ = ["VERSION", "History", "LiveSample", "Rates", "RuntimeNow", "TierNow"]

VERSION = 1  # of what `to_dict` makes
_WINDOW_S = 10.0  # window of throughput: images may be far apart
_SHORT_S = 2.0  # window of bytes, hits and waits


@dataclass(frozen=True, slots=True)
class TierNow:
    """One tier: its bytes and resident pages."""

    held_bytes: int
    budget_bytes: int
    peak_bytes: int
    pages: int


@dataclass(frozen=True, slots=True)
class RuntimeNow:
    """The models on one runtime, and their tiers.

    Attributes:
        models: name -> passes that have begun.
        policy: of the computing tier; "none" if weights train.
        tiers: the computing one first.
        moved: bytes by link, such as "cpu>gpu", since the beginning.
        hits, misses, prefetched: page leases since the beginning; a prefetched page also counts as a miss.
        wait_us: time that forwards waited for pages, on the host.
        waits: of that, by kind of layer ("layers.#.mlp.up_proj").
        work: throughput counters by unit: "tokens written", "tokens read", "tokens trained", "images", "steps" and
            "decodes" of pipelines.
        caches: bytes of KV caches, by name.
        leases: as `Stats.leases`.
        unseen: number of layers of routed experts whose hits the GPU counts; they are missing in these numbers.
    """

    models: Mapping[str, int]
    policy: str
    tiers: Mapping[str, TierNow]
    moved: Mapping[str, int]
    hits: int
    misses: int
    prefetched: int
    wait_us: int
    waits: Mapping[str, int]
    work: Mapping[str, int]
    caches: Mapping[str, int] = field(default_factory=dict)
    leases: str = ""
    unseen: int = 0

    @classmethod
    def read(cls, data: Mapping[str, Any]) -> Self:
        """Inverse of `dataclasses.asdict`."""
        tiers = {name: TierNow(**tier) for name, tier in data["tiers"].items()}
        return cls(**{**data, "tiers": tiers})


@dataclass(frozen=True, slots=True)
class LiveSample:
    """A process at one moment.

    Attributes:
        pid, command: of the process.
        up_s: seconds since vbrt was imported there, by a steady clock.
        runtimes: the open ones.
    """

    pid: int
    command: str
    up_s: float
    runtimes: tuple[RuntimeNow, ...]

    @property
    def names(self) -> list[str]:
        """The names of all models."""
        return [name for runtime in self.runtimes for name in runtime.models]

    def to_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        return {"version": VERSION, **asdict(self)}

    @classmethod
    def from_dict(cls, data: Any) -> Self:
        """Inverse of `to_dict`. Raises FormatError for other data, or that of another version of vbrt."""
        try:
            version, data = data["version"], _printable(data)
            if version == VERSION:
                runtimes = tuple(map(RuntimeNow.read, data["runtimes"]))
                return cls(int(data["pid"]), str(data["command"]), float(data["up_s"]), runtimes)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise FormatError(f"a live sample: {data!r:.80}; expected what LiveSample.to_dict() makes") from error
        raise FormatError(
            f"a live sample of version {version}; this vbrt reads version {VERSION}: use the same for both"
        )


def _printable(data: Any) -> Any:
    """Return plain data without control characters: another process may name its models as it likes."""
    if isinstance(data, str):
        return "".join(c if c.isprintable() else "?" for c in data)
    if isinstance(data, dict):
        return {_printable(key): _printable(value) for key, value in data.items()}
    return [_printable(value) for value in data] if isinstance(data, list) else data


@dataclass(frozen=True, slots=True)
class Rates:
    """Rates per second of one runtime.

    Attributes:
        bytes_per_s: by link.
        leases_per_s: of pages.
        hit_rate, ahead: share of leases that hit, and of leases whose page was prefetched; None without leases.
        wait_share: share of the time spent waiting for pages; above 1 if several threads wait. None after one sample,
            as there are no rates yet.
        waits: the same by kind of layer, the longest first.
        work_per_s: by unit; only units that were ever counted.
        passes_per_s: by model.
    """

    bytes_per_s: Mapping[str, float]
    leases_per_s: float
    hit_rate: float | None
    ahead: float | None
    wait_share: float | None
    waits: Mapping[str, float]
    work_per_s: Mapping[str, float]
    passes_per_s: Mapping[str, float]


class History:
    """Sliding window of samples of one process, and the rates between them."""

    def __init__(self) -> None:
        self._samples: deque[LiveSample] = deque()

    def __bool__(self) -> bool:
        return bool(self._samples)

    @property
    def last(self) -> LiveSample:
        """The latest sample."""
        return self._samples[-1]

    def add(self, sample: LiveSample) -> None:
        """Append a sample and drop expired ones. A runtime that opens or closes begins a new history."""
        samples = self._samples
        if samples and (samples[-1].pid, len(samples[-1].runtimes)) != (sample.pid, len(sample.runtimes)):
            samples.clear()
        samples.append(sample)
        while len(samples) > 2 and samples[1].up_s <= sample.up_s - _WINDOW_S:
            samples.popleft()

    def rates(self, number: int) -> Rates:
        """Return the rates of the runtime with this index."""
        now, long = self.last, self._samples[0]
        short = next((s for s in reversed(self._samples) if s.up_s <= now.up_s - _SHORT_S), long)
        return _rates(
            (short.runtimes[number], now.up_s - short.up_s),
            (long.runtimes[number], now.up_s - long.up_s),
            now.runtimes[number],
        )


def _rates(short: tuple[RuntimeNow, float], long: tuple[RuntimeNow, float], now: RuntimeNow) -> Rates:
    (before, seconds), (earlier, longer) = short, long
    hits, misses = (max(0, getattr(now, name) - getattr(before, name)) for name in ("hits", "misses"))
    ahead, leases = max(0, now.prefetched - before.prefetched), hits + misses
    waits = _per_s(now.waits, before.waits, seconds * 1e6)
    longest = dict(sorted(((name, share) for name, share in waits.items() if share > 0), key=lambda item: -item[1]))
    return Rates(
        bytes_per_s=_per_s(now.moved, before.moved, seconds),
        leases_per_s=leases / seconds if seconds else 0.0,
        hit_rate=hits / leases if leases else None,
        ahead=min(ahead, misses) / leases if leases else None,
        wait_share=max(0, now.wait_us - before.wait_us) / (seconds * 1e6) if seconds else None,
        waits=longest,
        work_per_s=_per_s({unit: count for unit, count in now.work.items() if count}, earlier.work, longer),
        passes_per_s=_per_s(now.models, earlier.models, longer),
    )


def _per_s(now: Mapping[str, int], before: Mapping[str, int], seconds: float) -> dict[str, float]:
    """Return the increase per second; counts of removed layers do not subtract."""
    return {name: max(0, count - before.get(name, 0)) / seconds for name, count in now.items() if seconds}
