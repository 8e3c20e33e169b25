# %% [markdown]
# # LoRA with Trainer and PEFT
#
# Adapters train while the model's own weights stay in 4-bit pages, within the budget.

# %%
import tempfile

import small
from peft import LoraConfig, get_peft_model
from transformers import Trainer, TrainingArguments

import vbrt

vb = vbrt.wrap(small.language_model(), "fp4")  # tiers={"gpu": {"budget": "6GiB"}} for a large model
vb.materialize()
model = get_peft_model(vb, LoraConfig(r=8, target_modules=["c_attn", "c_fc"], fan_in_fan_out=True))
model.print_trainable_parameters()

# %%
settings = TrainingArguments(
    tempfile.mkdtemp(),
    max_steps=12,
    per_device_train_batch_size=4,
    learning_rate=5e-3,
    logging_steps=3,
    report_to=[],
    save_strategy="no",
    disable_tqdm=True,
)
trainer = Trainer(model=model, args=settings, train_dataset=small.rows(32, 128))
trainer.train()
losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
print("loss", losses)
assert losses[-1] < losses[0]

# %% [markdown]
# The adapter alone is written; it loads onto the plain model as onto a wrapped one.

# %%
folder = tempfile.mkdtemp()
model.save_pretrained(folder)
print(vb.stats())
vb.close()
