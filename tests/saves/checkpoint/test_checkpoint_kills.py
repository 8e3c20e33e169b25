"""A run that is killed again and again, at any moment, ends with the bits of one that was not."""

import os
import random
import signal
import time
from pathlib import Path

import pytest
import torch

import vbrt
from tests.training.full.full_models import Tiny, batches, loss_of
from vbrt.saves.checkpoint.training_checkpoint import CHECKPOINT


def live(directory: Path, steps: int, pages: Path | None = None) -> dict[str, torch.Tensor]:
    """Train to the end from where the checkpoint is, with one after each step."""
    torch.manual_seed(0)
    model = Tiny(2)
    tiers = {} if pages is None else {"ssd": {"enabled": True, "path": str(pages)}, "cpu": {"budget": "64KiB"}}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 5, 0.5)
    with vbrt.wrap(model, "full", optimizer=optimizer, tiers=tiers) as vb:
        done = 0
        if (directory / CHECKPOINT).exists():
            extra = vb.load_checkpoint(directory)
            done = extra["done"]
            schedule.load_state_dict(extra["schedule"])
            torch.set_rng_state(extra["random"])
        for ids, target in batches(steps)[done:]:
            loss = loss_of(vb, ids, target) + 0.01 * torch.rand(()) * vb.norm.weight.sum()  # of the generator's state
            loss.backward()
            vb.step()
            vb.zero_grad()
            schedule.step()
            done += 1
            extra = {"done": done, "schedule": schedule.state_dict(), "random": torch.get_rng_state()}
            vb.save_checkpoint(directory, extra=extra)
        return {name: value.clone() for name, value in vb.state_dict().items()}


def killed(directory: Path, steps: int, pages: Path | None, seconds: float) -> bool:
    """Train in a process that dies at once after that much of its own CPU time. True if it was at work."""
    child = os.fork()
    if child == 0:
        try:
            torch.set_num_threads(1)
            signal.signal(signal.SIGPROF, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_PROF, seconds)  # CPU time: a busy machine kills at the same places
            live(directory, steps, pages)
        finally:
            os._exit(0)
    return os.WIFSIGNALED(os.waitpid(child, 0)[1])


@pytest.fixture
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a fork has none of the others
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("kills", [4, pytest.param(50, marks=pytest.mark.exhaustive)])
def test_killed_runs_end_with_the_same_bits(tmp_path, kills):
    steps = 16 if kills == 4 else 150
    live(tmp_path / "warm", 1)  # imports
    began = time.process_time()
    whole = live(tmp_path / "whole", steps)
    step = (time.process_time() - began) / steps
    dice, run, hits = random.Random(kills), tmp_path / "run", 0
    for turn in range(kills):
        pages = tmp_path / "pages" if turn % 2 else None  # on from other tiers each time
        hits += killed(run, steps, pages, dice.uniform(1, 6) * step)  # wrapping takes about two
    assert hits > kills // 2, "most runs had ended before they were killed"
    found = live(run, steps)
    assert all(torch.equal(whole[name], value) for name, value in found.items())
    assert sum(path.suffix == ".safetensors" for path in run.iterdir()) == 1  # nothing is left of the dead
