"""Text generation with a wrapped causal language model, in one turn or several.

    conversation = Conversation(vb, tokenizer)
    reply = conversation.say("What is the sea?", Turn(max_new_tokens=64), listener)

If the tokenizer has a chat template, a turn is a user message; else, or with `templated=False`, all text so far is
continued. Importing this module imports transformers, which vbrt does not install.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from transformers import StoppingCriteria, StoppingCriteriaList, TextStreamer

from vbrt.errors import VBError
from vbrt.integrations.hf_configs import quiet

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from vbrt.wrapper.wrapper import VBModelWrapper

__all__ = ["Conversation", "Listener", "Reply", "Turn"]


@dataclass(frozen=True, slots=True)
class Turn:
    """Generation settings of a reply: at most so many tokens; greedy, or sampled by the model's generation config."""

    max_new_tokens: int = 64
    sample: bool = False


@dataclass(frozen=True, slots=True)
class Reply:
    """Generated text without its prompt, token counts of both, and seconds taken; `stopped`: by the listener."""

    text: str
    prompt_tokens: int
    new_tokens: int
    seconds: float
    stopped: bool = False


class Listener(Protocol):
    """Callbacks during generation."""

    def text(self, piece: str) -> None:
        """Receive the next piece of the text, some words."""

    def token(self) -> None:
        """Count a new token."""

    def stops(self) -> bool:
        """True to stop after the last token."""


class _Silence:
    def text(self, piece: str) -> None:
        pass

    def token(self) -> None:
        pass

    def stops(self) -> bool:
        return False


class _Streamer(TextStreamer):
    """Passes text to a listener in whole words."""

    def __init__(self, tokenizer: Any, listener: Listener) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self._listener, self._is_prompt = listener, True

    def put(self, value: torch.Tensor) -> None:
        if not self._is_prompt:
            self._listener.token()
        self._is_prompt = False
        super().put(value)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        if text:
            self._listener.text(text)


class _Stop(StoppingCriteria):
    def __init__(self, listener: Listener) -> None:
        self._listener, self.stopped = listener, False

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: Any) -> torch.Tensor:
        self.stopped = self._listener.stops()
        return torch.full((input_ids.shape[0],), self.stopped, dtype=torch.bool, device=input_ids.device)


class Conversation:
    """Conversation with a wrapped causal language model.

    Attributes:
        turns: messages so far, as chat templates take them: dicts with "role" and "content".
        templated: True if the tokenizer's chat template is used.
    """

    def __init__(
        self,
        vb: "VBModelWrapper",
        tokenizer: "PreTrainedTokenizerBase",
        *,
        templated: bool = True,
        system: str | None = None,
    ) -> None:
        self._vb, self._tokenizer = vb, tokenizer
        self.templated = templated and bool(tokenizer.chat_template)
        self._begin = [{"role": "system", "content": system}] if system else []
        self.turns: list[dict[str, str]] = list(self._begin)

    def reset(self) -> None:
        """Forget all turns except the system message."""
        self.turns = list(self._begin)

    def say(self, text: str, turn: Turn, listener: Listener | None = None) -> Reply:
        """Send a user message; return the model's reply. Both become turns; an exception leaves the turns unchanged.

        Raises:
            VBError: no text; no tokens, or tokens outside the model's vocabulary; the chat template rejects the turns.
        """
        turns = [*self.turns, {"role": "user", "content": text}]
        _check_texts(turns)
        inputs = self._inputs(turns)
        listener = listener or _Silence()
        stop = _Stop(listener)
        start = time.perf_counter()
        with quiet(), torch.inference_mode():
            out = self._vb.generate(
                **inputs.to(self._vb.device),
                max_new_tokens=turn.max_new_tokens,
                do_sample=turn.sample,
                num_beams=1,
                streamer=_Streamer(self._tokenizer, listener),
                stopping_criteria=StoppingCriteriaList([stop]),
            )
        seconds = time.perf_counter() - start
        prompt_tokens = inputs["input_ids"].shape[1]
        new = out[0, prompt_tokens:]
        reply = self._tokenizer.decode(new, skip_special_tokens=True)
        self.turns = [*turns, {"role": "assistant", "content": reply}]
        return Reply(reply, prompt_tokens, new.numel(), seconds, stop.stopped)

    def prompt_ids(self, turns: Sequence[Mapping[str, str]]) -> list[int]:
        """Return the tokens of a prompt made of turns. Raises VBError as `say` does."""
        _check_texts(turns)
        return self._inputs(list(turns))["input_ids"][0].tolist()

    def text_of(self, ids: Sequence[int]) -> str:
        """Return the text of generated tokens."""
        return self._tokenizer.decode(ids, skip_special_tokens=True)

    def _inputs(self, turns: list[dict[str, str]]) -> Any:
        inputs = self._templated(turns) if self.templated else self._plain(turns)
        ids = inputs["input_ids"]
        if ids.numel() == 0:
            raise VBError("the prompt has no tokens; expected some text")
        rows = self._vb.get_input_embeddings().num_embeddings
        if int(ids.max()) >= rows:
            raise VBError(
                f"the tokenizer gives token {int(ids.max())}, the model has {rows}: they do not belong together"
            )
        return inputs

    def _plain(self, turns: list[dict[str, str]]) -> Any:
        """Return the tokens of all turns as one text, one line per user turn."""
        parts = [turn["content"] + ("" if turn["role"] == "user" else "\n") for turn in turns]
        return self._tokenizer("".join(parts), return_tensors="pt", return_token_type_ids=False)

    def _templated(self, turns: list[dict[str, str]]) -> Any:
        try:
            return self._tokenizer.apply_chat_template(
                turns, add_generation_prompt=True, return_tensors="pt", return_dict=True
            )
        except Exception as error:  # a template is third-party code
            raise VBError(
                f"the model's chat template does not take these turns: {str(error) or type(error).__name__}; "
                "--raw continues the text as it is"
            ) from error


def _check_texts(turns: Sequence[Mapping[str, str]]) -> None:
    """Raise VBError for text that was not UTF-8: Python holds it as lone surrogates, which tokenizers reject."""
    for turn in turns:
        try:
            turn["content"].encode()
        except UnicodeEncodeError as error:
            raise VBError(f"{turn['role']}: not UTF-8 at character {error.start}; expected text in UTF-8") from error
