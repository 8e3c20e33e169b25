"""Recorded blocks: checkpointed blocks of a model in training, replayed as CUDA graphs.

    blocks = RecordedBlocks(stack, captures=True)
    blocks.begin(model)        # at the begin of a pass with gradients: takes over transformers' checkpoint functions
    model(x).backward()        # from its third step on a block is two graphs: its forward; forward again, and backward
    blocks.release()           # the blocks have their own checkpoint functions again

What trains in few tokens is bound by the host, which launches each kernel of a block from Python three times a step.
A block whose activations are checkpointed, by transformers (`gradient_checkpointing_enable`) or by the config
(`training.activations`), has no state between its forward and its backward but its inputs, so both are recorded apart,
in memory that all blocks share. A recording serves calls of the same shapes, dtypes, constants and autocast; gradients
of adapters leave it as ever, through autograd.

Where pages live in host memory, the graphs read them in a ring of blocks (`vbrt.tiers.schedule.block_ring`): while one
block runs, the next one's pages are copied. The ring takes most of the GPU's budget for pages. It is given back where a
model decodes, or runs without gradients for long: eager passes stream all pages through the room that is left.

Weights that train in the tiers (mode = "full") are rewritten in host memory by each step, and the ring brings them
anew. A recorded backward computes their gradients into memory that every second block shares: while those of one block
are copied to the host, those of the next one are computed.

Of routed experts a recorded block leases all of a layer at once, so that nothing in it depends on the routing. Their
eager run leases what the routing names, in chunks where the budget cuts the lease, so gradients are summed in another
order.

A block stays eager where its pages cannot stream so, where it draws random numbers, has hooks, gets other arguments
than tensors and constants, where its graphs' results differ from eager ones, which are compared once, or where the GPU
has no room for its recordings (`recording_room.py`). Recordings are dropped when an attribute of the model has changed
between two passes (adapters that were added, scaled or switched), or a page has moved. Not seen: functions of Python
modules that are replaced while a model trains.
"""

import functools
import itertools
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.utils.checkpoint import checkpoint

from vbrt.errors import TierError
from vbrt.host import accelerator
from vbrt.kernels.observers import is_known_memory, is_watched
from vbrt.layers import SwappedLayer, weights_in
from vbrt.layers.experts import ExpertsHandle, leasing_all, why_not_recorded
from vbrt.layers.weights.linear_product import pass_precision
from vbrt.layers.weights.state import Weight
from vbrt.libraries.torch_api import TreeSpec, tree_flatten, tree_unflatten
from vbrt.libraries.transformers_api import CHECKPOINT_FUNCTION, checkpointed_blocks
from vbrt.model.mutation_watch import Watch
from vbrt.model.recording_room import RecordingRoom
from vbrt.tiers import Recording, TierStack
from vbrt.tiers.schedule.block_ring import BlockRing
from vbrt.tiers.schedule.graph_recorder import GraphRecorder, Recorded, waits_noticed
from vbrt.training import FullWeight, StreamedParameter
from vbrt.training.activations.checkpointing import HeldBlock
from vbrt.training.full.block_weights import BlockWeights
from vbrt.training.full.full_layers import collecting

__all__ = ["TURNS", "Checkpoint", "RecordedBlocks"]

#: memories of gradients of weights in the tiers: one is copied, one computed into
TURNS = 2

_EAGER_CALLS = 2  # of a block, before it is recorded: kernels are compiled and tuned, pages have found their places
_MOST, _MOST_KNOWN = 4, 64  # recordings of a block; kinds of calls whose number is known
_CAPTURE = 2  # a recorder's second run of a function, behind a warm-up
_DIFFERENCE = 1e-2  # of an eager result's norm: the order of a backward's sums may vary
_IDLE_PASSES = 64  # without gradients, one after the other, until the ring is given back
_SHORT_STEPS = 16  # of a ring: fewer are not worth its recordings
_SHORT_RINGS = 3  # of fewer steps, one after the other, until blocks stay eager
_CONSTANTS = (type(None), bool, int, float, str, torch.dtype, torch.device)

Plain = Callable[..., Any]


class GraphCapture(Protocol):
    """Captures a function's launches; see `GraphRecorder`."""

    def record(self, step: Callable[[], None], within: Callable[[], AbstractContextManager]) -> Recorded:
        """Capture a function."""

    def release(self) -> None:
        """Free what captures hold."""


