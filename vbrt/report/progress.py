"""How far work has come that takes more than a second, and how long it will still take: one bar, one way to estimate.

    with Progress("loading", total_bytes) as work:
        for name, weight in weights.items():
            work.at(name)
            ...                      # read it
            work.done(weight.nbytes)

On a terminal it is a bar on stderr, which is gone at the end; in a notebook one line that is written again; elsewhere
plain lines with percent, at least five seconds apart. Nothing is shown in the first second. `progress=False` where a
function takes that, or `VBRT_PROGRESS=0` in the environment, which is read each time, silences it.

The work itself only counts. A thread of its own draws, so that the bar also moves while one large weight is encoded,
and Ctrl-C never comes while the terminal is written to.
"""

import contextlib
import math
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, Self

from vbrt.host.ticker import Ticker
from vbrt.residency.byte_text import format_bytes

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["Eta", "Progress", "format_seconds", "screen_taken", "wanted"]

_SILENT_S = 1.0  # what takes less is not shown
_LINE_S = 5.0  # between plain lines, at first; they become rarer, to one a minute
_LONGEST_LINE_S = 60.0
_MEMORY_S = 30.0  # work that is this old counts 1/e of what is done now
_STALLED_S = 10.0  # until work that is measured is taken for abandoned, and the bar goes
_OFF = ("0", "off", "false", "no")

_takers: list[object] = []  # of the screen: a live view, into which a bar would draw
_current = threading.local()  # the outermost work of each thread: what happens within is a part of it


class Eta:
    """How long work will still take, by how fast it went, recent work counting more.

    The rate is what was done over the time it took, both weighted by exp(-age / 30 s): at first the mean since the
    beginning. Time without progress counts as soon as it passes, so that work that has stalled takes longer and longer.

    Attributes:
        finished: units that are done.
        total: units of all the work, such as bytes.
        since: when work was counted last.
    """

    def __init__(self, total: int, now: float) -> None:
        self.total, self.finished = total, 0
        self.since, self._units, self._seconds = now, 0.0, 0.0

    def note(self, units: int, now: float) -> None:
        """Count work that was done since the last call; `now` in seconds of any steady clock."""
        passed = max(0.0, now - self.since)
        keep = math.exp(-passed / _MEMORY_S)
        self._units, self._seconds = self._units * keep + units, self._seconds * keep + passed
        self.since, self.finished = now, self.finished + units

    def skip(self, units: int) -> None:
        """Count work that took no time, because an earlier run has done it."""
        self.finished += units

    @property
    def share(self) -> float:
        """What is done of the whole, from 0 to 1."""
        return min(1.0, self.finished / self.total) if self.total > 0 else 1.0

    def left_s(self, now: float) -> float | None:
        """Return the seconds that are left; None before anything was done."""
        seconds = self._seconds + max(0.0, now - self.since)
        if self._units <= 0 or seconds <= 0:
            return None
        return max(0, self.total - self.finished) * seconds / self._units


class Look(NamedTuple):
    """What there is to show. `left`: "12 s left", "" while nobody knows; `at`: the name of what is being done."""

    what: str
    share: float
    amount: str
    left: str
    at: str

    @property
    def line(self) -> str:
        """As one line: "loading: 42 %, 3.1 GiB of 7.4 GiB, 12 s left, layers.3.mlp"."""
        percent = f"{math.floor(100 * self.share)} %"
        return f"{self.what}: " + ", ".join(filter(None, (percent, self.amount, self.left, self.at)))


class Progress:
    """Work of a known size, shown on stderr while it runs and takes more than a second.

    Work within work, in one thread, shows nothing of its own.

    Args:
        what: a word or two: "loading".
        total: bytes, or whatever `unit` names in the plural; nothing is shown of 0.
        show: False: nothing is shown; None: unless the environment has VBRT_PROGRESS=0.
        measure: returns what is done so far, for work that nobody counts; it is called by the thread that draws.

    Attributes:
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
        self._what, self._unit, self._show, self._measure = what, unit, wanted(show) and total > 0, measure
        self._begun = self._moved = time.monotonic()
        self._eta = Eta(total, self._begun)
        self._at, self.ended = "", False
        self._painter = _Painter()
        self._ticker = Ticker(self, self._painter.draw, self._painter.hide)

    def at(self, name: str) -> None:
        """Name what is done next."""
        self._at = name

    def done(self, units: int = 1) -> None:
        """Count what was done."""
        self._eta.note(units, time.monotonic())

    def skip(self, units: int = 1) -> None:
        """Count what was done already, by an earlier run."""
        self._eta.skip(units)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Hide the bar in a `with` block that writes to the terminal."""
        with self._painter.drawing:
            self._painter.hide()
            yield

    def look(self) -> Look:
        """Return what there is to show now."""
        eta = self._eta
        more = 0 if self._measure is None else self._measure() - eta.finished
        if more:
            self.done(more)
            self._moved = time.monotonic()
        left = eta.left_s(time.monotonic())
        done = self._amount(eta.finished) if self._unit == "bytes" else str(eta.finished)
        amount, soon = f"{done} of {self._amount(eta.total)}", "" if left is None else f"{format_seconds(left)} left"
        return Look(self._what, eta.share, amount, soon, self._at)

    def _amount(self, units: int) -> str:
        return format_bytes(units) if self._unit == "bytes" else f"{units} {self._unit}"

    @property
    def stalls(self) -> bool:
        """True if work that is measured has not gone on for a while: it may have ended by Ctrl-C."""
        return self._measure is not None and time.monotonic() - self._moved > _STALLED_S

    def __enter__(self) -> Self:
        self._begun = self._moved = self._eta.since = time.monotonic()
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
        took = format_seconds(time.monotonic() - self._begun)
        self._painter.end("" if kind else f"{self._what}: {self._amount(self._eta.total)} in {took}")


