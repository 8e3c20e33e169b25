"""Decoding: what `generate` does beside transformers.

`generate.py` puts a weakly bound object on the instance (also of models within, as PEFT and vision models have them);
the loop stays transformers': sampling, processors, streamers, beams. For the length of a call the model's `forward` is
ours. A decode step, one new token a sequence on a filled cache, is captured and replayed; prompts, and whatever cannot
be captured, run the plain forward, and `stats().steps` counts them by reason.

| package | job |
| --- | --- |
| `static` | transformers' caches at fixed addresses, and length buckets |
| `kv` | a cache whose tokens live in the tiers |
| `fusion` | a step's graph with fewer launches |
| `capture` | sessions of captured steps: when a capture is good, and the eager fallback |
| `speculation` | drafts by coarse planes, exact verification |

**Bits.** Results equal eager decoding but for two things (on a CPU, where only weights that lose bits are captured,
also norms, routers and gates): attention to a masked bucket is another kernel than attention to exactly the tokens, and
4-bit layers are fused. `compute.captures = false` keeps steps eager.

**Ranks** decide alike: a rank that runs one pass more than another gives the sums of others wrong numbers, or waits for
ever. So nothing that a clock decides may decide on passes of a model whose weights are cut: the number of drafts is the
least of all ranks'. Inputs and tokens of `generate` are compared, once each a call. Replays count as passes do, so that
a rank which sleeps between two of them is seen to be behind.
"""

__all__: list[str] = []
