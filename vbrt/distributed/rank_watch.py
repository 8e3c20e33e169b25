"""Rank watchdog: ranks that compute one model stop together, with an error that names the failed rank.

A rank that fails between two collectives leaves the others blocked until the group's timeout, with an error that names
no rank. So every rank writes a heartbeat with its pass and layer to torch.distributed's store about once a second, and
a rank whose forward raises writes why before the error propagates. A rank whose collective fails, or that begins
another pass, reads the store: its error names the faulty rank and layer.

Rank-local failures (unreadable pages, out of memory) are published. For any other error a rank cannot know whether all
ranks had it: an argument that the model refuses is refused on all ranks, harmlessly, but an exception from a hook on
one rank leaves the others in the middle of a pass, whose collectives its next pass would corrupt. So it begins no
further pass before all ranks have left theirs. Before the first pass, ranks compare their shards' layout.

NCCL collectives are aborted, since a GPU would wait in them until the timeout. Gloo's are not: they end when the peer
process ends, or with the timeout.
"""

import contextlib
import json
import sys
import time
import weakref
from collections import Counter
from collections.abc import Iterator
from functools import partial
from itertools import zip_longest
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import xxhash
from torch import nn

from vbrt.errors import ArgumentError, TierError, VBError
from vbrt.host import accelerator
from vbrt.host.host_memory import bytes_view
from vbrt.host.ticker import Ticker
from vbrt.layers.weights.weight_shards import group_of
from vbrt.model.attachment import Attachment
from vbrt.residency.plan import Plan
from vbrt.residency.weight_site import Shard

__all__ = ["Watch", "watch", "watched"]

BEAT_S = 1.0
_PATIENCE = 0.8  # share of the timeout that a rank may stand still before others name it
_SILENT_BEATS = 15  # after which a rank counts as hung or gone
_LISTEN_BEATS = 2.5  # in which a live rank is heard
_WOKEN_BEATS = 2  # extra beats to listen after this rank hung itself
_CLOSED = -1  # replaces the beat count in a rank's last message
_POLL_S = 0.002
_begun: Counter[str] = Counter()  # watches begun, by group name


class _Seen(NamedTuple):
    """Last message of another rank, and this rank's beats at which it last answered and moved. Counting in beats means
    that a job suspended as a whole has missed none."""

    beats: int
    answered: int
    place: tuple[int, int, str]
    moved: int


