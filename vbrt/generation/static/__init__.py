"""Static caches: transformers' caches with their tensors at fixed addresses, so that a captured graph can read them.

A cache that a model has filled enters (`cache_kinds` says whether its layers can be captured); one of the same class
leaves, whose tensors have room for a length bucket (`length_buckets`) and whose appends are writes at a position.
"""

__all__: list[str] = []
