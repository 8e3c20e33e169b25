"""Multi-token prediction (MTP) head as a module: the token after the next one, from a hidden state and the next token.

    x_i = eh_proj([enorm(embedding(t_i+1)), hnorm(h_i)])    # h_i: the main model's hidden state after its final norm
    g_i = norm(layer(x_0, ..., x_i))                        # a decoder layer of the model's class; its own KV cache
    logits of t_i+2 = output head(g_i)

Embedding and output head are the main model's (DeepSeek-AI 2024, "DeepSeek-V3 technical report", arXiv 2412.19437,
section 2.2). More drafts feed g_i back as h_i+1, with the drafted token: for that the head was not trained, so each is
right less often.

h_i and g_i are taken after the norms. The report leaves that open; the modeling code that comes with DeepSeek-R1
passes on what `model.norm` returns, as do SGLang, vLLM and transformers' `MtpModel`. SGLang and transformers feed g_i
back after `norm`, too. vLLM did so before it, which cost acceptance (vllm-project/vllm, pull requests 46075, 47448).
"""

import copy
import functools
import inspect
import itertools
import weakref
from typing import Any

import torch
from torch import Tensor, nn

from vbrt.errors import WrapError
from vbrt.libraries import transformers_api
from vbrt.libraries.transformers_api import cache_argument

__all__ = ["mtp_head"]

_FULL = "full_attention"


def mtp_head(model: nn.Module) -> nn.Module:
    """Return an MTP head for a transformers model, on the meta device. See `_MTPHead.forward`.

    The decoder layer is built like the model's last layer with full attention: with experts where that has them.

    Raises WrapError: not a decoder with such a layer, a final norm and rotary embeddings.
    """
    decoder = model.get_decoder() if transformers_api.is_pretrained(model) and hasattr(model, "get_decoder") else None
    parts = ("layers", "norm", "rotary_emb", "config")
    lacks = next((name for name in parts if getattr(decoder, name, None) is None), "")
    if lacks or model.get_output_embeddings() is None:
        kind = type(model).__name__
        raise WrapError(f"{kind}: a multi-token prediction head needs a decoder's {lacks or 'output embedding'}")
    if "layer_type" in inspect.signature(decoder.rotary_emb.forward).parameters:
        raise WrapError(f"{type(model).__name__}: rotary embeddings differ by layer, and so would a head's")
    kinds = getattr(decoder.config, "layer_types", None) or [_FULL] * len(decoder.layers)
    if _FULL not in kinds:
        raise WrapError(f"{type(model).__name__}: no layer of full attention, which a multi-token prediction head has")
    index = len(kinds) - 1 - kinds[::-1].index(_FULL)
    with torch.device("meta"):
        return _class_for(type(decoder))(model, decoder, index).eval()


@functools.cache
def _class_for(decoder: type) -> type:
    """Return the class of heads for a decoder: of its family, which has rules for dtypes and checkpoints."""
    pairs = itertools.pairwise(decoder.__mro__)
    family = next(kind for kind, base in pairs if base.__name__ == "PreTrainedModel")
    # transformers reads the source of a class's module to learn what may be chosen for it
    return type("MTPHead", (_MTPHead, family), {"__module__": decoder.__module__})


class _MTPHead(nn.Module):
    """MTP head; its class is made with the family's base class."""

    def __init__(self, model: nn.Module, decoder: nn.Module, index: int) -> None:
        config = copy.deepcopy(decoder.config)
        # drafts need no bits: a mask for padding is passed, which flash attention and vbrt's own rows do not take
        transformers_api.set_attention(config, "sdpa" if getattr(decoder, "_supports_sdpa", False) else "eager")
        super().__init__(config)
        self._main = weakref.ref(model)
        self.eh_proj = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        own = self.eh_proj.weight.dtype  # all of one dtype take that of the files, another would be kept
        self.enorm, self.hnorm, self.norm = (copy.deepcopy(decoder.norm).to(own) for _ in range(3))
        self.layers = nn.ModuleList([type(decoder.layers[index])(config, index)])
        for module in self.layers.modules():
            if hasattr(module, "layer_idx"):
                module.layer_idx = 0  # in the head's cache
        self._cache_name = cache_argument(self.layers[0].forward)
        self.post_init()

    def forward(
        self, input_ids: Tensor, hidden_BTD: Tensor, attention_mask: Tensor | None, position_ids: Tensor, cache: Any
    ) -> Tensor:
        """Return g [B, T, D] after T tokens more than the cache holds, in the main model's dtype.

        The head computes in that of its files: the main model may have been loaded in another.

        Args:
            input_ids: int64 [B, T], t_i+1 of each position i.
            hidden_BTD: h_i, or g_i-1 of an earlier call.
            attention_mask: [B, S], 0 for positions i of padding, those of the cache included; None: there is none.
            position_ids: int64 [B, T] of positions i.
        """
        embedded_BTD, own = self.main.get_input_embeddings()(input_ids), self.norm.weight.dtype
        x_BTD = self.eh_proj(torch.cat([self.enorm(embedded_BTD.to(own)), self.hnorm(hidden_BTD.to(own))], dim=-1))
        out = self.layers[0](
            x_BTD,
            attention_mask=self._mask(x_BTD, attention_mask, cache.get_seq_length()),
            position_ids=position_ids,
            position_embeddings=self.main.get_decoder().rotary_emb(x_BTD, position_ids),
            use_cache=True,
            **{self._cache_name: cache},
        )
        return self.norm(out[0] if isinstance(out, tuple) else out).to(embedded_BTD.dtype)

    def logits(self, g_BD: Tensor) -> Tensor:
        """Return the logits [B, V] of the tokens after those of a forward."""
        return self.main.get_output_embeddings()(g_BD[:, None])[:, 0]

    @property
    def main(self) -> nn.Module:
        """The main model. Raises WrapError if it is gone."""
        model = self._main()
        if model is None:
            raise WrapError("MTPHead: the main model is gone; keep it in a variable for as long as its head is used")
        return model

    def _mask(self, x_BTD: Tensor, attention_mask: Tensor | None, past: int) -> Tensor | None:
        """Return a causal mask [B, 1, T, S] to add to attention scores; None where attention needs none."""
        tokens = x_BTD.shape[1]
        is_own = transformers_api.attention_of(self.config) == "sdpa" and not past  # which masks a prompt by itself
        if attention_mask is None and (tokens == 1 or is_own):
            return None
        keys = torch.arange(past + tokens, dtype=torch.int64, device=x_BTD.device)
        seen = keys <= keys[past:, None]
        if attention_mask is not None:
            own = keys == keys[past:, None]  # else a row of padding would see nothing, and be NaN
            seen = (seen & attention_mask.bool()[:, None, None, :]) | own
        mask = x_BTD.new_zeros(seen.shape).masked_fill_(~seen, torch.finfo(x_BTD.dtype).min)
        return mask.expand(len(x_BTD), 1, -1, -1)
