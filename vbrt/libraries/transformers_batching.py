"""transformers' continuous batching: many sequences of different lengths in one batch.

| feature | without it |
| --- | --- |
| `BATCHES` | `vbrt batch` raises |
| `CODED_CACHE` | `vbrt batch --kv` and `vbrt serve --kv` raise |
"""

import contextlib
import copy
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from vbrt.errors import LibraryError, VBError
from vbrt.libraries.probe import Feature
from vbrt.libraries.transformers_flash import flash_batches, is_routed
from vbrt.libraries.transformers_runner import CODED, MASKED, RUNNER, DecodeSteps, replay_steps

__all__ = [
    "BATCHES",
    "CODED_CACHE",
    "FEATURES",
    "CodedStorage",
    "CodedTokens",
    "Generated",
    "batching",
    "manager_of",
    "paging_refusal",
    "results_of",
]

_API = "generation.continuous_batching.continuous_api"
_CACHE = "generation.continuous_batching.cache"
_CONFIG = "generation.configuration_utils:ContinuousBatchingConfig"
_FULL, _SLIDING = (f"{_CACHE}:{kind}AttentionCacheAllocator" for kind in ("Full", "Sliding"))
BATCHES = Feature(
    "transformers",
    (
        f"{_API}:ContinuousMixin.init_continuous_batching(generation_config, continuous_batching_config)",
        f"{_API}:ContinuousBatchingManager.start",
        f"{_API}:ContinuousBatchingManager.stop(block, timeout)",
        f"{_API}:ContinuousBatchingManager.destroy",
        f"{_API}:ContinuousBatchingManager.add_request(input_ids, request_id, max_new_tokens, eos_token_id)",
        f"{_API}:ContinuousBatchingManager.get_result(timeout)",
        f"{_API}:ContinuousBatchingManager.is_running",
        f"{_CONFIG}(page_size, num_blocks, max_batch_tokens, max_requests_per_batch, use_cuda_graph)",
    ),
    without="many sequences are generated one after the other by `vbrt run`; pip install -U transformers",
)
CODED_CACHE = Feature(
    "transformers",
    (
        f"{_CACHE}:ATTN_TYPE_TO_ALLOCATOR",
        f"{_CACHE}:PagedAttentionCache(config, continuous_batching_config, device, dtype)",
        f"{_FULL}.get_bytes_per_page(num_key_value_heads, head_dim, cache_dtype, page_size)",
        f"{_FULL}._after_cache_tensor_init(non_trash_bytes, bytes_per_sector, cache_tensor, pool)",
        *(
            f"{kind}.{part}"
            for kind in (_FULL, _SLIDING)
            for part in (
                "register_cache_tensor(bytes_per_sector, non_trash_bytes, cache_tensor, pool)",
                "get_write_indices(request_id, past_length, query_length)",
                "get_read_indices(request_id, past_length, query_length)",
                "fork_blocks(source_request_id, dest_request_id, past_length)",
                "copy_blocks(source_block_ids, dest_block_ids)",
                "update(key_states, value_states, layer_idx, read_index, write_index)",
            )
        ),
        f"{_API}:ContinuousBatchingManager._create_batch_processor",
        f"{_CONFIG}(max_blocks_per_request, cpu_offload_space)",
    ),
    without="a batch keeps keys and values in the model's dtype; leave out --kv",
)
FEATURES = (BATCHES, CODED_CACHE)

_POLL_SECONDS = 0.2
_STOP_SECONDS = 5  # that a batch which is left has to end its pass
_PAGED = {"full_attention", "sliding_attention"}  # layers whose cache transformers pages


class Generated(NamedTuple):
    """Sequence that has ended: its request, new tokens, and why there are none; "" if there are."""

    request: str
    tokens: list[int]
    error: str


class CodedTokens(Protocol):
    """Keys and values of some layers in pages of another encoding. Rows are marked on the host as batches are prepared,
    and used on the device, in the same order."""

    def marked_writes(self, sequence: str, rows: list[int], past: int, alive: dict[str, Any]) -> list[int]:
        """Mark the rows of new tokens behind `past` others; `alive` has all sequences in the cache."""

    def marked_reads(self, sequence: str, rows: list[int], length: int, end: int | None = None) -> list[int]:
        """Mark the rows up to `end` of the last tokens of a sequence of this length."""

    def fork(self, sequence: str, other: str, alive: dict[str, Any]) -> None:
        """Copy, with the next `copy_tails`, what another sequence needs beside pages."""

    def copy_tails(self) -> None:
        """Carry out forks."""

    def begin(self, writes: Tensor, reads: Tensor) -> None:
        """Take marked rows int64 [M] and [N], for all layers of a pass."""

    def write(self, layer: int, keys: Tensor, values: Tensor) -> None:
        """Write new tokens, keys [M, H, K] and values [M, H, V], of a layer by its number here."""

    def read(self, layer: int) -> tuple[Tensor, Tensor]:
        """Return keys [N, H, K] and values [N, H, V]."""