class Watch:
    """Heartbeat of this rank within its group, and its view of the others.

    Attributes:
        verdict: which other rank failed, and how; "" while all are well.
    """

    def __init__(self, attachment: Attachment, shard: Shard) -> None:
        self._attachment, self._group = weakref.ref(attachment), group_of(shard)
        self._device, self._group_name = attachment.stack.device, shard.group
        self.rank, self.count = dist.get_rank(self._group), dist.get_world_size(self._group)
        options = self._group._get_backend(self._device).options
        self._timeout_s = getattr(options, "_timeout", dist.default_pg_timeout).total_seconds()
        self.verdict, self._beats = "", 0
        self._seen: dict[int, _Seen] = {}
        self._left, self._left_by = 0, ""  # passes left by errors, and the last error, until all ranks have left
        self._stood = (0, 0), 0, 0  # this rank's place, since which beat, and the beats spent at the one before
        self._aborted = False
        nccl = _nccl_of(self._group)  # Gloo raises in the waiting rank by itself
        self._patience_s = float("inf") if nccl is None else _PATIENCE * nccl.options._timeout.total_seconds()
        self._store: dist.Store | None = None
        self._agreed = False
        self._ticker: Ticker | None = None

    def _begin(self) -> None:
        """Start the heartbeat. Ranks begin their first passes in one order, but wrap models in any."""
        _begun[self._group_name] += 1  # keeps messages of an earlier model apart
        # a clone: waiting in torch's store would block every other user of it
        store = dist.distributed_c10d._get_default_store().clone()
        self._store = dist.PrefixStore(f"vbrt/{self._group_name}/{_begun[self._group_name]}", store)
        self.beat()
        self._ticker = Ticker(self, _beat, partial(_tell_closed, self._store, self.rank))
        self._ticker.start(BEAT_S)

    def stop(self) -> None:
        """Stop the heartbeat, and publish that."""
        if self._ticker is not None and self._ticker.running:
            self._ticker.stop()
            _tell_closed(self._store, self.rank)

    def compare(self, tensor: torch.Tensor, what: str) -> None:
        """Raise ArgumentError, on all ranks, if ranks call this with different tensors, described by `what`. Raises
        TierError: another rank failed."""
        digest = xxhash.xxh3_64_intdigest(bytes_view(tensor.cpu().contiguous())) ^ sum(tensor.shape)
        told = torch.tensor([digest >> 1], dtype=torch.int64, device=self._device)
        every = [torch.empty_like(told) for _ in range(self.count)]
        with watched(self):
            dist.all_gather(every, told, group=self._group)
        numbers = [int(number) for number in every]
        other = next((rank for rank, number in enumerate(numbers) if number != numbers[0]), None)
        if other is not None:
            raise ArgumentError(f"ranks compute one model together, and rank {other} has other {what}")

    def least(self, number: int) -> int:
        """Return the minimum over all ranks, which call this at the same place of their passes. Raises TierError:
        another rank failed."""
        told = torch.tensor([number], dtype=torch.int64, device=self._device)
        with watched(self):
            dist.all_reduce(told, dist.ReduceOp.MIN, group=self._group)
        return int(told)

    # -- this rank ----------------------------------------------------------------------------------------------------

    def tell(self, error: BaseException) -> None:
        """Publish why this rank fails, and refuse further passes: others wait in the middle of one."""
        self.verdict = f"this rank, {self.rank}, has failed in an earlier pass: {error}"[:500]
        if self._store is not None:
            with contextlib.suppress(RuntimeError):  # the store died with its rank
                self._publish(self.rank, self._failure(error))

    def leave(self, error: BaseException) -> None:
        """Publish that this rank left a pass by an error that other ranks may or may not have had."""
        if self._store is None or self.verdict or self._left_by:
            return
        self._left, self._left_by = self._left + 1, self._failure(error)
        with contextlib.suppress(RuntimeError):
            self._store.set(f"left/{self._left}/{self.rank}", self._left_by)

    def _failure(self, error: BaseException) -> str:
        layer = "" if isinstance(error, VBError) else self._place()[2]  # other messages begin with the layer
        return f"rank {self.rank} has failed{_at(layer)}: {type(error).__name__}: {error}"[:500]

    def _publish(self, rank: int, text: str) -> str:
        """Publish the faulty rank and why, unless something was published already; return the published reason."""
        return self._of_another(self._store.compare_set("failed", "", json.dumps({"rank": rank, "text": text})))

    def _of_another(self, told: bytes) -> str:
        """Return why ranks have stopped, from another rank's message."""
        what = json.loads(told)
        return what["text"] if what["rank"] != self.rank else f"the other ranks have stopped: {what['text']}"

    def _place(self) -> tuple[int, int, str]:
        """Pass number, products computed, and the next layer: the first that lags the first layer's count."""
        attachment = self._attachment()
        if attachment is None:
            return 0, 0, ""
        counts = [(name, layer.handle.forwards) for name, _, layer in attachment.registry.swapped()]
        ahead = counts[0][1] if counts else 0
        where = next((name for name, count in counts if count < ahead), "")
        return attachment.passes + attachment.replays, sum(count for _, count in counts), where

    # -- other ranks --------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Check before a pass. Raises TierError: another rank failed, or does not arrive at this pass; ArgumentError,
        on all ranks: they hold shards of different models."""
        if not self._agreed:
            self._agree()
        if self._left_by:
            self._meet()
        if self.verdict:
            raise TierError(self.verdict)

    def _agree(self) -> None:
        """Start the heartbeat, and compare the ranks' shard layouts."""
        if self._store is None:
            self._begin()
            self._store.set(f"parts/{self.rank}", json.dumps(_parts(self._attachment().plan)))
        late = self._late("parts")
        if late is not None:
            text = (
                f"rank {late} has not begun to compute the model that rank {self.rank} computes; wrap it on all ranks"
            )
            self.verdict = self._publish(late, text)
        if self.verdict:
            return
        parts = [json.loads(self._store.get(f"parts/{rank}")) for rank in range(self.count)]
        other = next((rank for rank, held in enumerate(parts) if held != parts[0]), None)
        if other is not None:
            here, there = next((a, b) for a, b in zip_longest(parts[0], parts[other], fillvalue="no more") if a != b)
            raise ArgumentError(
                f"ranks compute one model together, and rank {other} has other parts: {there}, where rank 0 has "
                f"{here}; give all ranks one model, one plan and one config"
            )
        self._agreed = True

    def _meet(self) -> None:
        """Wait until all ranks have left the pass that this one left."""
        if self._late(f"left/{self._left}") is not None:
            self.verdict = self._publish(self.rank, self._left_by)
        self._left_by = ""

    def _late(self, what: str) -> int | None:
        """Return the first rank that has not published `what` by the group's timeout; None if all have, or if one
        failed."""
        keys = [f"{what}/{rank}" for rank in range(self.count)]
        end = time.monotonic() + self._timeout_s + _LISTEN_BEATS * BEAT_S
        try:
            while not self._store.check(keys) and not self.look():
                if time.monotonic() > end:
                    return next(rank for rank, key in enumerate(keys) if not self._store.check([key]))
                time.sleep(_POLL_S)
        except RuntimeError as error:
            self.verdict = self.verdict or _no_store(error)
        return None

    def look(self) -> str:
        """Return which other rank failed, from messages so far; "" if none."""
        if self.verdict or self._store is None:
            return self.verdict
        try:
            if self._store.check(["failed"]):
                self.verdict = self._of_another(self._store.get("failed"))
        except RuntimeError as error:
            self.verdict = _no_store(error)
        return self.verdict

    def blame(self) -> str:
        """Return which rank a failed collective was waiting for, and where it was last seen; publish that for the
        others.

        It is a rank that has left the pass, or else the one furthest behind, after listening once more to the ranks
        that go on: a hung rank still tells its place, of a dead one the last place is known. If all are level, it is
        one that is silent; if none is, the one that was behind before listening: a rank that hung has woken up
        meanwhile.
        """
        text = f"another rank of {self.count} has ended or hangs"
        with contextlib.suppress(RuntimeError):
            left = self._leaver()
            if left is not None:
                return self._publish(*left)
            before = self._places()
            # ranks that have waited for this one know better
            time.sleep((_LISTEN_BEATS + (_WOKEN_BEATS if self._has_woken() else 0)) * BEAT_S)
            if self.look():
                return self.verdict
            after = self._places()
            heard = {rank: told != before.get(rank) for rank, told in after.items()}
            level = all(heard.values()) and len({told[1:3] for told in after.values()} | {self._place()[:2]}) == 1
            places = (before or after) if level else after
            if places:
                rank = min(places, key=lambda rank: (places[rank][0] != _CLOSED, places[rank][1:3], heard[rank]))
                beats, passes, _, layer = places[rank]
                last = f"has ended or hangs; it was last seen in pass {passes}{_at(layer)}"
                text = self._publish(rank, f"rank {rank} {'has closed its model' if beats == _CLOSED else last}")
        return text

    def _leaver(self) -> tuple[int, str] | None:
        """Return a rank that left a pass which this one has not, and its message."""
        keys = {rank: f"left/{self._left + 1}/{rank}" for rank in range(self.count) if rank != self.rank}
        return next(
            ((rank, self._store.get(key).decode()) for rank, key in keys.items() if self._store.check([key])), None
        )

    def _has_woken(self) -> bool:
        """True if this rank stood still for beats, and has moved in the last ones."""
        place, since, before = self._stood
        stood = self._beats - since
        return stood >= 2 if self._place()[:2] != place else stood < 2 <= before

    def _places(self) -> dict[int, tuple[int, int, int, str]]:
        """Return the last message of each other rank."""
        told = {rank: self._last(rank) for rank in range(self.count) if rank != self.rank}
        return {rank: last for rank, last in told.items() if last is not None}

    def _last(self, rank: int) -> tuple[int, int, int, str] | None:
        """Return a rank's last message: its beat count, and its place."""
        key = f"beat/{rank}"
        return tuple(json.loads(self._store.get(key).decode())) if self._store.check([key]) else None

    def beat(self) -> None:
        """Publish a heartbeat, and check the other ranks'."""
        self._beats += 1
        place = self._place()
        if place[:2] != self._stood[0]:
            self._stood = place[:2], self._beats, self._beats - self._stood[1]
        try:
            self._store.set(f"beat/{self.rank}", json.dumps([self._beats, *place]))
            self.look()
            for rank in range(self.count) if not self.verdict else ():
                self._see(rank)
        except RuntimeError as error:
            self.verdict = self.verdict or _no_store(error)
        if self.verdict:
            self._abort()

    def _see(self, rank: int) -> None:
        told = None if rank == self.rank else self._last(rank)
        if told is None or told[0] == _CLOSED:
            return
        seen = self._seen.get(rank)
        answered = self._beats if seen is None or told[0] != seen.beats else seen.answered
        moved = self._beats if seen is None or told[1:] != seen.place else seen.moved
        self._seen[rank] = _Seen(told[0], answered, told[1:], moved)
        where = f"pass {told[1]}{_at(told[3])}"
        silent_s, still_s = (self._beats - answered) * BEAT_S, (self._beats - moved) * BEAT_S
        if silent_s > _SILENT_BEATS * BEAT_S:
            text = f"rank {rank} does not answer for {silent_s:.0f} s; it was last seen in {where}"
            self.verdict = self._publish(rank, text)
        elif still_s > self._patience_s and told[1:3] < self._place()[:2]:
            text = f"rank {rank} hangs in {where} for {still_s:.0f} s, and rank {self.rank} is ahead"
            self.verdict = self._publish(rank, text)

    def _abort(self) -> None:
        """Abort collectives that would wait on the GPU."""
        nccl = None if self._aborted else _nccl_of(self._group)
        if nccl is None:
            return
        self._aborted = True
        print(f"vbrt: rank {self.rank} stops: {self.verdict}", file=sys.stderr, flush=True)
        try:
            nccl.abort()
        except RuntimeError as error:
            why = f"its collectives cannot be aborted ({_line(error)}), and end with their timeout"
            print(f"vbrt: rank {self.rank}: {why}", file=sys.stderr, flush=True)


