"""KV cache in the tiers: `vbrt.KVCache`, for `generate(past_key_values=...)` and
`generate(cache_implementation="vbrt")`.

`layer_tokens` seals a layer's tokens into pages (16, 8 or 4 bits, `quantized`); `extent_store` groups pages into
extents in the GPU, CPU and SSD tiers, under the same budgets as the weights; `fetch_ring` prefetches them layer by
layer.
"""

__all__: list[str] = []