class CodedStorage(Protocol):
    """Encoding of pages, in place of the model's dtype.

    Attributes:
        page_bytes: of keys and values of a page's tokens in one layer.
    """

    page_bytes: int

    def over(self, pages: Tensor, rows_per_block: int, window: int | None = None) -> CodedTokens:
        """Return the tokens of some layers in zeroed pages uint8 [blocks, layers, page_bytes]."""


@contextlib.contextmanager
def batching(
    model: nn.Module,
    *,
    sample: bool,
    max_new_tokens: int,
    cache: dict[str, Any],
    storage: CodedStorage | None,
    steps: DecodeSteps | None = None,
) -> Iterator[Any]:
    """Context of transformers' batching manager for a model, which generates in a thread of its own.

    Args:
        sample, cache, storage, steps: see `manager_of`.

    Raises:
        LibraryError: transformers lacks a part.
    """
    with flash_batches(model):
        how = {"sample": sample, "cache": cache, "storage": storage, "steps": steps}
        manager = manager_of(model, **how, max_new_tokens=max_new_tokens)
        manager.start()
        try:
            yield manager
        finally:
            manager.stop(block=True, timeout=_STOP_SECONDS)
            manager.destroy()


def manager_of(
    model: nn.Module,
    *,
    sample: bool,
    cache: dict[str, Any],
    storage: CodedStorage | None,
    steps: DecodeSteps | None = None,
    **generation: Any,
) -> Any:
    """Return transformers' batching manager for a model, not started; in a block of `flash_batches` it prepares a pass
    while the one before computes.

    Args:
        sample: draw tokens as the model's generation config says, else greedily.
        cache: of transformers' ContinuousBatchingConfig.
        storage: of the KV cache; None: the model's dtype.
        steps: runs decode steps; None: they are eager.
        generation: further keys of the generation config.

    Raises:
        LibraryError: transformers lacks a part.
    """
    BATCHES.check()
    config = copy.deepcopy(model.generation_config)
    for key, value in {"do_sample": sample, "num_beams": 1, **generation}.items():
        setattr(config, key, value)
    if storage is not None:
        CODED_CACHE.check()
        cache = {**cache, "max_blocks_per_request": 0, "cpu_offload_space": 0.0}  # kernels and copies of plain blocks
    elif is_routed(model) and model.device.type != "cpu":  # rows of codes are marked and used in turns
        cache = {**cache, "use_async_batching": True}
    how = BATCHES.part(_CONFIG)(**cache)
    manager = model.init_continuous_batching(generation_config=config, continuous_batching_config=how)
    if storage is not None:
        create = _with_names(type(manager)._create_batch_processor, PagedAttentionCache=_coded_cache(storage))
        manager._create_batch_processor = types.MethodType(create, manager)
    if steps is not None and RUNNER.is_there():
        if storage is not None or not is_routed(model):
            steps.refuse(MASKED if storage is None else CODED)
        replay_steps(manager, steps)
    return manager


def paging_refusal(model: nn.Module) -> str:
    """Return why a model's keys and values cannot be paged, as for people; "" if they can."""
    config, kind = model.config.get_text_config(), type(model).__name__
    if model.config.is_encoder_decoder:
        return f"{kind} is an encoder and a decoder"
    if others := sorted(set(getattr(config, "layer_types", None) or ()) - _PAGED):
        return f"{kind} has layers of {', '.join(others)}"
    if not getattr(model, "_supports_attention_backend", True) or not hasattr(config, "num_attention_heads"):
        return f"{kind} does not attend through transformers' interface"
    return ""


def results_of(manager: Any, count: int) -> Iterator[Generated]:
    """Yield so many sequences as they end. Raises VBError: the manager's thread has ended before."""
    while count:
        found = manager.get_result(timeout=_POLL_SECONDS)
        if found is not None and found.is_finished():
            count -= 1
            yield Generated(found.request_id, list(found.generated_tokens), found.error or "")
        elif found is None and not manager.is_running():
            fatal = getattr(getattr(manager, "background_thread_status", None), "fatal_error", None)
            why = f"{type(fatal).__name__}: {fatal}" if fatal is not None else "its thread has ended"
            raise VBError(f"transformers' batching stopped with {count} sequences to go: {why}") from fatal


