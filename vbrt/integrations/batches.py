"""Generation of many sequences at once with a wrapped causal language model, by transformers' continuous batching.

    for result in generate_many(vb, {"a": [5, 17], "b": [8]}, Turn(max_new_tokens=64)):
        print(result.request, result.tokens)

While weights stream, further sequences of a batch cost little: each pass reads them once. Importing this module imports
transformers, which vbrt does not install.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import psutil

from vbrt.host import accelerator
from vbrt.integrations.hf_configs import quiet
from vbrt.integrations.text_generation import Turn
from vbrt.libraries.transformers_batching import Generated, batching, results_of

if TYPE_CHECKING:
    from vbrt.wrapper.wrapper import VBModelWrapper

__all__ = ["generate_many"]

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
        VBError: the batch fails as a whole.
    """
    if not prompts:
        return
    model = vb.module
    most, tokens = _ON_GPU if vb.device.type == accelerator.TYPE else _ON_CPU
    most = min(sequences or most, len(prompts))
    longest = max(map(len, prompts.values())) + turn.max_new_tokens
    blocks = -(-longest // _PAGE) * most
    room = _blocks_that_fit(vb, model)
    how = {"page_size": _PAGE, "num_blocks": max(-(-longest // _PAGE), min(blocks, room)), "use_cuda_graph": False}
    how |= {"max_batch_tokens": max(most, min(tokens, longest * most)), "max_requests_per_batch": most}
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


def _blocks_that_fit(vb: "VBModelWrapper", model: Any) -> int:
    """Return how many blocks of the KV cache free memory has room for."""
    config = model.config.get_text_config()
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    block = 2 * config.num_hidden_layers * heads * width * model.dtype.itemsize * _PAGE
    on_gpu = vb.device.type == accelerator.TYPE
    free = accelerator.mem_get_info()[0] if on_gpu else psutil.virtual_memory().available
    return int(free * _SHARE["gpu" if on_gpu else "cpu"]) // block
