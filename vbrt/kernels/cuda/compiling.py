"""Ahead-of-time kernel compilation in threads, before the first launch.

    with noting() as found:
        linear(x, planes)          # launches nothing: each `Launcher` notes the compilation that a launch would need
    begin(found)

Compilations are those that the launch itself requests from Triton, with the same arguments, so there is no second list
of kernels. Triton releases the GIL for nine tenths of a compilation. A first launch takes what is ready, waits for what
is in progress, and compiles what has not begun; `FIRST` records which. If a compilation ahead failed, the launch
compiles again, and raises its error.
"""

import contextlib
import functools
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from vbrt.errors import first_line
from vbrt.host.logger import warn
from vbrt.host.worker_threads import Crew

__all__ = ["FIRST", "Compilation", "FirstLaunch", "begin", "noters", "noting"]

_MOST = 4096  # first launches to remember


class FirstLaunch(NamedTuple):
    """How the first launch of a kernel specialization obtained its code.

    Attributes:
        name: of the kernel.
        how: "ready"; "waited" for a thread in the middle of it; "compiled" by the launch although noted ahead;
            "unforeseen": compiled by the launch; or "failed" ahead, and compiled again.
        wait_us: of the launch.
        compile_us: of the compilation, or of reading it from disk; equals `wait_us` if unforeseen.
        at_ns: end, by time.perf_counter_ns.
    """

    name: str
    how: str
    wait_us: int
    compile_us: int
    at_ns: int


#: recent first launches of this process
FIRST: deque[FirstLaunch] = deque(maxlen=_MOST)
#: thread id -> compilations noted instead of launching
noters: dict[int, list["Compilation"]] = {}


class Compilation:
    """Compilation of one kernel specialization, run once by the first of: a thread, or the launch that needs it.

    Attributes:
        name: of the kernel.
        compiled: Triton's compiled kernel; None before, and on failure.
        error: why it failed; "" if it did not.
        took_us: duration in microseconds.
    """

    __slots__ = ("_compile", "_lock", "compiled", "error", "name", "took_us")

    def __init__(self, name: str, compile: Callable[[], Any]) -> None:
        self.name, self._compile, self._lock = name, compile, threading.Lock()
        self.compiled: Any = None
        self.error, self.took_us = "", 0

    def finish(self) -> None:
        """Compile unless done; wait if another thread is compiling."""
        with self._lock:
            if self._compile is None:
                return
            begun = time.perf_counter_ns()
            try:
                self.compiled = _again_after_collisions(self._compile)
            except Exception as error:  # noqa: BLE001 - the launch retries, and raises
                self.error = f"{self.name}: {type(error).__name__}: {first_line(error)}"
                warn(f"vbrt: compiling ahead failed, the first launch compiles: {self.error}", stacklevel=2)
            self._compile = None  # frees the arguments
            self.took_us = (time.perf_counter_ns() - begun) // 1000

    def finished(self) -> tuple[str, Any, int | None]:
        """Finish it. Return how, see `FirstLaunch`, the compiled kernel, and the duration unless it failed."""
        how = "ready" if self._compile is None else "waited" if self._lock.locked() else "compiled"
        self.finish()
        return ("failed", None, None) if self.error else (how, self.compiled, self.took_us)


def _again_after_collisions(compile: Callable[[], Any], attempts: int = 4) -> Any:
    """Compile, with retries on SystemError: CPython 3.11's AST recursion counter is shared by threads, and raises when
    two parse concurrently."""
    for _ in range(attempts - 1):
        with contextlib.suppress(SystemError):
            return compile()
    return compile()


@contextlib.contextmanager
def noting() -> Iterator[list[Compilation]]:
    """Yield a list of compilations that this thread's launches need and that have not happened; launches in the block
    are skipped, and their results hold arbitrary memory.
    """
    me, found = threading.get_ident(), []
    before = noters.get(me)
    noters[me] = found
    try:
        yield found
    finally:
        if before is None:
            del noters[me]
        else:
            noters[me] = before


def begin(compilations: Iterable[Compilation], *, soon: bool = True) -> None:
    """Compile in threads.

    soon: all concurrently. False: sequentially, for later needs: a compilation holds the GIL for the first tenth of its
    time, which must not delay urgent ones.
    """
    crew = _crew(os.cpu_count() or 1) if soon else _crew(1)
    for each in dict.fromkeys(compilations):
        crew.give(each.finish)


@functools.cache
def _crew(size: int) -> Crew:
    return Crew(size)
