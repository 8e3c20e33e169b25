"""Assistants: a small model drafts for a large one.

| tokenizers | drafter | batch |
| --- | --- | --- |
| the same | `Assistant`: steps of the small model on a cache of its own, rewound to the accepted tokens | any |
| two | `Translated`: transformers' universal assisted generation, by text | 1 |

`Assistant` draws its tokens as the target does (`Sequences.propose`: the target's processors, noise by seed, row and
position), so sampled drafts agree where both models do. Where the small model is wrapped, its steps are captured and
replayed by its own `generate`; a plain one runs eagerly, on the device where it is.

A proposal of k tokens computes k - 1 of them, so after a round with all drafts right two tokens are new to the cache. A
captured assistant takes a few new tokens in as many replays: a pass of several would leave its static memory.
"""

import contextlib
import functools
import inspect
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from vbrt.generation.speculation.cache_refusals import cache_refusal, past_refusal
from vbrt.generation.speculation.drafters import NotDraftable
from vbrt.generation.speculation.sequences import Sequences
from vbrt.generation.speculation.verification import Passes
from vbrt.generation.static.cache_kinds import NotRecordable
from vbrt.generation.static.static_cache import is_entered
from vbrt.libraries import transformers_api
from vbrt.libraries.transformers_api import CACHE_ARGUMENTS, DRAFTS, KV_CACHE, UNIVERSAL, as_generate_names_it
from vbrt.model.attachment import attached_to
from vbrt.model.pass_hooks import move_rest_

__all__ = ["Assistant", "Translated", "assistant_refusal", "translated_refusal"]

_ONE_BY_ONE = 4  # new tokens up to which a captured assistant takes one replay each


def assistant_refusal(model: Any, tokens: int) -> str:
    """Return why a model cannot draft `tokens` tokens, prompt included, on a cache of its own; "" if it can."""
    kind = type(model).__name__
    if missing := DRAFTS.refusal() or KV_CACHE.refusal():
        return missing
    if not hasattr(model, "prepare_inputs_for_generation") or getattr(model, "config", None) is None:
        return f"the assistant is a {kind}; expected a transformers model that generates"
    if model.config.is_encoder_decoder:
        return f"the assistant {kind} is an encoder-decoder model"
    if not any(name in inspect.signature(type(model).forward).parameters for name in CACHE_ARGUMENTS):
        return f"the forward of the assistant {kind} takes no cache"
    cache = transformers_api.DynamicCache(config=model.config)
    if not cache.layers:  # layers of one kind, made as needed
        cache = transformers_api.DynamicCache()
        cache.layers.append(transformers_api.DynamicLayer())
    refusal = cache_refusal(cache) or past_refusal(cache)
    if refusal:
        return f"the assistant {kind}: {refusal}"
    places = _places(model)
    return f"the assistant {kind} has {places} positions; the prompt has {tokens}" if tokens > places else ""


def translated_refusal(model: Any, batch: int) -> str:
    """Return why a model with another tokenizer cannot draft for `batch` rows; "" if it can."""
    if missing := UNIVERSAL.refusal():
        return missing
    if batch != 1:
        return f"an assistant with another tokenizer drafts for one sequence, not {batch}"
    return assistant_refusal(model, 0)


def _places(model: Any) -> int:
    """Return the maximum number of positions of a model."""
    return getattr(model.config.get_text_config(), "max_position_embeddings", None) or 2**62


