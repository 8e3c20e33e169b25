"""Compiling kernels ahead of their first launch, in threads.

    with noting() as found:
        linear(x, planes)          # launches nothing: each `Launcher` notes what a launch would need compiled
    begin(found)

What is compiled is what the launch itself asks Triton for, with the same arguments, so there is no second list of
kernels. Triton lets other threads run for all but a tenth of a compilation. A first launch takes what is ready, waits
for what is under way, and compiles what nobody has begun; `FIRST` says which it was. Where compiling ahead failed, the
launch compiles again, and raises what that raises.
"""

import contextlib
import functools
import os
import threading
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from vbrt.errors import first_line
from vbrt.host.worker_threads import Crew

__all__ = ["FIRST", "Compilation", "FirstLaunch", "begin", "noters", "noting"]

_MOST = 4096  # first launches that are remembered


class FirstLaunch(NamedTuple):
    """How the first launch of a kernel's specialization came to its code.

    Attributes:
        name: of the kernel.
        how: "ready", "waited" for a thread that was compiling it, "compiled" by the launch, although noted ahead,
            "unforeseen": compiled by the launch, or "failed": ahead, and compiled again.
        wait_us: of the launch.
        compile_us: of the compilation, or of reading it from disk; that of an unforeseen one is `wait_us`.
        at_ns: when it ended, by time.perf_counter_ns.
    """

    name: str
    how: str
    wait_us: int
    compile_us: int
    at_ns: int


#: the first launches of this process, the last `_MOST` of them
FIRST: deque[FirstLaunch] = deque(maxlen=_MOST)
#: thread -> what its launches note, in place of launching
noters: dict[int, list["Compilation"]] = {}


class Compilation:
    """One specialization of a kernel, compiled once by whoever comes first: a thread, or the launch that needs it.

    Attributes:
        name: of the kernel.
        compiled: what Triton made; None before, and where it failed.
        error: why it failed; "" if it did not.
        took_us: microseconds of it.
    """

    __slots__ = ("_compile", "_lock", "compiled", "error", "name", "took_us")

    def __init__(self, name: str, compile: Callable[[], Any]) -> None:
        self.name, self._compile, self._lock = name, compile, threading.Lock()
        self.compiled: Any = None
        self.error, self.took_us = "", 0

    def finish(self) -> None:
        """Compile it, unless that is done; wait for a thread that is at it."""
        with self._lock:
            if self._compile is None:
                return
            begun = time.perf_counter_ns()
            try:
                self.compiled = _again_after_collisions(self._compile)
            except Exception as error:  # noqa: BLE001 - the launch compiles again, and raises
                self.error = f"{self.name}: {type(error).__name__}: {first_line(error)}"
                warnings.warn(f"vbrt: compiling ahead failed, the first launch compiles: {self.error}", stacklevel=2)
            self._compile = None  # and the arguments with it
            self.took_us = (time.perf_counter_ns() - begun) // 1000

    def finished(self) -> tuple[str, Any, int | None]:
        """Finish it. Return how that was, see `FirstLaunch`, what was compiled, and the time it took if it did not
        fail."""
        how = "ready" if self._compile is None else "waited" if self._lock.locked() else "compiled"
        self.finish()
        return ("failed", None, None) if self.error else (how, self.compiled, self.took_us)


def _again_after_collisions(compile: Callable[[], Any], attempts: int = 4) -> Any:
    """Compile; once more where two threads have parsed at the same time: CPython 3.11 counts how deep syntax trees are
    for all threads together, and raises SystemError where that does not add up."""
    for _ in range(attempts - 1):
        with contextlib.suppress(SystemError):
            return compile()
    return compile()


@contextlib.contextmanager
def noting() -> Iterator[list[Compilation]]:
    """Yield a list of what launches of this thread need that were never launched; within the block none is launched.

    Results hold what their memory held.
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
    """Have threads compile these.

    soon: all at the same time. False: one after the other, for what is needed later: a compilation holds the
    interpreter for a tenth of its time, at its beginning, and what is needed first shall not wait for that.
    """
    crew = _crew(os.cpu_count() or 1) if soon else _crew(1)
    for each in dict.fromkeys(compilations):
        crew.give(each.finish)


@functools.cache
def _crew(size: int) -> Crew:
    return Crew(size)
