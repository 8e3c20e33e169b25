"""Generation of many sequences at once with a wrapped causal language model, by transformers' continuous batching.

    for result in generate_many(vb, {"a": [5, 17], "b": [8]}, Turn(max_new_tokens=64)):
        print(result.request, result.tokens)

While weights stream, further sequences of a batch cost little: each pass reads them once. Importing this module imports
transformers, which vbrt does not install.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import psutil

from vbrt.config.budgets import CONTEXT_BYTES
from vbrt.errors import ArgumentError, VBError
from vbrt.generation.capture.batch_steps import BatchSteps
from vbrt.generation.generate import Generating
from vbrt.generation.kv.paged_codes import PagedCodes
from vbrt.generation.kv.quantized import BITS, AffineCode, KVShape, page_code
from vbrt.host import accelerator
from vbrt.integrations.hf_configs import quiet
from vbrt.integrations.text_generation import Turn
from vbrt.libraries.transformers_batching import Generated, batching, paging_refusal, results_of

if TYPE_CHECKING:
    from vbrt.wrapper.wrapper import VBModelWrapper

__all__ = ["PagedCache", "cache_for", "generate_many", "replayed_steps"]

_PAGE = 256  # tokens of a block of the cache, as transformers has it
#: sequences at once and tokens a pass, at most, on a GPU and on a CPU, whose attention has a mask of their product
_ON_GPU, _ON_CPU = (256, 4096), (32, 512)
_SHARE = {"gpu": 0.6, "cpu": 0.25}  # of the free memory, for the cache; the rest is for activations


class PagedCache(NamedTuple):
    """Paged KV cache that fits: attributes of transformers' ContinuousBatchingConfig, and how pages are encoded; None:
    as the model computes."""

    config: dict[str, Any]
    storage: PagedCodes | None


def generate_many(
    vb: "VBModelWrapper",
    prompts: Mapping[str, Sequence[int]],
    turn: Turn,
    sequences: int | None = None,
    *,
    kv_bits: int = 16,
) -> Iterator[Generated]:
    """Yield the continuation of each prompt, as they end.

    Args:
        prompts: tokens, by the name of the request.
        sequences: at once, at most; None: by the device and the memory that is free.
        kv_bits: per value of the KV cache: 16 (as the model computes), 8 or 4, by `vbrt.KVCache`'s codes.

    Raises:
        ArgumentError: `kv_bits` is another number, or the model's keys and values cannot be had in so many.
        LibraryError: transformers has no continuous batching, or a cache that cannot be had in 8 or 4 bits.
        VBError: the model's cache cannot be paged, or the batch fails as a whole.
    """
    if not prompts:
        return
    model = vb.module
    longest = max(map(len, prompts.values())) + turn.max_new_tokens
    cache = cache_for(vb, longest, sequences, len(prompts), kv_bits=kv_bits)
    ends = model.generation_config.eos_token_id
    ends = model.config.get_text_config().eos_token_id if ends is None else ends
    with contextlib.ExitStack() as held:
        steps = held.enter_context(replayed_steps(vb, cache.config))
        held.enter_context(quiet(but="vbrt: "))
        how = {"cache": cache.config, "storage": cache.storage, "steps": steps}
        how |= {"sample": turn.sample, "max_new_tokens": turn.max_new_tokens}
        manager = held.enter_context(batching(model, **how))
        for name, ids in prompts.items():
            manager.add_request(
                input_ids=list(ids),
                request_id=name,
                max_new_tokens=turn.max_new_tokens,
                eos_token_id=-1 if ends is None else ends,
            )
        yield from results_of(manager, len(prompts))


@contextlib.contextmanager
def replayed_steps(vb: "VBModelWrapper", cache: dict[str, Any] | None) -> Iterator[BatchSteps | None]:
    """Context of a batch whose decode steps are captured and replayed; None where the device has no graphs.

    Args:
        cache: of `cache_for`; None: there is no batch.
    """
    generating, steps = vars(vb.module).get("generate"), None
    if cache is not None and isinstance(generating, Generating):
        steps = generating.batch_steps(cache["max_requests_per_batch"], cache["max_batch_tokens"])
    try:
        yield steps
    finally:
        if steps is not None:
            steps.release()


def cache_for(
    vb: "VBModelWrapper", longest: int, sequences: int | None, asked: int | None = None, *, kv_bits: int = 16
) -> PagedCache:
    """Return a KV cache for transformers' continuous batching that fits.

    Room decides how many sequences there are, not pay. A pass brings its weights once, over a link or from the
    device's memory, and computes for each sequence: more of them bring more tokens a second until computing takes
    longer, and no fewer then, while its time grows with them. That is so of kernels that attend to each sequence by
    itself; where transformers has a mask of all new by all cached tokens (sdpa, eager), the attention of a pass grows
    with the square, which the estimator, whose batches are padded, does not know: `_ON_CPU`, `sequences`.

    Args:
        longest: tokens of a sequence, at most.
        sequences: at once, at most; None: by the device and the memory that is free.
        asked: sequences in all, where that is known.
        kv_bits: per value: see `generate_many`.

    Raises:
        ArgumentError: see `generate_many`.
        VBError: the model's cache cannot be paged.
    """
    if kv_bits not in BITS:
        raise ArgumentError(f"kv_bits = {kv_bits!r}; expected one of {', '.join(map(str, BITS))}")
    if why := paging_refusal(vb.module):
        raise VBError(
            f"{why}, so transformers' continuous batching cannot run it; `vbrt run` and "
            "`vbrt serve --one-by-one` generate one sequence after the other"
        )
    vb.materialize()  # before what is free is asked for
    if vb.device.type == accelerator.TYPE:
        accelerator.synchronize(vb.device)  # batches compute in a stream of their own, which does not wait for pages
    most, tokens = _ON_GPU if vb.device.type == accelerator.TYPE else _ON_CPU
    most = sequences or most
    most = most if asked is None else min(most, asked)
    each, shape = -(-longest // _PAGE), _page_of(vb.module)
    code = page_code(shape, kv_bits)
    storage = PagedCodes(code, most) if isinstance(code, AffineCode) else None
    layers = vb.module.config.get_text_config().num_hidden_layers
    room = _free_bytes(vb) - (layers * most * storage.tail_bytes if storage else 0)
    fitting = room // (layers * (storage.page_bytes if storage else shape.plain_bytes))
    config = {
        "page_size": _PAGE,
        "num_blocks": max(each, min(each * most, fitting)),
        "use_cuda_graph": False,
        "max_batch_tokens": max(most, min(tokens, longest * most)),
        "max_requests_per_batch": most,
    }
    return PagedCache(config, storage)


def _page_of(model: Any) -> KVShape:
    """Return the shape of a page of one layer."""
    config = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return KVShape(1, heads, _PAGE, width, width, model.dtype)


def _free_bytes(vb: "VBModelWrapper") -> int:
    """Return the memory that the KV cache may take."""
    on_gpu = vb.device.type == accelerator.TYPE
    free = accelerator.mem_get_info()[0] if on_gpu else psutil.virtual_memory().available
    if on_gpu and vb.plan.gpu_room is not None:
        free = min(free, vb.plan.gpu_room.limit_bytes - CONTEXT_BYTES - accelerator.memory_reserved())
    return int(free * _SHARE["gpu" if on_gpu else "cpu"])
