"""`vbrt.KVCache`: a KV cache for transformers' models, stored in the tiers of a wrapped model.

    cache = vbrt.KVCache(vb)                      # or bits=8, bits=4, room="4GiB"
    vb.generate(ids, cache=cache)

Drop-in for `transformers.DynamicCache`: a layer's `update` returns the same tensors, bit-exact with `bits = 16`. They
are gathered for each layer and call, as DynamicCache concatenates anew: one layer's keys and values are scratch memory
outside of all budgets. Layers that cache no tokens or few remain transformers' own: linear attention, and windows
shorter than the tail.
"""

import contextlib
import copy
import threading
import weakref
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from vbrt.config import parse_budget
from vbrt.errors import ArgumentError, WrapError
from vbrt.generation.kv.extent import Extent
from vbrt.generation.kv.extent_store import KVStore
from vbrt.generation.kv.fetch_ring import Place
from vbrt.generation.kv.layer_tokens import TAIL_PAGES, LayerTokens
from vbrt.generation.kv.quantized import BITS
from vbrt.host import accelerator
from vbrt.host.logger import warn
from vbrt.kernels.uncompiled import uncompiled
from vbrt.libraries.transformers_api import (
    KV_CACHE,
    Cache,
    CacheLayerMixin,
    DynamicCache,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    EncoderDecoderCache,
)
from vbrt.model.attachment import Attachment, attached_to
from vbrt.model.placement import give_way
from vbrt.model.runtime import Runtime
from vbrt.report.kv_counters import CacheStats

__all__ = ["KVCache"]

KV_CACHE.check()


