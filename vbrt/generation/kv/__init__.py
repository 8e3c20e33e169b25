"""KV cache in the tiers: `vbrt.KVCache`, also by `generate(cache_implementation="vbrt")`.

Keys and values of new tokens enter; keys and values of all tokens leave, a layer at a time. Tokens are sealed into
pages (as they are, or in 8 or 4 bits), pages into extents, and extents live in the GPU, CPU and SSD tiers under the
weights' budgets, prefetched through a ring.

What a layer's `update` returns is gathered into contiguous keys and values, as DynamicCache's concatenation makes them,
so attention gets the same bits by construction. That is a copy in GPU memory for each layer and token, as concatenation
is; it hides behind the link.

**Pages.** The last tokens of a layer are in its *tail*, three open pages on the computing device. A page (256 tokens,
keys and values) is sealed when two pages behind it have tokens, so between one and two pages stay exact and may be
cropped. Sealed pages never change: they are written into an *extent*, room for up to 16 MiB of pages of one layer and
one page of the stack, and leave on a stream of their own. Pages bound for files are written within the pass. A layer's
record of what it holds is immutable and replaced as the last act, so what Ctrl-C interrupts has not happened; `align()`
then has all layers hold as many tokens. Copies share extents by reference. Beam search does not rewrite pages: an
extent's record says which of its sequences each row is. Windows free the extents that they have passed.

**Room.** Caches share what weights that live in the computing tier leave, equally; to a `room` that is named, weights
give way. It is for tails, a ring, and a share for each layer, so that the link has work all through a pass; what does
not fit lives in the first tier below with room. When a budget or the number of caches changes, the room is divided anew
and extents move. No policy is asked: the order of use is a circle that is known beforehand. A lease for each page would
take the host longer than the link takes for the page, and a learned order would change with every page. Extents are
*put*, so weights beside them count as resident.

**The same bits as whose?** Logits come from the attention that runs, and cuDNN's is not the same each time: with one
query to 811 keys on an H200 (torch 2.11), beside other processes, two of transformers' own caches differ. The tests on
a GPU turn it off.

**8 and 4 bits** (`quantized.py`): a low and a step in bf16 for 64 tokens of a channel of keys, and for 64 channels of a
token's values; the error is half a step. One kernel decodes right into the gathered keys and values. Layers that are
not plain or sliding attention stay transformers' own, on the device and in no budget, and are announced.
"""

__all__: list[str] = []
