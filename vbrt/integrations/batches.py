"""Generation of many sequences at once with a wrapped causal language model, by transformers' continuous batching.

    for result in generate_many(vb, {"a": [5, 17], "b": [8]}, Turn(max_new_tokens=64)):
        print(result.request, result.tokens)

While weights stream, further sequences of a batch cost little: each pass reads them once. Importing this module imports
transformers, which vbrt does not install.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import psutil

from vbrt.config.budgets import CONTEXT_BYTES
from vbrt.errors import VBError
from vbrt.host import accelerator
from vbrt.integrations.hf_configs import quiet
from vbrt.integrations.text_generation import Turn
from vbrt.libraries.transformers_batching import Generated, batching, paging_refusal, results_of

if TYPE_CHECKING:
    from vbrt.wrapper.wrapper import VBModelWrapper

__all__ = ["cache_for", "generate_many"]

_PAGE = 256  # tokens of a block of the cache, as transformers has it
#: sequences at once and tokens a pass, at most, on a GPU and on a CPU, whose attention has a mask of their product
_ON_GPU, _ON_CPU = (256, 4096), (32, 512)
_SHARE = {"gpu": 0.6, "cpu": 0.25}  # of the free memory, for the cache; the rest is for activations


def generate_many(
    vb: "VBModelWrapper", prompts: Mapping[str, Sequence[int]], turn: Turn, sequences: int | None = None
) -> Iterator[Generated]:
    """Yield the continuation of each prompt, as they end.

    Args:
        prompts: tokens, by the name of the request.
        sequences: at once, at most; None: by the device and the memory that is free.

    Raises:
        LibraryError: transformers has no continuous batching.
        VBError: the model's cache cannot be paged, or the batch fails as a whole.
    """
    if not prompts:
        return
    model = vb.module
    longest = max(map(len, prompts.values())) + turn.max_new_tokens
    how = cache_for(vb, longest, sequences, len(prompts))
    ends = model.generation_config.eos_token_id
    ends = model.config.get_text_config().eos_token_id if ends is None else ends
    with quiet(), batching(model, sample=turn.sample, max_new_tokens=turn.max_new_tokens, **how) as manager:
        for name, ids in prompts.items():
            manager.add_request(
                input_ids=list(ids),
                request_id=name,
                max_new_tokens=turn.max_new_tokens,
                eos_token_id=-1 if ends is None else ends,
            )
        yield from results_of(manager, len(prompts))


def cache_for(vb: "VBModelWrapper", longest: int, sequences: int | None, asked: int | None = None) -> dict[str, Any]:
    """Return attributes of transformers' ContinuousBatchingConfig for a KV cache that fits.

    Args:
        longest: tokens of a sequence, at most.
        sequences: at once, at most; None: by the device and the memory that is free.
        asked: sequences in all, where that is known.

    Raises:
        VBError: the model's cache cannot be paged.
    """
    if why := paging_refusal(vb.module):
        raise VBError(
            f"{why}, so transformers' continuous batching cannot run it; `vbrt run` and "
            "`vbrt serve --one-by-one` generate one sequence after the other"
        )
    most, tokens = _ON_GPU if vb.device.type == accelerator.TYPE else _ON_CPU
    most = sequences or most
    most = most if asked is None else min(most, asked)
    each = -(-longest // _PAGE)
    return {
        "page_size": _PAGE,
        "num_blocks": max(each, min(each * most, _blocks_that_fit(vb, vb.module))),
        "use_cuda_graph": False,
        "max_batch_tokens": max(most, min(tokens, longest * most)),
        "max_requests_per_batch": most,
    }


def _blocks_that_fit(vb: "VBModelWrapper", model: Any) -> int:
    """Return how many blocks of the KV cache free memory has room for."""
    config = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    block = 2 * config.num_hidden_layers * heads * width * model.dtype.itemsize * _PAGE
    on_gpu = vb.device.type == accelerator.TYPE
    free = accelerator.mem_get_info()[0] if on_gpu else psutil.virtual_memory().available
    if on_gpu and vb.plan.gpu_room is not None:
        free = min(free, vb.plan.gpu_room.limit_bytes - CONTEXT_BYTES - accelerator.memory_reserved())
    return int(free * _SHARE["gpu" if on_gpu else "cpu"]) // block
