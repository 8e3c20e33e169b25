"""Activation checkpointing of a model's repeated blocks: keep, recompute, or offload their inputs.

    activations = Activations("offload", blocks, device, host_bytes)
    model(x).backward()      # the blocks consult `activations` at each call
    activations.release_()   # the blocks are plain again

A block's class is swapped in place for a subclass whose `__call__` goes through torch's checkpoint
(`use_reentrant=False`: RNG states and autocast are restored for the recomputation, hooks and compiled forwards of the
block run inside). Recomputation repeats the same operations, so losses and gradients equal those of "keep" bit for bit.

A block that computes again may be replayed instead, as graphs that do the same: `Activations.replay`.

With a byte budget for `activations`, the first pass offloads and measures each kind of block; from the second pass on
`choose` fills the budget.
"""

import contextlib
import functools
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vbrt.host.host_memory import storage_of
from vbrt.libraries.transformers_api import CACHE_ARGUMENTS, is_cache
from vbrt.report.activation_counters import ActivationStats
from vbrt.residency.activation_plan import KEEP, OFFLOAD, RECOMPUTE, choose
from vbrt.training.activations.activation_offload import Offload
from vbrt.training.full.streamed_parameter import StreamedParameter

__all__ = ["Activations", "HeldBlock"]

_ATTRIBUTE = "_vb_activations"


class HeldBlock(nn.Module):
    """Mixin of a block's class while its activations are managed. Copies and pickles are plain blocks."""

    _plain: type[nn.Module]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the block."""
        activations = self.__dict__.get(_ATTRIBUTE)
        if activations is None or not self.training or not torch.is_grad_enabled():
            return super().__call__(*args, **kwargs)
        return activations.run(self, super().__call__, args, kwargs)

    def __reduce_ex__(self, protocol: Any) -> Any:
        state = super().__reduce_ex__(protocol)[2]
        return _new, (self._plain,), {key: value for key, value in state.items() if key != _ATTRIBUTE}


def _new(plain: type[nn.Module]) -> nn.Module:
    return plain.__new__(plain)


@functools.cache
def _held_class(plain: type[nn.Module]) -> type[nn.Module]:
    """Return the subclass of a block's class, under the same name, which libraries look for."""
    members = {"__module__": plain.__module__, "__doc__": plain.__doc__, "_plain": plain}
    return type(plain.__name__, (HeldBlock, plain), members)