# -- a cache in codes -------------------------------------------------------------------------------------------------


def _coded_cache(storage: CodedStorage) -> type:
    """Return transformers' paged cache with allocators whose pages are encoded."""
    plain = CODED_CACHE.part(f"{_CACHE}:PagedAttentionCache")
    kinds = dict(CODED_CACHE.part(f"{_CACHE}:ATTN_TYPE_TO_ALLOCATOR"))
    full, sliding = (_coded_allocator(CODED_CACHE.part(kind), storage) for kind in (_FULL, _SLIDING))
    kinds |= {"full_attention": full, "sliding_attention": sliding}
    begin = _with_names(plain.__init__, ATTN_TYPE_TO_ALLOCATOR=kinds, FullAttentionCacheAllocator=full)
    return type(f"Coded{plain.__name__}", (plain,), {"__init__": begin})


def _with_names(function: Callable[..., Any], **names: Any) -> Callable[..., Any]:
    """Return a function to which these global names mean something else. Raises LibraryError: it does not use one."""
    if missing := [name for name in names if name not in function.__code__.co_names]:
        raise LibraryError(
            f"transformers' {function.__qualname__} makes no use of {', '.join(missing)}: {CODED_CACHE.without}"
        )
    made = types.FunctionType(
        function.__code__, {**function.__globals__, **names}, function.__name__, None, function.__closure__
    )
    made.__defaults__, made.__kwdefaults__ = function.__defaults__, function.__kwdefaults__
    return made


def _coded_allocator(plain: type, storage: CodedStorage) -> type:
    """Return an allocator of transformers' paged cache whose pages are encoded."""

    class Coded(plain):
        supports_block_table = False  # kernels that read blocks of the model's dtype

        @classmethod
        def get_bytes_per_page(cls, *args: Any, **kwargs: Any) -> int:
            return storage.page_bytes

        def register_cache_tensor(
            self, bytes_per_sector: int, non_trash_bytes: int, cache_tensor: Tensor, pool: Any
        ) -> None:
            self.bytes_per_sector = bytes_per_sector
            self._copy_view = cache_tensor.view(-1, self.bytes_per_block)
            self._after_cache_tensor_init(non_trash_bytes, bytes_per_sector, cache_tensor, pool)
            pages = cache_tensor.view(-1, len(self.layer_indices), storage.page_bytes)
            self._window = getattr(self, "sliding_window", None)
            self.coded = storage.over(pages, self.block_physical_stride, self._window)

        def get_write_indices(self, request_id: str, past_length: int, query_length: int) -> list[int]:
            rows = super().get_write_indices(request_id, past_length, query_length)
            return self.coded.marked_writes(request_id, rows, past_length, self.block_table)

        def get_read_indices(self, request_id: str, past_length: int, query_length: int) -> list[int]:
            rows = super().get_read_indices(request_id, past_length, query_length)
            if self._window is None:
                return self.coded.marked_reads(request_id, rows, past_length + query_length)
            return self.coded.marked_reads(request_id, rows, past_length, len(rows) - query_length)

        def fork_blocks(
            self, source_request_id: str, dest_request_id: str, past_length: int
        ) -> tuple[list[int], list[int]]:
            found = super().fork_blocks(source_request_id, dest_request_id, past_length)
            if found[0]:  # else all tokens are in shared pages
                self.coded.fork(source_request_id, dest_request_id, self.block_table)
            return found

        def copy_blocks(self, source_block_ids: list[int], dest_block_ids: list[int]) -> None:
            super().copy_blocks(source_block_ids, dest_block_ids)
            self.coded.copy_tails()

        def update(
            self, key_states: Tensor, value_states: Tensor, layer_idx: int, read_index: Tensor, write_index: Tensor
        ) -> tuple[Tensor, Tensor]:
            layer, new = self.layer_indices.index(layer_idx), (key_states, value_states)
            if layer == 0:
                self.coded.begin(write_index, read_index)
            if read_index.numel() == 0 or self._window is None:
                self.coded.write(layer, *new)
                return self.coded.read(layer) if read_index.numel() else new
            found = self.coded.read(layer)  # before new tokens take the places of old ones
            here = (read_index == self.sentinel_index)[:, None, None]
            found = tuple(old.masked_scatter_(here, x) for old, x in zip(found, new, strict=True))
            self.coded.write(layer, *new)
            return found

    return Coded
