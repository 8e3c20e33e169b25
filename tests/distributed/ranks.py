"""A group of processes that stay alive for a session of tests, each a rank of a Gloo group on the CPU; with
`backend="cpu:gloo,cuda:nccl"` each has a GPU of its own, too.

    def test_something(two_ranks):
        assert two_ranks(case, width=64) == [..., ...]      # what `case(width=64)` returned on rank 0 and on rank 1

They are forks: see tests/forked.py.
"""

import os
import pickle
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests import forked

__all__ = ["Ranks", "RanksFailed"]


class RanksFailed(AssertionError):
    """Says what each rank raised.

    Attributes:
        errors: (name of the class, message) by rank, None of one that ended well; `died` of one that is gone.
        values: what each has returned, by rank.
    """

    def __init__(self, errors: list[tuple[str, str] | None], values: list[Any], text: str) -> None:
        super().__init__(text)
        self.errors, self.values = errors, values


def _serve(rank: int, count: int, folder: str, asked: Connection, timeout_s: float, backend: str) -> None:
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(count), LOCAL_WORLD_SIZE=str(count))
    os.environ["VBRT_PROGRESS"] = "0"
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", count)
    if "nccl" in backend:
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, store=store, rank=rank, world_size=count, timeout=timedelta(seconds=timeout_s))
    while True:
        try:
            function, kwargs = pickle.loads(asked.recv_bytes())
        except EOFError:
            os._exit(0)
        try:
            torch.manual_seed(0)
            answer = (True, function(**kwargs), None)
        except BaseException as error:  # noqa: BLE001 - it is told
            answer = (False, (type(error).__name__, str(error)), traceback.format_exc())
        asked.send(answer)


class Ranks:
    """`count` ranks; call it with a function of tests.distributed.cases and its arguments."""

    def __init__(self, count: int, timeout_s: float = 60, backend: str = "gloo") -> None:
        context = forked.context()
        self._folder = tempfile.TemporaryDirectory(prefix="vbrt-ranks-")
        self._timeout_s, self._ends, self.processes = timeout_s, [], []
        for rank in range(count):
            here, there = context.Pipe()
            arguments = (rank, count, self._folder.name, there, timeout_s, backend)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            there.close()
            self._ends.append(here)
            self.processes.append(process)

    def __call__(self, function: Callable[..., Any], **kwargs: Any) -> list[Any]:
        """Return what the function returns on each rank. Raises RanksFailed."""
        self.begin(function, **kwargs)
        return self.end()

    def begin(self, function: Callable[..., Any], **kwargs: Any) -> None:
        """Have all ranks call a function."""
        for end in self._ends:
            end.send_bytes(pickle.dumps((function, kwargs)))

    def end(self) -> list[Any]:
        """Return what the function has returned. Raises RanksFailed."""
        answers = [self._answer(end) for end in self._ends]
        if not all(good for good, _, _ in answers):
            errors = [None if good else value for good, value, _ in answers]
            text = "\n".join(f"rank {rank}: {trace}" for rank, (_, _, trace) in enumerate(answers) if trace)
            raise RanksFailed(errors, [value for _, value, _ in answers], text)
        return [value for _, value, _ in answers]

    def _answer(self, end: Connection) -> tuple[bool, Any, str | None]:
        try:
            if end.poll(60 + 2 * self._timeout_s):  # the first call waits for imports
                return end.recv()
        except EOFError:
            return False, ("died", ""), "it is gone"
        return False, ("silent", ""), "it does not answer"

    def close(self) -> None:
        """End the processes."""
        for end in self._ends:
            end.close()
        for process in self.processes:
            process.join(0.5)
            if process.is_alive():
                process.kill()
                process.join()
        self._folder.cleanup()


def folder_of(path: str) -> Path:
    """Return a path, made."""
    Path(path).mkdir(parents=True, exist_ok=True)
    return Path(path)
