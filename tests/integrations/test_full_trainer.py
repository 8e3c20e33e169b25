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


def made(**given):
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=64, **given)
    return transformers.LlamaForCausalLM(config)


def trained(folder, *, steps=4, resume=None, **settings):
    """Losses and the fp32 weights of a run of Trainer, with accumulation, clipping and a schedule."""
    model = made()
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


@pytest.mark.parametrize(("norm", "begins"), [(1e9, True), (1e-3, False)])
def test_trainers_clipping_hands_out_no_gradient_and_lets_updates_begin_before_the_step(tmp_path, norm, begins):
    model = made()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    with vbrt.wrap(model, "full", optimizer=optimizer, training={"ahead": "64MiB"}) as vb:
        arguments = transformers.TrainingArguments(
            str(tmp_path),
            max_steps=6,
            per_device_train_batch_size=2,
            bf16=True,
            use_cpu=not torch.cuda.is_available(),
            max_grad_norm=norm,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
        )
        schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
        transformers.Trainer(vb, arguments, train_dataset=rows(), optimizers=(optimizer, schedule)).train()
        assert not [key for key in vb._attachment.stack.pages if key.endswith("#gradient.float32")]
        assert bool(vb.stats().updates.ahead) is begins


def test_activations_change_nothing_in_a_run_of_trainer(tmp_path):
    losses, weights = trained(tmp_path / "kept", steps=2)
    again, others = trained(tmp_path / "recomputed", steps=2, activations="recompute")
    assert again == losses
    assert all(torch.equal(value, others[name]) for name, value in weights.items())


def test_trainer_smooths_the_labels_of_the_next_tokens_and_saves_tied_embeddings(tmp_path):
    model = made(tie_word_embeddings=True)
    own = {"label_smoothing_factor": 0.1, "bf16": True, "use_cpu": not torch.cuda.is_available(), "report_to": []}
    arguments = transformers.TrainingArguments(str(tmp_path), **own)
    batch = transformers.default_data_collator(rows()[:2])
    with torch.no_grad():
        plain = transformers.Trainer(model=model, args=arguments)
        expected = plain.compute_loss(model.eval(), {key: value.to(model.device) for key, value in batch.items()})
    vb = vbrt.wrap(model, "full", optimizer=torch.optim.AdamW)
    trainer = transformers.Trainer(model=vb, args=arguments, optimizers=(vb.optimizer, None))
    with torch.no_grad(), torch.autocast(vb.device.type, torch.bfloat16):
        found = trainer.compute_loss(vb, {key: value.to(vb.device) for key, value in batch.items()})
    assert found.item() == pytest.approx(expected.item(), rel=1e-2)
    trainer.save_model()
    assert (tmp_path / "model.safetensors").exists()