class _Call(NamedTuple):
    """A block's call, taken apart."""

    function: functools.partial
    tensors: tuple[Tensor, ...]
    places: tuple[int, ...]  # of tensors among the leaves
    leaves: tuple[Any, ...]
    form: TreeSpec

    @classmethod
    def of(cls, function: Any, args: tuple) -> "_Call | None":
        """A call of transformers' checkpointed function; None if it takes more than tensors and constants."""
        if not isinstance(function, functools.partial):
            return None
        leaves, form = tree_flatten((args, function.keywords))
        places = tuple(at for at, leaf in enumerate(leaves) if isinstance(leaf, Tensor))
        if not all(isinstance(leaf, (Tensor, *_CONSTANTS)) for leaf in leaves):
            return None
        return cls(function, tuple(leaves[at] for at in places), places, tuple(leaves), form)

    @property
    def key(self) -> Hashable:
        """Cache key of a recording within its block."""
        told = tuple((t.shape, t.stride(), t.dtype, t.device, t.requires_grad) for t in self.tensors)
        constants = tuple(None if isinstance(leaf, Tensor) else (type(leaf), leaf) for leaf in self.leaves)
        return self.form, constants, told, _autocast(self.tensors[0].device.type), pass_precision()

    def run(self, tensors: Sequence[Tensor]) -> tuple[list[Any], TreeSpec]:
        """Call the block with other tensors; its results, and their form."""
        leaves = list(self.leaves)
        for at, tensor in zip(self.places, tensors, strict=True):
            leaves[at] = tensor
        args, keywords = tree_unflatten(leaves, self.form)
        return tree_flatten(self.function.func(*self.function.args, *args, **keywords))


class Checkpoint:
    """Checkpoint function of a block: replays its recording, or calls the function whose place it has taken."""

    def __init__(self, owner: "RecordedBlocks", block: nn.Module, plain: Plain) -> None:
        self.plain = plain
        self._owner, self._block = weakref.ref(owner), weakref.ref(block)

    def __call__(self, function: Any, *args: Any) -> Any:
        owner, block = self._owner(), self._block()
        if owner is None or block is None:
            return self.plain(function, *args)
        recorded = owner.recorded(block, function, args)
        if recorded is not None:
            return recorded()
        outputs = self.plain(function, *args)
        owner.ran(outputs)
        return outputs

    def __deepcopy__(self, memo: dict) -> Plain:
        return self.plain

    def __reduce__(self) -> Any:
        return _same, (self.plain,)


def _same(plain: Plain) -> Plain:
    return plain


