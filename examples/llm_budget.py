# %% [markdown]
# # A language model under a memory budget
#
# The same tokens as the dense model, with room for half of the weights in memory and the rest in files.

# %%
import tempfile

import small
import torch

import vbrt

model = small.language_model()  # or AutoModelForCausalLM.from_pretrained("./Llama-3.1-8B")
prompt = small.encode(small.PROMPT)
how = {"max_new_tokens": 60, "do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones_like(prompt)}
expected = model.generate(prompt, **how)
print(small.decode(expected))

# %% [markdown]
# What would be swapped, what not and why, before anything moves:

# %%
plan = vbrt.make_plan(model, vbrt.load_config("exact"))
print(plan)

# %% [markdown]
# `exact` holds every weight bit for bit: a 4-bit plane, and a fine one that restores it. On a machine with a GPU, give
# `tiers={"gpu": {"budget": "8GiB"}}`; here host memory computes, and files hold what it has no room for.

# %%
tiers = {
    "gpu": {"enabled": False},
    "cpu": {"budget": plan.page_bytes // 2},
    "ssd": {"enabled": True, "path": tempfile.mkdtemp()},
}
vb = vbrt.wrap(model, "exact", tiers=tiers)
tokens = vb.generate(prompt, **how)
assert torch.equal(tokens, expected)
print(vb.stats())

# %% [markdown]
# More room while it runs, and the dense model back at the end:

# %%
vb.set_budget("cpu", 2 * plan.page_bytes)
assert torch.equal(vb.generate(prompt, **how), expected)
model = vb.unwrap()
assert torch.equal(model.generate(prompt, **how), expected)
print("the same tokens before, within the budget, and after")
