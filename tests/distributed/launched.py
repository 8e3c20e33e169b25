"""LoRA by Trainer and PEFT on a wrapped model, as `torchrun` and `accelerate launch` start it: DIRECTORY, BATCH A RANK.

Rank 0 writes the losses, the number of ranks and the class around the model to DIRECTORY/found.json.
"""

import json
import sys
from pathlib import Path

import torch
import transformers
from peft import LoraConfig, get_peft_model

import vbrt

SIZES = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}


def main(directory: Path, batch: int) -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(vocab_size=128, num_key_value_heads=2, **SIZES)
    off = {"gpu": {"enabled": False}}
    vb = vbrt.wrap(transformers.LlamaForCausalLM(config), "fp4", weights={"min_parameters": 0}, tiers=off)
    torch.manual_seed(1)
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    ids = torch.randint(0, 128, (16, 12)).tolist()
    settings = transformers.TrainingArguments(
        str(directory), max_steps=4, per_device_train_batch_size=batch, report_to=[], save_strategy="no",
        logging_steps=1, disable_tqdm=True, use_cpu=True, learning_rate=1e-2, lr_scheduler_type="constant",
    )  # fmt: skip
    trainer = transformers.Trainer(
        model=get_peft_model(vb.module, lora), args=settings, train_dataset=[{"input_ids": i, "labels": i} for i in ids]
    )
    trainer.train()  # each rank's first forward encodes the weights
    if trainer.is_world_process_zero():
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        found = {"losses": losses, "ranks": settings.world_size, "around": type(trainer.model_wrapped).__name__}
        (directory / "found.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
