"""OptimizedTransformerBlock: a pre-norm transformer block made of vbrt's layers."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from vbrt.blocks.attention import FlashAttention
from vbrt.blocks.fp4_linear import FusedFP4Linear
from vbrt.config.argument_checks import check_whole

__all__ = ["OptimizedTransformerBlock"]


class OptimizedTransformerBlock(nn.Module):
    """x + attention(norm(x)), then x + down(gelu(up(norm(x)))), as in GPT-2 (Radford et al. 2019, section 2.3).

    Args:
        d_model: width of the block; attention projections have no bias.
        n_heads: of the attention; must divide `d_model`.
        d_ff: width of the MLP's hidden layer.
        dropout: of attention weights and of both residual branches, in training.
        use_fp4: make all six projections FusedFP4Linear: trained dense, frozen by `vbrt.quantize`.
        use_checkpoint: save only the block's input, and recompute the block in the backward pass (in training).
        causal: each position attends to itself and earlier ones.

    Raises:
        ArgumentError: invalid sizes or dropout.
    """

    def __init__(
        self,
        d_model: int,
        n_heads: int,
        d_ff: int,
        dropout: float = 0.0,
        use_fp4: bool = False,
        use_checkpoint: bool = False,
        *,
        causal: bool = False,
    ) -> None:
        super().__init__()
        check_whole(d_model, "OptimizedTransformerBlock: d_model")
        check_whole(d_ff, "OptimizedTransformerBlock: d_ff")
        linear = FusedFP4Linear if use_fp4 else nn.Linear
        self.attention_norm, self.mlp_norm = nn.LayerNorm(d_model), nn.LayerNorm(d_model)
        self.attention = FlashAttention(d_model, n_heads, dropout=dropout, causal=causal, linear=linear)
        self.up = FusedFP4Linear(d_model, d_ff, activation="gelu") if use_fp4 else nn.Linear(d_model, d_ff)
        self.down = linear(d_ff, d_model)
        self.activation = nn.Identity() if use_fp4 else nn.GELU()  # with use_fp4 it is fused into `up`
        self.dropout, self.use_checkpoint = dropout, use_checkpoint

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """x [B, S, d_model] -> [B, S, d_model]; masks as in `vbrt.blocks.attention.attention`.

        Raises:
            ArgumentError: an input or mask of another shape or dtype.
        """
        if self.use_checkpoint and self.training and torch.is_grad_enabled():
            return checkpoint(self._forward, x, mask, use_reentrant=False, preserve_rng_state=self.dropout > 0)
        return self._forward(x, mask)

    def _forward(self, x: Tensor, mask: Tensor | None) -> Tensor:
        drop = partial(F.dropout, p=self.dropout, training=self.training)
        x = x + drop(self.attention(self.attention_norm(x), mask=mask))
        return x + drop(self.down(self.activation(self.up(self.mlp_norm(x)))))

    def extra_repr(self) -> str:
        """Settings that the inner layers do not print."""
        return f"dropout={self.dropout}, use_checkpoint={self.use_checkpoint}"