class Assistant:
    """Drafts of a small model with the target's tokenizer.

    Args:
        model: of transformers, plain or with VB layers in it.
        mask: attention mask of the prompt [B, L]; None: nothing is masked.
        limit: maximum sequence length of the call, in tokens.
        vocabulary: the target's number of tokens; the small model's may be padded to another.
    """

    name, free = "assistant", False

    def __init__(self, model: Any, mask: torch.Tensor | None, *, limit: int, vocabulary: int) -> None:
        self._model, self._mask, self._vocabulary = model, mask, vocabulary
        self._limit, self._most = limit, min(limit, _places(model))
        self._own_vocabulary = model.config.get_text_config().vocab_size
        self._takes = inspect.signature(type(model).forward).parameters
        attachment, own = attached_to(model), model.__dict__.get("generate")
        self._captured = attachment is not None and not attachment.closed and hasattr(own, "passes")
        self._new_passes: Callable[[], AbstractContextManager[Passes]] = lambda: contextlib.nullcontext(Passes())
        self._recordings: Callable[[], int] = lambda: 0
        if self._captured:
            move_rest_(model, attachment.stack.device)
            self._new_passes = functools.partial(own.passes, limit, watched=False)
            self._recordings = lambda: own.counts().recordings
        self._opened = contextlib.ExitStack()
        self._passes: Passes | None = None
        self._cache: Any = None
        self._held: torch.Tensor | None = None  # tokens in the cache, [B, C]; the first `_certain` are accepted ones
        self._certain = 0
        self._fills = 0

    @property
    def one_time(self) -> int:
        return self._fills + self._recordings()

    @property
    def length(self) -> int:
        """Tokens in the cache."""
        return 0 if self._held is None else self._held.shape[1]

    def propose(self, sequences: Sequences, k: int) -> torch.Tensor:
        k = min(k, self._most - sequences.length + 1)  # the last draft takes no position
        if k < 1:
            return sequences.ids[:, :0]
        self._rewind(sequences)
        if self._passes is None:
            self._passes = self._opened.enter_context(self._new_passes())
        return self._passes.run(functools.partial(self._drafted, sequences, k))

    def close(self) -> None:
        self._opened.close()
        self._passes = self._cache = self._held = None

    # -- passes -------------------------------------------------------------------------------------------------------

    def _drafted(self, sequences: Sequences, k: int) -> torch.Tensor:
        ids, fed = sequences.ids, sequences.length
        logits_BV = self._caught_up(ids)
        k = min(k, self._reach(fed) + 1)
        for place in range(k):
            tokens = sequences.propose(ids, logits_BV)
            ids = torch.cat([ids, tokens[:, None]], dim=-1)
            if place + 1 < k:
                logits_BV, fed = self._forward(ids, 1), fed + 1
        self._held, self._certain = ids[:, :fed], sequences.length
        return ids[:, sequences.length :]

    def _reach(self, length: int) -> int:
        """Return how many tokens after `length` can be taken back: in static memory a window goes back to the begin of
        its bucket; elsewhere it must keep its past from now on."""
        if not self._windows():
            return self._limit
        with contextlib.suppress(NotRecordable):
            return self._passes.placed(self._cache).span.end - length
        self._cache.activate_past_recording()
        return self._limit

    def _caught_up(self, ids: torch.Tensor) -> torch.Tensor:
        """Compute the tokens that the cache lacks; return the logits [B, V] after the last one."""
        if self._cache is None:
            return self._filled(ids)
        new = ids.shape[1] - self.length
        if not self._captured or new > _ONE_BY_ONE:
            return self._forward(ids, new)
        for length in range(self.length + 1, ids.shape[1] + 1):
            logits_BV = self._forward(ids[:, :length], 1)
        return logits_BV

    def _filled(self, ids: torch.Tensor) -> torch.Tensor:
        self._fills += 1
        self._cache = transformers_api.DynamicCache(config=self._model.config)
        self._read_mask(ids)
        outputs = self._model._prefill(self._own(ids), self._model.generation_config, self._arguments(ids.shape[1]))
        return self._logits(outputs)

    def _forward(self, ids: torch.Tensor, tokens: int) -> torch.Tensor:
        """Run a pass over the last `tokens` tokens of `ids`; return the logits [B, V] after the last one."""
        kwargs = self._arguments(ids.shape[1])
        inputs = self._model.prepare_inputs_for_generation(self._own(ids), next_sequence_length=tokens, **kwargs)
        return self._logits(self._model(**inputs, return_dict=True))

    def _own(self, ids: torch.Tensor) -> torch.Tensor:
        """Return ids on the model's device, within its vocabulary: an embedding fails for tokens beyond."""
        ids = ids.to(self._model.device)
        return ids if self._own_vocabulary >= self._vocabulary else ids.clamp(max=self._own_vocabulary - 1)

    def _logits(self, outputs: Any) -> torch.Tensor:
        """Return the last logits with the target's number of tokens: noise is drawn for each token of a vocabulary."""
        logits_BV = outputs.logits[:, -1, : self._vocabulary]
        lacking = self._vocabulary - logits_BV.shape[1]
        return torch.nn.functional.pad(logits_BV, (0, lacking), value=float("-inf")) if lacking else logits_BV

    def _read_mask(self, ids: torch.Tensor) -> None:
        """Extend the prompt's mask to the longest sequence of the call; positions count its tokens."""
        device, rows = self._model.device, len(ids)
        ones = torch.ones(rows, self._most, dtype=torch.int64, device=device)
        self._padded = self._mask is not None and not bool(self._mask.all())
        if self._padded:
            ones[:, : self._mask.shape[1]] = self._mask[:, : self._most].to(device)
        self._ones, self._positions = ones, (ones.cumsum(-1) - 1).clamp(min=0)

    def _arguments(self, length: int) -> dict[str, Any]:
        """Return the arguments of a pass at the end of `length` tokens, as `generate` prepares them."""
        given: dict[str, Any] = {"cache": self._cache, "use_cache": True}
        if "attention_mask" in self._takes:
            given["attention_mask"] = self._ones[:, :length] if self._padded else None
        if "position_ids" in self._takes:
            given["position_ids"] = self._positions[:, :length]
        if "logits_to_keep" in self._takes:
            given["logits_to_keep"] = 1
        return as_generate_names_it(given)

    # -- rewinding ----------------------------------------------------------------------------------------------------

    def _rewind(self, sequences: Sequences) -> None:
        """Crop the cache to the accepted tokens, the last one left out, whose logits are to be computed."""
        if self._cache is None:
            return
        most = min(self.length, sequences.length - 1)
        begin = min(self._certain, most)
        same = self._held[:, begin:most] == sequences.ids[:, begin:most]
        same = same | (sequences.running == 0)[:, None]  # keys of stopped rows do not matter
        length = begin + int(same.all(0).cumprod(0).sum())
        if length < self.length and not self._can_crop():
            self._cache = self._held = None  # a capture failed, and a window has dropped what would be needed
            return
        self._cache.crop(length - self.length)
        self._held, self._certain = self._held[:, :length], length

    def _can_crop(self) -> bool:
        windows = self._windows()
        keeps = is_entered(self._cache) or any(getattr(layer, "record_past", False) for layer in self._cache.layers)
        return keeps or not windows or self.length < min(windows)

    def _windows(self) -> list[int]:
        """Sliding windows that the call may pass."""
        layers = self._cache.layers
        found = [layer.sliding_window for layer in layers if getattr(layer, "is_sliding", False)]
        return [window for window in found if window < self._limit]