class Activations:
    """Activation policy of one model's blocks.

    Args:
        asked: "keep", "recompute", "offload", or a budget in device bytes.
        blocks: in execution order; changed in place.
        kinds: a number per block; blocks of one kind keep the same amount.
        offload: target of inputs; None: inputs stay, as on a CPU.

    Attributes:
        replay: returns what replays a block's call, of a function and its positional arguments, and keeps its inputs
            alone for the backward pass; None where it is to run eagerly. See `vbrt.model.recorded_blocks`.
        ran: gets the results of blocks that run eagerly.
    """

    replay: Callable[[nn.Module, functools.partial, tuple], Callable[[], Any] | None] | None = None
    ran: Callable[[Any], None] | None = None

    def __init__(
        self, asked: str | int, blocks: Sequence[nn.Module], kinds: Sequence[int], offload: Offload | None
    ) -> None:
        self.asked, self.kinds, self.offload = asked, tuple(kinds), offload
        self._blocks = tuple(map(weakref.ref, blocks))  # weak: blocks refer to this object
        self.passes, self._notes = 0, list[str]()
        self._inputs: dict[int, int] = {}  # bytes of the last pass, by block index
        self._measured: dict[int, tuple[int, int]] = {}  # by kind: bytes of its input, and of all that it keeps
        self._modes = self._first_modes()
        self._index = {id(block): index for index, block in enumerate(blocks)}
        if asked != KEEP and not blocks:
            self._note(f"training.activations = {asked!r}: the model has no repeated blocks, so everything is kept")
        for block in blocks if asked != KEEP else ():
            block.__dict__[_ATTRIBUTE] = self
            block.__class__ = _held_class(type(block))

    def release_(self) -> None:
        """Restore the blocks' classes."""
        for block in (ref() for ref in self._blocks):
            if isinstance(block, HeldBlock):
                block.__class__ = block._plain
                del block.__dict__[_ATTRIBUTE]

    def run(self, block: nn.Module, call: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        """Run a block in its mode."""
        index, nbytes = self._index[id(block)], _input_bytes(args, kwargs)
        self._begin(index, nbytes)
        mode = self._modes[index]
        if mode != KEEP:
            args, kwargs, again = self._without_cache(args, kwargs)
            mode = mode if again else KEEP
        if mode == KEEP:
            return self._kept(block, nbytes, call, args, kwargs)
        if torch.compiler.is_compiling():
            return _checkpointed(block, call, args, kwargs)
        recorded = None
        if self.replay is not None and not _checkpoints_itself(block):
            recorded = self.replay(block, functools.partial(call, **kwargs), args)
        offloads = mode == OFFLOAD and self.offload is not None
        with self.offload.hooks() if offloads else contextlib.nullcontext():
            if recorded is not None:
                return recorded()
            outputs = _checkpointed(block, call, args, kwargs)
        if self.ran is not None:
            self.ran(outputs)
        return outputs

    def stats(self) -> ActivationStats | None:
        """Return the counters; None for "keep"."""
        if self.asked == KEEP:
            return None
        modes = dict(Counter(self._modes)) if self.passes else {}
        inside = max((kept for _, kept in self._measured.values()), default=0)
        own = {
            "asked": str(self.asked),
            "modes": modes,
            "passes": self.passes,
            "input_bytes": max(self._inputs.values(), default=0),
            "inside_bytes": inside,
        }
        return ActivationStats(**own) if self.offload is None else self.offload.counted(own)

    @property
    def fallbacks(self) -> list[str]:
        """Deviations from the config."""
        return [*self._notes, *(self.offload.fallbacks + self.offload.host.fallbacks if self.offload else [])]

    # -- modes --------------------------------------------------------------------------------------------------------

    def _first_modes(self) -> list[str]:
        if self.asked == KEEP:
            return [KEEP] * len(self._blocks)
        if self.asked == RECOMPUTE:
            return [RECOMPUTE] * len(self._blocks)
        if self.asked == OFFLOAD and self.offload is None:
            self._note(
                'training.activations = "offload": the model computes in host memory, where the inputs of its blocks '
                'are already; they stay, as with "recompute"'
            )
        modes = [RECOMPUTE if self.offload is None else OFFLOAD] * len(self._blocks)
        if self.asked != OFFLOAD:
            for index in {kind: index for index, kind in enumerate(self.kinds)}.values():  # measured: last of its kind
                modes[index] = KEEP
        return modes

    def _begin(self, index: int, nbytes: int) -> None:
        """Record a block's input; at the first block of a pass choose the modes."""
        if torch.compiler.is_compiling():
            return
        if index == 0:
            self.passes += 1
            known = len(self._inputs) == len(self._blocks) and self._measured.keys() == set(self.kinds)
            if isinstance(self.asked, int) and known:
                self._modes = self._chosen(nbytes)
        self._inputs[index] = nbytes

    def _chosen(self, nbytes: int) -> list[str]:
        """Choose modes for a pass whose first block's input has `nbytes`; other sizes scale with it."""
        growth = nbytes / max(1, self._inputs[0])
        inputs = [int(growth * self._inputs[index]) for index in range(len(self._blocks))]
        insides = []
        for index, kind in enumerate(self.kinds):
            taken, kept = self._measured[kind]
            insides.append(int(inputs[index] * kept / max(1, taken)))
        modes = choose(int(self.asked), inputs, insides)
        return modes if self.offload is not None else [RECOMPUTE if mode == OFFLOAD else mode for mode in modes]

    def _kept(self, block: nn.Module, nbytes: int, call: Callable[..., Any], args: tuple, kwargs: dict) -> Any:
        kind = self.kinds[self._index[id(block)]]
        if kind in self._measured or not isinstance(self.asked, int) or torch.compiler.is_compiling():
            return call(*args, **kwargs)
        meter = _Meter(block)
        with torch.autograd.graph.saved_tensors_hooks(meter.pack, lambda tensor: tensor):
            out = call(*args, **kwargs)
        self._measured[kind] = nbytes, meter.nbytes
        return out

    def _without_cache(self, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any], bool]:
        """Drop the empty KV cache that transformers makes in training, since a recomputed block would append twice.
        Third value False: a cache holds tokens, so the block must run once."""
        found = [value for value in (*args, *kwargs.values()) if is_cache(value)]
        odd = [name for name in CACHE_ARGUMENTS if kwargs.get(name) is not None and not is_cache(kwargs[name])]
        if odd or any(cache.get_seq_length() > 0 for cache in found):
            self._note("activations: a block called with a non-empty KV cache keeps everything")
            return args, kwargs, False
        if found:
            self._note("activations: recomputed blocks fill no KV cache in training")
            args = tuple(None if is_cache(value) else value for value in args)
            kwargs = {name: None if is_cache(value) else value for name, value in kwargs.items()}
        return args, kwargs, True

    def _note(self, text: str) -> None:
        if text not in self._notes:
            self._notes.append(text)


class _Meter:
    """Counts the bytes that autograd saves in a block, without its parameters."""

    def __init__(self, block: nn.Module) -> None:
        self.nbytes = 0
        self._block, self._known = block, set[int]()

    def pack(self, tensor: Tensor) -> Tensor:
        """Count each storage once."""
        address = storage_of(tensor)
        if address not in self._known and not self._is_parameter(address):
            self._known.add(address)
            self.nbytes += tensor.untyped_storage().nbytes()
        return tensor.detach()

    def _is_parameter(self, address: int) -> bool:
        """True for memory of a current parameter; a layer's first forward frees its weight's."""
        held = (p for p in self._block.parameters() if not isinstance(p, StreamedParameter))  # have no memory
        return any(storage_of(parameter) == address for parameter in held)


def _input_bytes(args: tuple, kwargs: dict[str, Any]) -> int:
    """Return the bytes of a block's first tensor: the residual stream."""
    return next((value.nbytes for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), 0)


def _checkpoints_itself(block: nn.Module) -> bool:
    return getattr(block, "gradient_checkpointing", False) or getattr(block, "use_checkpoint", False)


def _checkpointed(block: nn.Module, call: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
    """Run a block under torch's checkpoint; leave one that checkpoints itself alone."""
    if _checkpoints_itself(block):
        return call(*args, **kwargs)
    given = [name for name, value in kwargs.items() if isinstance(value, Tensor) and value.requires_grad]
    rest = {name: value for name, value in kwargs.items() if name not in given}
    count = len(args)  # the closure must not keep the tensors alive: autograd does

    def run(*values: Any) -> Any:
        return call(*values[:count], **rest, **dict(zip(given, values[count:], strict=True)))

    return checkpoint(run, *args, *(kwargs[name] for name in given), use_reentrant=False)
