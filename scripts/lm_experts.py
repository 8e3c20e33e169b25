"""The byte language model with routed experts: transformers' own Qwen3-MoE with a vocabulary of 256 bytes.

So what scripts/train leaves of it is a checkpoint that `Qwen3MoeForCausalLM.from_pretrained` reads, and its experts are
3-D parameters behind `@use_experts_implementation`, as in every routed model of transformers. Importing this takes
seconds, because transformers does; `scripts.lm.build` imports it when experts are asked for.

Legend: B batch, S positions, V vocabulary, T tokens, k experts a token.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, grouped_mm_experts_forward

from scripts.lm import Shape

IMPLEMENTATION = "grouped_mm_autocast"
_ATTENTIONS = {"plain": "eager", "vbrt": "sdpa", "sdpa": "sdpa"}  # torch's fused attention is what transformers calls


def config_of(shape: Shape, *, dropout: float = 0.0, balance: float = 0.0) -> Qwen3MoeConfig:
    """The config of a model of this shape, as transformers knows it."""
    return Qwen3MoeConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.width,
        intermediate_size=shape.experts * shape.inner,
        moe_intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        head_dim=shape.width // shape.heads,
        num_experts=shape.experts,
        num_experts_per_tok=shape.active,
        norm_topk_prob=True,
        max_position_embeddings=shape.context,
        tie_word_embeddings=shape.tied,
        attention_dropout=dropout,
        router_aux_loss_coef=balance,
        architectures=["Qwen3MoeForCausalLM"],
    )


class ExpertsLanguageModel(Qwen3MoeForCausalLM):
    """Ids [B, S] -> logits [B, S, V], or with targets [B, S] the mean loss in nats a byte.

    While it trains, the loss has the load-balancing term of Switch Transformers (Fedus et al. 2021) in it, `balance`
    times; the least that this term can be is k.
    """

    def __init__(
        self,
        shape: Shape,
        *,
        dropout: float = 0.0,
        attention: str = "vbrt",
        checkpointing: bool = False,
        balance: float = 0.0,
    ) -> None:
        config = config_of(shape, dropout=dropout, balance=balance)
        config._attn_implementation = _ATTENTIONS[attention]
        config._experts_implementation = IMPLEMENTATION
        super().__init__(config)
        self.shape, self.balance = shape, balance
        if checkpointing:
            # transformers' older and newer name
            getattr(self, "activation_checkpointing_enable", self.gradient_checkpointing_enable)()

    def forward(self, ids: Tensor, targets: Tensor | None = None, *, last: bool = False) -> Tensor:
        """`last`: logits of the last position only, [B, 1, V], as generation needs them."""
        balanced = targets is not None and self.training and self.balance > 0
        out = super().forward(
            input_ids=ids, use_cache=False, output_router_logits=balanced, logits_to_keep=1 if last else 0
        )
        if targets is None:
            return out.logits
        loss = F.cross_entropy(out.logits.flatten(0, 1).float(), targets.flatten())
        return loss + self.balance * out.aux_loss if balanced else loss


class _InDtype:
    """A module of experts as `grouped_mm_experts_forward` reads it, with its matrices in another dtype."""

    def __init__(self, module: nn.Module, dtype: torch.dtype) -> None:
        self._module = module
        self.gate_up_proj, self.down_proj = module.gate_up_proj.to(dtype), module.down_proj.to(dtype)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def _grouped_mm_autocast(module: nn.Module, hidden_TH: Tensor, index_Tk: Tensor, weights_Tk: Tensor) -> Tensor:
    """transformers' grouped_mm, which autocast does not reach: fp32 matrices are cast as those of Linear layers are."""
    device = hidden_TH.device.type
    if not torch.is_autocast_enabled(device):
        return grouped_mm_experts_forward(module, hidden_TH, index_Tk, weights_Tk)
    dtype = torch.get_autocast_dtype(device)
    return grouped_mm_experts_forward(_InDtype(module, dtype), hidden_TH.to(dtype), index_Tk, weights_Tk)


ALL_EXPERTS_FUNCTIONS.register(IMPLEMENTATION, _grouped_mm_autocast)
