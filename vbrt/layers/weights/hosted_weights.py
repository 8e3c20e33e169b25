"""Hosted weights: the CPU multiplies few tokens with pages that lie in host memory, for layers on a GPU.

    host = Host(stack)
    hosted = host.take(weight, tokens)        # a state of the weight; None where the CPU cannot compute it
    y = hosted.compute(weight, x, bias)       # None for an x that the CPU does not take: the page is moved then

A product is one launch: the kernel posts x into a mailbox in page-locked memory, a thread of the team answers, and the
kernel picks the result up (`kernels/cuda/mailbox.py`, `kernels/cpu/hosted.py`). So it is captured in a CUDA graph like
any other. Recorded steps post products of one input together (`compute_siblings`). A bias stays on the GPU, where it
may be written to at any time, and is added there; so is the activation applied there, which costs a step less than
shorter results would save.

Who launches a post says so first, so that the team is awake: `compute` for itself, `Host.replayed` for a graph. A post
that is not answered in time gives NaN; the next product, or `Host.check`, raises an error then.
"""

import ctypes
import math
import os
import threading
import weakref
from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from torch import Tensor

from vbrt.config import FORMATS
from vbrt.errors import KernelError
from vbrt.host import accelerator
from vbrt.kernels import fused_on
from vbrt.kernels.cpu import build
from vbrt.kernels.cpu.hosted import (
    ANSWER,
    ENTRY_BITS,
    GAVE_UP,
    POST,
    HostedExperts,
    HostedPart,
    HostedTeam,
    Mailbox,
    Places,
    X,
    new_team,
)
from vbrt.kernels.cuda import devices
from vbrt.kernels.cuda.mailbox import GROUP, NEEDS, Outbox
from vbrt.layers.weights.encoded_weight import EncodedWeight
from vbrt.layers.weights.products import Streamed
from vbrt.layers.weights.weight_spec import HandleSpec
from vbrt.libraries.torch_api import is_capturing, raw_stream
from vbrt.tiers import TierStack
from vbrt.tiers.stack.host_lease import LowerLease, host_level

__all__ = [
    "MOST_TOKENS",
    "Host",
    "Hosted",
    "held_at_home",
    "is_hostable",
    "part_of",
    "refusal",
    "results_at",
    "shared_team",
]

#: most tokens of a product that the CPU computes
MOST_TOKENS = 8
_LINE = 64  # bytes


def refusal(stack: TierStack) -> str | None:
    """Return why the CPU computes no products for a stack's computing tier, or None. May build kernels."""
    device = stack.device
    if device.type != accelerator.CUDA:
        return f"it computes for CUDA GPUs, not for {device}"
    if not accelerator.pins():
        return "host memory cannot be page-locked here"
    return devices.refusal(device, NEEDS) or build.refusal(torch.device("cpu"), "hosted")


class Refreshed(Protocol):
    """Operands in host memory that are copies of tensors on the device."""

    def refresh(self) -> None:
        """Copy those that were written to since the last time."""


