"""OpenAI-compatible server of a wrapped causal language model: transformers' own, with vbrt's metrics beside it.

    server_of(vb, tokenizer, "llama", context=8192).run(listening)

Requests are generated together, by transformers' continuous batching: while weights stream, further users cost little.
Importing this module imports transformers, which vbrt does not install.
"""

from typing import TYPE_CHECKING, Any

from vbrt.integrations.batches import cache_for, replayed_steps
from vbrt.libraries.transformers_serving import Server, check_server
from vbrt.report.openmetrics import CONTENT_TYPE

if TYPE_CHECKING:
    from vbrt.wrapper.wrapper import VBModelWrapper

__all__ = ["check_server", "context_of", "server_of"]

_CONTEXT = 8192  # tokens of a sequence by default; fewer where the model has fewer


def context_of(vb: "VBModelWrapper", asked: int | None) -> int:
    """Tokens of a sequence, prompt and answer: those asked for, at most the model's."""
    own = getattr(vb.module.config.get_text_config(), "max_position_embeddings", None)
    return min(asked or _CONTEXT, own or asked or _CONTEXT)


def server_of(
    vb: "VBModelWrapper",
    tokenizer: Any,
    name: str,
    *,
    context: int,
    sample: bool = False,
    sequences: int | None = None,
    together: bool = True,
    kv_bits: int = 16,
) -> Server:
    """Return a server of a model; `run(socket)` serves until SIGINT or SIGTERM.

    Args:
        name: of the model, in requests.
        context: tokens of a sequence, at most.
        sample: draw tokens as the model's generation config says, else greedily.
        sequences: at once, at most; None: by the device and the memory that is free.
        together: False: one request after the other, each with its own temperature.
        kv_bits: per value of the KV cache of requests together: 16 (as the model computes), 8 or 4.

    Raises:
        ArgumentError: `kv_bits` is another number, or the model's keys and values cannot be had in so many.
        LibraryError: packages of the server are not installed, or transformers lacks a part.
    """
    cache, storage = cache_for(vb, context, sequences, kv_bits=kv_bits) if together else (None, None)
    metrics = lambda: (vb.metrics(), CONTENT_TYPE)  # noqa: E731
    how = {"cache": cache, "storage": storage, "steps": replayed_steps(vb, cache), "metrics": metrics}
    return Server(vb.module, tokenizer, name, context=context, sample=sample, **how)
