"""Runs of scripts/train that several files look at."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.scripts.training import TEXT, run_as_people_do


@pytest.fixture
def one_deterministic_thread() -> Iterator[None]:
    """One thread, as runs in other processes have; and what the script sets for its process is as before."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(False)


@pytest.fixture(scope="session")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "squares.txt"
    path.write_bytes(TEXT)
    return path


@pytest.fixture(scope="session")
def whole(text: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nobody disturbed; its output is in `output`."""
    out = tmp_path_factory.mktemp("whole") / "run"
    output = run_as_people_do(text, out)
    (out / "output").write_text(output)
    return out
