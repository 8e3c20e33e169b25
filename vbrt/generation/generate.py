"""`generate` of a wrapped model of transformers with drafts from its own coarse planes, or with noise by a seed."""

import contextlib
import copy
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from vbrt.errors import ArgumentError
from vbrt.generation.noise import Noise, greedy
from vbrt.generation.pace import MOST, Pace
from vbrt.generation.sequences import Sequences
from vbrt.generation.speculation import EXACTNESS, Decoding, announce, speculate
from vbrt.layers import VBLayer
from vbrt.model.attachment import Attachment

__all__ = ["Speculation", "generate"]


@dataclass(frozen=True, slots=True)
class Speculation:
    """How a call of `generate` drafts and draws.

    Attributes:
        speculate: "auto", a number of drafts, or False.
        exactness: "tokens" or "distribution".
        seed: of the noise that sampled tokens are drawn with; None: drawn from torch's default generator where drafts
            are wanted, else transformers' own sampling.
    """

    speculate: str | int | bool = False
    exactness: str = "tokens"
    seed: int | None = None

    def __post_init__(self) -> None:
        """Raises ArgumentError for values out of range."""
        k = self.speculate
        if not (k is False or k == "auto" or (type(k) is int and 1 <= k <= MOST)):
            raise ArgumentError(f'generate: speculate = {k!r}; expected "auto", a number from 1 to {MOST}, or False')
        if self.exactness not in EXACTNESS:
            raise ArgumentError(f"generate: exactness = {self.exactness!r}; expected one of {', '.join(EXACTNESS)}")
        if self.seed is not None and type(self.seed) is not int:
            raise ArgumentError(f"generate: seed = {self.seed!r}; expected a whole number or None")

    @property
    def asked(self) -> bool:
        """True if there is something to do that transformers does not do."""
        return self.speculate is not False or self.seed is not None


def generate(attachment: Attachment, how: Speculation, args: tuple, kwargs: dict[str, Any]) -> Any:
    """Return what `model.generate(*args, **kwargs)` returns, decoded as `how` says.

    Where drafts are asked for and cannot be had, a warning and `stats().fallbacks` say why.

    Raises:
        ArgumentError: a seed for a call that draws no tokens one by one, such as beam search.
    """
    attachment.check_open("generate")
    model = attachment.model
    if not how.asked:
        return model.generate(*args, **kwargs)
    config, _ = model._prepare_generation_config(kwargs.get("generation_config"), **kwargs)
    refusal = _refusal(model, config, kwargs)
    if refusal is not None:
        if how.seed is not None:
            raise ArgumentError(f"generate: seed = {how.seed}: {refusal}; use torch.manual_seed")
        announce(attachment.speculation, refusal)
        return model.generate(*args, **kwargs)
    if how.speculate is not False and not _can_draft(attachment):
        announce(attachment.speculation, "no weight has a fine plane, so there is no coarser one to draft with")
        if how.seed is None:
            return model.generate(*args, **kwargs)
        how = Speculation(False, how.exactness, how.seed)
    kwargs = dict(kwargs)
    criteria = _with_stop_strings(kwargs)
    method = _Method(attachment, how, kwargs.get("streamer"))
    return model.generate(*args, custom_generate=method, stopping_criteria=criteria, **kwargs)


def _refusal(model: Any, config: Any, kwargs: dict[str, Any]) -> str | None:
    """Return why a call does not decode token by token, by itself, with a cache; None if it does."""
    mode = str(getattr(config.get_generation_mode(kwargs.get("assistant_model")), "value", ""))
    if kwargs.get("custom_generate") is not None:
        return "custom_generate decodes in its own way"
    if mode not in ("greedy_search", "sample"):
        return f"{mode.replace('_', ' ')} does not decode token by token"
    if model.config.is_encoder_decoder:
        return f"{type(model).__name__} has an encoder and a decoder"
    if config.output_attentions or config.output_hidden_states:
        return "output_attentions and output_hidden_states ask for every pass of plain decoding"
    if not config.use_cache:
        return "use_cache = False"
    if model.generation_config.stop_strings is not None:
        return "the model's generation_config has stop_strings; give them to generate instead"
    return None


def _can_draft(attachment: Attachment) -> bool:
    layers = attachment.registry.layers.values()
    return any(isinstance(layer, VBLayer) and layer.handle.spec.fine for layer in layers)


def _with_stop_strings(kwargs: dict[str, Any]) -> Any:
    """Take stop strings out of the arguments: the caller's stopping criteria, and one for those.

    transformers gives the tokenizer that they need to its own methods only.
    """
    from transformers import StoppingCriteriaList, StopStringCriteria

    criteria = StoppingCriteriaList(kwargs.pop("stopping_criteria", None) or [])
    tokenizer, strings = kwargs.pop("tokenizer", None), kwargs.pop("stop_strings", None)
    config = kwargs.get("generation_config")
    if strings is None and config is not None and config.stop_strings is not None:
        strings, config = config.stop_strings, copy.deepcopy(config)
        kwargs["generation_config"], config.stop_strings = config, None
    if strings is not None:
        criteria.append(StopStringCriteria(tokenizer=tokenizer, stop_strings=strings))
    return criteria


class _Method:
    """A decoding method as transformers calls it, with everything prepared.

    Args:
        streamer: which transformers gives the prompt, and itself to its own methods only.
    """

    def __init__(self, attachment: Attachment, how: Speculation, streamer: Any) -> None:
        self._attachment, self._how, self._streamer = attachment, how, streamer

    def __call__(
        self,
        model: Any,
        input_ids: torch.Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **model_kwargs: Any,
    ) -> Any:
        counts = self._attachment.speculation
        counts.totals["exactness"] = self._how.exactness
        draw = self._noise().draw if generation_config.do_sample else greedy
        given = (input_ids, logits_processor, stopping_criteria, generation_config, self._streamer)
        sequences = Sequences(*given, draw)
        decoding = Decoding(
            model,
            self._attachment,
            Pace({False: 0, "auto": None}.get(self._how.speculate, self._how.speculate)),
            self._how.exactness,
            counts,
            generation_config.max_length,
        )
        with _link_bytes(self._attachment):
            outputs = model._prefill(input_ids, generation_config, model_kwargs)
            model_kwargs = speculate(decoding, sequences, outputs, model_kwargs)
        sequences.end()
        return _result(sequences, model_kwargs, generation_config)

    def _noise(self) -> Noise:
        seed = self._how.seed
        if seed is None:
            seed = int(torch.randint(2**62, (), dtype=torch.int64, device="cpu"))
        return Noise(seed)


@contextlib.contextmanager
def _link_bytes(attachment: Attachment) -> Iterator[None]:
    """Count the bytes that move between tiers within a `with` block."""
    before = sum(attachment.stats().bytes_moved.values())
    try:
        yield
    finally:
        attachment.speculation.totals["link_bytes"] += sum(attachment.stats().bytes_moved.values()) - before


def _result(sequences: Sequences, kwargs: dict[str, Any], config: Any) -> Any:
    if not config.return_dict_in_generate:
        return sequences.ids
    from transformers.generation import GenerateDecoderOnlyOutput

    return GenerateDecoderOnlyOutput(
        sequences=sequences.ids,
        scores=sequences.scores,
        logits=sequences.logits,
        past_key_values=kwargs.get("past_key_values"),
    )
