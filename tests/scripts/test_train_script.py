"""scripts/train: it learns, and a killed run ends with the bits and the log of one that was not."""

import contextlib
import errno
import itertools
import json
import math
import os
import random
import re
import signal
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import vbrt
from scripts import train
from vbrt.saves.manifest import content_digest
from vbrt.saves.tensorfile import TensorFile

ROOT = Path(__file__).resolve().parents[2]
SMALL = (
    "--layers",
    "1",
    "--width",
    "32",
    "--context",
    "32",
    "--batch",
    "4",
    "--steps",
    "60",
    "--dropout",
    "0.1",
    "--log-every",
    "7",
    "--checkpoint-every",
    "4",
    "--device",
    "cpu",
)
TEXT = b"".join(b"%d squared is %d.\n" % (n, n * n) for n in range(2000))


@pytest.fixture(autouse=True)
def as_before():
    """What the script sets for its own process; and one thread, as the processes here have."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("text") / "squares.txt"
    path.write_bytes(TEXT)
    return path


def command(text: Path, out: Path, *more: str) -> list[str]:
    return [sys.executable, "scripts/train.py", "tiny", "--text", str(text), "--out", str(out), *SMALL, *more]


def start(text: Path, out: Path, *more: str) -> subprocess.Popen:
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.Popen(command(text, out, *more), cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True)


def finish(text: Path, out: Path, *more: str) -> str:
    process = start(text, out, *more)
    output, _ = process.communicate(timeout=60)
    assert process.returncode == 0, output
    return output


@pytest.fixture(scope="module")
def whole(text, tmp_path_factory) -> Path:
    """A run that nobody disturbed; its output is in `output`."""
    out = tmp_path_factory.mktemp("whole") / "run"
    output = finish(text, out)
    (out / "output").write_text(output)
    return out


def run(text: Path, out: Path, *more: str) -> None:
    train.main([*command(text, out, *more)[2:]])


def refusal(text: Path, out: Path, *more: str) -> str:
    with pytest.raises(SystemExit) as caught:
        run(text, out, *more)
    assert str(caught.value).startswith("error: ")
    return str(caught.value)


def lines(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]


def assert_same_run(out: Path, whole: Path) -> None:
    for name in ("log.jsonl", "model.safetensors", "checkpoint.safetensors"):
        assert (out / name).read_bytes() == (whole / name).read_bytes(), name


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


def wait_for(process: subprocess.Popen, there) -> None:
    deadline = time.monotonic() + 60
    while not there() and process.poll() is None:
        assert time.monotonic() < deadline
        time.sleep(0.0001)


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
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
        process.communicate()
        torn += half_written()
        if turn == 3 or process.returncode == 0:
            break
    assert torn, "no kill came while a checkpoint was written"
    finish(text, out)
    assert_same_run(out, whole)
    assert not half_written()


def test_training_in_four_bits_goes_on_with_the_scales_it_had(text, tmp_path):
    """The scales are from the first step: fitted anew after a restart they would be others."""
    whole, out = tmp_path / "whole", tmp_path / "run"
    finish(text, whole, "--use-fp4")
    process = start(text, out, "--use-fp4")
    wait_for(process, (out / "checkpoint.safetensors").exists)
    process.kill()
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    finish(text, out, "--use-fp4")
    assert_same_run(out, whole)
    losses = [line["loss"] for line in lines(out) if "loss" in line]
    assert losses[0] > 4 > 3.2 > losses[-1]
    with torch.device("meta"):
        model = train.build(
            train.Shape(1, 32, train.PRESETS["tiny"].shape.heads, 32), train.Options(), torch.device("meta")
        )
    vb = vbrt.load(out / "planes", model.eval())
    loss = train.loss_of(vb, train.read_text(text, 32).held_out, 32, at_most=train.HELD_OUT_WINDOWS)
    assert loss == pytest.approx(lines(out)[-1]["held_out_loss"], rel=1e-3)


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
    process.communicate()
    assert process.returncode == -signal.SIGKILL
    finish(text, tmp_path / "run", *more)
    assert_same_run(tmp_path / "run", tmp_path / "whole")


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
        (("--width", "64"), "width = 32, and now it is 64"),
        (("--steps", "70"), "steps = 60, and now it is 70"),
        (("--use-flash-attn",), "attention = plain, and now it is vbrt"),
    ],
)
def test_a_checkpoint_of_something_else_is_refused_by_name(text, whole, more, what):
    message = refusal(text, whole, *more)
    assert what in message and str(whole / "checkpoint.safetensors") in message


def test_another_text_is_refused(whole, tmp_path):
    other = tmp_path / "other.txt"
    other.write_bytes(TEXT[::-1])
    assert "text_digest" in refusal(other, whole)


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


def test_a_damaged_checkpoint_is_named_and_not_gone_on_from(text, tmp_path):
    out = tmp_path / "run"
    run(text, out, "--steps", "4")
    path = out / "checkpoint.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-100])
    assert f"{path}: damaged, truncated" in refusal(text, out, "--steps", "4")
    path.write_bytes(whole[:-5] + bytes([whole[-5] ^ 1]) + whole[-4:])
    assert f"{path}: damaged" in refusal(text, out, "--steps", "4")


STATE = {
    "step": 4,
    "losses": [2.5, 1.0],
    "model": {"weight": torch.arange(6.0).reshape(2, 3)},
    "flag": True,
    "optimizer": {"state": {0: {"step": torch.tensor(4.0)}}, "param_groups": [{"lr": 1e-3, "betas": [0.9, 0.95]}]},
}


def head_of(path: Path) -> dict:
    return json.loads(TensorFile(path).read("state").numpy().tobytes())


def rewrite(path: Path, head: dict) -> None:
    """Give a checkpoint another `state`, as somebody would who knows how."""
    tensors = load_file(path)
    if "digest" in head:
        head["digest"] = content_digest(head)
    save_file(tensors | {"state": torch.frombuffer(bytearray(json.dumps(head).encode()), dtype=torch.uint8)}, path)


def as_version_1(path: Path) -> None:
    head = head_of(path)
    rewrite(path, {"version": 1, "state": head["state"], "digests": {k: v[2] for k, v in head["tensors"].items()}})


def test_a_checkpoint_comes_back_as_it_was_written_also_one_of_version_1(tmp_path):
    path = tmp_path / "checkpoint.safetensors"
    train.write_checkpoint(path, STATE)
    for version in (2, 1):
        if version == 1:
            as_version_1(path)
        back = train.Checkpoint(path).read()
        assert torch.equal(back["model"].pop("weight"), STATE["model"]["weight"])
        assert back["optimizer"]["state"][0].pop("step") == 4
        assert back == {**STATE, "model": {}, "optimizer": {**STATE["optimizer"], "state": {0: {}}}}


def test_any_flipped_bit_of_a_checkpoint_is_refused_or_changes_nothing(tmp_path):
    path, dice = tmp_path / "checkpoint.safetensors", random.Random(0)
    train.write_checkpoint(path, STATE)
    good = path.read_bytes()
    want = str(train.Checkpoint(path).read())
    for _ in range(400):
        bad = bytearray(good)
        bad[dice.randrange(len(bad))] ^= 1 << dice.randrange(8)
        path.write_bytes(bad)
        try:
            assert str(train.Checkpoint(path).read()) == want
        except vbrt.CheckpointError as error:
            assert str(path) in str(error)


@pytest.mark.parametrize(
    ("nesting", "words"),
    [
        (["tensor", "elsewhere"], "state.x is a tensor 'elsewhere'"),
        (["tensor", "state"], "state.x is a tensor"),
        (["value", []], "state.x is"),
        (["code", "x"], "state.x is"),
        (5, "state.x is 5"),
        (["value"], "state.x is"),
        (["dict", [["a", ["value", 1]], ["a", ["value", 2]]]], "state.x.a is there twice"),
        (["dict", [5]], "state.x is 5"),
        (["dict", {"a": 1}], "state.x is"),
        (["tensor", "model.weight"], "state is not with each tensor once"),
        (["list", "ab"], "state.x is"),
    ],
)
def test_a_strange_nesting_is_refused_by_the_name_of_the_entry(tmp_path, nesting, words):
    path = tmp_path / "checkpoint.safetensors"
    train.write_checkpoint(path, STATE)
    head = head_of(path)
    head["state"][1].append(["x", nesting])
    rewrite(path, head)
    with pytest.raises(vbrt.CheckpointError, match=f"{path}: damaged: {re.escape(words)}"):
        train.Checkpoint(path)


def test_a_checkpoint_that_this_training_cannot_have_is_refused_by_the_name_of_the_entry(text, tmp_path):
    out = tmp_path / "run"
    run(text, out, "--steps", "4")
    path = out / "checkpoint.safetensors"
    good = path.read_bytes()

    def changed(words, change):
        path.write_bytes(good)
        state = train.Checkpoint(path).read()
        change(state)
        train.write_checkpoint(path, state)
        assert f"{path}: damaged: {words}" in refusal(text, out, "--steps", "4")

    changed("state.step is 5 of 4", lambda s: s.update(step=5))
    changed("state.step is '4'; expected int", lambda s: s.update(step="4"))
    changed("state.losses is [nan", lambda s: s.update(losses=[math.nan]))
    changed("state has ", lambda s: s.pop("random"))
    changed("state.config has ", lambda s: s["config"].pop("lr"))
    changed("state.config.shape has 7", lambda s: s["config"].update(shape=7))
    changed("state.model has ", lambda s: s["model"].popitem())
    changed("state.model.", lambda s: s["model"].update({next(iter(s["model"])): torch.zeros(1 << 20)}))
    changed("state.optimizer.state.0.exp_avg", lambda s: s["optimizer"]["state"][0].update(exp_avg=torch.zeros(3)))
    changed(
        "state.optimizer.param_groups.0.betas is [0.8",
        lambda s: s["optimizer"]["param_groups"][0].update(betas=[0.8, 0.95]),
    )
    changed("state.optimizer.param_groups.0.lr is '1'", lambda s: s["optimizer"]["param_groups"][0].update(lr="1"))
    changed("torch cannot go on from it", lambda s: s["random"].update(cpu=torch.zeros_like(s["random"]["cpu"])))


@pytest.mark.parametrize("name", ["lock", "log.jsonl", "speed.jsonl", "checkpoint.safetensors"])
@pytest.mark.parametrize("plant", ["link", "fifo"])
def test_a_run_writes_through_no_link_and_waits_for_no_fifo(text, tmp_path, name, plant):
    out, victim = tmp_path / "run", tmp_path / "victim"
    out.mkdir()
    victim.write_text("mine\n")
    (out / name).symlink_to(victim) if plant == "link" else os.mkfifo(out / name)
    assert f"{out / name}: " in refusal(text, out, "--steps", "4") or name == "lock"
    assert victim.read_text() == "mine\n"


def test_a_log_that_is_long_is_not_read_whole(tmp_path):
    path = tmp_path / "speed.jsonl"
    path.write_bytes(b'{"a": 1}\n' * 3)
    for size, line in ((27, b'{"step": 1'), (27 + 10, b"x" * 200_000)):
        with open(path, "ab") as file:
            file.write(line)
        tracemalloc.start()
        with train.JsonLines(path, None) as log:
            assert log.sync() == 27, size
        assert tracemalloc.get_traced_memory()[1] < 1 << 19
        tracemalloc.stop()


def test_a_full_disk_leaves_the_checkpoint_before(text, tmp_path, monkeypatch):
    out, written = tmp_path / "run", []
    pwrite = os.pwrite

    def full(fd, data, at):
        written.append(len(data))
        if sum(written) > 500_000:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return pwrite(fd, data, at)

    monkeypatch.setattr("vbrt.host.files.os.pwrite", full)
    assert f"{out / 'checkpoint.safetensors'}: cannot be written: the disk is full" in refusal(text, out)
    monkeypatch.undo()
    state = train.Checkpoint(out / "checkpoint.safetensors").state
    assert state["step"] >= 4 and not list(out.glob("*.tmp"))


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


def test_a_log_that_is_gone_is_named(text, tmp_path):
    out = tmp_path / "run"
    run(text, out, "--steps", "4")
    (out / "log.jsonl").unlink()
    assert f"{out / 'log.jsonl'}: 0 bytes" in refusal(text, out, "--steps", "4")


def test_one_process_at_a_time_trains_into_a_folder(text, tmp_path):
    with train.claimed(tmp_path / "run"):
        assert "another process is training into it" in refusal(text, tmp_path / "run")


def test_auto_turns_on_what_the_free_memory_asks_for_and_says_why():
    shape = train.PRESETS["medium"].shape
    config = train.Config(shape, train.Options(), 8, 1, 1e-3, 0.0, 0, "", None)
    gpu, cpu = torch.device("cuda"), torch.device("cpu")
    options, reasons = train.auto_options(config, gpu, free=140 << 30)
    assert (options.attention, options.mixed_precision, options.checkpointing) == ("vbrt", True, False)
    options, reasons = train.auto_options(config, gpu, free=12 << 30)
    assert options.checkpointing and "10.8 GiB is nine tenths" in reasons[-1]
    options, _ = train.auto_options(config, cpu, free=140 << 30)
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
