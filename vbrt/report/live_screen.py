"""Frames of a live view on a terminal, by rich."""

import sys
from typing import TYPE_CHECKING

from vbrt.report.live_sample import History
from vbrt.report.live_view import frame

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

__all__ = ["LiveScreen"]


class LiveScreen:
    """Frames below what else is printed, or on a screen of their own that goes at the end.

    Args:
        alone: on a screen of their own.
    """

    def __init__(self, console: "Console", *, alone: bool = False) -> None:
        from rich.live import Live

        self._console, self._alone = console, alone
        self._live = Live(
            console=console,
            screen=alone,
            auto_refresh=False,
            redirect_stdout=sys.stdout.isatty(),  # what goes to a file must not come here
            vertical_overflow="crop",
        )

    def show(self, history: History) -> None:
        """Show the last sample."""
        size = self._console.size
        text = self._frame(history, size.height if self._alone else max(4, size.height - 2))
        if not self._live.is_started:
            self._live.start()
        self._live.update(text, refresh=True)

    def print(self, history: History) -> None:
        """Print one frame, and leave it there."""
        self._console.print(self._frame(history, 0))

    def _frame(self, history: History, height: int) -> "Text":
        return frame(history, self._console.width, height, ascii_only=self._console.options.ascii_only)

    def end(self) -> None:
        """Leave the terminal as it was, with the last frame where it is not alone."""
        self._live.stop()