def _nccl_of(group: Any) -> Any:
    """Return a group's NCCL backend for GPU tensors; None if it has another."""
    try:
        backend = group._get_backend(torch.device(accelerator.TYPE))
    except RuntimeError:  # no backend for GPUs
        return None
    return backend if backend.name() == "nccl" else None


def _at(layer: str) -> str:
    return f" at {layer}" if layer else ""


def _no_store(error: BaseException) -> str:
    return f"rank 0 has ended: the store of torch.distributed, which it had, is gone ({_line(error)})"


def _line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), "")[:100]


def _beat(watch: Watch) -> float | None:
    watch.beat()
    return BEAT_S


def _tell_closed(store: dist.Store, rank: int) -> None:
    with contextlib.suppress(RuntimeError):  # the store died with its rank
        store.set(f"beat/{rank}", json.dumps([_CLOSED, 0, 0, ""]))


def _parts(plan: Plan) -> list[str]:
    """Describe each sharded weight, in words that are the same on all ranks."""
    return [
        f"{site.tensor} {site.whole_matrices} x {site.whole_shape} in {swap.label}, fine {swap.fine}"
        for swap in plan.swaps
        for site in swap.sites
    ]


_TOLD = (TierError, torch.OutOfMemoryError)


class _Begin:
    """Forward pre-hook: refuses a pass once a rank has failed."""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch

    def __call__(self, model: nn.Module, args: tuple) -> None:
        self.watch.check()

    def __deepcopy__(self, memo: dict) -> "_Begin":
        return self


