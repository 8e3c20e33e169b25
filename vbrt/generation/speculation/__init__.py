"""Self-speculative decoding: coarse planes of `exact` weights draft, one pass over the exact weights verifies.

A prompt and generate's arguments enter; the tokens of plain decoding leave (or, by choice, tokens of the same
distribution), and counters of acceptance. `draft_length` chooses how many tokens to draft by measured acceptance and
times.

The coarse planes live on the computing device where they fit beside four of the largest pages, so a draft moves
nothing, and its steps are captured and fused as a 4-bit model's. A round (`draft_loop.py`):

- `draft_length.py` takes k from eight numbers, since each number of rows has to agree by itself; the best of these is
  within 2 % of the best of all. Near the end of a call, or of the cache's bucket, it is what is left. The first two
  rounds of a process have 16 and 8, two lengths for a line of times. Where weights wait for no link, captured steps
  without drafts are timed, too, and taken where they are faster.
- k passes in phase "draft", coarse, on the call's own KV cache.
- The cache is rewound. `verification.py` computes the last token and the k drafts exactly, which writes their exact
  keys.
- `sequences.py` takes token after token as plain decoding does: processors, criteria and streamers are called once for
  each, in order. What looks ahead asks only processors of transformers that keep nothing.

**The same bits as plain decoding.** Verification "token by token" (`rowwise_pass.py`) is one pass in which whatever
sums runs for each token alone. Where one launch for all tokens gives the same bits, it takes the place of these
(`bitwise_equivalence.py`): 2^18 numbers of each form are compared before it is trusted. On an H200 cuBLAS sums a
product of 2 to 33 rows as it sums that of one; a batch of products (`bmm`) does not, nor do torch's means, nor cuDNN's
attention of a batch. Where plain decoding replays captured steps, rows attend as these do: to the whole bucket of the
cache, masked, so drafts, rows and plain steps share one memory, and a round copies nothing. The first four rows of the
first two rounds of a batch size are computed by steps as they would be captured, too, logits, keys and values compared;
where a bit differs, this batch size is decoded plainly. So it is where such a step differs from an eager one by more
than rounding, which is looked at once for each batch size and bucket, and again behind windows. A model that masks no
window, but has its cache forget what that has passed (Moshi), is not drafted for where the call is longer than the
window: a pass of several tokens would see more than steps do. One token without a cache tells, by the masks that the
model asks transformers for. A round ends with its bucket. Attention of eager steps would cost more than all else: cuDNN
plans each new length on the host, and each row has one of its own; "distribution" leaves cuDNN's attention out. 17 rows
of the 8B shape take the 124 ms of the link, token by token as in one pass: the host needs less than that for its
launches, so a CUDA graph of a verification would save time that the link takes anyway (`scripts/speculate.py` measures
rounds).

**Elsewhere** (no graphs, a cache in the tiers) plain decoding is eager: rows attend to the keys up to their own,
and the first four are compared with eager steps.

**Without drafts.** A row-wise pass needs a dimension of tokens in whatever sums, and attention through transformers'
interface. Routed experts multiply [tokens, channels], and Bloom's attention is its own. A pass for each row would read
all weights for each, as plain decoding does. So with "tokens" the first attempt gives up for good, at any batch size,
and `stats().fallbacks` says why. "distribution" verifies in one plain pass and needs neither.

**Sampling** draws with noise by seed, row and position, common to drafts and verification: a draft is confirmed if it
is the token that is drawn. Rows of a batch advance together; what a row has right beyond that is its draft in the next
round.

**Roads not taken.** Rejection sampling (Leviathan) accepts as many, 13.0 of 16 at T = 1, and gives other tokens than
plain sampling. A cache for drafts alone halves neither time nor memory, and doubles the misses. A tree: a second
sibling is right for 6 of 7 wrong drafts. As a leaf of the chain it gives one token more in a round that breaks off: 6/7
(1 - a^k) on (1 - a^(k+1)) / (1 - a), which is 4, 8 and 17 % at a = .95, .9 and .8 with 24, 16 and 10 drafts. More take
siblings that are drafted on from, so drafts of several paths, each with its own keys. Either way rows must see their
own path only, and keys of the path that is taken must move to its place; to keep the bits of "tokens", a sibling's key
must be read at that place from the start, since attention sums in the order of places. At the acceptances measured that
is not worth it.
"""

__all__: list[str] = []
