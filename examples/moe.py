# %% [markdown]
# # A mixture of experts
#
# Nearly all weights of such a model are its routed experts, of which a token reads a few. Each expert is a page by
# itself: those that tokens go to often stay, the others wait in host memory or, as here, in files.

# %%
import tempfile

import small
import torch
from transformers import AutoModelForCausalLM

import vbrt

model = AutoModelForCausalLM.from_pretrained(small.EXPERTS, dtype=torch.bfloat16)  # 4 layers of 48 experts, 4 a token
prompt = small.encode(small.PROMPT)
how = {"max_new_tokens": 40, "do_sample": False, "pad_token_id": 0, "attention_mask": torch.ones_like(prompt)}
expected = model.generate(prompt, **how)
plan = vbrt.make_plan(model, vbrt.load_config("exact"))

# %%
tiers = {
    "gpu": {"enabled": False},
    "cpu": {"budget": plan.page_bytes // 2},
    "ssd": {"enabled": True, "path": tempfile.mkdtemp()},
}
vb = vbrt.wrap(model, "exact", tiers=tiers)
tokens = vb.generate(prompt, **how)
assert torch.equal(tokens, expected)
print(small.decode(tokens))
print(vb.stats())

# %% [markdown]
# One layer, expert by expert; and what another policy would have made of the same routing, without running the model:

# %%
layer = next(name for name, row in vb.stats().layers.items() if row.experts)
print(*str(vb.stats(experts=True).experts(layer)).splitlines()[:12], "...", sep="\n")
routing = f"{tempfile.mkdtemp()}/code.routing"
with vb.record_routing(routing):
    vb.generate(prompt, **how)
for policy in ("experts", "lru"):
    counts = vbrt.simulate(policy, routing, plan.page_bytes // 4)
    print(f"{policy}: {counts.hit_rate:.0%} of the leases hit with room for a quarter of the pages")
vb.close()
