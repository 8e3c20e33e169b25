"""Static caches: transformers' caches with their tensors at fixed addresses, for captured graphs.

A filled cache (if `cache_kinds` can capture its layers) is converted to one of the same class, whose tensors have room
for a length bucket (`length_buckets`) and whose appends are writes at a position.

The cache stays the caller's object; its layers change class in place. Eagerly they behave like a DynamicCache's, so
prompts, beams and callers are unaffected. While a step is captured, keys and values are whole buckets of 256 to 1024
tokens, the token is written at a position in device memory, and models mask the rest, as for transformers' StaticCache.
Memory is allocated for the whole call if its length is known, else by doubling; each bucket has its graph on the same
memory. It is filled layer by layer, each of which frees its own tensors, and is kept for the next call, whose prompt is
computed there if it fits. A cache gets its own tensors when the call ends, or when another cache of the call needs the
memory. Layers with a sliding window keep the window and two buckets. States of fixed size (linear attention, cross
attention) are copies at fixed addresses; tensors that a step replaces them with are copied back within the graph.
"""

__all__: list[str] = []
