"""Progress bars, with rich's estimate of the remaining time, for work of more than a second.

    with Progress("loading", total_bytes) as work:
        for name, weight in weights.items():
            work.at(name)
            ...                      # read it
            work.done(weight.nbytes)

On a terminal it is a bar on stderr, which is gone at the end; elsewhere, in notebooks too, plain lines with percent, at
least five seconds apart. Nothing is shown in the first second. `progress=False` where a function takes that, or
`VBRT_PROGRESS=0` in the environment, which is read each time, silences it; so does a logger "vbrt" above INFO. If a
handler takes its INFO records (`vbrt.host.logger`), lines go there, and of a bar the line at the end.

Workers only count. A separate thread draws, so that the bar also moves while one large weight is encoded, and Ctrl-C
never interrupts a write to the terminal.
"""

import contextlib
import logging
import math
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Self

from vbrt.host.logger import is_heard, is_silent, say
from vbrt.host.ticker import Ticker
from vbrt.residency.byte_text import format_bytes

if TYPE_CHECKING:
    from rich.progress import Progress as RichProgress
    from rich.progress import Task

__all__ = ["Progress", "format_seconds", "screen_taken", "wanted"]

_SILENT_S = 1.0  # what takes less is not shown
_BAR_S = 0.25  # between two drawings of a bar
_LINE_S = 5.0  # between plain lines, at first; they become rarer, to one a minute
_LONGEST_LINE_S = 60.0
_SPEED_S = 120.0  # of the latest work, by which what is left is estimated
_STALLED_S = 10.0  # until work that is measured is taken for abandoned, and the bar goes
_OFF = ("0", "off", "false", "no")

_takers: list[object] = []  # of the screen: a live view, into which a bar would draw
_current = threading.local()  # the outermost work of each thread: what happens within is a part of it