class _End:
    """Forward hook, also called with errors: publishes this rank's error, and finds the faulty rank."""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch

    def __call__(self, model: nn.Module, args: tuple, out: Any) -> None:
        error = sys.exc_info()[1]
        if error is not None:
            _explain(self.watch, error)

    def __deepcopy__(self, memo: dict) -> "_End":
        return self


def _explain(watch: Watch, error: BaseException) -> None:
    """Add what is known of other ranks to an error, or publish the error if it is this rank's own."""
    if watch.verdict:
        return
    theirs = watch.look() or (watch.blame() if _is_of_collective(error) else "")
    if theirs:
        watch.verdict = theirs
        error.add_note(f"vbrt: {theirs}")
    elif isinstance(error, _TOLD):
        watch.tell(error)
    else:
        watch.leave(error)


def _is_of_collective(error: BaseException) -> bool:
    known = isinstance(error, dist.DistError)
    return known or (isinstance(error, RuntimeError) and any(word in str(error) for word in ("gloo", "NCCL", "Gloo")))


@contextlib.contextmanager
def watched(watch: Watch | None) -> Iterator[None]:
    """Context that raises failed collectives as TierError naming the faulty rank, and publishes this rank's own errors.

    Raises:
        TierError: another rank failed, or made a collective fail.
    """
    if watch is None:
        yield
        return
    watch.check()
    try:
        yield
    except TierError:
        raise
    except Exception as error:
        _explain(watch, error)
        if watch.verdict:
            raise TierError(watch.verdict) from error
        raise
    watch.check()  # an aborted collective has no result


def watch(attachment: Attachment, model: nn.Module) -> Watch | None:
    """Install the watchdog for a sharded model. Returns None if this process holds all weights."""
    shards = (swap.site.shard for swap in attachment.plan.swaps if swap.site.shard is not None)
    shard = next((shard for shard in shards if shard.count > 1), None)
    if shard is None or not dist.is_initialized():
        return None
    if isinstance(attachment.watcher, Watch):
        return attachment.watcher
    made = attachment.watcher = Watch(attachment, shard)
    model.register_forward_pre_hook(_Begin(made))
    model.register_forward_hook(_End(made), always_call=True)
    return made
