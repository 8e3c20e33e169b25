"""Ranks that compute one model together stop together, and say whose fault it is.

A rank that fails between two collectives leaves the others waiting in theirs: until the group's timeout, and then with
an error that names nobody. So every rank writes to the store of torch.distributed, about once a second, which pass and
which layer it is at, and a rank whose forward raises writes why, before anything else sees the error. Whoever is raised
out of a collective, or begins another pass, reads there what happened: the error names the rank and its layer.

What any rank may meet alone is told: pages that cannot be read, no memory. Of any other error a rank cannot know
whether all have met it: an argument that the model refuses is refused on all ranks alike, and harms none, but what a
hook raises on one leaves the others in the midst of a pass, whose sums its next pass would spoil. So it begins no other
before all have left theirs. Before the first pass, ranks compare what parts of weights they hold.

Collectives of NCCL are aborted, since a GPU would wait in them until the timeout. Gloo's are not: they end when the
other process does, or with the timeout.
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
from vbrt.host.host_memory import bytes_view
from vbrt.host.ticker import Ticker
from vbrt.layers.weights.weight_shards import group_of
from vbrt.model.attachment import Attachment
from vbrt.residency.plan import Plan
from vbrt.residency.weight_site import Shard

__all__ = ["Watch", "watch", "watched"]

BEAT_S = 1.0
_PATIENCE = 0.8  # of a group's timeout, which a rank may stay in one place while others wait: then its name can be told
_SILENT_BEATS = 15  # after which a rank is taken to hang or to be gone
_LISTEN_BEATS = 2.5  # in which a rank that is there is heard
_WOKEN_BEATS = 2  # for which a rank listens longer that has hung itself
_CLOSED = -1  # in the place of its beats, what a rank tells last
_POLL_S = 0.002
_begun: Counter[str] = Counter()  # watches that have begun to tell, by the name of their group


class _Seen(NamedTuple):
    """What another rank has told last, and since which beat of this one: that it is there, and its place. A job that
    was stopped as a whole has missed no beat of another rank."""

    beats: int
    answered: int
    place: tuple[int, int, str]
    moved: int


class Watch:
    """What this rank tells the others of its group, and what they have told.

    Attributes:
        verdict: what is wrong with another rank, and with which; "" while all are well.
    """

    def __init__(self, attachment: Attachment, shard: Shard) -> None:
        self._attachment, self._group = weakref.ref(attachment), group_of(shard)
        self._device, self._group_name = attachment.stack.device, shard.group
        self.rank, self.count = dist.get_rank(self._group), dist.get_world_size(self._group)
        options = self._group._get_backend(self._device).options
        self._timeout_s = getattr(options, "_timeout", dist.default_pg_timeout).total_seconds()
        self.verdict, self._beats = "", 0
        self._seen: dict[int, _Seen] = {}
        self._left, self._left_by = 0, ""  # passes that errors have ended, and the last one, until all have left it
        self._stood = (0, 0), 0, 0  # where this rank is, since which beat, and for how many it was where it was before
        self._aborted = False
        nccl = _nccl_of(self._group)  # Gloo itself raises in who waits
        self._patience_s = float("inf") if nccl is None else _PATIENCE * nccl.options._timeout.total_seconds()
        self._store: dist.Store | None = None
        self._agreed = False
        self._ticker: Ticker | None = None

    def _begin(self) -> None:
        """Begin to tell. Ranks begin their first passes in one order, and wrap their models in any."""
        _begun[self._group_name] += 1  # what an earlier model was told says nothing of this one
        # of its own: who waits in torch's store for another rank keeps everybody else from using it
        store = dist.distributed_c10d._get_default_store().clone()
        self._store = dist.PrefixStore(f"vbrt/{self._group_name}/{_begun[self._group_name]}", store)
        self.beat()
        self._ticker = Ticker(self, _beat, partial(_tell_closed, self._store, self.rank))
        self._ticker.start(BEAT_S)

    def stop(self) -> None:
        """Tell nothing more, and that."""
        if self._ticker is not None and self._ticker.running:
            self._ticker.stop()
            _tell_closed(self._store, self.rank)

    def compare(self, tensor: torch.Tensor, what: str) -> None:
        """Raise ArgumentError, on all ranks, if one of them calls this with another tensor, which is `what`. Raises
        TierError: another rank is not well."""
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
        """Return the least of the numbers with which all ranks call this, each at the same place of its passes. Raises
        TierError: another rank is not well."""
        told = torch.tensor([number], dtype=torch.int64, device=self._device)
        with watched(self):
            dist.all_reduce(told, dist.ReduceOp.MIN, group=self._group)
        return int(told)

    # -- this rank ----------------------------------------------------------------------------------------------------

    def tell(self, error: BaseException) -> None:
        """Tell the others why this rank stops, and begin no pass any more: others wait in the midst of one."""
        self.verdict = f"this rank, {self.rank}, has failed in an earlier pass: {error}"[:500]
        if self._store is not None:
            with contextlib.suppress(RuntimeError):  # the store is gone with the rank that had it
                self._publish(self.rank, self._failure(error))

    def leave(self, error: BaseException) -> None:
        """Tell the others that this rank has left a pass by an error that they may have met, too, or not."""
        if self._store is None or self.verdict or self._left_by:
            return
        self._left, self._left_by = self._left + 1, self._failure(error)
        with contextlib.suppress(RuntimeError):
            self._store.set(f"left/{self._left}/{self.rank}", self._left_by)

    def _failure(self, error: BaseException) -> str:
        layer = "" if isinstance(error, VBError) else self._place()[2]  # else its message begins with the layer
        return f"rank {self.rank} has failed{_at(layer)}: {type(error).__name__}: {error}"[:500]

    def _publish(self, rank: int, text: str) -> str:
        """Tell all ranks whose fault it is that they stop, unless they were told already; return what they were."""
        return self._of_another(self._store.compare_set("failed", "", json.dumps({"rank": rank, "text": text})))

    def _of_another(self, told: bytes) -> str:
        """Return why ranks have stopped, as another one has told it."""
        what = json.loads(told)
        return what["text"] if what["rank"] != self.rank else f"the other ranks have stopped: {what['text']}"

    def _place(self) -> tuple[int, int, str]:
        """The pass, the products computed, and the layer of the next one: the first that has fewer than the first."""
        attachment = self._attachment()
        if attachment is None:
            return 0, 0, ""
        counts = [(name, layer.handle.forwards) for name, _, layer in attachment.registry.swapped()]
        ahead = counts[0][1] if counts else 0
        where = next((name for name, count in counts if count < ahead), "")
        return attachment.passes + attachment.replays, sum(count for _, count in counts), where

    # -- the others ---------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """To be called before a pass. Raises TierError if another rank is not well, or does not come to where this one
        is; ArgumentError, on all ranks, if they hold parts of other models."""
        if not self._agreed:
            self._agree()
        if self._left_by:
            self._meet()
        if self.verdict:
            raise TierError(self.verdict)

    def _agree(self) -> None:
        """Begin, and compare what weights ranks hold parts of, and how."""
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
        """Wait until all ranks have left the pass that this one has left."""
        if self._late(f"left/{self._left}") is not None:
            self.verdict = self._publish(self.rank, self._left_by)
        self._left_by = ""

    def _late(self, what: str) -> int | None:
        """Return the first rank that has not told `what` when the group's timeout is over; None if all have told it, or
        one of them is not well."""
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
        """Return what is wrong with another rank, by what they have told until now; "" if nothing is."""
        if self.verdict or self._store is None:
            return self.verdict
        try:
            if self._store.check(["failed"]):
                self.verdict = self._of_another(self._store.get("failed"))
        except RuntimeError as error:
            self.verdict = _no_store(error)
        return self.verdict

    def blame(self) -> str:
        """Return which rank a collective that failed here was waiting for, and where that one was last seen; tell the
        others, who wait for it or for this rank.

        One that has left the pass, or else who is furthest behind, once those that go on have been heard again: one
        that hangs tells where it is, and of one that has ended the last place is known. Where they are level it is one
        that tells nothing more, and where all do it is who was behind when it was not yet listened to: one that hung
        has woken up meanwhile.
        """
        text = f"another rank of {self.count} has ended or hangs"
        with contextlib.suppress(RuntimeError):
            left = self._leaver()
            if left is not None:
                return self._publish(*left)
            before = self._places()
            # others that have waited for this rank know better
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
        """Return a rank that has left a pass which this one has not, and what it has told."""
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
        """What each of the others has told last, by rank."""
        told = {rank: self._last(rank) for rank in range(self.count) if rank != self.rank}
        return {rank: last for rank, last in told.items() if last is not None}

    def _last(self, rank: int) -> tuple[int, int, int, str] | None:
        """What a rank has told last: how often it has, and its place."""
        key = f"beat/{rank}"
        return tuple(json.loads(self._store.get(key).decode())) if self._store.check([key]) else None

    def beat(self) -> None:
        """Tell that this rank is there, and see whether the others are."""
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
        """End collectives that would wait on the GPU."""
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
    """Return the backend of a group for tensors on GPUs if that is NCCL's, whatever the group has for others."""
    try:
        backend = group._get_backend(torch.device("cuda"))
    except RuntimeError:  # it has none
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
    with contextlib.suppress(RuntimeError):  # the store is gone with the rank that had it
        store.set(f"beat/{rank}", json.dumps([_CLOSED, 0, 0, ""]))


