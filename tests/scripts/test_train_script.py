"""scripts/train: it learns, says what it does, and names mistakes."""

import json
import math

import pytest
import torch

from scripts import train, train_options
from scripts.lm import Options
from tests.scripts.training import lines, refusal, run

pytestmark = pytest.mark.usefixtures("one_deterministic_thread")


def test_the_loss_falls_and_the_log_says_so(whole):
    losses = [line["loss"] for line in lines(whole) if "loss" in line]
    assert losses[0] > 4 > 3 > losses[-1]
    held_out = [line for line in lines(whole) if "held_out_loss" in line]
    assert held_out[-1]["step"] == 60 and held_out[-1]["held_out_loss"] < 3
    assert held_out[-1]["held_out_perplexity"] == math.exp(held_out[-1]["held_out_loss"])


def test_speed_and_memory_are_logged_beside(whole):
    record = json.loads((whole / "speed.jsonl").read_text().splitlines()[-1])
    assert record["tokens_per_s"] > 0 and record["memory_bytes"]["cpu"] > 1 << 20


def test_output_that_is_no_terminal_has_no_control_codes(whole):
    output = (whole / "output").read_text()
    assert "loss" in output and "tokens/s" in output and "cpu" in output
    assert all(character.isprintable() or character == "\n" for character in output)


def test_a_finished_run_is_left_as_it_is(text, whole, capsys):
    before = {path.name: path.read_bytes() for path in whole.iterdir()}
    run(text, whole)
    assert "nothing left to do" in capsys.readouterr().out
    assert {path.name: path.read_bytes() for path in whole.iterdir()} == before


def test_a_run_may_start_from_the_weights_of_another(text, whole, tmp_path):
    run(text, tmp_path / "run", "--init", str(whole / "model.safetensors"), "--steps", "4")
    first, *_ = (line["loss"] for line in lines(tmp_path / "run") if "loss" in line)
    assert first < 3
    message = refusal(text, tmp_path / "other", "--init", str(whole / "model.safetensors"), "--width", "64")
    assert "token.weight is (256, 32) there, and (256, 64) here" in message


def test_options_of_memory_change_what_it_takes_and_hardly_what_is_learned(text, tmp_path):
    losses = {}
    for name, flags in {
        "plain": (),
        "flash": ("--use-flash-attn",),
        "checkpointing": ("--gradient-checkpointing",),
        "mixed": ("--mixed-precision",),
    }.items():
        run(text, tmp_path / name, "--steps", "12", "--dropout", "0", *flags)
        losses[name] = lines(tmp_path / name)[-1]["held_out_loss"]
    assert losses["checkpointing"] == losses["plain"]
    assert losses["flash"] == pytest.approx(losses["plain"], rel=1e-5)
    assert losses["mixed"] == pytest.approx(losses["plain"], rel=2e-2) and losses["mixed"] != losses["plain"]


@pytest.mark.parametrize(
    ("more", "what"),
    [
        (("--text", "/nowhere/text.txt"), "/nowhere/text.txt: cannot be read"),
        (("--text", "/dev/null"), "/dev/null: 0 bytes of text"),
        (("--batch", "0"), "--batch 0: expected at least 1"),
        (("--checkpoint-every", "0"), "--checkpoint-every 0: expected at least 1"),
        (("--heads", "3"), "--heads 3: expected a divisor of the width, 32"),
        (("--lr", "nan"), "--lr nan"),
        (("--batch", "100000000"), "not enough memory"),
        (("--init", "/nowhere/model.safetensors"), "/nowhere/model.safetensors: no such file"),
    ],
)
def test_mistakes_are_named(text, tmp_path, more, what):
    assert what in refusal(text, tmp_path / "run", *more)


@pytest.mark.parametrize("more", [(), ("--use-fp4",)])
def test_a_loss_that_is_not_finite_names_the_layer_and_leaves_the_checkpoint_before(text, tmp_path, more, monkeypatch):
    out, advance = tmp_path / "run", train.Trainer.advance

    def poisoned(trainer, ids, targets):
        if trainer.step == 6:
            trainer.weights()["blocks.0.mlp_norm.weight"].data[3] = torch.inf
        return advance(trainer, ids, targets)

    monkeypatch.setattr(train.Trainer, "advance", poisoned)
    message = refusal(text, out, *more)
    assert "step 7: the loss is nan" in message and "blocks.0.mlp_norm: its weight holds 1 Inf of 32" in message
    assert train.Checkpoint(out / "checkpoint.safetensors").state["step"] == 4


def test_a_gradient_that_is_not_finite_is_named(text, tmp_path, monkeypatch):
    clip = torch.nn.utils.clip_grad_norm_

    def poisoned(parameters, norm):
        parameters = list(parameters)
        parameters[0].grad[0, 0] = torch.nan
        return clip(parameters, norm)

    monkeypatch.setattr("torch.nn.utils.clip_grad_norm_", poisoned)
    assert "outputs are finite, and the gradients that are not are of" in refusal(text, tmp_path / "run")


def test_memory_that_runs_out_all_the_same_is_an_error_for_people(text, tmp_path, monkeypatch):
    monkeypatch.setattr(train, "build", lambda *args, **kwargs: torch.empty(1 << 50))
    message = refusal(text, tmp_path / "run")
    assert "out of memory" in message and "smaller --batch" in message


def test_one_process_at_a_time_trains_into_a_folder(text, tmp_path):
    with train.claimed(tmp_path / "run"):
        assert "another process is training into it" in refusal(text, tmp_path / "run")


def test_auto_turns_on_what_the_free_memory_asks_for_and_says_why():
    shape = train_options.PRESETS["medium"].shape
    config = train_options.Config(shape, Options(), 8, 1, 1e-3, 0.0, 0, "", None)
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    options, reasons = train_options.auto_options(config, gpu, free=140 << 30)
    assert (options.attention, options.mixed_precision, options.checkpointing) == ("vbrt", True, False)
    options, reasons = train_options.auto_options(config, gpu, free=12 << 30)
    assert options.checkpointing and "10.8 GiB is nine tenths" in reasons[-1]
    options, _ = train_options.auto_options(config, cpu, free=140 << 30)
    assert not options.mixed_precision and not options.checkpointing


def test_auto_goes_on_with_the_options_that_it_chose_first(text, tmp_path, monkeypatch, capsys):
    out = tmp_path / "run"
    run(text, out, "--vb-auto", "--steps", "4")
    assert "--vb-auto turned on --use-flash-attn" in capsys.readouterr().out
    monkeypatch.setattr(train, "free_bytes", lambda device: 900_000)  # would ask for more
    run(text, out, "--vb-auto", "--steps", "4")
    assert "--vb-auto: as the checkpoint has it" in capsys.readouterr().out


def test_batches_follow_from_the_step_and_read_every_byte_once_an_epoch():
    text = torch.arange(0, 1003) % 251
    windows = train.Windows(text.to(torch.uint8), 10, 3, seed=1)
    assert windows.windows == 99
    epoch = torch.cat([windows.batch(step)[0] for step in range(33)])
    assert len({tuple(row) for row in epoch.tolist()}) == 99
    ids, targets = windows.batch(40)
    again = train.Windows(text.to(torch.uint8), 10, 3, seed=1).batch(40)
    assert torch.equal(ids, again[0]) and torch.equal(ids[:, 1:], targets[:, :-1])
    assert not torch.equal(epoch[:3], windows.batch(33)[0])
