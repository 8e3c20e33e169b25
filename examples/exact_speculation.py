# %% [markdown]
# # Exact speculation
#
# The 4-bit planes of `exact` draft tokens, one pass over the exact weights verifies them. The tokens are those of
# plain decoding, bit for bit. It pays most where passes wait for the fine planes, as under a small budget on a GPU;
# seconds on a small model in host memory say little of that.

# %%
import time

import small
import torch

import vbrt

vb = vbrt.wrap(small.language_model(), "exact")  # tiers={"gpu": {"budget": "8GiB"}} for a large model
prompt = small.encode(small.PROMPT).to(vb.device)
how = {"max_new_tokens": 64, "pad_token_id": 0, "attention_mask": torch.ones_like(prompt)}


def timed(**options):
    """Return the tokens and the seconds."""
    start = time.perf_counter()
    return vb.generate(prompt, **how, **options), time.perf_counter() - start


# %%
timed(do_sample=False)  # encodes the weights and learns the order of the pages
plain, plain_s = timed(do_sample=False)
drafted, drafted_s = timed(do_sample=False, speculate="auto")
assert torch.equal(plain, drafted)
print(small.decode(drafted))
print(f"\nplain {plain_s:.2f} s, drafted {drafted_s:.2f} s")
counted = vb.stats().speculation
print(f"{counted.acceptance:.0%} of the drafts accepted, {counted.tokens_per_round:.1f} tokens a pass over the weights")

# %% [markdown]
# Sampled tokens are the same with drafts and without, too, by a seed:

# %%
drawn, _ = timed(do_sample=True, seed=7)
again, _ = timed(do_sample=True, seed=7, speculate=4)
assert torch.equal(drawn, again)
vb.close()