def _parts(plan: Plan) -> list[str]:
    """What each rank holds parts of, and how, in words that are the same on all of them."""
    return [
        f"{site.tensor} {site.whole_matrices} x {site.whole_shape} in {swap.format}, fine {swap.fine}"
        for swap in plan.swaps
        for site in swap.sites
    ]


_TOLD = (TierError, torch.OutOfMemoryError)


class _Begin:
    """A forward pre-hook: no pass begins once a rank is not well."""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch

    def __call__(self, model: nn.Module, args: tuple) -> None:
        self.watch.check()

    def __deepcopy__(self, memo: dict) -> "_Begin":
        return self


class _End:
    """A forward hook that is called with errors, too: tells the others of this rank's, and says who is to blame."""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch

    def __call__(self, model: nn.Module, args: tuple, out: Any) -> None:
        error = sys.exc_info()[1]
        if error is not None:
            _explain(self.watch, error)

    def __deepcopy__(self, memo: dict) -> "_End":
        return self


def _explain(watch: Watch, error: BaseException) -> None:
    """Add to an error what is known of other ranks, or tell them of it where it is this rank's own."""
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
    """Raise errors of collectives within the block as TierError that names the rank; tell others of this rank's own.

    Raises:
        TierError: another rank is not well, or has made a collective fail.
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
    watch.check()  # a collective that was aborted has given no sum


def watch(attachment: Attachment, model: nn.Module) -> Watch | None:
    """Have the ranks that hold parts of a model's weights stop together. Returns None where this process has all."""
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
