"""Hidden states of the main model's passes, for drafters that read them.

| pass | its states come from |
| --- | --- |
| eager, the prompt's included | a forward hook of the decoder: `hidden_states_fed` |
| replayed | a result of captured steps that is there if a head is: `Terms.decoder` of `capture/captured_step.py` |
"""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from vbrt.generation.capture.exact_attention import is_captured
from vbrt.libraries.transformers_api import cache_of

__all__ = ["PassStates", "hidden_states_fed"]


class PassStates:
    """States after the final norm, of the passes since `begin`; a later pass replaces those of its positions."""

    def __init__(self) -> None:
        self.begin()

    def begin(self) -> None:
        """Forget all passes."""
        self._start, self._hidden = 0, None

    def note(self, start: int, hidden_BTD: Tensor) -> None:
        """Take a pass's states; `start`: position of its first token in the sequences, padding included."""
        before = self.of(self._start, start)
        self._start = start if before is None else self._start
        self._hidden = hidden_BTD.detach() if before is None else torch.cat([before, hidden_BTD.detach()], dim=1)

    def of(self, start: int, end: int) -> Tensor | None:
        """Return the states of positions start <= i < end; None if any was not noted."""
        if self._hidden is None or not self._start <= start < end <= self._start + self._hidden.shape[1]:
            return None
        return self._hidden[:, start - self._start : end - self._start]


@contextlib.contextmanager
def hidden_states_fed(model: nn.Module, feed: Callable[[int, Tensor], None]) -> Iterator[None]:
    """Context in which every eager pass of a transformers model on a KV cache, in this thread, is fed.

    Replays call no hook, and what is fed of a pass under capture would be a static tensor.
    """
    thread = threading.get_ident()

    def hook(decoder: nn.Module, args: tuple, kwargs: dict[str, Any], output: Any) -> None:
        cache = cache_of(kwargs) or cache_of(output)
        if cache is not None and not is_captured() and threading.get_ident() == thread:
            hidden_BTD = output.last_hidden_state
            feed(cache.get_seq_length() - hidden_BTD.shape[1], hidden_BTD)

    handle = model.get_decoder().register_forward_hook(hook, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()
