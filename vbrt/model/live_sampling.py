"""The runtimes of this process, and a sample of them that any thread may take at any moment.

Nothing here takes a lock of a stack or asks the device for anything: a CUDA graph may be recorded at that moment, in
which case a wait for the device, from any thread, would end the recording with an error. So the hits of routed experts
whose residency the GPU decides are missing, and are said to be.
"""

import functools
import json
import os
import sys
import time
import warnings
import weakref
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Protocol

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
#: times as long as a sample took, nobody takes another: models may have ten thousand layers
REST = 100
_begun = time.monotonic()
_pattern_of = functools.lru_cache(maxsize=1 << 16)(pattern_of)


class Sampled(Protocol):
    """A runtime, as far as samples read it."""

    stack: TierStack
    caches: Collection[TieredCache]

    @property
    def attachments(self) -> tuple[Attached, ...]:
        """The models on it that are alive."""


_known: list[weakref.ref[Sampled]] = []


class _Offered:
    """The offer of this process, and how many want it to be there."""

    def __init__(self) -> None:
        self.offer: Offer | None = None
        self.wanted = 0
        self.pid = os.getpid()
        self.last, self.again = b"", 0.0  # the last answer, and when there may be another


_offered = _Offered()


def know(runtime: Sampled) -> None:
    """Count a runtime among those of this process; with VBRT_TOP=1 in the environment the process offers itself."""
    _known[:] = [ref for ref in _known if ref() is not None] + [weakref.ref(runtime)]
    if os.environ.get("VBRT_TOP", "").strip().lower() in _ASKED and not _is_offered():
        try:
            offer()
        except OSError as error:
            warnings.warn(f"VBRT_TOP: this process cannot be offered to vbrt top: {error.strerror}", stacklevel=2)


def _is_offered() -> bool:
    return _offered.offer is not None and _offered.pid == os.getpid()


def offer() -> None:
    """Have this process answer `vbrt top` until `withdraw` was called as often.

    Raises OSError: no socket can be made.
    """
    if not _is_offered():  # nor is a child, whose parent is
        _offered.again = 0.0
        _offered.offer, _offered.wanted, _offered.pid = Offer(_answer), 0, os.getpid()
    _offered.wanted += 1


def withdraw() -> None:
    """End one `offer`."""
    if _is_offered():
        _offered.wanted -= 1
        if not _offered.wanted:
            _offered.offer.stop()
            _offered.offer = None


def _answer() -> bytes:
    """Return a sample as JSON; the last one again, where samples would take more than a hundredth of the time."""
    begun = time.monotonic()
    if begun < _offered.again:
        return _offered.last
    try:
        answer = sample().to_dict()
    except Exception as error:  # noqa: BLE001 - it is said to who asked, and the process goes on
        answer = {"version": VERSION, "error": f"{type(error).__name__}: {error}"}
    _offered.last, ended = json.dumps(answer).encode(), time.monotonic()
    _offered.again = ended + REST * (ended - begun)
    return _offered.last


def sample(*only: Sampled) -> LiveSample:
    """Return a sample of these runtimes, or of all that are open."""
    runtimes = only or tuple(filter(None, (ref() for ref in _known.copy())))
    now = tuple(_settled(runtime) for runtime in runtimes if not runtime.stack.closed)
    return LiveSample(os.getpid(), _command(), time.monotonic() - _begun, now)


def _command() -> str:
    program, *rest = sys.argv or [""]
    return " ".join((os.path.basename(program) or "python", *rest))[:200]


def _settled(runtime: Sampled) -> RuntimeNow:
    """Return a runtime's counters; what another thread changes while they are read is read again."""
    for left in reversed(range(_TRIES)):
        try:
            return runtime_now(runtime)
        except (AttributeError, RuntimeError):  # a layer has become a plain one; a set or dict has changed its size
            if not left:
                raise
    raise AssertionError


def runtime_now(runtime: Sampled) -> RuntimeNow:
    """Return the counters of one runtime, as far as they are plain integers."""
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
    """Return microseconds that forwards have waited, by kind of layer."""
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
