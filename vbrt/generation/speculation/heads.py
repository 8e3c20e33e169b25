"""Drafter "heads": the multi-token prediction head of a checkpoint drafts from the model's last hidden states.

    position i        0    1    2    3
    token             t_0  t_1  t_2  t_3      t_3 is accepted, but no pass has read it
    hidden state      h_0  h_1  h_2           as fed
    head reads        t_1  t_2  t_3           with h_i, and returns g_i
    head drafts                      t_4 from g_2, then t_5 from g_3 = head(t_4, g_2), ...

What the head reads of accepted tokens stays in its KV cache; what it reads of its own drafts is dropped at the end of
each `propose`. So drafts depend on accepted tokens only, however many of the earlier drafts were right.
"""

import torch
from torch import Tensor, nn

from vbrt.errors import VBError
from vbrt.generation.speculation.load_head import load_head
from vbrt.generation.speculation.sequences import Sequences
from vbrt.libraries import transformers_api
from vbrt.model.attachment import Attachment

__all__ = ["Heads", "heads_for"]

_CHUNK = 2048  # tokens of a prompt that the head reads at once: with padding, a mask has a row for each


def heads_for(attachment: Attachment, input_ids: Tensor, attention_mask: Tensor | None, *, load: bool) -> "Heads | str":
    """Return the drafter of a `generate` call, or why there is none.

    Args:
        load: load the head from the model's directory if it is not there yet.
    """
    if not input_ids.shape[1] or (attention_mask is not None and attention_mask.shape[1] > input_ids.shape[1]):
        return "the prompt is in embeddings or in a cache, whose hidden states no multi-token head has read"
    if attachment.head is None and load:
        try:
            load_head(attachment)
        except VBError as error:
            return str(error)
    if attachment.head is None:
        return "no multi-token head is loaded; vbrt.load_heads(vb) loads the checkpoint's"
    return Heads(attachment.head, attention_mask)


class Heads:
    """Drafts with an MTP head, for one `generate` call.

    Args:
        head: of `load_head`, as `attachment.head`.
        attention_mask: [B, P] of the prompt, 0 for padding; None if there is none.
    """

    name, free = "heads", False

    def __init__(self, head: nn.Module, attention_mask: Tensor | None = None) -> None:
        self._head = head
        padded = attention_mask is not None and not bool(attention_mask.all())
        self._prompt_mask = attention_mask.bool() if padded else None
        self._prompts = 0
        self._restart(0)

    def _restart(self, start: int) -> None:
        """Forget all positions; the first that the head can read is `start`."""
        self._cache = transformers_api.DynamicCache()
        self._first = self._read = start  # positions that the head has read: first <= i < read
        self._hidden: list[Tensor] = []  # states of positions from `read` on, in pieces: a prompt's are not copied
        self._last: Tensor | None = None  # g [B, D] of the last position read

    @property
    def one_time(self) -> int:
        """See `Drafter`: prompts read."""
        return self._prompts

    def close(self) -> None:
        """Free the cache and the states. Idempotent."""
        self._restart(0)

    def feed(self, start: int, hidden_BTD: Tensor) -> None:
        """Take the hidden states of a pass of the main model after its final norm; held until the head has read them.

        Passes are fed in order, prompts as well. States of rejected drafts may be left out, and are to be if the next
        pass may not be fed; else that pass, which begins before them, replaces them. After a gap the head reads on
        without what was before it, and drafts worse.

        Args:
            start: position of the pass's first token in the sequences, padding included.
        """
        if start > self._read + self._fed:
            self._restart(start)
        begin = max(start, self._read)  # the head has read those before
        while (surplus := self._read + self._fed - begin) > 0:
            last = self._hidden.pop()
            if surplus < last.shape[1]:
                self._hidden.append(last[:, :-surplus])
        self._hidden.append(hidden_BTD[:, begin - start :].detach())

    @property
    def _fed(self) -> int:
        return sum(piece.shape[1] for piece in self._hidden)

    def propose(self, sequences: Sequences, k: int) -> Tensor:
        """See `Drafter`. Nothing if the hidden state of the last token that a pass has read was not fed."""
        ids, end = sequences.ids, sequences.length - 1
        drafted = ids[:, :0]
        if k < 1 or not self._catches_up(ids, end):
            return drafted
        g_BD, mask = self._last, self._mask(end + k)
        places = _places(ids, mask, end + k)
        for place in range(end, end + k):
            tokens = sequences.propose(torch.cat([ids, drafted], dim=1), self._head.logits(g_BD))
            drafted = torch.cat([drafted, tokens[:, None]], dim=1)
            if place < end + k - 1:
                seen = None if mask is None else mask[:, self._first : place + 1]
                g_BD = self._head(tokens[:, None], g_BD[:, None], seen, places[:, place : place + 1], self._cache)[:, 0]
        self._cache.crop(1 - k)
        return drafted

    def _catches_up(self, ids: Tensor, end: int) -> bool:
        """Read all positions before `end`; False if states are missing, or there is none."""
        if self._read + self._fed < end:
            return False
        mask = self._mask(end)
        places = _places(ids, mask, end)
        self._prompts += self._last is None and self._read < end
        if len(self._hidden) > 1:
            self._hidden = [torch.cat(self._hidden, dim=1)]
        while self._read < end:
            begin, until = self._read, min(end, self._read + _CHUNK)
            hidden_BTD, rest_BTD = self._hidden[0].tensor_split([until - begin], dim=1)
            self._hidden = [rest_BTD] if rest_BTD.shape[1] else []
            seen = None if mask is None else mask[:, self._first : until]
            tokens = ids[:, begin + 1 : until + 1]
            g_BTD = self._head(tokens, hidden_BTD, seen, places[:, begin:until], self._cache)
            self._read, self._last = until, g_BTD[:, -1]
        return self._last is not None

    def _mask(self, length: int) -> Tensor | None:
        """Return the padding mask [B, length], extended by tokens."""
        if self._prompt_mask is None:
            return None
        return nn.functional.pad(self._prompt_mask, (0, length - self._prompt_mask.shape[1]), value=True)


def _places(ids: Tensor, mask: Tensor | None, length: int) -> Tensor:
    """Return positions int64 [1 or B, length] for rotary embeddings, as `generate` counts them."""
    if mask is None:
        return torch.arange(length, dtype=torch.int64, device=ids.device)[None]
    return (mask.long().cumsum(-1) - 1).clamp_(min=0)
