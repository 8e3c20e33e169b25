"""scripts/train --experts: a model with routed experts learns, goes on after a kill, and transformers can read it."""

import json
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForCausalLM, Qwen3MoeForCausalLM

import vbrt
from scripts import lm_experts, train
from scripts.lm import Options, Shape, build, read_text
from tests.scripts.training import assert_same_run, lines, refusal, run

pytestmark = pytest.mark.usefixtures("one_deterministic_thread")

EXPERTS = ("--experts", "8", "--active", "2", "--use-flash-attn")
SHAPE = Shape(layers=2, width=32, heads=2, context=32, experts=8, active=2, inner=16)


@pytest.fixture(scope="module")
def routed(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with experts that nobody disturbed, on one thread as those beside it."""
    out, threads = tmp_path_factory.mktemp("routed") / "run", torch.get_num_threads()
    torch.set_num_threads(1)
    run(text, out, *EXPERTS)
    torch.set_num_threads(threads)
    return out


def test_the_loss_falls_and_the_folder_is_a_checkpoint_of_transformers(text, routed):
    losses = [line["loss"] for line in lines(routed) if "loss" in line]
    assert losses[0] > 4 > 3 > losses[-1]
    model = AutoModelForCausalLM.from_pretrained(routed).eval()
    assert type(model) is Qwen3MoeForCausalLM and model.model.layers[0].mlp.experts.gate_up_proj.shape == (8, 16, 32)
    held_out = read_text(text, 32).held_out
    rows = held_out[:-1].unfold(0, 33, 32).long()  # windows as loss_of cuts them
    with torch.no_grad():
        loss = F.cross_entropy(model(rows[:, :-1]).logits.flatten(0, 1), rows[:, 1:].flatten())
    assert loss.item() == pytest.approx(lines(routed)[-1]["held_out_loss"], rel=1e-3)


def test_an_interrupted_run_ends_with_the_same_bits_and_the_same_log(text, routed, tmp_path, monkeypatch):
    out, advance = tmp_path / "run", train.Trainer.advance

    def interrupted(trainer: train.Trainer, ids: Tensor, targets: Tensor) -> dict[str, float]:
        if trainer.step == 22:  # two steps after a checkpoint
            raise KeyboardInterrupt
        return advance(trainer, ids, targets)

    monkeypatch.setattr(train.Trainer, "advance", interrupted)
    with pytest.raises(SystemExit, match="130"):
        run(text, out, *EXPERTS)
    monkeypatch.undo()
    assert train.Checkpoint(out / "checkpoint.safetensors").state["step"] == 20
    run(text, out, *EXPERTS)
    assert_same_run(out, routed)


def test_a_run_goes_on_with_no_other_experts(text, routed):
    assert "experts = 8, and now it is 4" in refusal(text, routed, "--experts", "4", "--use-flash-attn")
    assert "inner = 8, and now it is 16" in refusal(text, routed, *EXPERTS, "--expert-width", "16")
    assert "balance = 0.01, and now it is 0.0" in refusal(text, routed, *EXPERTS, "--balance", "0")


def test_a_checkpoint_from_before_there_were_experts_is_gone_on_from(text, tmp_path, capsys):
    out = tmp_path / "run"
    run(text, out, "--steps", "4")
    state = train.Checkpoint(out / "checkpoint.safetensors").read()
    assert state["config"].pop("balance") == 0.0
    for name in ("experts", "active", "inner"):
        assert state["config"]["shape"].pop(name) == 0
    train.write_checkpoint(out / "checkpoint.safetensors", state)
    run(text, out, "--steps", "4")
    assert "nothing left to do" in capsys.readouterr().out


def test_balance_spreads_bytes_over_experts(text, tmp_path):
    shares = {}
    for balance in ("0", "1"):
        out = tmp_path / balance
        run(text, out, *EXPERTS, "--steps", "30", "--balance", balance)
        shares[balance] = busiest_share(Qwen3MoeForCausalLM.from_pretrained(out), text)
    assert shares["1"] < 0.8 * shares["0"], shares


def busiest_share(model: Qwen3MoeForCausalLM, text: Path) -> float:
    """The share of all selections that go to the expert which is chosen most."""
    ids = read_text(text, 32).held_out[:256].view(8, 32).long()
    with torch.no_grad():
        logits = model(ids, output_router_logits=True).router_logits[0]
    counts = torch.bincount(logits.topk(2).indices.flatten())
    return (counts.max() / counts.sum()).item()


def test_balance_is_in_the_loss_of_training_alone():
    torch.manual_seed(0)
    free = build(SHAPE, Options("vbrt"), torch.device("cpu"))
    balanced = build(SHAPE, Options("vbrt"), torch.device("cpu"), balance=0.1)
    balanced.load_state_dict(free.state_dict())
    ids = torch.randint(256, (2, 33))
    losses = [model(ids[:, :-1], ids[:, 1:]).item() for model in (free, balanced)]
    assert losses[1] - losses[0] >= 0.1 * SHAPE.active * 0.999
    assert math.isclose(*(model.eval()(ids[:, :-1], ids[:, 1:]).item() for model in (free, balanced)))


def test_mixed_precision_reaches_the_experts(monkeypatch):
    seen = []
    plain = lm_experts.grouped_mm_experts_forward
    monkeypatch.setattr(
        lm_experts, "grouped_mm_experts_forward", lambda m, x, *rest: seen.append((x, m)) or plain(m, x, *rest)
    )
    model = build(SHAPE, Options("vbrt", mixed_precision=True), torch.device("cpu"))
    ids = torch.randint(256, (2, 33))
    with Options(mixed_precision=True).autocast(torch.device("cpu")):
        model(ids[:, :-1], ids[:, 1:]).backward()
    assert {(x.dtype, m.gate_up_proj.dtype, m.down_proj.dtype) for x, m in seen} == {(torch.bfloat16,) * 3}
    gradient = model.model.layers[0].mlp.experts.down_proj.grad
    assert gradient.dtype == torch.float32 and gradient.abs().sum() > 0


def test_attention_and_checkpointing_change_nothing_that_is_learned():
    losses, ids = [], torch.randint(256, (2, 33))
    for options in (Options("vbrt"), Options("plain"), Options("vbrt", checkpointing=True)):
        torch.manual_seed(0)
        model = build(SHAPE, options, torch.device("cpu"), balance=0.01)
        loss = model(ids[:, :-1], ids[:, 1:])
        loss.backward()
        losses.append((loss.item(), model.model.layers[0].mlp.gate.weight.grad.norm().item()))
    assert losses[2] == losses[0] and losses[1] == pytest.approx(losses[0], rel=1e-4)


@pytest.mark.parametrize(
    ("more", "what"),
    [
        (("--active", "2"), "--active 2: of which experts? Give --experts too"),
        (("--expert-width", "2"), "--expert-width 2: of which experts?"),
        (("--experts", "0"), "--experts 0 --active 0"),
        (("--experts", "4", "--active", "5"), "--experts 4 --active 5"),
        (("--experts", "4", "--balance", "-1"), "--balance -1.0: expected"),
        (("--experts", "4", "--balance", "nan"), "--balance nan: expected"),
    ],
)
def test_mistakes_are_named(text, tmp_path, more, what):
    assert what in refusal(text, tmp_path / "run", *more)


def test_the_config_beside_the_weights_is_that_of_the_run(routed):
    config = json.loads((routed / "config.json").read_text())
    assert config["architectures"] == ["Qwen3MoeForCausalLM"] and config["vocab_size"] == 256
    assert (config["num_experts_per_tok"], config["router_aux_loss_coef"]) == (2, 0.01)


def test_training_in_four_bits_goes_on_with_the_scales_it_had(text, tmp_path, monkeypatch):
    whole, out, advance = tmp_path / "whole", tmp_path / "run", train.Trainer.advance
    run(text, whole, *EXPERTS, "--use-fp4", "--steps", "12")

    def interrupted(trainer: train.Trainer, ids: Tensor, targets: Tensor) -> dict[str, float]:
        if trainer.step == 6:
            raise KeyboardInterrupt
        return advance(trainer, ids, targets)

    monkeypatch.setattr(train.Trainer, "advance", interrupted)
    with pytest.raises(SystemExit, match="130"):
        run(text, out, *EXPERTS, "--use-fp4", "--steps", "12")
    monkeypatch.undo()
    run(text, out, *EXPERTS, "--use-fp4", "--steps", "12")
    assert_same_run(out, whole)
    planes = vbrt.load(out / "planes", lm_experts.ExpertsLanguageModel(Shape(1, 32, 2, 32, 256, True, 8, 2, 8)).eval())
    assert [swap.experts for swap in planes.plan.swaps if swap.experts] == [8]
