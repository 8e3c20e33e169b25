"""Building blocks for custom models: attention in O(N) memory, a frozen 4-bit linear layer, a block, sampling."""

from vbrt.blocks.attention import AttentionChoice, FlashAttention
from vbrt.blocks.fp4_linear import FusedFP4Linear, quantize
from vbrt.blocks.sampling import gumbel_max_sample
from vbrt.blocks.transformer import OptimizedTransformerBlock

__all__ = [
    "AttentionChoice",
    "FlashAttention",
    "FusedFP4Linear",
    "OptimizedTransformerBlock",
    "gumbel_max_sample",
    "quantize",
]
