"""`vbrt top`: live view of a running process's tiers, in the terminal.

A process answers if it was started with VBRT_TOP=1, or inside `with vb.live(offer=True):`. That is up to the user who
runs it, so there is no config key for it, because configs come with other people's checkpoints. A request touches
neither torch nor the model.
"""

import argparse
import contextlib
import json
import os
import select
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any, Self

import psutil
from rich.console import Console

from vbrt.cli.options import add_command
from vbrt.cli.screen import complain
from vbrt.errors import VBError
from vbrt.host import stats_endpoint
from vbrt.report.live_sample import History, LiveSample
from vbrt.report.live_screen import LiveScreen
from vbrt.report.live_view import plain_line

__all__ = ["add"]

try:  # Windows has neither; vbrt top refuses it
    import termios
    import tty
except ImportError:
    termios = tty = None

_LINE_S = 1.0  # between lines in a pipe
_HOW = "start it with VBRT_TOP=1 in its environment, or run it inside `with vb.live(offer=True):`"


def add(commands: Any) -> None:
    """Add `vbrt top` to the subparsers `commands` of the command line."""
    parser = add_command(
        commands,
        "top",
        _top,
        help="watch a running process: tiers, hit rates, links, waits, tokens a second",
        text="q ends it. A process\nanswers if it was started with VBRT_TOP=1 in its environment, or inside\n"
        "`with vb.live(offer=True):`. Into a pipe it writes a line a second.",
        examples="  VBRT_TOP=1 vbrt run ./Llama-3.1-8B 'The sea is'     in one terminal\n"
        "  vbrt top                                            in another\n"
        "  vbrt top 12345\n"
        "  vbrt top Llama --once\n",
    )
    parser.add_argument(
        "process", metavar="PID|NAME", nargs="?", help="its PID, or part of its command or of a model's class name"
    )
    parser.add_argument("--every", metavar="SECONDS", type=_seconds, default=0.5, help="sampling interval (0.5)")
    parser.add_argument("--once", action="store_true", help="one sample only")
    parser.add_argument("--json", action="store_true", help="one sample of plain counters as JSON")


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0.1 <= seconds <= 3600:
        raise argparse.ArgumentTypeError(f"{text!r}; expected seconds, 0.1 to 3600")
    return seconds


def _top(args: argparse.Namespace) -> int:
    if refusal := stats_endpoint.refusal():
        raise VBError(f"vbrt top: {refusal}")
    pid = _chosen(args.process)
    history = History()
    history.add(_look(pid))
    if args.json:
        print(json.dumps(history.last.to_dict(), indent=2))
        return 0
    if args.once:
        time.sleep(args.every)  # rates need two samples
        history.add(_look(pid))
        _Once().show(history)
        return 0
    with contextlib.suppress(KeyboardInterrupt), _ends_cleanly(), _Keys() as keys:
        _watch(pid, history, args.every, keys)
    return 0


def _watch(pid: int, history: History, every_s: float, keys: "_Keys") -> None:
    """Show a process until it ends, Ctrl-C, or the key q."""
    console = Console(highlight=False, markup=False, emoji=False)
    is_screen = console.is_terminal and not console.is_dumb_terminal
    screen = LiveScreen(console, alone=True) if is_screen else _Lines()
    wait_s, name = every_s if is_screen else max(_LINE_S, every_s), history.last.command
    try:
        while True:
            screen.show(history)
            if keys.quits_within(wait_s):
                return
            try:
                history.add(_sample(pid))
            except (ConnectionError, TimeoutError):
                continue  # busy or suspended; or it has ended, which the next sample finds
            except ProcessLookupError:
                break
    finally:
        screen.end()
    complain("note", f"process {pid} ({name}) has ended, or no longer answers")


