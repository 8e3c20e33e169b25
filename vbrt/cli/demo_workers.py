"""Processes that `vbrt demo` asks, one question each, so that each one's memory is that of one way to run a model."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from vbrt.errors import VBError

__all__ = ["Worker"]

_ROOT = Path(__file__).resolve().parent.parent.parent  # of the checkout, or site-packages
_MODULE = "vbrt.integrations.showcase"


class Worker:
    """A process that imports torch and transformers, and then waits for its question.

    Ctrl-C does not reach it: who has it ends it, by `close` or a `with` block.

    Args:
        act: what it will be asked to do, also for errors.
    """

    def __init__(self, act: str) -> None:
        self._act, self._said = act, tempfile.TemporaryFile("w+")
        paths = [str(_ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
        own = {"PYTHONPATH": os.pathsep.join(paths), "PYTHONWARNINGS": "ignore"}
        waits = {"OMP_WAIT_POLICY": "passive"}  # threads that spin for work take the cores from those that read pages
        self._process = subprocess.Popen(
            [sys.executable, "-m", _MODULE],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._said,
            text=True,
            env=waits | dict(os.environ) | own,
            start_new_session=True,
        )

    def ready(self) -> dict[str, Any]:
        """Wait until everything is imported; return {"device": "cpu" or "cuda", "threads": a number}.

        Raises VBError: the process has ended, and what it said last.
        """
        return self._read()

    def ask(self, **asked: Any) -> Any:
        """Ask, once, wait for the answer and the end of the process, and return it. Raises VBError."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"act": self._act, **asked}) + "\n")
        self._process.stdin.flush()
        answer = self._read()
        self._process.wait()
        return answer

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if line:
            return json.loads(line)
        code = self._process.wait()
        raise VBError(f"the process for {self._act!r} ended: {self._last_words(code)}")

    def _last_words(self, code: int) -> str:
        if code < 0:
            return f"signal {-code}" + ("; the system was out of memory, it seems" if code == -9 else "")
        self._said.seek(0)
        lines = [line.strip() for line in self._said if line.strip()]
        return lines[-1] if lines else f"exit code {code}"

    def close(self) -> None:
        """End the process; idempotent."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._said):
            if stream is not None:
                stream.close()

    def __enter__(self) -> "Worker":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
