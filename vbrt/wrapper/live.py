"""`vb.live()`: what the tiers do while a `with` block runs, on this terminal, or for `vbrt top` on another."""

import contextlib
import sys
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

from vbrt.errors import ArgumentError, TierError
from vbrt.model.live import offer, sample, withdraw
from vbrt.report.live import History
from vbrt.report.live_screen import LiveScreen
from vbrt.report.live_view import plain_line
from vbrt.report.progress import screen_taken

if TYPE_CHECKING:
    from vbrt.model.runtime import Runtime

__all__ = ["Live", "Watched"]

_LINE_S = 1.0


class Watched:
    """Mixin of what has a runtime."""

    runtime: "Runtime"

    def live(self, *, offer: bool = False, every_s: float = 0.5) -> contextlib.AbstractContextManager[None]:
        """Show, while a `with` block runs, how tiers fill, hit rates, GB/s of each link, waits and tokens a second.

        On a terminal it stays below what the block prints; elsewhere it is a line a second on stderr. It is read by a
        thread, without a lock and without waiting for the device.

        Args:
            offer: show nothing here, but answer `vbrt top` in another terminal. Other ways to have a process do that:
                VBRT_TOP=1 in its environment.
            every_s: seconds between two looks.

        Raises:
            ArgumentError: `every_s` is not positive.
            TierError: (on entering) with `offer`: no socket can be made.
        """
        if not every_s > 0:
            raise ArgumentError(f"live: every_s = {every_s}; expected seconds, more than 0")
        return _offered() if offer else Live(self.runtime, every_s)


@contextlib.contextmanager
def _offered() -> Iterator[None]:
    try:
        offer()
    except OSError as error:
        raise TierError(f"live: this process cannot be offered to vbrt top: {error.strerror}") from error
    try:
        yield
    finally:
        withdraw()


class Live:
    """Shows a runtime while a `with` block runs."""

    def __init__(self, runtime: "Runtime", every_s: float) -> None:
        self._runtime, self._every_s = runtime, every_s
        self._ended, self._thread = threading.Event(), None

    def __enter__(self) -> None:
        self._thread = threading.Thread(target=self._run, name="vbrt-live", daemon=True)
        try:
            self._thread.start()
        except BaseException:  # Ctrl-C
            self._ended.set()
            raise

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        from rich.console import Console

        console = Console(stderr=True, highlight=False, markup=False, emoji=False)
        is_screen = console.is_terminal and not console.is_dumb_terminal and not console.is_jupyter
        screen, every_s = (LiveScreen(console), self._every_s) if is_screen else (_Lines(), max(_LINE_S, self._every_s))
        with screen_taken() if is_screen else contextlib.nullcontext():
            try:
                self._show(screen, every_s)
            finally:
                screen.end()

    def _show(self, screen: "LiveScreen | _Lines", every_s: float) -> None:
        history, ends = History(), False
        while not ends:
            ends = self._ended.wait(every_s if history else 0)
            history.add(sample(self._runtime))
            screen.show(history)


class _Lines:
    def show(self, history: History) -> None:
        print(f"vbrt: {plain_line(history)}", file=sys.stderr, flush=True)

    def end(self) -> None:
        pass
