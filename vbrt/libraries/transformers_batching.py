"""transformers' continuous batching: many sequences of different lengths in one batch.

| feature | without it |
| --- | --- |
| `BATCHES` | `vbrt batch` raises |
"""

import copy
from collections.abc import Iterator
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from torch import nn

from vbrt.errors import VBError
from vbrt.libraries.probe import Feature

__all__ = ["BATCHES", "FEATURES", "Generated", "batching", "batching_config", "paging_refusal", "results_of"]

_API = "generation.continuous_batching.continuous_api"
BATCHES = Feature(
    "transformers",
    (
        f"{_API}:ContinuousMixin.continuous_batching_context_manager(generation_config, continuous_batching_config)",
        f"{_API}:ContinuousBatchingManager.add_request(input_ids, request_id, max_new_tokens, eos_token_id)",
        f"{_API}:ContinuousBatchingManager.get_result(timeout)",
        f"{_API}:ContinuousBatchingManager.is_running",
        ":ContinuousBatchingConfig(page_size, num_blocks, max_batch_tokens, max_requests_per_batch, use_cuda_graph)",
    ),
    without="many sequences are generated one after the other by `vbrt run`; pip install -U transformers",
)
FEATURES = (BATCHES,)

_POLL_SECONDS = 0.2
_PAGED = {"full_attention", "sliding_attention"}  # layers whose cache transformers pages


class Generated(NamedTuple):
    """Sequence that has ended: its request, new tokens, and why there are none; "" if there are."""

    request: str
    tokens: list[int]
    error: str


def batching(model: nn.Module, *, sample: bool, max_new_tokens: int, **how: Any) -> AbstractContextManager[Any]:
    """Return a context of transformers' batching manager for a model, which generates in a thread of its own.

    Args:
        sample: draw tokens as the model's generation config says, else greedily.
        how: of transformers' ContinuousBatchingConfig.

    Raises:
        LibraryError: transformers lacks a part.
    """
    BATCHES.check()
    config = copy.deepcopy(model.generation_config)
    config.do_sample, config.num_beams, config.max_new_tokens = sample, 1, max_new_tokens
    return model.continuous_batching_context_manager(
        generation_config=config, continuous_batching_config=batching_config(**how), timeout=5, warmup=False
    )


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


def batching_config(**how: Any) -> Any:
    """Return transformers' ContinuousBatchingConfig with these attributes. Raises LibraryError: there is none."""
    return BATCHES.part(":ContinuousBatchingConfig")(**how)


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