class KVLayer(CacheLayerMixin):
    """Keys and values [B, H, T, D] of one attention layer, in pages."""

    is_sliding = False
    is_croppable = True

    def __init__(self, tokens: LayerTokens) -> None:  # super() sets what are properties here
        self.tokens = tokens
        self._values: Tensor | None = None

    # -- interface of transformers' cache layers -----------------------------------------------------------------------

    @property
    def is_initialized(self) -> bool:
        """True after the first tokens."""
        return self.tokens.held is not None

    @property
    def dtype(self) -> torch.dtype | None:
        """Dtype of keys and values; None before the first tokens."""
        return self.tokens.held.code.shape.dtype if self.is_initialized else None

    @property
    def device(self) -> torch.device:
        """The tiers' computing device."""
        return self.tokens.store.stack.device

    @property
    def keys(self) -> Tensor | None:
        """Keys that the next tokens attend to, gathered; `values` read next is free."""
        if not self.is_initialized:
            return None
        with self._lock:
            keys, self._values = self.tokens.read()
        return keys

    @property
    def values(self) -> Tensor | None:
        """Values that the next tokens attend to, gathered."""
        if not self.is_initialized:
            return None
        values, self._values = self._values, None
        if values is None:
            with self._lock:
                values = self.tokens.read()[1]
        return values

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate the tail for these shapes."""
        self.tokens.begin(key_states, value_states)

    @uncompiled(reason="a KVCache grows, and its pages move")
    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Append tokens; return keys [B, H, T, K] and values [B, H, T, V] that they attend to.

        Raises:
            TierError: no tier has room for them, or a page cannot be read; the layer is unchanged.
            WrapError: they require gradients, are on another device, or are being captured in a CUDA graph.
        """
        self._check(key_states, value_states)
        self._values = None
        with self._lock:
            return self.tokens.append(key_states.detach(), value_states.detach())

    @property
    def _lock(self) -> threading.RLock:
        """Held while pages are in use, so that no budget change and no other cache moves them."""
        return self.tokens.store.stack.encoding

    def _check(self, keys: Tensor, values: Tensor) -> None:
        name = f"{self.tokens.store.name}, layer {self.tokens.layer}"
        if torch.is_grad_enabled() and (keys.requires_grad or values.requires_grad):
            raise WrapError(f"{name}: a KVCache keeps no graph for gradients; call the model under torch.no_grad()")
        if keys.device != self.device:
            raise WrapError(f"{name}: keys are on {keys.device}; the model's tiers compute on {self.device}")
        if keys.device.type == accelerator.TYPE and accelerator.is_current_stream_capturing():
            raise WrapError(f"{name}: a CUDA graph cannot record a cache that grows and moves; use a StaticCache")
        held = self.tokens.held
        if held is not None:
            found, shape = (*keys.shape[:2], keys.shape[3], values.shape[3]), held.code.shape
            if found != (shape.batch, shape.heads, *shape.dims) or keys.dtype != shape.dtype:
                raise WrapError(
                    f"{name}: sequences, heads and channels {found} in {keys.dtype}; it holds "
                    f"{(shape.batch, shape.heads, *shape.dims)} in {shape.dtype}; reset() it, or begin another cache"
                )

    def get_seq_length(self) -> int:
        """Return the number of tokens so far."""
        return self.tokens.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return how many keys queries of this length attend to, and the position of the first key."""
        return self.tokens.past + query_length, self.tokens.length - self.tokens.past

    def get_max_length(self) -> int:
        """Return -1: unbounded."""
        return -1

    def offload(self) -> None:
        """No-op: the tiers offload."""

    prefetch = offload

    def reset(self) -> None:
        """Drop all tokens and free their pages."""
        self._values = None
        self.tokens.reset()

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the last -`tokens_to_remove` tokens.

        Raises:
            ArgumentError: a positive number, which older versions of transformers took as the length to keep.
        """
        if tokens_to_remove > 0:
            raise ArgumentError(f"crop({tokens_to_remove}): expected a negative number, of tokens to remove")
        self._values = None
        if tokens_to_remove and self.is_initialized:
            with self._lock:
                self.tokens.crop(-tokens_to_remove)

    def batch_select_indices(self, indices: Tensor) -> None:
        """Select sequences by index, in this order, or by a bool mask."""
        self._select(indices.nonzero().flatten() if indices.dtype == torch.bool else indices)

    reorder_cache = batch_select_indices

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each sequence `repeats` times."""
        if self.get_seq_length():
            batch = self.tokens.held.code.shape.batch
            self._select(torch.arange(batch, dtype=torch.int64, device=self.device).repeat_interleave(repeats))

    def _select(self, rows: Tensor) -> None:
        self._values = None
        if self.get_seq_length():
            with self._lock:
                self.tokens.select(rows)


class KVSlidingLayer(KVLayer):
    """KVLayer with sliding-window attention; pages behind the window are freed."""

    is_sliding = True

    @property
    def sliding_window(self) -> int:
        """Tokens that a query attends to, itself included."""
        return self.tokens.window

    @property
    def record_past(self) -> bool:
        """True while pages behind the window are kept, for a later `crop`."""
        return self.tokens.keep_past

    @record_past.setter
    def record_past(self, value: bool) -> None:
        self.tokens.keep_past = value

    def activate_past_recording(self) -> None:
        """Keep pages behind the window until the next `crop`."""
        self.tokens.keep_past = True

    def get_max_length(self) -> int:
        """Return the window size."""
        return self.tokens.window

    def crop(self, tokens_to_remove: int) -> None:
        """Remove tokens, then drop pages behind the window.

        Raises:
            WrapError: the window would need dropped tokens; `activate_past_recording` keeps them.
        """
        held = self.tokens.held
        if held is not None and tokens_to_remove < 0:
            left = max(0, held.length + tokens_to_remove)
            if held.dropped > max(0, left - (self.tokens.window - 1)):
                raise WrapError(
                    f"crop({tokens_to_remove}): tokens of this window have been dropped; call "
                    "activate_past_recording() before the tokens that may be removed are added"
                )
        super().crop(tokens_to_remove)
        keep, self.tokens.keep_past = self.tokens.keep_past, False
        self.tokens.forget_past()
        self.tokens.keep_past = keep


class KVCache(DynamicCache):
    """KV cache in the tiers of a wrapped model: on the computing device within its budget, then in host memory, then in
    files. Pages are written once and prefetched layer by layer.

    For an encoder-decoder model the constructor returns a `transformers.EncoderDecoderCache` of two of them.

    Args:
        vb: result of `vbrt.wrap`, `load` or `from_pretrained`, or the model in it.
        bits: per value in sealed pages: 16 (unchanged), 8 or 4; for the error see `vbrt.generation.kv.quantized`.
        page: tokens per page. The last one to two pages of tokens always stay unquantized.
        room: share of the computing tier for the cache, in bytes or as "4GiB"; weights are evicted for it. Default:
            what resident pages leave there, minus streaming slots.

    Attributes:
        store: the pages.
        fallbacks: messages for users: which layers keep their tokens outside of the tiers.

    Raises:
        ArgumentError: an argument is out of range.
        WrapError: the model is not wrapped, or has no transformers config.
    """

    def __new__(cls, vb: nn.Module, **options: Any) -> Cache:
        """Return the cache, or an EncoderDecoderCache of two for an encoder-decoder model."""
        config = getattr(_attachment_of(vb).model, "config", None)
        if getattr(config, "is_encoder_decoder", False):
            return EncoderDecoderCache(_made(cls, vb, **options), _made(cls, vb, **options))
        return super().__new__(cls)

    def __init__(self, vb: nn.Module, *, bits: int = 16, page: int = 256, room: int | str | None = None) -> None:
        if bits not in BITS:
            raise ArgumentError(f"KVCache(bits={bits!r}); expected one of {', '.join(map(str, BITS))}")
        if not isinstance(page, int) or page < 1:
            raise ArgumentError(f"KVCache(page={page!r}); expected a number of tokens, such as 256")
        attachment = _attachment_of(vb)
        attachment.check_open("KVCache")
        config = getattr(attachment.model, "config", None)
        if not hasattr(config, "get_text_config"):
            raise WrapError(
                f"KVCache({type(attachment.model).__name__}): expected a model with a transformers config, which says "
                "which kinds of cache layers it has"
            )
        attachment.materialize(progress=False)
        plain = DynamicCache(config=config.get_text_config(decoder=True)).layers
        paged = [layer for layer in plain if _is_paged(layer, page)]
        self.bits, self.page, self._runtime = bits, page, attachment.runtime
        self.store = _store(self._runtime, len(paged), _bytes(room))
        Cache.__init__(self, layers=[self._layer(layer, paged) for layer in plain])
        self.fallbacks = _announced(self.plain_layers, self.layers)
        self._begin()

    def _layer(self, plain: CacheLayerMixin, paged: list[CacheLayerMixin]) -> CacheLayerMixin:
        """Return the KVLayer that replaces a transformers layer, or that layer itself."""
        if plain not in paged:
            return plain
        window = getattr(plain, "sliding_window", None)
        tokens = LayerTokens(self.store, paged.index(plain), bits=self.bits, page=self.page, window=window)
        return KVLayer(tokens) if window is None else KVSlidingLayer(tokens)

    def _begin(self) -> None:
        """Set the store's prefetch order, and register the cache with the runtime."""
        refs = [weakref.ref(layer.tokens) for layer in self.layers if isinstance(layer, KVLayer)]

        def order(place: Place) -> tuple[Place, Extent, int] | None:
            first, number = place
            for step in range(len(refs) + 1):
                tokens = refs[(first + step) % len(refs)]()
                found = None if tokens is None else next(tokens.streamed(0 if step else number + 1), None)
                if found is not None:
                    return found
            return None

        self.store.order = order
        self._runtime.caches.add(self)

    # -- vbrt's interface ----------------------------------------------------------------------------------------------

    @property
    def plain_layers(self) -> dict[int, str]:
        """Index -> class name of layers that remain transformers' own, on the computing device, outside of budgets."""
        return {n: type(layer).__name__ for n, layer in enumerate(self.layers) if not isinstance(layer, KVLayer)}

    @property
    def name(self) -> str:
        """Name in stats and timelines."""
        return self.store.name

    @property
    def nbytes(self) -> int:
        """Bytes of all pages in all tiers."""
        return self.store.nbytes

    def movable(self) -> contextlib.AbstractContextManager[None]:
        """Allow budget changes to move pages in a `with` block."""
        return self.store.movable()

    def stats(self) -> CacheStats:
        """Return a frozen snapshot of the counters."""
        tally, paged = self.store.tally, [layer for layer in self.layers if isinstance(layer, KVLayer)]
        return CacheStats(
            bits=self.bits,
            layers=len(paged),
            tokens=max((layer.get_seq_length() for layer in paged), default=0),
            tier_bytes=self.store.bytes_by_tier(),
            hits=tally.hits,
            misses=tally.misses,
            prefetched=tally.prefetched,
            bytes_moved=dict(tally.bytes_moved),
            wait_us=tally.wait_ns // 1000,
        )

    def align(self) -> None:
        """Crop all layers to the shortest one, to continue after an interrupted pass."""
        lengths = [layer.get_seq_length() for layer in self.layers if isinstance(layer, CacheLayerMixin)]
        for layer in self.layers:
            if isinstance(layer, CacheLayerMixin) and layer.get_seq_length() > min(lengths):
                layer.crop(min(lengths) - layer.get_seq_length())

    def close(self) -> None:
        """Drop all tokens and free the pages now instead of at the next access to the tiers. Idempotent."""
        for layer in self.layers:
            layer.reset()
        self.store.close()

    def __deepcopy__(self, memo: dict) -> "KVCache":
        """Return an independent cache: sealed pages are shared (they are immutable), tails are copied."""
        copied = Cache.__new__(type(self))
        memo[id(self)] = copied
        copied.__dict__.update({k: v for k, v in self.__dict__.items() if k not in ("layers", "store")})
        copied.store = _store(self._runtime, self.store.layers, self.store.room)
        copied.layers = [copied._copied(layer, memo) for layer in self.layers]
        copied._begin()
        return copied

    def _copied(self, layer: CacheLayerMixin, memo: dict) -> CacheLayerMixin:
        """Return a copy of another cache's layer, on this cache's store."""
        if not isinstance(layer, KVLayer):
            return copy.deepcopy(layer, memo)
        old = layer.tokens
        tokens = LayerTokens(self.store, old.layer, bits=old.bits, page=old.page, window=old.window)
        with self.store.stack.encoding:
            old.copy_to(tokens)
        return type(layer)(tokens)

    def __reduce_ex__(self, protocol: int) -> Any:
        raise WrapError(
            "KVCache: its pages are in a runtime's tiers; copy.deepcopy() shares them, nothing pickles them"
        )


