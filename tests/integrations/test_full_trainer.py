"""transformers' Trainer with a model that trains from the tiers, and the user's optimizer and schedule."""

import pytest
import torch

import vbrt

transformers = pytest.importorskip("transformers")
pytest.importorskip("accelerate")

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(autouse=True)
def other_tests_get_an_accelerator_of_their_own():
    from accelerate.state import AcceleratorState

    yield
    AcceleratorState._reset_state(reset_partial_state=True)  # it keeps bf16 for the process


def rows():
    drawn = torch.randint(0, 64, (32, 12), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row} for row in drawn]


def trained(folder, *, steps=4, resume=None, **settings):
    """Losses and the fp32 weights of a run of Trainer, with accumulation, clipping and a schedule."""
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=64))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    with vbrt.wrap(model, "full", optimizer=optimizer, training=settings) as vb:
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        arguments = transformers.TrainingArguments(
            str(folder),
            max_steps=steps,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            bf16=True,
            use_cpu=not torch.cuda.is_available(),
            save_steps=2,
            logging_steps=1,
            report_to=[],
            disable_tqdm=True,
        )
        trainer = transformers.Trainer(model=vb, args=arguments, train_dataset=rows(), optimizers=(optimizer, schedule))
        trainer.train(resume_from_checkpoint=resume)
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        return losses, {name: value.clone() for name, value in vb.state_dict().items()}


def test_trainer_goes_on_from_its_checkpoint_with_the_same_bits(tmp_path):
    losses, weights = trained(tmp_path / "whole")
    again, others = trained(tmp_path / "other", resume=str(tmp_path / "whole" / "checkpoint-2"))
    assert again == losses
    assert all(torch.equal(value, others[name]) for name, value in weights.items())


def test_activations_change_nothing_in_a_run_of_trainer(tmp_path):
    losses, weights = trained(tmp_path / "kept", steps=2)
    again, others = trained(tmp_path / "recomputed", steps=2, activations="recompute")
    assert again == losses
    assert all(torch.equal(value, others[name]) for name, value in weights.items())
