"""Which weights of one model the CPU computes where they lie: measured rates in, states of weights out.

Asked before passes of few tokens; the answer is kept until budgets, homes or the number of tokens change. The choice
itself is pure: `vbrt.residency.hosted_share`.
"""

import contextlib
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence

from vbrt.errors import KernelError
from vbrt.host import accelerator
from vbrt.layers import Weight
from vbrt.layers.experts import ExpertsHandle
from vbrt.layers.weights.hosted_rates import measured_rates, resident_seconds
from vbrt.layers.weights.hosted_weights import MOST_TOKENS, Host, is_hostable, refusal
from vbrt.libraries.torch_api import is_capturing
from vbrt.model.layer_registry import Registry
from vbrt.residency.hosted_share import HostRates, Use, hosted_keys
from vbrt.residency.room_division import Room
from vbrt.tiers import TierStack

__all__ = ["Hosting"]

_LOOKS = 8  # passes of a model that does not generate, in which its products are looked at


class Hosting:
    """Hosted weights of one model.

    Args:
        registry: of the model's layers.
        where: `compute.where`.

    Attributes:
        version: counts the choices; captured steps are valid for one.
        rates: measured once, at the first choice.
        fallbacks: the first reason why a weight is not hosted.
    """

    def __init__(self, stack: TierStack, registry: Registry, where: str) -> None:
        self._stack, self._registry, self._where = stack, registry, where
        self._host: Host | None = None
        self._key: object = None
        self._choosing = threading.Lock()
        self._hosted: weakref.WeakValueDictionary[str, Weight] = weakref.WeakValueDictionary()
        self._looked: tuple[object, int] = (None, 0)
        self._orders: dict[str, list[str]] = {}  # pages of a pass in order, hosted ones included
        self._groups: dict[str, str] = {}  # page -> the first one of those whose products have the same input
        self.version = 0
        self.rates: dict[int, HostRates] = {}
        self.fallbacks: list[str] = []

    # -- the choice ---------------------------------------------------------------------------------------------------

    def follow(self, phase: str, tokens: int = 0) -> None:
        """Choose the hosted weights of passes of a phase, if what that depends on has changed.

        Args:
            tokens: of each product; 0: as in the last pass, in which products of some layers may have had few.

        Raises:
            KernelError: an earlier pass was not answered by the CPU.
        """
        if self._host is not None:
            self._host.check()
        stack = self._stack
        if self._where != "auto" or stack.device.type != accelerator.CUDA or stack.closed:
            return
        if is_capturing() or not (self._hosted or stack.ledger.travellers):
            return
        state = stack.ledger.changes, stack.levels[0].policy.capacity_bytes
        if not tokens and not self._looks_again(state):
            return
        weights = [] if tokens else self._of_few_tokens()
        few = tokens or max((weight.tokens for weight in weights), default=0)
        key = *state, few, len(weights)
        if key == self._key or not stack.last_order(phase):  # before the first pass it is unknown what passes use
            return
        if self._choosing.acquire(blocking=False):  # else another thread is at it
            try:
                self._choose(phase, few, weights if not tokens else self._weights())
                self._key = key
            finally:
                self._choosing.release()

    def _looks_again(self, state: object) -> bool:
        """True in the first passes in a state: after them it is known which products have few tokens."""
        if state != self._looked[0]:
            self._looked = state, 0
        self._looked = state, self._looked[1] + 1
        return self._looked[1] <= _LOOKS

    def _choose(self, phase: str, tokens: int, candidates: Sequence[Weight]) -> None:
        """candidates: those that the CPU may compute, for so many tokens."""
        chosen = self._chosen(phase, tokens, {weight.keys[0]: weight for weight in candidates})
        if chosen == set(self._hosted) and self._valid():
            return
        self._let_go()
        if chosen:
            weights = {weight.keys[0]: weight for weight in candidates if weight.keys[0] in chosen}
            try:
                self._take(self.mailbox(self._room_bytes(weights)), weights, tokens)
            except KernelError as error:
                self._note(str(error))
            self._stack.leave_out(phase, frozenset(self._hosted))
        self.version += 1

    def _take(self, host: Host, weights: dict[str, Weight], tokens: int) -> None:
        for key, weight in weights.items():
            hosted = host.take(weight, tokens)
            if hosted is not None:
                weight.host(hosted)
                self._hosted[key] = weight
        if host.refusals:
            self._note(host.refusals[0])

    def _valid(self) -> bool:
        return all(weight.held.hosts for weight in self._hosted.values())

    def _chosen(self, phase: str, tokens: int, weights: dict[str, Weight]) -> frozenset[str]:
        policy = self._stack.levels[0].policy
        if tokens > MOST_TOKENS or not weights or getattr(policy, "foresight", None) is None:
            return frozenset()
        if any(isinstance(handle, ExpertsHandle) for handle in self._registry.handles):
            return frozenset()  # what passes need of experts, and so what else fits, varies from token to token
        uses = self._uses(phase, weights)
        if sum({use.key: use.nbytes for use in uses}.values()) <= policy.capacity_bytes:
            return frozenset()
        why = refusal(self._stack)
        try:
            rates = None if why else self.rates_for(tokens, list(weights.values()))
        except KernelError as error:
            rates, why = None, str(error)
        if rates is None:
            self._note(why)
            return frozenset()
        room = Room(policy.capacity_bytes, getattr(policy, "group", 1), getattr(policy, "prefetch", 2))
        device_s = resident_seconds([use.nbytes for use in uses], self._stack.device)
        return hosted_keys(uses, room, rates, tokens, device_s=device_s)

    def rates_for(self, tokens: int, weights: list[Weight]) -> HostRates:
        """Return the rates for products of so many tokens, measured at the first call.

        Raises KernelError: the CPU computes with none of the weights; says why.
        """
        if tokens not in self.rates:
            self.rates[tokens] = measured_rates(weights, tokens)
        return self.rates[tokens]

    def _note(self, why: str) -> None:
        if not self.fallbacks:
            self.fallbacks.append(
                f"compute.where: weights that do not fit are moved where the CPU cannot compute them: {why}"
            )

    def _weights(self) -> list[Weight]:
        """Weights below the computing tier that the CPU may compute."""
        found = (handle for handle in self._registry.handles if isinstance(handle, Weight) and len(handle.keys) == 1)
        return [handle for handle in found if handle.streams and is_hostable(handle.spec)]

    def _of_few_tokens(self) -> list[Weight]:
        """Weights that are hosted, or whose last product had few tokens."""
        return [w for w in self._weights() if 0 < w.tokens <= MOST_TOKENS or w.keys[0] in self._hosted]

    def _uses(self, phase: str, weights: dict[str, Weight]) -> list[Use]:
        """Pages of a pass that live below the computing tier, in the order of the last pass of the phase, or of any."""
        pages, overhead = self._stack.pages, self._stack.levels[0].overhead_bytes
        seen, known = self._stack.last_order(phase), self._orders.get(phase, [])
        if set(seen) >= {key for key in known if key in pages}:  # else passes have left out what was hosted
            self._orders[phase] = seen
            self._groups = _groups([weights[key] for key in seen if key in weights])
        keys = [key for key in self._orders[phase] if key in pages and pages[key].home]
        return [Use(key, pages[key].nbytes + overhead, key in weights, self._groups.get(key)) for key in keys]

    def _room_bytes(self, weights: dict[str, Weight]) -> int:
        """Bytes of a mailbox for products with these weights, those with one input in one post."""
        room: dict[str, int] = {}
        for key, weight in weights.items():
            outputs, inputs = (side * MOST_TOKENS * weight.dtype.itemsize for side in weight.spec.shape)
            group = self._groups.get(key, key)
            room[group] = room.get(group, inputs) + outputs
        return max(room.values())

    def mailbox(self, nbytes: int) -> Host:
        """Return the mailbox of the model, with room for so many bytes of inputs and results.

        Raises KernelError: there is no page-locked memory, or no thread, for it.
        """
        if self._host is None or self._host.room_bytes < nbytes:
            try:
                self._host = Host(self._stack, nbytes)
            except (RuntimeError, MemoryError) as error:  # as torch and threading say it
                raise KernelError(f"no mailbox of {nbytes} bytes for the CPU's products: {error}") from error
        return self._host

    # -- passes -------------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def captured(self) -> Iterator[Callable[[], int]]:
        """Capture products in the block; gives a function that returns how many were captured."""
        host = self._host
        if host is None:
            yield int
            return
        before = host.captured
        host.capturing = True
        try:
            yield lambda: host.captured - before
        finally:
            host.capturing = False

    def replayed(self, posts: int, replay: Callable[[], bool]) -> bool:
        """Announce a replay with so many captured products, and call it; False if it did not run."""
        return self._host.replayed(posts, replay)

    def check_results(self) -> None:
        """Wait for the products launched so far; raise KernelError if the CPU did not answer one."""
        if self._host is not None:
            accelerator.current_stream(self._stack.device).synchronize()
            self._host.check()

    # -- the end ------------------------------------------------------------------------------------------------------

    def _let_go(self) -> None:
        for weight in list(self._hosted.values()):
            if weight.held.hosts:
                weight.forget_ready()
        self._hosted.clear()

    def release(self) -> None:
        """Host nothing until the next choice: pages are about to move."""
        if self._hosted:
            self._let_go()
            self.version += 1
        self._key = None

    def told(self) -> str:
        """Return what the CPU computes, for statistics; "" for nothing."""
        if not self._hosted:
            return ""
        rates = next(iter(self.rates.values()))
        nbytes = sum(self._stack.pages[key].nbytes for key in self._hosted if key in self._stack.pages)
        return f"{len(self._hosted)} weights, {nbytes / 2**20:,.0f} MiB ({rates})"


def _groups(weights: Iterable[Weight]) -> dict[str, str]:
    """Return the groups of weights, in the order of a pass, whose last products had the same input: a guess, as memory
    is used again."""
    groups, last, first = dict[str, str](), None, ""
    for weight in weights:
        read = weight.input_at, weight.spec.shape[1]
        first = first if weight.input_at and read == last else weight.keys[0]
        groups[weight.keys[0]], last = first, read
    return groups
