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

**Bits.** Results equal eager decoding with two exceptions (on a CPU, where only lossy weights are captured, also norms,
routers and gates): attention to a masked bucket is a different kernel from attention to exactly the tokens, and 4-bit
layers are fused. `compute.captures = false` keeps steps eager.

**Ranks** must run the same passes: one pass more on one rank corrupts the all-reduce of the others, or deadlocks. So
timings must not decide on the passes of a sharded model: the number of drafts is the minimum over all ranks. Inputs and
tokens of `generate` are compared, once each per call. Replays count as passes, so that a stalled rank is noticed.
"""

__all__: list[str] = []
