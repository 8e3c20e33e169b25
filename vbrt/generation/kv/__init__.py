"""KV cache in the tiers: `vbrt.KVCache`, also by `generate(cache_implementation="vbrt")`.

`update` takes keys and values of new tokens and returns those of all tokens, layer by layer. Tokens are sealed into
pages (unchanged, or in 8 or 4 bits), pages into extents, and extents are at home in the GPU, CPU and SSD tiers under
the weights' budgets, prefetched through a ring.

`update` gathers contiguous keys and values, as DynamicCache's concatenation does, so attention gets the same bits by
construction. That is a device copy per layer and token, as concatenation is; it overlaps with the link's copies.

**Pages.** The last tokens of a layer are in its *tail*, three open pages on the computing device. A page (256 tokens,
keys and values) is sealed when the two pages after it have tokens, so one to two pages stay exact and croppable. Sealed
pages are immutable: they are copied on a separate stream into an *extent*, room for up to 16 MiB of pages of one layer,
and one page of the stack. Pages at home in files are written within the pass. A layer's record is immutable and
replaced last, so an interrupted update has no effect; `align()` then crops all layers to equal lengths. Copies share
extents by reference. Beam search does not rewrite pages: an extent's record maps rows to its sequences. Sliding windows
free the extents that they have passed.

**Room.** Caches share the room that weights at home in the computing tier leave, equally; for an explicit `room`,
weights are evicted. It holds tails, a ring, and a share per layer, so that the link is busy throughout a pass; the rest
is at home in the first tier below with room. When a budget or the number of caches changes, the room is divided anew
and extents move. No policy decides, since the order of use is cyclic and known: a lease per page would take the host
longer than the page's copy, and a learned order would change with every page. Extents are *put*, so weights next to
them count as resident.

**Bitwise equality.** Logits depend on the attention kernel, and cuDNN's is not deterministic: with one query to 811
keys on an H200 (torch 2.11), with other processes running, two of transformers' own caches differ. GPU tests disable
it.

**8 and 4 bits** (`quantized.py`): a low and a step in bf16 for 64 tokens of a channel of keys, and for 64 channels of a
token's values; the error is half a step. One kernel decodes right into the gathered keys and values. Layers that are
not plain or sliding attention stay transformers' own, on the device and in no budget, and are announced.
"""

__all__: list[str] = []