class Host:
    """The mailbox of one stack, and the team that answers its posts.

    Attributes:
        capturing: True while a graph is captured whose replays are announced by `replayed`.
        captured: posts captured so far.
        refusals: why the CPU cannot compute some weights.
    """

    def __init__(self, stack: TierStack, room_bytes: int) -> None:
        """room_bytes: of the largest inputs, plus the largest results."""
        self.capturing, self.captured = False, 0
        self.refusals: list[str] = []
        self._device, self._lock = stack.device, threading.RLock()
        self._room = torch.zeros(X + room_bytes + _LINE, dtype=torch.uint8, device="cpu", pin_memory=accelerator.pins())
        self._outbox = Outbox(self._room, (POST, ANSWER, GAVE_UP, X), ENTRY_BITS, stack.device)
        self._gave_up = ctypes.c_int64.from_address(self._room.data_ptr() + GAVE_UP)
        self._team = shared_team()
        self._handle = self._team.attach(self._room)
        self._names: dict[int, str] = {}
        self._launches = _Launches(stack.device)
        #: called before graphs are replayed: operands in host memory follow those on the device
        self.refreshed: weakref.WeakSet[Refreshed] = weakref.WeakSet()
        weakref.finalize(self, _detach, self._team, self._handle, self._launches)

    @property
    def room_bytes(self) -> int:
        """Bytes for inputs and results."""
        return self._room.numel() - X - _LINE

    def take(self, weight: EncodedWeight, tokens: int) -> "Hosted | None":
        """Return the state of a weight whose products of so many tokens the CPU computes; None where it cannot."""
        lease = held_at_home(weight)
        if lease is None:
            return None
        try:
            return Hosted(self, weight, lease, tokens)
        except KernelError as error:
            lease.end()
            self.refusals.append(str(error))
            return None

    # -- entries ------------------------------------------------------------------------------------------------------

    def enter(self, name: str, parts: Sequence[HostedPart], tokens: int, dtype: torch.dtype) -> int:
        """Register products of one x. Raises KernelError if the CPU's kernels do not take one."""
        entry = self._team.entry(self._handle, parts, tokens, dtype)
        self._names[entry] = name
        return entry

    def enter_experts(self, name: str, experts: HostedExperts, tokens: int, dtype: torch.dtype) -> int:
        """Register a layer of routed experts. Raises KernelError if the CPU's kernels do not take it."""
        entry = self._team.experts(self._handle, experts, tokens, dtype)
        self._names[entry] = name
        return entry

    def settle(self) -> None:
        """Wait until launched posts have come: a kernel that is still queued posts later."""
        self._team.settle(self._handle, self._launches.are_done)

    def leave(self, entry: int) -> None:
        """Forget a product, once it is not being computed. Those launched before need `settle` first."""
        self._names.pop(entry, None)
        self._team.forget(self._handle, entry)

    # -- launches -----------------------------------------------------------------------------------------------------

    def exchange(self, x_MK: Tensor, y_MN: Tensor, bias_N: Tensor | None, entry: int, result_at: int) -> None:
        """Launch a product on the current stream, or capture it. Raises KernelError if one was not answered."""
        with self._lock:
            self._post()
            self._outbox.exchange(x_MK, y_MN, bias_N, entry, result_at)

    def post(
        self, x_TK: Tensor, ids_Tk: Tensor, kept_Tk: Tensor, weights_Tk: Tensor, entry: int, places: Places
    ) -> None:
        """Launch a post of routed experts, or capture it: see `Outbox.post`. Raises KernelError as `exchange` does."""
        with self._lock:
            self._post()
            self._outbox.post(x_TK, ids_Tk, kept_Tk, weights_Tk, entry, places[:2])

    def add(self, y_TN: Tensor, entry: int, result_at: int) -> None:
        """Launch the wait for the last post of routed experts: see `Outbox.add`."""
        self._outbox.add(y_TN, entry, result_at)

    def _post(self) -> None:
        if self.capturing and is_capturing():
            self.captured += 1
        else:
            self._begin(1)

    def replayed(self, posts: int, replay: Callable[[], bool]) -> bool:
        """Announce the posts of a graph, and launch it; False if it was not. Raises KernelError."""
        with self._lock:
            for each in list(self.refreshed):
                each.refresh()
            self._begin(posts)
            done = False
            try:
                done = replay()
            finally:
                if not done:
                    self._team.expect(self._handle, -posts)
            return done

    def _begin(self, posts: int) -> None:
        self.check()
        self._launches.follow()
        self._team.expect(self._handle, posts)

    def check(self) -> None:
        """Raise KernelError if the device has given up waiting for an answer; it waits for further ones again."""
        post = self._gave_up.value
        if not post:
            return
        with self._lock:
            if self._gave_up.value:
                accelerator.synchronize(self._device)
                self._gave_up.value = 0
                self._outbox.mend()
        name = self._names.get(post & ((1 << ENTRY_BITS) - 1), "a layer")
        raise KernelError(
            f"{name}: the CPU did not answer within {self._outbox.wait_ns / 1e9:g} s, so that results since then are "
            'NaN; compute.where = "device" moves all weights to the GPU instead'
        )


