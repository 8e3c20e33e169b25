"""Decoding: captured decode steps, KV caches in tiers, and self-speculation under transformers' `generate`.

`generate.py` puts a weakly bound object on the instance (also of nested models, as in PEFT and vision models); the loop
stays transformers': sampling, processors, streamers, beams. During a call the model's `forward` is replaced. A decode
step, one new token per sequence on a filled cache, is captured and replayed; prompts, and steps that cannot be
captured, run the plain forward, and `stats().steps` counts them by reason.

| package | job |
| --- | --- |
| `static` | transformers' caches at fixed addresses, and length buckets |
| `kv` | a cache whose tokens live in the tiers |
| `fusion` | a step's graph with fewer launches |
| `capture` | sessions of captured steps: validity of a capture, and the eager fallback |
| `speculation` | drafts by coarse planes, exact verification |

**Bits.** Lossless weights give the plain model's tokens and logits: captured steps attend eagerly, between CUDA graphs
(`capture/exact_attention.py`), and steps are eager where that cannot be had, on a CPU, and where pages stream, since
those are as fast as their copies. Under `compute.exactness = "rounded"`, and with 4-bit weights, captured steps attend
to a masked bucket, which rounds differently, and 4-bit layers are fused (on a CPU also norms, routers and gates).
`compute.captures = false` keeps steps eager.

**Ranks** must run the same passes: one pass more on one rank corrupts the all-reduce of the others, or deadlocks. So
timings must not decide on the passes of a sharded model: the number of drafts is the minimum over all ranks. Inputs and
tokens of `generate` are compared, once each per call. Replays count as passes, so that a stalled rank is noticed.
"""

__all__: list[str] = []
