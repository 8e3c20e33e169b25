"""Self-speculative decoding: coarse planes of `exact` weights draft, one pass over the exact weights verifies.

The result is plain decoding's tokens (or, by choice, tokens of the same distribution), with acceptance counters.
`draft_length` chooses the number of drafts by measured acceptance and times.

The coarse planes are at home on the computing device if they fit besides four of the largest pages, so a draft moves no
bytes, and its steps are captured and fused like a 4-bit model's. A round (`draft_loop.py`):

- `draft_length.py` chooses k among eight lengths, since equivalence is checked per number of rows; the best of these is
  within 2 % of the optimum. Near the end of a call, or of the cache's bucket, k is the rest. The first two rounds of a
  process have 16 and 8: two points for a linear time model. If weights are not streamed, captured steps without drafts
  are timed, too, and used if they are faster.
- k passes in phase "draft", coarse, on the call's own KV cache.
- The cache is rewound. `verification.py` computes the last token and the k drafts exactly, which writes their exact
  keys.
- `sequences.py` takes token after token as plain decoding does: processors, criteria and streamers are called once for
  each, in order. Look-ahead calls stateless processors of transformers only.

**Bitwise equality with plain decoding.** Verification "token by token" (`rowwise_pass.py`) is one pass in which every
reduction runs per token. One launch for all tokens replaces these if it gives the same bits (`bitwise_equivalence.py`):
2^18 numbers of each form are compared before it is trusted. On an H200 cuBLAS sums a product of 2 to 33 rows like that
of one; `bmm`, torch's means and cuDNN's attention differ with the batch. If plain decoding replays steps that attend to
buckets (`compute.exactness = "rounded"`), rows attend likewise: to the whole bucket of the cache, masked, so drafts,
rows and plain steps share one memory, and a round copies nothing. For each batch size, the first four rows of the first
two rounds are also computed by steps as captured, and logits, keys and values compared; if a bit differs, this batch
size is decoded plainly. The same holds if such a step differs from an eager one by more than rounding, which is checked
once per batch size and bucket, and again past sliding windows. A model that masks no window, but whose cache drops the
tokens before it (Moshi), has no drafts in calls longer than the window: a pass of several tokens would see more than
steps do. This is detected on one token without a cache, by the masks that the model requests from transformers. A round
ends with its bucket. Eager attention would dominate the cost: cuDNN plans each new length on the host, and each row has
a different one; "distribution" avoids cuDNN's attention. 17 rows of the 8B shape take the 124 ms of the link, token by
token or in one pass: launches take the host less than that, so a CUDA graph of a verification would save no time
(`scripts/speculate.py` measures rounds).

**Elsewhere** (exact steps, no graphs, a cache in the tiers) rows attend to the keys up to their own, and the first four
are compared with eager steps.

**Unsupported models.** A row-wise pass needs a token dimension in every reduction, and attention through transformers'
interface. Routed experts multiply [tokens, channels], and Bloom has its own attention. A pass per row would read all
weights per row, like plain decoding. So with "tokens" such models fall back permanently, at any batch size, and
`stats().fallbacks` says why. "distribution" verifies in one plain pass and needs neither.

**Sampling** draws noise by seed, row and position, the same for drafts and verification: a draft is accepted if it
equals the drawn token. Rows of a batch advance together; further accepted tokens of a row are its drafts in the next
round.

**Rejected.** Rejection sampling (Leviathan) accepts as many, 13.0 of 16 at T = 1, and gives other tokens than plain
sampling. A cache for drafts alone halves neither time nor memory, and doubles the misses. A tree: a second sibling is
right for 6 of 7 wrong drafts. As a leaf of the chain it gives one token more in a round that breaks off: 6/7 (1 - a^k)
on (1 - a^(k+1)) / (1 - a), which is 4, 8 and 17 % at a = .95, .9 and .8 with 24, 16 and 10 drafts. More take siblings
that are drafted on from, so drafts of several paths, each with its own keys. Either way rows must see their own path
only, and keys of the path that is taken must move to its place; to keep the bits of "tokens", a sibling's key must be
read at that place from the start, since attention sums in the order of places. At the acceptances measured that is not
worth it.
"""

__all__: list[str] = []
