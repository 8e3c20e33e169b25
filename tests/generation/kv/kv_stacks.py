"""Caches on small stacks: memories and a store, all on this machine."""

import gc
from pathlib import Path

import torch

from vbrt.generation.kv.extent_store import KVStore
from vbrt.generation.kv.layer_tokens import LayerTokens
from vbrt.tiers import Level, MemoryTier, SsdTier, TierStack

CPU = torch.device("cpu")
PAGE = 4
SHAPE = (2, 2, 8, 6)
"""Sequences, heads, channels of a key and of a value."""


def stack_of(root: Path, *, near: int = 1 << 30, far: int = 1 << 30, files: int = 1 << 30) -> TierStack:
    """Two memories above files, with these budgets in bytes."""
    return TierStack([Level(MemoryTier("gpu", CPU, near)), Level(MemoryTier("cpu", CPU, far)), SsdTier(root, files)])


def layers_of(stack: TierStack, count: int = 2, *, room: int | None = None, **options) -> list[LayerTokens]:
    """The layers of one cache, read in a circle."""
    store = KVStore(stack, count, room=room, others=lambda: [store])
    layers = [LayerTokens(store, number, **{"bits": 16, "page": PAGE} | options) for number in range(count)]

    def order(place):
        layer, number = place
        for step in range(count + 1):
            found = next(layers[(layer + step) % count].streamed(0 if step else number + 1), None)
            if found is not None:
                return found
        return None

    store.order = order
    return layers


def tokens(
    count: int, *, batch: int = SHAPE[0], dims: tuple[int, int] = SHAPE[2:], dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, ...]:
    """Random keys and values."""
    return tuple(torch.randn(batch, SHAPE[1], count, dim).to(dtype) for dim in dims)


def assert_empty(stack: TierStack) -> None:
    """Nothing is left in any tier."""
    gc.collect()
    stack.retire_unowned()
    assert not stack.pages
    assert [level.tier.used_bytes for level in stack.levels] == [0] * len(stack.levels)
