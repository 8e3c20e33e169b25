"""Speculative decoding: a drafter proposes tokens, one pass over the weights verifies them.

The result is plain decoding's tokens (or, by choice, tokens of the same distribution), with acceptance counters. A
round (`draft_loop.py`):

- `draft_length.py` chooses a drafter and a number of drafts, or a plain step, by each drafter's record
  (`drafter_record.py`), such that 64 tokens take at most 3 % longer than plain decoding. k is one of seven numbers,
  since recordings and equivalence are per number of rows.
- The drafter proposes up to k tokens.
- `verification.py` computes the last token and the drafts as consecutive rows; the cache then holds all of them.
- `sequences.py` takes token after token as plain decoding does: processors, criteria and streamers are called once for
  each, in order. Look-ahead calls stateless processors of transformers only.
- The cache is rewound to the accepted tokens.

| drafter | drafts | costs per token |
| --- | --- | --- |
| "ngrams" (`drafters.py`) | what followed where the text ended alike | some microseconds of the host |
| "assistant" (`assistant.py`) | a small model's tokens, translated if its tokenizer differs | a pass of it |
| "heads" (`heads.py`, `mtp_head.py`, `load_head.py`) | the checkpoint's multi-token head | one layer |
| "coarse" (`coarse_drafts.py`) | the 4-bit planes of `exact` weights, on the call's cache | a 4-bit step |

**Rows with plain decoding's bits.** Where `generate` captures steps, the captured step's own calls compute the rows,
each call for row after row (`generation/fusion/step_rows.py`): same kernels, same shapes, so the same bits, for 4-bit
weights and routed experts too. A weight is leased once for all rows. On the link that is the cost of one step; on the
GPU it is k + 1 steps, so it pays where weights stream. The first passes run from Python, later ones as a CUDA graph:
of 9 rows of the 8B shape in streamed `fp4`, 105 and 65 ms on an H200, where a step takes 57; its recording takes 700.

Where steps run eagerly (lossless weights that stream, no graphs, a cache in the tiers), `rowwise_pass.py` computes
them in one pass in which every reduction runs per token. One launch for all tokens replaces these if it gives the
same bits (`bitwise_equivalence.py`): 2^18 numbers of each form are compared before it is trusted. On an H200 cuBLAS
sums a product of 2 to 33 rows like that of one; `bmm`, torch's means and cuDNN's attention differ with the batch. The
first two rounds of a batch size are compared with plain steps, whose tokens are the ones taken. Such a pass needs a
token dimension in every reduction, and attention through transformers' interface: routed experts multiply [tokens,
channels], and Bloom has its own attention, so those fall back permanently, and `stats().fallbacks` says why. A model
that masks no window, but whose cache drops the tokens before it (Moshi), has no drafts in calls longer than the
window: a pass of several tokens would see more than steps do. This is detected on one token without a cache, by the
masks that the model requests.

"distribution" verifies in one plain pass, and needs none of this.

**Resident weights.** A row costs what a step costs, so "auto" stays away where captured steps read no streamed
weight.

**Sampling** draws noise by seed, row and position, the same for drafts and verification: a draft is accepted if it
equals the drawn token. Rows of a batch advance together; further accepted tokens of a row are its drafts in the next
round.

**Rejected.** Rejection sampling (Leviathan) accepts as many, 13.0 of 16 at T = 1, and gives other tokens than plain
sampling. A cache for coarse drafts alone halves neither time nor memory, and doubles the misses. A tree: a second
sibling is right for 6 of 7 wrong drafts. As a leaf of the chain it gives one token more in a round that breaks off:
6/7 (1 - a^k) on (1 - a^(k+1)) / (1 - a), which is 4, 8 and 17 % at a = .95, .9 and .8 with 24, 16 and 10 drafts. More
take siblings that are drafted on from, so drafts of several paths, each with its own keys. Either way rows must see
their own path only, and keys of the path that is taken must move to its place; to keep the bits of "tokens", a
sibling's key must be read at that place from the start, since attention sums in the order of places. At the
acceptances measured that is not worth it.
"""

__all__: list[str] = []