def _store(runtime: Runtime, layers: int, room: int | None) -> KVStore:
    """Return a new store on a runtime."""

    def stores() -> list[KVStore]:
        runtime.open_stores()
        return [cache.store for cache in list(runtime.caches)]

    return KVStore(runtime.stack, layers, room=room, others=stores, give_way=partial(give_way, runtime))


def _bytes(room: int | str | None) -> int | None:
    if room is None:
        return None
    parsed = parse_budget(room, where="KVCache: room")
    if parsed.kind != "bytes":
        raise ArgumentError(f'KVCache(room={room!r}); expected bytes, such as "4GiB"')
    return parsed.amount


def _made(cls: type[KVCache], vb: nn.Module, **options: Any) -> KVCache:
    cache = object.__new__(cls)
    cache.__init__(vb, **options)
    return cache


def _attachment_of(vb: nn.Module) -> Attachment:
    """Return the attachment of a wrapped model, or of the first one within it."""
    model = vb if isinstance(vb, nn.Module) else getattr(vb, "model", None)  # a pipeline's
    for module in model.modules() if isinstance(model, nn.Module) else ():
        attachment = attached_to(module)
        if attachment is not None:
            return attachment
    raise WrapError(f"KVCache({type(vb).__name__}): expected a model that is wrapped, such as vbrt.wrap(model)")


def _announced(plain: dict[int, str], layers: list[CacheLayerMixin]) -> list[str]:
    """Warn about layers that keep all their tokens outside of the tiers; return the messages."""
    found = [n for n in plain if isinstance(layers[n], CacheLayerMixin) and not getattr(layers[n], "is_sliding", False)]
    if not found:
        return []
    kinds, numbers = sorted({plain[n] for n in found}), ", ".join(map(str, found))
    reason = f"KVCache: layers {numbers} ({', '.join(kinds)}) stay transformers' own, on the device and in no budget"
    warn(reason, stacklevel=3)
    return [reason]


def _is_paged(layer: CacheLayerMixin, page: int) -> bool:
    """True for layers that cache all tokens, or a window longer than the tail."""
    if type(layer) is DynamicSlidingWindowLayer:
        return layer.sliding_window > TAIL_PAGES * page
    return type(layer) is DynamicLayer