class RecordedBlocks:
    """Recordings of one model's checkpointed blocks.

    Args:
        captures: false: blocks stay eager.
        recorder: makes what captures their launches.

    Attributes:
        replays: of blocks' forwards.
        reasons: why blocks are eager.
    """

    def __init__(
        self, stack: TierStack, *, captures: bool, recorder: Callable[[torch.device], GraphCapture] = GraphRecorder
    ) -> None:
        self._stack, self._captures, self._new_recorder = stack, captures, recorder
        self._blocks: list[weakref.ref[nn.Module]] = []
        self._known: weakref.WeakKeyDictionary[nn.Module, dict[Hashable, _Block | int]] = weakref.WeakKeyDictionary()
        self._memory = _Memory()
        self._recorder: GraphCapture | None = None
        self._watch: Watch | None = None
        self._reasons: dict[str, None] = {}
        self._rings, self._room = _Rings(stack), RecordingRoom(stack.device)
        self._last: torch.Size | None = None  # of the input of the model's last block, while the rest is measured
        self._failed = False  # then no more is recorded: a pool that lost a capture may refuse the next
        self._idle = 0  # passes without gradients since the last one with
        self.replays = 0

    @property
    def reasons(self) -> list[str]:
        """Why blocks are eager, for statistics."""
        return [f"checkpointed blocks run from Python, as {reason}" for reason in self._reasons]

    def begin(self, model: nn.Module) -> bool:
        """Take over the checkpoint functions of a model's blocks, at the begin of a pass with gradients; True if there
        are any."""
        if not self._captures or torch.compiler.is_compiling():
            return False
        self._idle = 0
        if self._rings.ring is not None and not any(
            isinstance(found, _Block) for known in self._known.values() for found in known.values()
        ):
            self._rings.leave()
        if self._watch is not None and self._watch.sees_changes():
            self._forget()
        blocks = _blocks_of(model) if self._watch is None else self._live_blocks()
        for block in blocks:
            plain = vars(block).get(CHECKPOINT_FUNCTION)
            if plain is not None and not isinstance(plain, Checkpoint):
                setattr(block, CHECKPOINT_FUNCTION, Checkpoint(self, block, plain))
        self._blocks = [weakref.ref(block) for block in blocks]
        if blocks and self._watch is None:
            self._watch = Watch(model)
        return bool(blocks)

    def rest(self, *, decodes: bool) -> None:
        """Note the begin of a pass without gradients: after many of them, or where the model decodes, the policy gets
        the ring's room."""
        self._idle += 1
        if self._rings.ring is not None and (decodes or self._idle > _IDLE_PASSES):
            self._rings.ring.give_back()
            self._forget()

    def recorded(self, block: nn.Module, function: Any, args: tuple) -> Callable[[], Any] | None:
        """Return a replay of a call; None where it is to run eagerly."""
        if not self._captures or is_watched() or not torch.is_grad_enabled() or torch.is_inference_mode_enabled():
            return None
        call = _Call.of(function, args)
        if call is None or not call.tensors or not all(map(is_known_memory, call.tensors)):
            self._eager("one gets more than tensors and constants")
            return None
        known, key = self._known.setdefault(block, {}), call.key
        if len(known) > _MOST_KNOWN:
            known = self._known[block] = {key: found for key, found in known.items() if isinstance(found, _Block)}
        found = known.get(key, 0)
        if isinstance(found, int) and self._rings.hold():
            known[key] = found + 1
            shape = call.tensors[0].shape
            recordings = sum(isinstance(each, _Block) for each in known.values())
            if self._failed or recordings >= _MOST or self._room.refuses(shape):
                return None
            self._last = shape if found == _EAGER_CALLS - 1 and self._live_blocks()[-1:] == [block] else None
            if found != _EAGER_CALLS:  # once refused, it stays eager
                return None
            try:
                found = self._record(block, call)
            except (RuntimeError, TierError) as error:  # a synchronization, too little memory: torch names it
                found, self._failed = None, True
                self._eager(f"recording one failed: {str(error).splitlines()[0][:160]}")
                if isinstance(error, torch.OutOfMemoryError):
                    self._forget()  # the step that goes on eagerly needs the memory
            if found is None:
                return None
            known[key] = found
        if isinstance(found, int) or not found.holds():
            self._forget()
            self._known[block] = {key: 1}
            return None
        self.replays += 1
        self._rings.count()
        return functools.partial(found, call)

    def ran(self, outputs: Any) -> None:
        """Note the results of the call that `recorded` has just left to run eagerly."""
        if self._last is not None:
            self._room.measure_rest(self._last, outputs)
            self._last = None

    def _record(self, block: nn.Module, call: _Call) -> "_Block | None":
        handles, blocks, shape = _handles_of(block), self._live_blocks(), call.tensors[0].shape
        why = self._refusal(block, handles)
        if not why:
            before = self._room.begin(shape)
            found = _Block(block, call, self._memory, handles, blocks.index(block) if block in blocks else 0)
            why = found.run_eagerly(handles) or self._room.lacks(shape, before, captured=False)
        if not why:
            self._rings.open(blocks)  # before any recording: one more page ends recordings
            why = self._rings.refusal_of(block)
        if why:
            return self._refused(why, shape)
        if self._recorder is None:
            self._recorder = self._new_recorder(self._stack.device)
        with self._stack.encoding:
            why = found.capture(self._recorder, self._stack, handles, self._rings.places(block))
        if not why:
            why = self._room.lacks(shape, before, captured=True)
        return self._refused(why, shape) if why else found

    def _refused(self, why: str, shape: torch.Size) -> None:
        self._eager(why)
        if self._room.refuses(shape):
            self._forget()  # its memory is needed, and that of recordings of other shapes

    def _live_blocks(self) -> list[nn.Module]:
        return [block for block in (ref() for ref in self._blocks) if block is not None]

    def _refusal(self, block: nn.Module, handles: Sequence[Any]) -> str:
        """Return why a block cannot be recorded now; "" if it can."""
        if why := _why_asked(handles):
            return why
        if any(isinstance(handle, Weight) and handle.held.hosts for handle in handles):
            return "the CPU computes products of one"
        trained = [handle for handle in handles if isinstance(handle, FullWeight)]
        if len(set(trained)) < len(trained):
            return "one uses a weight twice, whose gradients the host adds"
        if not all(handle.keys and handle.streams for handle in trained):
            return "weights of one train where it computes"
        if any(m._forward_hooks or m._forward_pre_hooks or m._backward_hooks for m in block.modules()):
            return "one has hooks"
        return ""

    def _eager(self, why: str) -> None:
        self._reasons[why] = None

    def _forget(self) -> None:
        """Drop all recordings."""
        self._known.clear()
        self._rings.close()
        self._watch = None
        self._memory.gone, self._memory = True, _Memory()
        if self._recorder is not None:
            self._recorder.release()
            self._recorder = None

    def release(self) -> None:
        """Give blocks their own checkpoint functions back, and free all recordings. Idempotent."""
        self._captures = False
        self._forget()
        for block in (ref() for ref in self._blocks):
            taken = None if block is None else vars(block).get(CHECKPOINT_FUNCTION)
            if isinstance(taken, Checkpoint):
                setattr(block, CHECKPOINT_FUNCTION, taken.plain)
        self._blocks = []