class Translated:
    """Drafts of a small model with another tokenizer: transformers' universal assisted generation, greedy.

    The text is encoded for the small model and its answer for the target, whose tokens are then compared from their
    longest common run on.

    Args:
        model: of transformers, plain or wrapped by vbrt.
        tokenizers: the target's and the small model's.
        limit: maximum sequence length of the call, in tokens.
    """

    name, free = "assistant", False

    def __init__(self, model: Any, tokenizers: tuple[Any, Any], *, limit: int) -> None:
        self._model, self._tokenizers, self._limit = model, tokenizers, limit
        self._generator: Any = None

    @property
    def one_time(self) -> int:
        return int(self._generator is not None)

    def propose(self, sequences: Sequences, k: int) -> torch.Tensor:
        ids, length = sequences.ids, sequences.length
        if self._generator is None:
            self._generator = self._made(ids)
        self._generator.num_assistant_tokens = k
        try:
            found, _ = self._generator.get_candidates(ids)
        except torch.OutOfMemoryError:  # says nothing about the texts
            raise
        except Exception as error:  # texts that the two tokenizers cannot be aligned on fail in many ways
            raise NotDraftable(f"universal assisted generation failed: {type(error).__name__}: {error}") from error
        return found[:, length : length + k].to(ids.device)

    def close(self) -> None:
        self._generator = None

    def _made(self, ids: torch.Tensor) -> Any:
        """Make transformers' candidate generator. Its config has the small model's token ids, and samples nothing: that
        would draw from torch's default generator."""
        own = self._model.generation_config
        config = type(own)(
            do_sample=False,
            max_length=self._limit,
            min_length=0,
            bos_token_id=own.bos_token_id,
            eos_token_id=own.eos_token_id,
            pad_token_id=own.pad_token_id,
        )
        kind = transformers_api.AssistedCandidateGeneratorDifferentTokenizers
        target, small = self._tokenizers
        return kind(ids, self._model, target, small, generation_config=config, model_kwargs={})
