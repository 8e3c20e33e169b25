"""KV cache in the tiers: `vbrt.KVCache`, for `generate(past_key_values=...)` and
`generate(cache_implementation="vbrt")`.

Keys and values of new tokens enter; keys and values of all tokens leave, a layer at a time. Tokens are sealed into
pages (as they are, or in 8 or 4 bits), pages into extents, and extents live in the GPU, CPU and SSD tiers under the
weights' budgets, prefetched through a ring.
"""

__all__: list[str] = []