class _Places(NamedTuple):
    """Places of a block's pages in a ring."""

    ring: BlockRing
    block: int


class _Rings:
    """The ring of a model's blocks, while there is one.

    Attributes:
        ring: None without one.
        refusal: why there is none although pages of blocks move; "" otherwise.
    """

    def __init__(self, stack: TierStack) -> None:
        self._stack = stack
        self.ring: BlockRing | None = None
        self.refusal, self._opened = "", False
        self._numbers: weakref.WeakKeyDictionary[nn.Module, int] = weakref.WeakKeyDictionary()
        self._runs = self._short = 0

    def open(self, blocks: Sequence[nn.Module]) -> None:
        """Open a ring if pages of blocks move, unless that has been tried since the last `close`."""
        whole = [[] if _why_asked(handles) else handles for handles in map(_handles_of, blocks)]
        if self._opened or not any(handle.streams for handles in whole for handle in handles):
            return
        self._opened, self._runs = True, 0
        if self._short >= _SHORT_RINGS:
            self.refusal = f"the pages of one move: their room was needed otherwise {self._short} times, too soon"
            return
        keys = [[key for handle in handles for key in handle.keys] for handles in whole]
        leases = [_lease_bytes(handle) for handle in weights_in(self._stack) if handle.streams]
        leases += [page.nbytes for page in list(self._stack.pages.values()) if page.passes and page.home]
        try:
            self.ring, self.refusal = BlockRing(self._stack, keys, lease_bytes=max(leases, default=0)), ""
        except TierError as error:
            self.refusal = f"the pages of one move: {error}"
        self._numbers = weakref.WeakKeyDictionary({block: number for number, block in enumerate(blocks)})

    def refusal_of(self, block: nn.Module) -> str:
        """Return why a block's pages have no places; "" if they have, or need none."""
        if not any(handle.streams for handle in _handles_of(block)):
            return ""
        return self.refusal or ("" if block in self._numbers else "the pages of one move, which is new to the model")

    def places(self, block: nn.Module) -> _Places | None:
        """Return the places of a block's pages; None if they are at home on the computing device."""
        streams = any(handle.streams for handle in _handles_of(block))
        return _Places(self.ring, self._numbers[block]) if streams else None

    def hold(self) -> bool:
        """True unless pages of the ring, or its room, have gone elsewhere."""
        return self.ring is None or self.ring.holds()

    def count(self) -> None:
        """Count a run of a block."""
        self._runs += 1

    def leave(self) -> None:
        """Give the ring back, as no block could be recorded, and open no other until `close`."""
        self.close()
        self.refusal, self._opened = "the pages of one move, and no block could be recorded", True

    def close(self) -> None:
        """Give the ring back. Idempotent."""
        if self.ring is not None:
            if self.ring.ended:  # others took it
                self._short = self._short + 1 if self._runs < _SHORT_STEPS * len(self._numbers) else 0
            self.ring.give_back()
        self.ring, self.refusal, self._opened = None, "", False


def _blocks_of(model: nn.Module) -> list[nn.Module]:
    """Return the blocks whose activations are checkpointed, in training, in the model's order."""
    found = {id(block) for block in checkpointed_blocks(model)}
    return [m for m in model.modules() if id(m) in found or (isinstance(m, HeldBlock) and m.training)]


def _handles_of(block: nn.Module) -> list[Any]:
    return [module.handle for module in block.modules() if isinstance(module, SwappedLayer)]


