"""Static caches: transformers' caches with their tensors at fixed addresses, for captured graphs.

A cache that a model has filled enters (`cache_kinds` says whether its layers can be captured); one of the same class
leaves, whose tensors have room for a length bucket (`length_buckets`) and whose appends are writes at a position.

The cache stays the caller's object; its layers change class in place. Eagerly they show what a DynamicCache shows, so
prompts, beams and callers notice nothing. While a step is captured, keys and values are whole buckets of 256 to 1024
tokens, the token is written where a tensor on the device says, and models mask the rest, as for transformers'
StaticCache. Memory reaches to the end of the call where that is known, else it doubles; each bucket has its graph on
the same memory. It is filled layer by layer, each of which lets go of its own tensors, and stays for the next call,
whose prompt is computed there if it fits. Such a cache gets tensors of its own when the call ends, or when another one
of the call needs the memory. Layers with a window keep the window and two buckets. States of one size (linear
attention, cross attention) are copies at fixed addresses, and what a step puts in their place is copied back within the
graph.
"""

__all__: list[str] = []
