"""Streaming of generated text to stdout, on a terminal with a live line of tier activity below it."""

import signal
import sys
import time
from collections.abc import Callable
from types import FrameType
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from vbrt.cli.screen import Spinner
from vbrt.report.stats import Stats
from vbrt.residency.plan import format_bytes

__all__ = ["LiveSpeaker", "Speaker", "speaker_for", "tier_line"]

_REFRESH_S = 0.25  # sampling interval of the counters
_ROWS = 3  # terminal rows that the live part leaves free


class Speaker:
    """Writes text to stdout as it arrives, and ends a spinner before the first piece. A context manager: inside, if
    `stoppable`, the first Ctrl-C ends the reply after the next token, and a second one is a KeyboardInterrupt.

    Attributes:
        tokens: received so far.
    """

    def __init__(self, spinner: Spinner | None = None, before: str = "", *, stoppable: bool = False) -> None:
        self._spinner, self._before, self._stoppable = spinner, before, stoppable
        self._stops, self._handler = False, None
        self.tokens, self._first = 0, 0.0

    def text(self, piece: str) -> None:
        """See `Listener`."""
        self._show(self._before + piece)
        self._before = ""

    def token(self) -> None:
        """See `Listener`."""
        if not self.tokens:
            self._first = time.perf_counter()
            if self._spinner is not None:
                self._spinner.stop()
        self.tokens += 1

    def stops(self) -> bool:
        """See `Listener`."""
        return self._stops

    def _show(self, text: str) -> None:
        sys.stdout.write(text)
        sys.stdout.flush()

    def _on_interrupt(self, number: int, frame: FrameType | None) -> None:
        if self._stops:
            raise KeyboardInterrupt
        self._stops = True

    def __enter__(self) -> Self:
        if self._stoppable:
            self._handler = signal.signal(signal.SIGINT, self._on_interrupt)
        return self

    def __exit__(self, *_: object) -> None:
        if self._stoppable:
            signal.signal(signal.SIGINT, self._handler)


class LiveSpeaker(Speaker):
    """Speaker for a terminal: a live line of tokens/s and tiers below the text, removed at the end."""

    def __init__(self, stats: Callable[[], Stats], console: Console, *args: object, **options: object) -> None:
        super().__init__(*args, **options)
        self._stats, self._console, self._line, self._status = stats, console, "", Text("", style="dim")
        self._seen: tuple[float, Stats] | None = None
        self._live = Live(console=console, auto_refresh=False, transient=True)

    def token(self) -> None:
        """See `Listener`."""
        is_first = not self.tokens
        super().token()
        if is_first:
            self._live.start()
        now = time.perf_counter()
        if self._seen is None or now - self._seen[0] >= _REFRESH_S:
            self._look(now)

    def _look(self, now: float) -> None:
        stats = self._stats()
        if self._seen is not None:
            rate = self.tokens / (now - self._first)
            line = tier_line(stats, self._seen[1], now - self._seen[0])
            self._status = Text(f"{rate:.1f} tokens/s · {line}", style="dim", no_wrap=True, overflow="ellipsis")
        self._seen = now, stats
        self._draw()

    def _show(self, text: str) -> None:
        text = text.replace("\x1b", "\N{SYMBOL FOR ESCAPE}")  # no escape sequences from models
        *lines, self._line = (self._line + text).split("\n")
        room = max(1, self._console.height - _ROWS) * self._console.width
        if len(self._line) > room:  # otherwise it would not fit on the screen
            head, _, self._line = self._line.rpartition(" ") if " " in self._line else (self._line, "", "")
            lines.append(head)
        for line in lines:
            self._live.console.print(Text(line))
        self._draw()

    def _draw(self) -> None:
        if self._live.is_started:
            self._live.update(Group(Text(self._line), self._status), refresh=True)

    def __exit__(self, *error: object) -> None:
        super().__exit__(*error)
        self._live.stop()
        self._console.print(Text(self._line), end="")
        self._line = ""


def speaker_for(
    stats: Callable[[], Stats], spinner: Spinner | None = None, before: str = "", *, stoppable: bool = False
) -> Speaker:
    """Return a speaker for stdout, with a live line on a terminal."""
    if not sys.stdout.isatty():
        return Speaker(spinner, before, stoppable=stoppable)
    console = Console(highlight=False, markup=False, emoji=False)
    return LiveSpeaker(stats, console, spinner, before, stoppable=stoppable)


def tier_line(now: Stats, before: Stats, seconds: float) -> str:
    """Return tier occupancy, hit rate since `before`, and GB/s per link: "gpu 3.1 GiB of 4.0 GiB · hits 87% · cpu>gpu
    2.10 GB/s"."""
    held = [
        f"{name} {format_bytes(tier.held_bytes)} of {format_bytes(tier.budget_bytes)}"
        for name, tier in now.tiers.items()
    ]
    leases, waited = now.hits + now.misses - before.hits - before.misses, now.waited - before.waited
    rate = [f"hits {1 - waited / leases:.0%}"] if leases else []
    moved = {link: nbytes - before.bytes_moved.get(link, 0) for link, nbytes in now.bytes_moved.items()}
    links = [f"{link} {nbytes / seconds / 1e9:.2f} GB/s" for link, nbytes in moved.items() if nbytes]
    return " · ".join([*held, *rate, *links])
