"""Terminal output of commands: tables, a spinner, messages. Results go to stdout, everything else to stderr."""

import contextlib
import shutil
import sys
import textwrap
import warnings
from collections.abc import Iterator

from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from rich.text import Text

from vbrt.host.terminal import text_width

__all__ = [
    "Spinner",
    "add_footer",
    "add_row",
    "complain",
    "console_for_stdout",
    "table_of",
    "warnings_as_lines",
    "without_warnings_of_wrap",
    "working",
]


_PIPE_WIDTH = 132  # columns of a table that goes into a file or a pipe


def complain(kind: str, what: object) -> None:
    """Write to stderr: `vbrt: error: ...`, in one line, which a terminal gets wrapped between words.

    A file that cannot be written, as on a full drive, loses the message.
    """
    text = " ".join(str(what).split())
    line = f"vbrt: {kind}: {text}" if text else f"vbrt: {kind}"
    if sys.stderr.isatty():
        width = shutil.get_terminal_size().columns
        line = textwrap.fill(line, width, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)
    try:
        print(line, file=sys.stderr)
    except BrokenPipeError:  # nobody reads any more
        raise
    except OSError:
        pass


@contextlib.contextmanager
def without_warnings_of_wrap() -> Iterator[None]:
    """Silence plans' warnings inside the block: the command reports them itself."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=r"(vbrt\.wrap|vbrt\.load|from_pretrained): ")
        yield


@contextlib.contextmanager
def warnings_as_lines() -> Iterator[None]:
    """Write warnings as one line each inside the block."""
    with warnings.catch_warnings():
        warnings.showwarning = lambda message, *_args, **_kwargs: complain("warning", message)
        yield


def console_for_stdout() -> Console:
    """Return a console of the terminal's width, or 132 columns for a file or a pipe; COLUMNS=0 is ignored."""
    return Console(width=text_width(_PIPE_WIDTH), highlight=False, markup=False, emoji=False)


class Spinner:
    """Spinner with a text on stderr, if that is a terminal; calling it changes the text."""

    def __init__(self, text: str) -> None:
        self._status = Console(stderr=True, markup=False).status(text) if sys.stderr.isatty() else None

    def __call__(self, text: str) -> None:
        if self._status is not None:
            self._status.update(text)

    def start(self) -> None:
        """Show it; idempotent."""
        if self._status is not None:
            self._status.start()

    def stop(self) -> None:
        """Hide it; idempotent."""
        if self._status is not None:
            self._status.stop()


@contextlib.contextmanager
def working(text: str) -> Iterator[Spinner]:
    """Show a spinner inside the block."""
    spinner = Spinner(text)
    spinner.start()
    try:
        yield spinner
    finally:
        spinner.stop()


def table_of(*heads: str) -> Table:
    """Return an empty table; ">" before a head makes a right-aligned number column. The first column may wrap."""
    table = Table(
        box=SIMPLE, show_edge=False, pad_edge=False, padding=(0, 0, 0, 1), header_style="bold", footer_style="bold"
    )
    for index, head in enumerate(heads):
        is_number = head.startswith(">")
        table.add_column(
            Text(head.removeprefix(">")),
            justify="right" if is_number else "left",
            no_wrap=is_number,
            overflow="fold",
            min_width=None if is_number else 12 if index == 0 else 6,
        )
    return table


def add_row(table: Table, *cells: str) -> None:
    """Add a row of plain text."""
    table.add_row(*map(Text, cells))  # Text: names are not markup


def add_footer(table: Table, *cells: str) -> None:
    """Set the footer, one text per column."""
    table.show_footer = True
    for column, cell in zip(table.columns, cells, strict=True):
        column.footer = Text(cell)
