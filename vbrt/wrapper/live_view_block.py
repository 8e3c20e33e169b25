"""`vb.live()`: live view of the tiers during a `with` block, on this terminal or through `vbrt top`."""

import contextlib
import sys
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from vbrt.errors import ArgumentError, TierError
from vbrt.host.ticker import Ticker
from vbrt.model.live_sampling import REST, offer, sample, withdraw
from vbrt.report.live_sample import History
from vbrt.report.live_screen import LiveScreen
from vbrt.report.live_view import plain_line
from vbrt.report.progress import screen_taken

if TYPE_CHECKING:
    from vbrt.model.runtime import Runtime

__all__ = ["Live", "Watched"]

_LINE_S = 1.0


class Watched:
    """Mixin for objects with a `vbrt.runtime`."""

    vbrt: Any

    def live(self, *, offer: bool = False, every_s: float = 0.5) -> contextlib.AbstractContextManager[None]:
        """Show tier occupancy, hit rates, GB/s per link, waits and tokens a second during a `with` block.

        On a terminal the view stays below the block's output; elsewhere it is a line a second on stderr. A thread
        samples the counters without locks and without synchronizing the device.

        Args:
            offer: show nothing here, but answer `vbrt top` in another terminal. Alternative: VBRT_TOP=1 in the
                environment.
            every_s: sampling interval, seconds.

        Raises:
            ArgumentError: `every_s` is not positive.
            TierError: (on entering) with `offer`: the socket cannot be created.
        """
        if not every_s > 0:
            raise ArgumentError(f"live: every_s = {every_s}; expected seconds, more than 0")
        return _offered() if offer else Live(self.vbrt.runtime, every_s)


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
    """Live view of a runtime during a `with` block."""

    def __init__(self, runtime: "Runtime", every_s: float) -> None:
        self._view = _View(runtime, every_s)
        self._ticker = Ticker(self, self._view.tick, self._view.end)

    def __enter__(self) -> None:
        self._ticker.start(0.0)

    def __exit__(self, *_: object) -> None:
        self._ticker.stop()
        self._view.end()


class _View:
    """Drawing state; used by the thread until it has ended."""

    def __init__(self, runtime: "Runtime", every_s: float) -> None:
        self._runtime, self._every_s, self._history = runtime, every_s, History()
        self._screen: LiveScreen | _Lines | None = None
        self._taken = contextlib.ExitStack()

    def tick(self, _: Live) -> float:
        """Show a sample; return the seconds until the next."""
        is_first = self._screen is None
        if is_first:
            self._begin()
        begun = time.thread_time()
        self._history.add(sample(self._runtime))
        self._screen.show(self._history)
        spent = 0.0 if is_first else time.thread_time() - begun  # the first one also imports the drawing library
        return max(self._every_s, REST * spent)

    def _begin(self) -> None:
        from rich.console import Console

        console = Console(stderr=True, highlight=False, markup=False, emoji=False)
        if console.is_terminal and not console.is_dumb_terminal and not console.is_jupyter:
            self._taken.enter_context(screen_taken())
            self._screen = LiveScreen(console)
        else:
            self._every_s = max(_LINE_S, self._every_s)
            self._screen = _Lines()

    def end(self) -> None:
        """Show the last sample, and restore the terminal."""
        if self._screen is None:
            return
        try:
            self._history.add(sample(self._runtime))
            self._screen.show(self._history)
        finally:
            self._screen.end()
            self._taken.close()


class _Lines:
    def show(self, history: History) -> None:
        print(f"vbrt: {plain_line(history)}", file=sys.stderr, flush=True)

    def end(self) -> None:
        pass
