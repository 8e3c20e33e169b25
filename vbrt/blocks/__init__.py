"""Building blocks for models of one's own: attention, a frozen 4-bit layer, a transformer block, sampling.

They work without `vbrt.wrap`, on `vbrt.kernels` and `vbrt.formats` alone.

**Attention.** torch's `scaled_dot_product_attention` silently takes a path that holds all N² scores wherever no fused
kernel serves. `FlashAttention` never does: the math backend is excluded, and what fused kernels refuse is computed on
blocks of queries, announced once with the reason.

| backend | when |
| --- | --- |
| `sdpa` | no mask, causal or not; causal with more queries than keys (the first get zeros); dropout on a GPU |
| `sdpa-blocks` | a mask of any kind; causal with 1 < queries < keys |
| `blocks` | dropout on a CPU; an additive mask that requires grad; float64, unaligned heads on a GPU; other devices |

A block has at least 16 queries, and holds up to 64 MiB of scores (`blocks`) or of the kernel's copy of the mask
(`sdpa-blocks`). Blocks are computed again in the backward pass; a mask whose copy fits into one block is not cut, and
nothing is computed twice. Causal is aligned bottom-right: query i sees keys up to i + Sk - Sq, so that prefill, chunks
and single tokens give the same. Rows that attend to nothing are opened before the kernel and set to zero behind it,
because devices and versions differ in what they make of them. FlexAttention is not used: its block mask of a tensor is
built from a dense one, and on a CPU it has no backward pass.

**FusedFP4Linear** keeps its frozen weight as one uint8 buffer, the page of its format: casts leave bytes alone, and
every checkpoint file holds them. A JSON header beside it in the state dict names layout and dtype. On a GPU the page is
kept in the kernels' order and saved in the format's own. Backward takes the page again and keeps no weight. To
torch.compile a frozen layer is one opaque op.

**Sampling** adds Gumbel noise made of float64 exponentials. Noise of float32 uniforms ends at 16.6: a token of
probability 1e-9 is never drawn beside a likely one. Whether a row has anything to draw is known on the device only: on
a CPU such a row raises, on a GPU it gives -1 and nothing waits, unless `check=True`.
"""

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
