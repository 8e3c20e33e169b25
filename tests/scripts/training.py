"""What the tests of scripts/train share: a short run, in this process, in one of its own, or in a fork of one."""

import contextlib
import json
import os
import subprocess
import sys
import time
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest
import torch

from scripts import train
from tests import forked

ROOT = Path(__file__).resolve().parents[2]
SMALL = (
    "--layers 1 --width 32 --context 32 --batch 4 --steps 60 --dropout 0.1 --log-every 7 --checkpoint-every 4 "
    "--device cpu"
).split()
TEXT = b"".join(b"%d squared is %d.\n" % (n, n * n) for n in range(2000))


def arguments(text: Path, out: Path, *more: str) -> list[str]:
    return ["tiny", "--text", str(text), "--out", str(out), *SMALL, *more]


def run(text: Path, out: Path, *more: str) -> None:
    train.main(arguments(text, out, *more))


def refusal(text: Path, out: Path, *more: str) -> str:
    with pytest.raises(SystemExit) as caught:
        run(text, out, *more)
    assert str(caught.value).startswith("error: ")
    return str(caught.value)


def run_as_people_do(text: Path, out: Path, *more: str) -> str:
    """Run the script in a new process and return what it prints."""
    command = [sys.executable, "scripts/train.py", *arguments(text, out, *more)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def start(text: Path, out: Path, *more: str) -> BaseProcess:
    """Start a run in a process of `forked.context`."""
    process = forked.context().Process(target=_run_quietly, args=arguments(text, out, *more))
    process.start()
    return process


def finish(text: Path, out: Path, *more: str) -> None:
    process = start(text, out, *more)
    process.join(60)
    assert process.exitcode == 0


def _run_quietly(*given: str) -> None:
    torch.set_num_threads(1)
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        train.main(list(given))


def lines(out: Path) -> list[dict]:
    return [json.loads(line) for line in (out / "log.jsonl").read_text().splitlines()]


def assert_same_run(out: Path, whole: Path) -> None:
    for name in ("log.jsonl", "model.safetensors", "checkpoint.safetensors"):
        assert (out / name).read_bytes() == (whole / name).read_bytes(), name


def wait_for(process: BaseProcess, there) -> None:
    deadline = time.monotonic() + 60
    while not there() and process.is_alive():
        assert time.monotonic() < deadline
        time.sleep(0.0001)