class _Launches:
    """Launches of one mailbox's posts: one on another stream than the last waits for it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: torch.Stream | None = None
        self._raw: object = None

    def follow(self) -> None:
        """Have the current stream wait for the launches so far."""
        raw = raw_stream(self._device.index)
        if raw != self._raw:
            current = accelerator.current_stream(self._device)
            if self._stream is not None:
                current.wait_stream(self._stream)
            self._stream, self._raw = current, raw

    def are_done(self) -> bool:
        """Whether the device has run them all; False in a capture, where it must not be asked."""
        return self._stream is None or (not is_capturing() and self._stream.query())

    def wait(self) -> None:
        """Wait until the device has run them all, but in a capture."""
        if self._stream is not None and not is_capturing():
            self._stream.synchronize()


def _detach(team: HostedTeam, mailbox: Mailbox, launches: _Launches) -> None:
    """Stop polling a mailbox, which the device then no longer reads."""
    try:
        if team.pid == os.getpid():
            team.settle(mailbox, launches.are_done)
            launches.wait()
    finally:
        team.detach(mailbox)


class Hosted(Streamed):
    """State of a weight whose page lies in host memory, where the CPU multiplies few tokens with it; for more tokens
    the page is moved, as of a streamed one.

    Attributes:
        tokens: most tokens of a product on the CPU.
    """

    hosts = True
    __slots__ = ("_entries", "_host", "_lease", "_part", "_result_at", "_shared", "tokens")

    def __init__(self, host: Host, weight: EncodedWeight, lease: LowerLease, tokens: int) -> None:
        (page,) = lease.wait().values()
        self._host, self._lease, self.tokens = host, lease, min(tokens, MOST_TOKENS)
        self._result_at = results_at(weight, MOST_TOKENS)
        self._part = part_of(weight, page, self._result_at)
        self._entries: dict[int, int] = {}
        self._shared: dict[object, _SharedEntry] = {}  # by tokens, and names of the weights
        self._entries[1] = host.enter(weight.spec.name, [self._part], 1, weight.dtype)

    def compute(self, weight: EncodedWeight, x: Tensor, bias: Tensor | None) -> Tensor | None:
        """x Wᵀ + bias, rounded like a product of the GPU; None for operands that the CPU does not take.

        Raises KernelError: an earlier product was not answered.
        """
        return self._product(weight, x, bias) if 0 < x.numel() <= self.tokens * weight.spec.shape[1] else None

    def compute_rows(self, weight: EncodedWeight, rows: Sequence[Tensor], bias: Tensor | None) -> list[Tensor] | None:
        """`compute` of each x in `rows`, alike in shape, with the bits of a call for it alone, in few products."""
        shape, inputs = rows[0].shape, weight.spec.shape[1]
        tokens = rows[0].numel() // inputs
        if not 0 < tokens <= self.tokens or any(x.shape != shape for x in rows):
            return None
        found: list[Tensor] = []
        most = MOST_TOKENS // tokens
        for at in range(0, len(rows), most):
            some = rows[at : at + most]
            y = self._product(weight, torch.cat([x.reshape(tokens, -1) for x in some]), bias)
            if y is None:
                return None
            found += [each.view(*shape[:-1], -1) for each in y.split(tokens)]
        return found

    def compute_siblings(self, weights: Sequence[EncodedWeight], x: Tensor) -> list[Tensor] | None:
        """`compute` with each of several weights, this one's among them, without biases, as one post; None where the
        CPU does not compute all of them, or the mailbox has no room for their results."""
        states, first = [weight.held for weight in weights], weights[0]
        if not all(isinstance(state, Hosted) and state._host is self._host for state in states):
            return None
        x_MK = _rows(first, x, self._host) if 0 < x.numel() <= self.tokens * first.spec.shape[1] else None
        if x_MK is None or any((w.dtype, w.spec.shape[1]) != (x.dtype, x.shape[-1]) for w in weights):
            return None
        tokens = len(x_MK)
        starts = [0]  # of results, in numbers
        for weight in weights:
            nbytes = tokens * weight.spec.shape[0] * x.element_size()
            starts.append(starts[-1] + -(-nbytes // _LINE) * _LINE // x.element_size())
        entry = self._entry_of(weights, starts, tokens)
        if entry is None:
            return None
        ys = x.new_empty(1, starts[-1])
        self._host.exchange(x_MK, ys, None, entry, self._result_at)
        if not is_capturing():
            for weight in weights:
                weight.computed += 1
        sizes = ((*x.shape[:-1], weight.spec.shape[0]) for weight in weights)
        return [ys[0, at : at + math.prod(size)].view(size) for at, size in zip(starts, sizes, strict=False)]

    def _entry_of(self, weights: Sequence[EncodedWeight], starts: Sequence[int], tokens: int) -> int | None:
        key = tokens, tuple(weight.spec.name for weight in weights)
        shared = self._shared.get(key)
        if shared is None or shared.entry is None:
            host, dtype = self._host, weights[0].dtype
            if self._result_at + starts[-1] * dtype.itemsize > X + host.room_bytes:
                return None
            states = [weight.held for weight in weights]
            places = (self._result_at + at * dtype.itemsize for at in starts)
            parts = [state._part._replace(y=at) for state, at in zip(states, places, strict=False)]
            shared = _SharedEntry(host, host.enter(" and ".join(key[1]), parts, tokens, dtype))
            for state in states:
                state._shared[key] = shared
        return shared.entry

    def _product(self, weight: EncodedWeight, x: Tensor, bias: Tensor | None) -> Tensor | None:
        host, rows = self._host, weight.spec.shape[0]
        x_MK = _rows(weight, x, host)
        if x_MK is None:
            return None
        if bias is not None and (bias.dtype is not x.dtype or bias.device != x.device or bias.shape != (rows,)):
            return None
        tokens = len(x_MK)
        entry = self._entries.get(tokens)
        if entry is None:
            entry = self._entries[tokens] = host.enter(weight.spec.name, [self._part], tokens, weight.dtype)
        y = x.new_empty(*x.shape[:-1], rows)
        bias = None if bias is None else bias.detach().contiguous()
        host.exchange(x_MK, y.view(tokens, rows), bias, entry, self._result_at)
        if not is_capturing():
            weight.computed += 1
        return y

    def end(self) -> None:
        """Let the page go, once launched products have been computed. Idempotent."""
        try:
            self._host.settle()
        finally:
            while self._entries:
                self._host.leave(self._entries.popitem()[1])
            while self._shared:
                self._shared.popitem()[1].leave()
            self._lease.end()


class _SharedEntry:
    """An entry of several weights, which ends with the first of them. Attributes: entry: None once it has ended."""

    def __init__(self, host: Host, entry: int) -> None:
        self._host, self.entry = host, entry

    def leave(self) -> None:
        """Forget the entry, once it is not being computed. Idempotent."""
        entry, self.entry = self.entry, None
        if entry is not None:
            self._host.leave(entry)


def _rows(weight: EncodedWeight, x: Tensor, host: Host) -> Tensor | None:
    """Return x [M, K] as a post takes it; None for an x that the CPU does not take."""
    inputs = weight.spec.shape[1]
    if x.shape[-1] != inputs or x.dtype is not weight.dtype:
        return None
    if x.device != weight.device or (is_capturing() and not host.capturing):
        return None
    x_MK = x.reshape(-1, inputs)
    if x_MK.is_contiguous() and not x_MK.data_ptr() % 16:
        return x_MK
    return x_MK.clone(memory_format=torch.contiguous_format)


def is_hostable(spec: HandleSpec) -> bool:
    """True if the CPU may compute products of such weights: rounded ones, in shapes that a mailbox takes, unless only
    GPUs have kernels for their format."""
    rounds = not (spec.lossless or spec.by_rows or FORMATS[spec.format].lossless)
    decodes = FORMATS[spec.format].kernels is not None and "cpu" not in fused_on(spec.format)
    return rounds and not decodes and not any(side % GROUP for side in spec.shape)


def held_at_home(weight: EncodedWeight) -> LowerLease | None:
    """Hold the page of a weight of which the CPU could compute products, where it lies; None if there is none."""
    stack = weight.stack
    if not is_hostable(weight.spec) or len(weight.pages) != 1:
        return None
    page = weight.pages[0]
    level = host_level(stack, page)
    if level is None or level.index != page.home or not page.pinned:
        return None
    lease = LowerLease(stack, weight.keys, looks=True)
    if lease.begin():
        return lease
    lease.end()
    return None


def results_at(weight: EncodedWeight, tokens: int) -> int:
    """Return the byte offset of results in a mailbox, behind inputs of so many tokens."""
    return -(-(X + tokens * weight.spec.shape[1] * weight.dtype.itemsize) // _LINE) * _LINE


def part_of(weight: EncodedWeight, page: Tensor, y: int) -> HostedPart:
    """Return the product with a weight's page, without a bias; `y`: byte offset of the results."""
    spec = weight.spec
    return HostedPart(spec.format, weight.dtype, spec.shape, weight.pages[0].layout, page, None, y)


_teams: dict[tuple[int, int], HostedTeam] = {}


def shared_team(choose: Callable[[Sequence[int]], HostedTeam] | None = None) -> HostedTeam:
    """The team of this process, for the number of threads that torch has now.

    Args:
        choose: makes it, from the numbers of threads in question; None: of as many as torch has, but one.
    """
    key = os.getpid(), torch.get_num_threads()
    if key not in _teams:
        team = new_team()
        counts = sorted({team.threads, -(-team.threads * 3 // 4), -(-team.threads // 2)})
        _teams[key] = team if choose is None else choose(counts)
    return _teams[key]
