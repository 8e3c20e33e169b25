"""Live sampling of this process's runtimes, for `vbrt top`; safe from any thread at any moment.

Sampling takes no lock of a stack and makes no device call: a CUDA graph may be under capture, and a synchronization,
from any thread, would invalidate it. So hits of experts in a device cache are missing, and are reported as missing.
"""

import functools
import json
import os
import sys
import time
import weakref
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Protocol

from vbrt.host.logger import warn
from vbrt.host.stats_endpoint import Offer
from vbrt.model.attached import Attached
from vbrt.model.kv_caches import TieredCache
from vbrt.report.live_sample import VERSION, LiveSample, RuntimeNow, TierNow
from vbrt.report.stats_data import sums_by_name
from vbrt.residency.name_patterns import pattern_of
from vbrt.tiers import TierStack

__all__ = ["REST", "Sampled", "know", "offer", "runtime_now", "sample", "withdraw"]

_ASKED = ("1", "on", "true", "yes")
_TRIES = 5
#: pause after a sample, in multiples of its duration: models may have ten thousand layers
REST = 100
_begun = time.monotonic()
_pattern_of = functools.lru_cache(maxsize=1 << 16)(pattern_of)


class Sampled(Protocol):
    """Runtime, as far as samples read it."""

    stack: TierStack
    caches: Collection[TieredCache]

    @property
    def attachments(self) -> tuple[Attached, ...]:
        """Live models on the runtime."""


_known: list[weakref.ref[Sampled]] = []


class _Offered:
    """Stats endpoint of this process, with a reference count."""

    def __init__(self) -> None:
        self.offer: Offer | None = None
        self.wanted = 0
        self.pid = os.getpid()
        self.last, self.again = b"", 0.0  # the last answer, and the earliest time of another sample


_offered = _Offered()


def know(runtime: Sampled) -> None:
    """Register a runtime for sampling; with VBRT_TOP=1 in the environment, open the stats endpoint."""
    _known[:] = [ref for ref in _known if ref() is not None] + [weakref.ref(runtime)]
    if os.environ.get("VBRT_TOP", "").strip().lower() in _ASKED and not _is_offered():
        try:
            offer()
        except OSError as error:
            warn(f"VBRT_TOP: this process cannot be offered to vbrt top: {error.strerror}", stacklevel=2)


def _is_offered() -> bool:
    return _offered.offer is not None and _offered.pid == os.getpid()


def offer() -> None:
    """Open this process's stats endpoint for `vbrt top`; it closes after as many calls of `withdraw`.

    Raises OSError: no socket can be created.
    """
    if not _is_offered():  # a forked child does not inherit the endpoint
        _offered.again = 0.0
        _offered.offer, _offered.wanted, _offered.pid = Offer(_answer), 0, os.getpid()
    _offered.wanted += 1


def withdraw() -> None:
    """Undo one `offer`; the last one closes the endpoint."""
    if _is_offered():
        _offered.wanted -= 1
        if not _offered.wanted:
            _offered.offer.stop()
            _offered.offer = None


def _answer() -> bytes:
    """Return a sample as JSON, rate-limited: the last answer again if sampling would exceed 1/REST of the time."""
    begun = time.monotonic()
    if begun < _offered.again:
        return _offered.last
    try:
        answer = sample().to_dict()
    except Exception as error:  # noqa: BLE001 - reported to the client
        answer = {"version": VERSION, "error": f"{type(error).__name__}: {error}"}
    _offered.last, ended = json.dumps(answer).encode(), time.monotonic()
    _offered.again = ended + REST * (ended - begun)
    return _offered.last


def sample(*only: Sampled) -> LiveSample:
    """Return a sample of the given runtimes, or of all open ones."""
    runtimes = only or tuple(filter(None, (ref() for ref in _known.copy())))
    now = tuple(_settled(runtime) for runtime in runtimes if not runtime.stack.closed)
    return LiveSample(os.getpid(), _command(), time.monotonic() - _begun, now)


def _command() -> str:
    program, *rest = sys.argv or [""]
    return " ".join((os.path.basename(program) or "python", *rest))[:200]


def _settled(runtime: Sampled) -> RuntimeNow:
    """Return a runtime's counters; retries if another thread changes them during the read."""
    for left in reversed(range(_TRIES)):
        try:
            return runtime_now(runtime)
        except (AttributeError, RuntimeError):  # a layer became a plain one, or a container changed its size
            if not left:
                raise
    raise AssertionError


def runtime_now(runtime: Sampled) -> RuntimeNow:
    """Return the plain integer counters of one runtime."""
    stack, attachments = runtime.stack, runtime.attachments
    counted = stack.ledger.census().counted
    names = [(f"{a.prefix}{name}", layer) for a in attachments for name, layer in a.registry.layers.items()]
    handles = {layer.handle: name for name, layer in names}
    trains = bool(attachments) and all(a.plan.mode == "train" for a in attachments)
    return RuntimeNow(
        models={attachment.name: attachment.passes for attachment in attachments},
        policy="none" if trains else stack.levels[0].policy.kind,
        tiers={} if trains else _tiers(stack),
        moved=sums_by_name(one.bytes_moved for one in counted),
        hits=sum(one.hits for one in counted),
        misses=sum(one.misses for one in counted),
        prefetched=sum(one.prefetched for one in counted),
        wait_us=sum(one.wait_ns for one in counted) // 1000,
        waits={} if trains else _waits(stack, handles),
        work=_work(attachments),
        caches={cache.name: cache.nbytes for cache in list(runtime.caches)},
        leases=stack.ledger.programmes.told(),
        unseen=sum(getattr(getattr(handle, "deciding", None), "cache", None) is not None for handle in handles),
    )


def _tiers(stack: TierStack) -> dict[str, TierNow]:
    tiers = [(level.tier, len(level.slots)) for level in stack.levels]
    return {t.name: TierNow(t.held_bytes, t.capacity_bytes, t.peak_bytes, pages) for t, pages in tiers}


def _waits(stack: TierStack, handles: dict) -> dict[str, int]:
    """Return the wait of forwards by kind of layer, in microseconds."""
    census, waits = stack.ledger.census(), Counter()
    for handle, name in handles.items():
        wait_ns = census.family(handle.keys).tally().wait_ns
        if wait_ns:
            waits[_pattern_of(name)] += wait_ns // 1000
    return dict(waits)


def _work(attachments: Sequence[Attached]) -> dict[str, int]:
    works = [attachment.work for attachment in attachments]
    speculated = sum(attachment.speculation.totals["tokens"] for attachment in attachments)
    return {
        "tokens written": sum(work.written for work in works) + speculated,
        "tokens read": sum(work.read for work in works),
        "tokens trained": sum(work.trained for work in works),
        "images": sum(work.images for work in works),
        "steps": sum(work.steps for work in works),
        "decodes": sum(work.decodes for work in works),
    }