def _why_asked(handles: Sequence[Any]) -> str:
    """Return why what layers lease depends on their inputs; "" if it does not."""
    for handle in handles:
        if isinstance(handle, ExpertsHandle):
            why = why_not_recorded(handle)
            if why:
                return why
        elif not isinstance(handle, Weight | FullWeight):
            return "weights of one train in 4 bits"
        elif handle.spec.by_rows:
            return "one has tables in the tiers"
        elif handle.spec.site.stacked:
            return "experts of one train in the tiers"
    return ""


def _lease_bytes(handle: Any) -> int:
    """Bytes of a lease: of a weight, or of one of several experts."""
    sizes = [page.nbytes for page in handle.pages]
    return sum(sizes) if isinstance(handle, Weight) else max(sizes, default=0)


class _Memory:
    """Static tensors that all blocks' graphs read and write, by what they are for.

    Attributes:
        gone: the recordings in it were dropped.
        read: by what memory is for: the event after which the copies that read it have ended.
    """

    def __init__(self) -> None:
        self.gone = False
        self.read: dict[Hashable, torch.Event | None] = {}
        self._tensors: dict[Hashable, Tensor] = {}
        self._filled: dict[Hashable, tuple[weakref.ref[Tensor], int]] = {}

    def like(self, name: Hashable, tensor: Tensor) -> Tensor:
        """Return the tensor of a name with another's shape, strides and dtype."""
        key = name, tensor.shape, tensor.stride(), tensor.dtype
        if key not in self._tensors:
            with torch.no_grad():
                self._tensors[key] = torch.empty_strided(
                    tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device
                )
        return self._tensors[key]

    def fill(self, name: Hashable, target: Tensor, source: Tensor) -> None:
        """Copy a tensor, unless it was the last that was copied there, and has not changed since."""
        key = name, target.data_ptr()
        last = self._filled.get(key)
        if last is None or last[0]() is not source or last[1] != source._version:
            target.copy_(source.detach())
            self._filled[key] = weakref.ref(source), source._version