class Progress:
    """Work of a known size, shown on stderr while it runs and takes more than a second.

    Nested progress in one thread shows nothing.

    Args:
        what: a word or two: "loading".
        total: bytes, or the units that `unit` names in the plural; 0 shows nothing.
        show: False shows nothing; None shows unless the environment has VBRT_PROGRESS=0.
        measure: returns the units done so far, for work that is not counted; called by the drawing thread.

    Attributes:
        name: of the current item.
        skipped: units done by an earlier run.
        ended: True after the `with` block.
    """

    def __init__(
        self,
        what: str,
        total: int,
        *,
        unit: str = "bytes",
        show: bool | None = None,
        measure: Callable[[], int] | None = None,
    ) -> None:
        self._show, self._measure = wanted(show) and total > 0, measure
        self._begun = self._moved = time.monotonic()
        self._finished = self.skipped = 0
        self.name, self.ended = "", False
        self._painter = _Painter(what, total, unit)
        self._ticker = Ticker(self, self._painter.draw, self._painter.hide)

    def at(self, name: str) -> None:
        """Name the next item."""
        self.name = name

    def done(self, units: int = 1) -> None:
        """Count finished units."""
        self._finished += units

    def skip(self, units: int = 1) -> None:
        """Count units that an earlier run finished."""
        self._finished += units
        self.skipped += units

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Hide the bar in a `with` block that writes to the terminal."""
        with self._painter.drawing:
            self._painter.hide()
            yield

    def finished(self) -> int:
        """Return the finished units, counted or measured."""
        found = self._finished if self._measure is None else self._measure()
        if found != self._finished:
            self._finished, self._moved = found, time.monotonic()
        return found

    @property
    def stalls(self) -> bool:
        """True if measured work has made no progress for a while: Ctrl-C may have ended it."""
        return self._measure is not None and time.monotonic() - self._moved > _STALLED_S

    def __enter__(self) -> Self:
        self._begun = self._moved = time.monotonic()
        outer = getattr(_current, "work", None)
        is_inner = outer is not None and outer() is not None and not outer().ended
        if self._show and not is_inner:
            _current.work = weakref.ref(self)
            with contextlib.suppress(RuntimeError):  # no more threads: the work is done without
                self._ticker.start(_SILENT_S)
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.ended = True
        self._ticker.stop()
        self._painter.end(None if kind else time.monotonic() - self._begun)


def wanted(show: bool | None = None) -> bool:
    """True if progress is shown: the caller's choice or, with None, the environment's."""
    if show is not None:
        return show
    return os.environ.get("VBRT_PROGRESS", "").strip().lower() not in _OFF and not is_silent(logging.INFO)


@contextlib.contextmanager
def screen_taken() -> Iterator[None]:
    """Suppress bars while a `with` block owns the screen."""
    taker = object()
    _takers.append(taker)
    try:
        yield
    finally:
        _takers.remove(taker)


def format_seconds(seconds: float) -> str:
    """Return a time for people: "0.4 s", "12 s", "3 min 20 s", "1 h 05 min"."""
    if seconds < 9.95:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 100:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60:02} min"


# -- drawing ----------------------------------------------------------------------------------------------------------


class _Painter:
    """Drawing thread: a bar on a terminal, removed at the end; elsewhere lines at growing intervals."""

    def __init__(self, what: str, total: int, unit: str) -> None:
        self.drawing = threading.Lock()
        self._what, self._total, self._unit = what, total, unit
        self._bar: RichProgress | None = None  # made once there is something to show
        self._skipped, self._every_s = 0, _LINE_S / 1.5

    def draw(self, work: Progress) -> float | None:
        """Draw once; return the seconds until the next time, None for never."""
        with self.drawing, contextlib.suppress(OSError, ValueError):  # stderr is closed: nobody looks
            finished = work.finished()
            if finished >= self._total or _takers or work.stalls:
                self.hide()
                return None if finished >= self._total else _SILENT_S
            if self._bar is None:
                self._bar = _bar(self._what, self._total, self._unit)
            task = self._bar.tasks[0]
            task.completed += work.skipped - self._skipped  # `update` would take it for speed
            self._skipped = work.skipped
            self._bar.update(task.id, completed=finished, at=work.name)
            if self._bar.console.is_interactive:
                self._bar.start()
                self._bar.refresh()
                return _BAR_S
            self._say(self._line(task, work.name))
            self._every_s = min(_LONGEST_LINE_S, self._every_s * 1.5)
            return self._every_s
        return None

    def _line(self, task: "Task", name: str) -> str:
        left = "" if task.time_remaining is None else f"{format_seconds(task.time_remaining)} left"
        done = format_bytes(int(task.completed)) if self._unit == "bytes" else str(task.completed)
        percent, amount = f"{math.floor(task.percentage)} %", f"{done} of {self._amount(self._total)}"
        return ", ".join(filter(None, (percent, amount, left, name)))

    def _amount(self, units: int) -> str:
        return format_bytes(units) if self._unit == "bytes" else f"{units} {self._unit}"

    def _say(self, text: str) -> None:
        say(f"{self._what}: {text}")

    def hide(self) -> None:
        """Take it from the screen until it is drawn again; by the thread, or under the lock `drawing`."""
        if self._bar is not None and self._bar.live.is_started:
            with contextlib.suppress(OSError, ValueError):
                self._bar.stop()

    def end(self, took_s: float | None) -> None:
        """Take it from the screen; where it was lines, or is logged, leave one with the time, unless that is None."""
        self.hide()
        if self._bar is None or took_s is None:
            return
        if not self._bar.console.is_interactive or is_heard(logging.INFO):
            with contextlib.suppress(OSError, ValueError):
                self._say(f"{self._amount(self._total)} in {format_seconds(took_s)}")


def _bar(what: str, total: int, unit: str) -> "RichProgress":
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as RichProgress
    from rich.table import Column

    bar = RichProgress(
        TextColumn("{task.description}", markup=False),
        BarColumn(20),
        TaskProgressColumn(),
        DownloadColumn(binary_units=True)
        if unit == "bytes"
        else TextColumn(f"{{task.completed}}/{{task.total}} {unit}"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[at]}", markup=False, table_column=Column(no_wrap=True, overflow="ellipsis", ratio=1)),
        console=Console(stderr=True, markup=False, highlight=False, force_jupyter=False),  # lines in notebooks
        auto_refresh=False,
        speed_estimate_period=_SPEED_S,
        transient=True,
        expand=True,
        redirect_stdout=sys.stdout.isatty(),  # what goes to a file must not come here
    )
    bar.add_task(what, total=total, at="")
    return bar
