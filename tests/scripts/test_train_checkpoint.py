"""scripts/train: a checkpoint is what was written, or refused by the name of what is wrong with it."""

import errno
import json
import math
import os
import random
import re
import tracemalloc
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import vbrt
from scripts import train
from tests.scripts.training import TEXT, refusal, run
from vbrt.saves.common.manifest import content_digest
from vbrt.saves.files.safetensors_file import TensorFile

pytestmark = pytest.mark.usefixtures("one_deterministic_thread")


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


def test_a_damaged_checkpoint_is_named_and_not_gone_on_from(text, tmp_path):
    out = tmp_path / "run"
    run(text, out, "--steps", "4")
    path = out / "checkpoint.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-100])
    assert f"{path}: damaged, truncated" in refusal(text, out, "--steps", "4")
    path.write_bytes(whole[:-5] + bytes([whole[-5] ^ 1]) + whole[-4:])
    assert f"{path}: damaged" in refusal(text, out, "--steps", "4")


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

    monkeypatch.setattr("vbrt.host.safe_files.os.pwrite", full)
    assert f"{out / 'checkpoint.safetensors'}: cannot be written: the disk is full" in refusal(text, out)
    monkeypatch.undo()
    state = train.Checkpoint(out / "checkpoint.safetensors").state
    assert state["step"] >= 4 and not list(out.glob("*.tmp"))


def test_a_log_that_is_gone_is_named(text, tmp_path):
    out = tmp_path / "run"
    run(text, out, "--steps", "4")
    (out / "log.jsonl").unlink()
    assert f"{out / 'log.jsonl'}: 0 bytes" in refusal(text, out, "--steps", "4")


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
