"""Static caches: transformers' caches with their tensors at fixed addresses, for captured graphs.

`cache_kinds` decides which caches can be captured; `static_cache` moves a filled cache's tensors into memory for a
length bucket (`length_buckets`), where appends are writes at a position that the device reads. The cache keeps its
class.
"""

__all__: list[str] = []