def wanted(show: bool | None = None) -> bool:
    """True if work is to be shown, by what a caller says or, with None, the environment."""
    return os.environ.get("VBRT_PROGRESS", "").strip().lower() not in _OFF if show is None else show


@contextlib.contextmanager
def screen_taken() -> Iterator[None]:
    """Draw no bar while a `with` block has the screen."""
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


class _Display(Protocol):
    every_s: float  # between two drawings

    def draw(self, look: Look) -> None: ...

    def hide(self) -> None: ...

    def end(self, line: str) -> None:
        """Leave this line, or nothing where it is ""."""


class _Painter:
    """Draws work, in a thread."""

    def __init__(self) -> None:
        self.drawing = threading.Lock()
        self._display: _Display | None = None  # made once there is something to show

    def draw(self, work: Progress) -> float | None:
        """Draw once; return the seconds until the next time, None for never."""
        with self.drawing:
            look = work.look()
            if look.share >= 1:
                self.hide()
                return None
            if _takers or work.stalls:
                self.hide()
                return _SILENT_S
            if self._display is None:
                self._display = _display()
            return self._display.every_s if _done(self._display.draw, look) else None

    def hide(self) -> None:
        """Take it from the screen until it is drawn again; by the thread, or under the lock `drawing`."""
        if self._display is not None:
            _done(self._display.hide)

    def end(self, line: str) -> None:
        """Take it from the screen; where it was plain text, leave a line, if that is not ""."""
        if self._display is not None:
            _done(self._display.end, line)


def _done(draw: Callable[..., None], *args: Any) -> bool:
    """Draw; False if stderr is closed: nobody looks."""
    try:
        draw(*args)
    except (OSError, ValueError):
        return False
    return True


def _display() -> _Display:
    from rich.console import Console

    console = Console(stderr=True, markup=False, highlight=False)
    if console.is_terminal and not console.is_dumb_terminal and not console.is_jupyter:
        return _Bar(console)
    return _OneLine() if "ipykernel" in sys.modules else _Lines()


class _Bar:
    """A bar on a terminal, gone at the end."""

    every_s = 0.25

    def __init__(self, console: "Console") -> None:
        from rich.progress import BarColumn, Progress, TextColumn
        from rich.table import Column

        name = Column(no_wrap=True, overflow="ellipsis", ratio=1)
        texts = [TextColumn(f"{{task.fields[{field}]}}", markup=False) for field in ("percent", "amount", "left")]
        bar = BarColumn(20 if console.width >= 100 else 10)
        columns = (TextColumn("{task.description}", markup=False), bar, *texts)
        self._bar = Progress(
            *columns,
            TextColumn("{task.fields[at]}", markup=False, table_column=name),
            console=console,
            auto_refresh=False,
            transient=True,
            expand=True,
            redirect_stdout=sys.stdout.isatty(),  # what goes to a file must not come here
        )
        self._task = self._bar.add_task("", total=1.0, percent="", amount="", left="", at="")

    def draw(self, look: Look) -> None:
        percent = f"{math.floor(100 * look.share):3} %"
        fields = {"percent": percent, "amount": look.amount, "left": look.left, "at": look.at}
        self._bar.update(self._task, description=look.what, completed=look.share, **fields)
        if self._bar.live.is_started:
            self._bar.refresh()
        else:
            self._bar.start()

    def hide(self) -> None:
        self._bar.stop()

    def end(self, line: str) -> None:
        self._bar.stop()


class _OneLine:
    """One line that is written again, for notebooks."""

    every_s = 0.5

    def __init__(self) -> None:
        self._width = 0

    def draw(self, look: Look) -> None:
        self._write(look.line)

    def _write(self, text: str) -> None:
        print(f"\r{text:<{self._width}}", end="", file=sys.stderr, flush=True)
        self._width = len(text)

    def hide(self) -> None:
        self._write("")

    def end(self, line: str) -> None:
        self._write(line)
        print(file=sys.stderr, flush=True)


class _Lines:
    """Plain lines for files and pipes, the longer it takes the rarer."""

    def __init__(self) -> None:
        self.every_s = _LINE_S / 1.5

    def draw(self, look: Look) -> None:
        print(f"vbrt: {look.line}", file=sys.stderr, flush=True)
        self.every_s = min(_LONGEST_LINE_S, self.every_s * 1.5)

    def hide(self) -> None:
        pass

    def end(self, line: str) -> None:
        if line:
            print(f"vbrt: {line}", file=sys.stderr, flush=True)