@contextlib.contextmanager
def _ends_cleanly() -> Iterator[None]:
    """Make SIGTERM and SIGHUP end the block as Ctrl-C does, so that the terminal is restored."""
    before = {number: signal.signal(number, _interrupt) for number in (signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


class _Keys:
    """Single keys of the terminal on stdin, not echoed; none where stdin or stdout is something else."""

    def __init__(self) -> None:
        self._stdin = sys.stdin.fileno() if sys.stdin.isatty() and sys.stdout.isatty() else None
        self._before: list[Any] = []

    def __enter__(self) -> Self:
        if self._stdin is not None:
            self._before = termios.tcgetattr(self._stdin)
            tty.setcbreak(self._stdin)
        return self

    def __exit__(self, *_: object) -> None:
        if self._stdin is not None:
            termios.tcsetattr(self._stdin, termios.TCSADRAIN, self._before)

    def quits_within(self, seconds: float) -> bool:
        """Wait; return True at once if q is pressed."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            if self._stdin is None:
                time.sleep(left)
            elif select.select([self._stdin], [], [], left)[0]:
                key = os.read(self._stdin, 1)
                if key in (b"q", b"Q"):
                    return True
                if not key:  # the terminal is gone
                    self._stdin = None
        return False


class _Lines:
    def show(self, history: History) -> None:
        encoding = sys.stdout.encoding or "utf-8"
        print(plain_line(history).encode(encoding, "replace").decode(encoding), flush=True)

    def end(self) -> None:
        pass


class _Once(_Lines):
    def show(self, history: History) -> None:
        console = Console(highlight=False, markup=False, emoji=False)
        if not console.is_terminal:
            super().show(history)
            return
        LiveScreen(console).print(history)


# -- which process ----------------------------------------------------------------------------------------------------


def _chosen(wanted: str | None) -> int:
    """Return the selected process's pid. Raises VBError: none, or several without a terminal to ask on."""
    if wanted is not None and wanted.isascii() and wanted.isdigit():
        return int(wanted)
    offered = {}
    for pid in stats_endpoint.pids():
        with contextlib.suppress(OSError, VBError):
            offered[pid] = _sample(pid)
    found = {pid: of for pid, of in offered.items() if wanted is None or _is_called(of, wanted)}
    if len(found) == 1:
        return next(iter(found))
    rows = [f"{pid:>8}  {', '.join(of.names) or 'no model'}  ({of.command})" for pid, of in (found or offered).items()]
    if not offered:
        raise VBError(f"no process of this user answers vbrt top; {_HOW}")
    if not found:
        raise VBError(f"no answering process matches {wanted!r}; there is {'; '.join(map(str.strip, rows))}")
    return _ask_which(list(found), rows)


def _is_called(sample: LiveSample, wanted: str) -> bool:
    return any(wanted.lower() in name.lower() for name in (sample.command, *sample.names))


def _ask_which(pids: list[int], rows: list[str]) -> int:
    print("\n".join(rows), file=sys.stderr)
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        raise VBError(f"{len(pids)} processes answer; name one of them: vbrt top {pids[0]}")
    print("which one? ", end="", file=sys.stderr, flush=True)
    answer = sys.stdin.readline().strip() or str(pids[0])
    if not answer.isdigit() or int(answer) not in pids:
        raise VBError(f"{answer!r}; expected one of {', '.join(map(str, pids))}")
    return int(answer)


def _look(pid: int) -> LiveSample:
    """Return a sample of a process just selected. Raises VBError."""
    try:
        return _sample(pid)
    except ProcessLookupError as error:
        raise VBError(_why_not(pid)) from error
    except TimeoutError as error:
        raise VBError(f"process {pid} does not answer: it is stopped, or busy in one long call; try again") from error
    except OSError as error:
        raise VBError(f"process {pid} cannot be asked: {error.strerror or error}") from error


def _sample(pid: int) -> LiveSample:
    """Return a sample. Raises OSError; VBError: not a sample."""
    try:
        data = json.loads(stats_endpoint.ask(pid))
    except ValueError as error:
        raise VBError(f"process {pid}: what it answers is not JSON ({error}); is it vbrt?") from error
    if isinstance(data, dict) and "error" in data:
        raise VBError(f"process {pid}: it could not sample itself: {data['error']}")
    return LiveSample.from_dict(data)


def _why_not(pid: int) -> str:
    """Return why a process cannot be watched."""
    try:
        owner = psutil.Process(pid).uids().real
    except psutil.NoSuchProcess:
        return f"there is no process {pid}"
    if owner != os.getuid():
        return f"process {pid} belongs to another user ({owner}); run vbrt top as that user"
    return f"process {pid} does not answer vbrt top; {_HOW}"
