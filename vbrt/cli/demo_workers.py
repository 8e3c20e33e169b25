"""The process that `vbrt demo` asks, which has another one run for each question: each one's memory is its own."""

import json
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from vbrt.errors import VBError

__all__ = ["Workers"]

_ROOT = Path(__file__).resolve().parent.parent.parent  # of the checkout, or site-packages
_MODULE = "vbrt.integrations.showcase"


class Workers:
    """A process that imports torch and transformers once, and forks for each question.

    Ctrl-C does not reach it: who has it ends it and its forks, by `close` or a `with` block.
    """

    def __init__(self) -> None:
        self._said = tempfile.TemporaryFile("w+")
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

    def ask(self, act: str, **asked: Any) -> Any:
        """Have a process of its own do something, and return its answer. Raises VBError: it failed, and how."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"act": act, **asked}) + "\n")
        self._process.stdin.flush()
        found = self._read()
        if "error" in found:
            raise VBError(f"the process for {act!r} ended: {found['error']}")
        return found["answer"]

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if line:
            return json.loads(line)
        code = self._process.wait()
        self._said.seek(0)
        lines = [line.strip() for line in self._said if line.strip()]
        raise VBError(f"the demo's process ended: {lines[-1] if lines else f'exit code {code}'}")

    def close(self) -> None:
        """End the process and its forks; idempotent."""
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout, self._said):
            if stream is not None:
                stream.close()

    def __enter__(self) -> "Workers":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