class _Block:
    """Two graphs of one block, for calls of one kind: its forward; and the forward again with the backward."""

    def __init__(self, block: nn.Module, call: _Call, memory: _Memory, handles: Sequence[Any], number: int) -> None:
        self._block = weakref.ref(block)
        self._weights = BlockWeights([handle for handle in handles if isinstance(handle, FullWeight)])
        self._turn = number % TURNS
        own = (p for p in block.parameters() if not isinstance(p, StreamedParameter))
        self.parameters = [p for p in own if p.requires_grad and is_known_memory(p)]
        self._memory, self._call = memory, call
        self._recording: Recording | None = None
        self._places: _Places | None = None
        self._autocast = _autocast(call.tensors[0].device.type)
        self._device = call.tensors[0].device
        self._inputs = [memory.like(("in", at), tensor) for at, tensor in enumerate(call.tensors)]
        self._wanting = [at for at, tensor in enumerate(call.tensors) if tensor.requires_grad]
        self._outputs: list[Tensor] = []
        self._incoming: list[Tensor] = []
        self._gradients: list[Tensor | None] = []
        self._added: list[tuple[Any, int, int]] = []  # handle, its forwards in the forward, in the backward
        self._checkpointed: tuple[list[Tensor], Sequence[Tensor]] | None = None  # what gets gradients, results
        self._eager: tuple[list[Tensor], list[Tensor | None]] = [], []
        self._counted: list[int] = []
        self._routes = False  # to experts
        self.form: TreeSpec | None = None

    # -- capture ------------------------------------------------------------------------------------------------------

    def run_eagerly(self, handles: Sequence[Any]) -> str:
        """Run the block as it will be recorded; return why it cannot be recorded, "" if it can."""
        before, self._counted = _random_state(self._device), [handle.forwards for handle in handles]
        self._routes = any(isinstance(handle, ExpertsHandle) for handle in handles)
        if not self._asked(self._inputs):
            return "nothing of one gets a gradient but weights in the tiers"
        with self._weights.uncounted():
            outputs, gradients, why = self._run_twice(asks=self._routes)
        if why:
            return why
        if any(each is None for each in self._divided(gradients)[1]):
            return "a weight of one gets no gradient"
        if not torch.equal(before, _random_state(self._device)):
            _set_random_state(self._device, before)
            return "one draws random numbers"
        self._eager = outputs, gradients
        return ""

    def _run_twice(self, *, asks: bool) -> tuple[list[Tensor], list[Tensor | None], str]:
        """See `_run`; also why it cannot be recorded as it waits for the GPU, unless it `asks` for a routing."""
        for _ in range(2):  # another thread's wait counts, too, and one of lazy initialization
            with waits_noticed(self._device) as where:
                outputs, gradients, why = self._run(self._call.tensors)
            if why or asks or not where():
                return outputs, gradients, why
        return [], [], f"one waits for the GPU, in {where()}"

    def capture(self, recorder: GraphCapture, stack: TierStack, handles: Sequence[Any], places: _Places | None) -> str:
        """Record the block, and compare it with its eager run; return why that cannot be believed, "" if it can.

        Call it under `stack.encoding`: no page may move, and no room be given back, while its addresses are captured.
        """
        (outputs, gradients), self._eager = self._eager, ([], [])
        self._places = places
        if places is None:
            keys = [key for handle in handles for key in handle.keys]
            self._recording = Recording(stack, "forward", keys)
        else:
            places.ring.run(places.block, "capture", list)  # brings its pages
            self._recording = Recording(stack, "forward", (), places=places.ring.places(places.block))
        if self._routes:
            with self._recording, leasing_all():
                *_, why = self._run_twice(asks=False)
            if why:
                return why
        self._outputs = [self._memory.like(("out", at), each) for at, each in enumerate(outputs)]
        self._incoming = [self._memory.like(("dy", at), each) for at, each in enumerate(outputs)]
        like = [None if each is None else torch.empty_like(each) for each in gradients]
        self._gradients = [  # shared by all blocks, as they are handed on at once
            None if each is None else self._memory.like(self._name_of(at, len(like)), each)
            for at, each in enumerate(like)
        ]
        self._load(self._call.tensors)
        for each in self._incoming:
            each.fill_(1.0)
        self._wait_for_copies()
        eager = [handle.forwards for handle in handles]
        with self._recording, self._weights.uncounted():
            self._forward = recorder.record(self._forward_again, nullcontext)
        between = [handle.forwards for handle in handles]
        captured, runs = self._checkpointed, itertools.count(1)
        # a warm-up, which needs a forward of its own; then the backward of the captured one
        with self._recording, self._weights.uncounted():
            self._backward = recorder.record(
                lambda: self._backward_again(captured if next(runs) == _CAPTURE else None), nullcontext
            )
        self._checkpointed = None
        for handle, begin, middle, forwards in zip(handles, eager, between, self._counted, strict=True):
            once = (middle - begin) // 2  # a warm-up, and the capture
            self._added.append((handle, once, (handle.forwards - middle - once) // 2))
            handle.forwards = forwards
        self._forward.replay()
        self._backward.replay()
        pairs = [*zip(outputs, self._outputs, strict=True), *zip(gradients, self._gradients, strict=True)]
        if not all(_alike(want, got) for want, got in pairs):
            return "the graphs of one gave other results than its eager forward and backward"
        self._call = self._call._replace(tensors=(), leaves=tuple(map(_without_memory, self._call.leaves)))
        return ""

    def _run(self, tensors: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor | None], str]:
        """Forward and backward of a gradient of ones; the results, the gradients, or why there can be none."""
        inputs = self._leaves(tensors)
        with torch.enable_grad(), self._as_called():
            outputs, self.form = self._call.run(inputs)
            if not all(
                isinstance(each, Tensor) and each.is_floating_point() and each.requires_grad for each in outputs
            ):
                return [], [], "one returns more than tensors with gradients"
            ones = [torch.ones_like(each) for each in outputs]
            return outputs, self._differentiated(outputs, self._asked(inputs), ones, _new_gradient), ""

    def _forward_again(self) -> None:
        inputs = self._leaves(self._inputs)
        with torch.enable_grad(), self._as_called(), leasing_all(), self._own_parameters() as parameters:
            outputs = checkpoint(
                lambda *given: tuple(self._call.run(given)[0]), *inputs, use_reentrant=False, preserve_rng_state=False
            )
        for kept, each in zip(self._outputs, outputs, strict=True):
            kept.copy_(each.detach())
        self._checkpointed = [*(inputs[at] for at in self._wanting), *parameters], outputs

    def _backward_again(self, captured: tuple[list[Tensor], Sequence[Tensor]] | None) -> None:
        """The forward again, as far as the backward needs it, and the backward."""
        if captured is None:
            self._forward_again()
            captured = self._checkpointed
        asked, outputs = captured
        places = dict(zip(self._weights.trained, self._divided(self._gradients)[1], strict=True))
        with leasing_all():
            gradients = self._differentiated(outputs, asked, self._incoming, places.__getitem__)
        for kept, each in zip(self._gradients, gradients, strict=True):
            if kept is not None and kept is not each:
                kept.copy_(each)

    def _differentiated(
        self,
        outputs: Sequence[Tensor],
        asked: Sequence[Tensor],
        incoming: Sequence[Tensor],
        place: Callable[[FullWeight], Tensor],
        *,
        create_graph: bool = False,
    ) -> list[Tensor | None]:
        """Return gradients of what is asked, then of the weights in the tiers, computed where `place` says."""
        found: dict[FullWeight, Tensor] = {}
        with collecting(lambda weight: found.setdefault(weight, place(weight))):
            gradients = _gradients_of(outputs, asked, incoming, create_graph=create_graph)
        return [*gradients, *(found.get(weight) for weight in self._weights.trained)]

    def _divided(self, gradients: list[Tensor | None]) -> tuple[list[Tensor | None], list[Tensor | None]]:
        """Return gradients of what autograd asks for, and, behind them, of the weights in the tiers."""
        asked = len(gradients) - len(self._weights.trained)
        return gradients[:asked], gradients[asked:]

    def _name_of(self, gradient: int, count: int) -> Hashable:
        """Return the name of a gradient's memory. Copies to the host read those of weights in the tiers while the next
        block computes its own."""
        return ("dx", gradient) if gradient < count - len(self._weights.trained) else ("dw", self._turn, gradient)

    def _wait_for_copies(self) -> None:
        """Have the current stream wait for the copies of gradients in this block's memory."""
        event = self._memory.read.pop(self._turn, None)
        if event is not None:
            event.wait(accelerator.current_stream(self._device))

    def _asked(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """What gets gradients: the inputs that want one, then the parameters."""
        return [*(inputs[at] for at in self._wanting), *self.parameters]

    @contextmanager
    def _own_parameters(self) -> Iterator[list[Tensor]]:
        """Have the block compute with other tensors over its parameters' memory: autograd sums the gradients of the
        parameters themselves on the stream of their first use, which a capture must not wait for."""
        own = {id(parameter): parameter.detach().requires_grad_() for parameter in self.parameters}
        held = [(m._parameters, name, p) for m in self._modules() for name, p in m._parameters.items() if id(p) in own]
        try:
            for parameters, name, parameter in held:
                parameters[name] = own[id(parameter)]
            yield list(own.values())
        finally:
            for parameters, name, parameter in held:
                parameters[name] = parameter

    def _modules(self) -> list[nn.Module]:
        block = self._block()
        return [] if block is None else list(block.modules())

    def _leaves(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        return [each.detach().requires_grad_(at in self._wanting) for at, each in enumerate(tensors)]

    @contextmanager
    def _as_called(self) -> Iterator[None]:
        enabled, dtype = self._autocast
        with torch.autocast(self._device.type, dtype=dtype, enabled=enabled, cache_enabled=False):
            yield

    # -- replay -------------------------------------------------------------------------------------------------------

    def holds(self) -> bool:
        """True while the graphs may be replayed."""
        return not self._memory.gone and self._recording.holds() and (self._places is None or self._places.ring.holds())

    def _launch(self, graph: Recorded, kind: str) -> bool:
        """Replay a graph; False if its pages have moved."""
        self._weights.settle()
        if self._places is None:
            graph.replay()
            return True
        return self._places.ring.run(self._places.block, kind, graph.replay)

    def __call__(self, call: _Call) -> Any:
        """The block's results, whose gradients come from the recorded backward."""
        outputs = _Replayed.apply(self, call, *call.tensors, *self.parameters, *self._weights.parameters)
        return tree_unflatten(list(outputs), self.form)

    def forward(self, ctx: Any, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Replay the forward, or compute it eagerly where pages have moved since the last `holds`. ctx: of `_Replayed`,
        which gets the versions of the weights that it computed with."""
        self._load(tensors)
        if not self._launch(self._forward, "forward"):
            with self._weights.uncounted(), self._as_called():
                outputs = tuple(ctx.call.run(tensors)[0])
        else:
            for handle, forwards, _ in self._added:
                handle.count_replays(forwards)
            outputs = tuple(each.clone() for each in self._outputs)
        ctx.versions = self._weights.begin_forward()
        return outputs

    def backward(self, ctx: Any, tensors: Sequence[Tensor], incoming: Sequence[Tensor]) -> list[Tensor | None]:
        """Gradients of the inputs that want one, then of the parameters: replayed, or eagerly once pages have moved.
        Those of weights in the tiers go to the host."""
        twice = torch.is_grad_enabled()  # create_graph
        self._weights.check(ctx.versions)
        asked = self._weights.wanted(ctx, ctx.inputs + len(self.parameters))
        if not twice and self.holds():
            self._load(tensors)
            for target, each in zip(self._incoming, incoming, strict=True):
                target.copy_(each)
            self._wait_for_copies()
            if self._launch(self._backward, "backward"):
                for handle, _, again in self._added:
                    handle.count_replays(again)
                others, of_weights = self._divided(self._gradients)
                self._memory.read[self._turn] = self._weights.hand_on(of_weights, asked)
                return [None if each is None else each.clone() for each in others]
        inputs = list(tensors) if twice else self._leaves(tensors)
        with torch.enable_grad(), self._as_called():
            outputs, _ = ctx.call.run(inputs)
            gradients = self._differentiated(outputs, self._asked(inputs), incoming, _new_gradient, create_graph=twice)
        others, of_weights = self._divided(gradients)
        copied = self._weights.hand_on(of_weights, asked)
        if copied is not None:  # before their memory is used again
            copied.wait(accelerator.current_stream(self._device))
        return others

    def _load(self, tensors: Sequence[Tensor]) -> None:
        for at, (target, source) in enumerate(zip(self._inputs, tensors, strict=True)):
            self._memory.fill(("in", at), target, source)

    @property
    def wanting(self) -> Sequence[int]:
        """Which tensors of a call want a gradient."""
        return self._wanting


class _Replayed(Function):
    """Replay of a block: keeps its inputs alone."""

    @staticmethod
    def forward(ctx: Any, block: _Block, call: _Call, *tensors: Tensor) -> tuple[Tensor, ...]:
        inputs = tensors[: len(call.tensors)]
        leaves = tuple(map(_without_memory, call.leaves))  # autograd holds the inputs, and frees them
        ctx.block, ctx.call, ctx.inputs = block, call._replace(tensors=(), leaves=leaves), len(inputs)
        ctx.save_for_backward(*inputs)
        return block.forward(ctx, inputs)

    @staticmethod
    def backward(ctx: Any, *incoming: Tensor) -> tuple[Tensor | None, ...]:
        gradients = ctx.block.backward(ctx, ctx.saved_tensors, incoming)
        of_inputs = dict(zip(ctx.block.wanting, gradients, strict=False))
        rest = gradients[len(ctx.block.wanting) :]
        trained = (None,) * (len(ctx.needs_input_grad) - 2 - ctx.inputs - len(rest))
        return None, None, *(of_inputs.get(at) for at in range(ctx.inputs)), *rest, *trained


def _gradients_of(
    outputs: Sequence[Tensor], asked: Sequence[Tensor], incoming: Sequence[Tensor], *, create_graph: bool = False
) -> list[Tensor | None]:
    with torch.autograd.set_multithreading_enabled(False):  # leases belong to the thread that records
        return list(torch.autograd.grad(outputs, asked, incoming, allow_unused=True, create_graph=create_graph))


def _new_gradient(weight: FullWeight) -> Tensor:
    return torch.empty(weight.spec.weight_shape, dtype=torch.bfloat16, device=weight.device)


def _without_memory(leaf: Any) -> Any:
    return None if isinstance(leaf, Tensor) else leaf


def _autocast(kind: str) -> tuple[bool, torch.dtype]:
    return torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)


def _random_state(device: torch.device) -> Tensor:
    return torch.get_rng_state() if device.type == "cpu" else torch.get_device_module(device).get_rng_state(device)


def _set_random_state(device: torch.device, state: Tensor) -> None:
    if device.type == "cpu":
        torch.set_rng_state(state)
    else:
        torch.get_device_module(device).set_rng_state(state, device)


def _alike(want: Tensor | None, got: Tensor | None) -> bool:
    if want is None or got is None:
        return want is got
    want, got = want.detach().float(), got.float()
    return bool((want - got).norm() <= _DIFFERENCE * want.norm() + 1e-12)
