"""LoRA of a wrapped model by the launchers that people use: the losses of one process with the batch of all ranks."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.distributed import launched

pytest.importorskip("transformers")
pytest.importorskip("peft")

ROOT = Path(__file__).parents[2]
LAUNCHERS = {
    "torchrun": ["torch.distributed.run", "--nproc-per-node", "2", "--standalone"],
    "accelerate launch": [
        *("accelerate.commands.launch", "--num_processes", "2", "--num_machines", "1", "--mixed_precision", "no"),
        *("--dynamo_backend", "no", "--use_fsdp", "--fsdp_version", "2"),  # on CPUs this is what starts two processes
    ],
}


def losses(directory: Path, batch: int, *launcher: str) -> dict:
    directory.mkdir()
    command = [sys.executable, *launcher, launched.__file__, str(directory), str(batch)]
    where = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=where, cwd=directory, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((directory / "found.json").read_text())


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    found = losses(tmp_path_factory.mktemp("alone") / "run", 4)
    assert found["ranks"] == 1
    return found["losses"]


@pytest.mark.parametrize("launcher", ["torchrun", pytest.param("accelerate launch", marks=pytest.mark.exhaustive)])
def test_losses_of_two_ranks_are_those_of_one_process_with_both_batches(launcher, alone, tmp_path):
    found = losses(tmp_path / "run", 2, "-m", *LAUNCHERS[launcher])
    assert (found["ranks"], found["around"]) == (2, "DistributedDataParallel")
    assert found["losses"] == pytest.approx(alone, rel=1e-5) and len(alone) == 4
