"""Terminal output of a live view, by rich."""

import sys
from typing import TYPE_CHECKING

from vbrt.report.live_sample import History
from vbrt.report.live_view import frame

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

__all__ = ["LiveScreen"]


class LiveScreen:
    """Frames below other output, or on an alternate screen that is restored at the end.

    Args:
        alone: use the alternate screen.
    """

    def __init__(self, console: "Console", *, alone: bool = False) -> None:
        from rich.live import Live

        self._console, self._alone = console, alone
        self._live = Live(
            console=console,
            screen=alone,
            auto_refresh=False,
            redirect_stdout=sys.stdout.isatty(),  # output that goes to a file must stay there
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
        """Print one permanent frame."""
        self._console.print(self._frame(history, 0))

    def _frame(self, history: History, height: int) -> "Text":
        return frame(history, self._console.width, height, ascii_only=self._console.options.ascii_only)

    def end(self) -> None:
        """Restore the terminal; without an alternate screen the last frame stays."""
        self._live.stop()
