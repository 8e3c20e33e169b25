"""scripts/train: a killed run ends with the bits and the log of one that was not."""

import itertools
import random
import signal
import time

import pytest
import torch

import vbrt
from scripts import train
from scripts.lm import Options, Shape
from tests.scripts.training import assert_same_run, finish, lines, start, wait_for

pytestmark = pytest.mark.usefixtures("one_deterministic_thread")


def test_runs_killed_at_any_moment_end_with_the_same_bits_and_the_same_log(text, whole, tmp_path):
    out, dice, torn = tmp_path / "run", random.Random(0), 0
    checkpoint = out / "checkpoint.safetensors"

    def half_written() -> bool:
        return any(out.glob("checkpoint.safetensors.*.tmp"))

    for turn in itertools.count():
        process, before = start(text, out), checkpoint.stat().st_mtime_ns if checkpoint.exists() else None
        if turn == 0:  # before the first checkpoint, the log begun
            wait_for(process, (out / "log.jsonl").exists)
        elif turn == 1:  # while one is written
            wait_for(process, half_written)
        else:
            wait_for(process, lambda: checkpoint.exists() and checkpoint.stat().st_mtime_ns != before)  # noqa: B023
            time.sleep(dice.uniform(0, 0.1))
        process.kill()
        process.join()
        torn += half_written()
        if turn == 2 or process.exitcode == 0:
            break
    assert torn, "no kill came while a checkpoint was written"
    finish(text, out)
    assert_same_run(out, whole)
    assert not half_written()


@pytest.mark.exhaustive
def test_training_in_four_bits_goes_on_with_the_scales_it_had(text, tmp_path):
    """The scales are from the first step: fitted anew after a restart they would be others."""
    whole, out = tmp_path / "whole", tmp_path / "run"
    finish(text, whole, "--use-fp4")
    process = start(text, out, "--use-fp4")
    wait_for(process, (out / "checkpoint.safetensors").exists)
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    finish(text, out, "--use-fp4")
    assert_same_run(out, whole)
    losses = [line["loss"] for line in lines(out) if "loss" in line]
    assert losses[0] > 4 > 3.2 > losses[-1]
    with torch.device("meta"):
        model = train.build(Shape(1, 32, train.PRESETS["tiny"].shape.heads, 32), Options(), torch.device("meta"))
    vb = vbrt.load(out / "planes", model.eval())
    loss = train.loss_of(vb, train.read_text(text, 32).held_out, 32, at_most=train.HELD_OUT_WINDOWS)
    assert loss == pytest.approx(lines(out)[-1]["held_out_loss"], rel=1e-3)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_training_from_the_tiers_goes_on_with_the_same_bits(text, tmp_path, device):
    whole, out = tmp_path / "whole", tmp_path / "run"
    options = ("--vb-full", "--steps", "12", "--device", device, *(("--mixed-precision",) * (device == "cuda")))
    finish(text, whole, *options)
    process = start(text, out, *options)
    wait_for(process, (out / "checkpoint" / "vbrt-checkpoint.json").exists)
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    finish(text, out, *options, "--gradient-checkpointing")
    for name in ("log.jsonl", "model.safetensors"):
        assert (out / name).read_bytes() == (whole / name).read_bytes(), name


@pytest.mark.gpu
@pytest.mark.parametrize(
    "more",
    [("--use-flash-attn", "--mixed-precision"), ("--gradient-checkpointing",), ("--use-fp4", "--mixed-precision")],
    ids=["flash", "checkpointing", "fp4"],
)
def test_a_killed_run_ends_with_the_same_bits_on_a_gpu(text, tmp_path, more):
    more = ("--device", "cuda", "--width", "64", *more)
    finish(text, tmp_path / "whole", *more)
    process = start(text, tmp_path / "run", *more)
    wait_for(process, lambda: len(list((tmp_path / "run").glob("checkpoint*"))) == 2)  # one, and the next half written
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    finish(text, tmp_path / "run", *more)
    assert_same_run(tmp_path / "run", tmp_path / "whole")
