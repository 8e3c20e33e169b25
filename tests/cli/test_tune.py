"""`vbrt tune`: the launches of a model's shapes, measured and kept."""

import errno
import functools
import json
import os
import subprocess
import sys

import pytest
import torch

from tests.cli.cases import errors
from vbrt.cli import main as cli
from vbrt.kernels.cuda import devices, tuned_configs, tuning
from vbrt.kernels.cuda.launch_table import Gpu, Launch

pytest.importorskip("transformers")


@pytest.fixture
def fake_gpu(tmp_path, monkeypatch):
    """A device of sm_90 with a cache of its own, on which one configuration takes 8 µs and any other 10."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(tuned_configs, "identity", lambda index: {"gpu": "Some GPU", "triton": "3.6", "kernels": 1})
    monkeypatch.setattr(tuned_configs, "has_device", lambda: True)
    monkeypatch.setattr(tuning, "check", lambda tokens, device: None)
    monkeypatch.setattr(devices, "capability", lambda index: (9, 0))
    monkeypatch.setattr(devices, "gpu", lambda index: Gpu(9, 132))

    def timer(case, device):
        return lambda launch: 8.0 if launch == Launch(4, 16, False) and case.tokens == 1 else 10.0

    monkeypatch.setattr(tuning, "_timer", timer)
    tuned_configs.tuned.cache_clear()
    yield tuned_configs.tuning_file(0)
    tuned_configs.tuned.cache_clear()


def test_tune_needs_only_a_config_and_shows_each_shape_and_the_file(config_json, fake_gpu, capsys):
    assert cli.main(["tune", str(config_json), "--tokens", "1,16,256", "--set", "weights.format=mxfp4"]) == 0
    out, err = capsys.readouterr()
    lines = [line.split() for line in out.splitlines()]
    assert lines[0] == "out x in format tokens table µs found µs gain".split() and err == ""
    assert lines[1] == "512 x 2048 mxfp4 1 R2 WK16 ahead 10.00 R4 WK16 8.00 25.0 %".split()
    assert lines[2] == "512 x 2048 mxfp4 16 R2 WK16 ahead 10.00 same 10.00".split()
    assert [(*line[:3:2], line[4]) for line in lines[1:-2]] == [
        (n, k, tokens)
        for n, k in (("512", "2048"), ("2048", "2048"), ("2048", "8192"), ("8192", "2048"))
        for tokens in ("1", "16", "256")
    ]
    assert lines[3] == "512 x 2048 mxfp4 256 128x64/4 r4 10.00 same 10.00".split()
    assert out.splitlines()[-1] == f"12 of 12 kept in {fake_gpu}" and fake_gpu.exists()
    assert max(map(len, out.splitlines()[:-1])) <= 79


def test_tune_shows_what_is_kept_and_where(llama, fake_gpu, monkeypatch, capsys):
    assert cli.main(["tune", "--show"]) == 0
    assert capsys.readouterr().out == f"nothing is kept yet; it would be in {fake_gpu}\n"
    assert cli.main(["tune", str(llama), "--tokens", "1", "--set", "weights.min_parameters=1"]) == 0
    kept = json.loads(fake_gpu.read_text())["launches"]
    capsys.readouterr()
    assert cli.main(["tune", "--show"]) == 0
    out = capsys.readouterr().out
    assert out.count("linear") == len(kept) > 0 and out.endswith(f"{len(kept)} kept in {fake_gpu}\n")
    with monkeypatch.context() as patched:
        patched.setattr(tuned_configs, "has_device", lambda: False)
        patched.setattr(tuned_configs, "KERNELS", 1)
        assert cli.main(["tune", "--show"]) == 0  # of all GPUs, where none is at hand
        assert capsys.readouterr().out == f"Some GPU, Triton 3.6\n{out}"
        fake_gpu.unlink()
        assert cli.main(["tune", "--show"]) == 0
        assert capsys.readouterr().out == f"nothing is kept yet; it would be in {fake_gpu.parent}\n"
    fake_gpu.write_text("{")
    tuned_configs.tuned.cache_clear()
    assert cli.main(["tune", "--show"]) == 0
    assert capsys.readouterr().err.startswith(f"vbrt: warning: {fake_gpu} is ignored (JSONDecodeError")


def test_an_interrupted_tune_says_what_it_has_kept(config_json, fake_gpu, monkeypatch, capsys):
    timed = []

    def timer(case, device):
        timed.append(case)
        if len(timed) > 3:
            raise KeyboardInterrupt
        return lambda launch: 10.0

    monkeypatch.setattr(tuning, "_timer", timer)
    assert cli.main(["tune", str(config_json)]) == 130
    out, err = capsys.readouterr()
    assert out.splitlines()[-1] == f"3 of 16 kept in {fake_gpu}" and err == "vbrt: interrupted\n"
    assert len(json.loads(fake_gpu.read_text())["launches"]) == 3


def test_tune_refuses_what_it_cannot_do(config_json, fake_gpu, tmp_path, monkeypatch, capsys):
    assert cli.main(["tune"]) == 2
    assert "tune: no model; expected a model directory or a config.json" in errors(capsys)
    assert cli.main(["tune", str(config_json), "--set", "weights.format=dense"]) == 2
    assert "no layer of this plan runs on a kernel with a choice of launches" in errors(capsys)
    assert cli.main(["tune", str(tmp_path / "nothing")]) == 2
    assert "no such file or directory" in errors(capsys)
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "vbrt").touch()
    fake_tuned = functools.cache(lambda index: {})  # that the file cannot be read either is a warning of its own
    monkeypatch.setattr(tuned_configs, "tuned", fake_tuned)
    assert cli.main(["tune", str(config_json)]) == 2
    assert f"{fake_gpu}: cannot be written: {os.strerror(errno.ENOTDIR)}" in errors(capsys)


def test_tune_without_a_gpu_or_with_too_many_tokens_reads_no_model(config_json, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.main(["tune", str(config_json)]) == 2
    assert "no CUDA device; expected one from sm_80 on" in errors(capsys)
    for tokens in ("4097", "0", "1,5000"):
        assert cli.main(["tune", str(config_json), "--tokens", tokens]) == 2
        assert "expected numbers from 1 to 4096" in errors(capsys)
    for arguments in (["--tokens", "1,x"], ["--tokens", ""], ["--device", "a"]):
        with pytest.raises(SystemExit, match="2"):
            cli.main(["tune", "nothing", *arguments])
        assert "expected a whole number" in capsys.readouterr().err


@pytest.mark.gpu
def test_tune_on_a_gpu_keeps_configurations_that_a_new_process_uses(llama, tmp_path):
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path)}
    command = [sys.executable, "-m", "vbrt", "tune"]
    small = ["--set", "weights.min_parameters=1", "--tokens", "1"]
    done = subprocess.run([*command, str(llama), *small], env=environment, capture_output=True, text=True, check=True)
    count = len(done.stdout.splitlines()) - 3  # the head, a gap, the file
    assert "Traceback" not in done.stderr and count > 0
    assert done.stdout.splitlines()[-1].startswith(f"{count} of {count} kept in {tmp_path}")
    shown = subprocess.run([*command, "--show"], env=environment, capture_output=True, text=True, check=True)
    assert 0 < shown.stdout.count("linear") <= count  # such small shapes may be of as many tiles


def test_ranks_of_several_machines_are_not_measured_as_those_of_one(monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert cli.main(["tune", "--machine"]) == 2
    assert "4 ranks, 2 of them on this machine" in errors(capsys)
