"""What a model's repeated blocks keep for the backward pass: all of it, their inputs, or their inputs in host memory.

    activations = Activations("offload", blocks, device, host_bytes)
    model(x).backward()      # the blocks ask `activations` at each call
    activations.release_()   # the blocks are plain again

A block changes its class in place, to one made of its own whose `__call__` goes through torch's checkpoint
(`use_reentrant=False`: RNG states and autocast are restored for the recomputation, hooks and compiled forwards of the
block run inside). What is computed is computed twice, never otherwise: losses and gradients are those of "keep", bit
for bit.

With bytes for `activations`, the first pass offloads and measures what a block keeps; from the second on `choose` fills
the bytes.
"""

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
    """Mixin of a block's class while somebody decides over its activations. Copies and pickles are plain blocks."""

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
    """Return the class that takes the place of a block's own; with its name, which libraries look for."""
    members = {"__module__": plain.__module__, "__doc__": plain.__doc__, "_plain": plain}
    return type(plain.__name__, (HeldBlock, plain), members)


class Activations:
    """The activations of one model's blocks.

    Args:
        asked: "keep", "recompute", "offload", or bytes of the device that activations may take.
        blocks: in the order in which they run; changed in place.
        kinds: of each block a number; those of one kind keep the same.
        offload: where inputs go; None: they stay, as on a CPU, whose memory that is already.
    """

    def __init__(
        self, asked: str | int, blocks: Sequence[nn.Module], kinds: Sequence[int], offload: Offload | None
    ) -> None:
        self.asked, self.kinds, self.offload = asked, tuple(kinds), offload
        self._blocks = tuple(map(weakref.ref, blocks))  # blocks refer to this, and a model goes with its last reference
        self.passes, self._notes = 0, list[str]()
        self._inputs: dict[int, int] = {}  # bytes by the block's index, of the last pass
        self._measured: dict[int, tuple[int, int]] = {}  # of a kind: bytes of its input, and of all that it keeps
        self._modes = self._first_modes()
        self._index = {id(block): index for index, block in enumerate(blocks)}
        if asked != KEEP and not blocks:
            self._note(f"training.activations = {asked!r}: the model has no list of equal blocks, so all is kept")
        for block in blocks if asked != KEEP else ():
            block.__dict__[_ATTRIBUTE] = self
            block.__class__ = _held_class(type(block))

    def release_(self) -> None:
        """Give the blocks their classes back."""
        for block in (ref() for ref in self._blocks):
            if isinstance(block, HeldBlock):
                block.__class__ = block._plain
                del block.__dict__[_ATTRIBUTE]

    def run(self, block: nn.Module, call: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        """Run a block as its mode has it."""
        index, nbytes = self._index[id(block)], _input_bytes(args, kwargs)
        self._begin(index, nbytes)
        mode = self._modes[index]
        if mode != KEEP:
            args, kwargs, again = self._without_cache(args, kwargs)
            mode = mode if again else KEEP
        if mode == KEEP:
            return self._kept(block, nbytes, call, args, kwargs)
        if mode == OFFLOAD and self.offload is not None and not torch.compiler.is_compiling():
            with self.offload.hooks():
                return _checkpointed(block, call, args, kwargs)
        return _checkpointed(block, call, args, kwargs)

    def stats(self) -> ActivationStats | None:
        """Return the counters; None where autograd keeps what it likes."""
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
        """What is done otherwise than asked."""
        return [*self._notes, *(self.offload.fallbacks + self.offload.host.fallbacks if self.offload else [])]

    # -- what each block does -----------------------------------------------------------------------------------------

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
            for index in {kind: index for index, kind in enumerate(self.kinds)}.values():  # the last of each kind
                modes[index] = KEEP
        return modes

    def _begin(self, index: int, nbytes: int) -> None:
        """Note a block's input, and with the first block of a pass what the blocks will do."""
        if torch.compiler.is_compiling():
            return
        if index == 0:
            self.passes += 1
            known = len(self._inputs) == len(self._blocks) and self._measured.keys() == set(self.kinds)
            if isinstance(self.asked, int) and known:
                self._modes = self._chosen(nbytes)
        self._inputs[index] = nbytes

    def _chosen(self, nbytes: int) -> list[str]:
        """Choose for a pass whose first block takes `nbytes`; what blocks take and keep grows with that."""
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
        """The arguments of a block without the empty KV cache that transformers makes for a pass of training: a block
        that runs twice would append twice. False as the third: a cache holds tokens, so the block must run once."""
        found = [value for value in (*args, *kwargs.values()) if is_cache(value)]
        odd = [name for name in CACHE_ARGUMENTS if kwargs.get(name) is not None and not is_cache(kwargs[name])]
        if odd or any(cache.get_seq_length() > 0 for cache in found):
            self._note("activations: a block that is given a cache with keys and values keeps everything")
            return args, kwargs, False
        if found:
            self._note("activations: blocks that run twice fill no cache of keys and values while they train")
            args = tuple(None if is_cache(value) else value for value in args)
            kwargs = {name: None if is_cache(value) else value for name, value in kwargs.items()}
        return args, kwargs, True

    def _note(self, text: str) -> None:
        if text not in self._notes:
            self._notes.append(text)


class _Meter:
    """Adds up what a block keeps, its parameters aside."""

    def __init__(self, block: nn.Module) -> None:
        self.nbytes = 0
        self._block, self._known = block, set[int]()

    def pack(self, tensor: Tensor) -> Tensor:
        """Count a tensor's memory once."""
        address = storage_of(tensor)
        if address not in self._known and not self._is_parameter(address):
            self._known.add(address)
            self.nbytes += tensor.untyped_storage().nbytes()
        return tensor.detach()

    def _is_parameter(self, address: int) -> bool:
        """True for memory that a parameter has now: a layer's first forward frees that of its weight."""
        held = (p for p in self._block.parameters() if not isinstance(p, StreamedParameter))  # which has no memory
        return any(storage_of(parameter) == address for parameter in held)


def _input_bytes(args: tuple, kwargs: dict[str, Any]) -> int:
    """Return the bytes of a block's first tensor: the stream that goes through all blocks."""
    return next((value.nbytes for value in (*args, *kwargs.values()) if isinstance(value, Tensor)), 0)


def _checkpointed(block: nn.Module, call: Callable[..., Any], args: tuple, kwargs: dict[str, Any]) -> Any:
    """Run a block that keeps its inputs only; one that does so by itself is left to that."""
    if getattr(block, "gradient_checkpointing", False) or getattr(block, "use_checkpoint", False):
        return call(*args, **kwargs)
    given = [name for name, value in kwargs.items() if isinstance(value, Tensor) and value.requires_grad]
    rest = {name: value for name, value in kwargs.items() if name not in given}
    count = len(args)  # the function must not hold the tensors: autograd does

    def run(*values: Any) -> Any:
        return call(*values[:count], **rest, **dict(zip(given, values[count:], strict=True)))

    return checkpoint(run, *args, *(kwargs[name] for name in given), use_reentrant=False)
