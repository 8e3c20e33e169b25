"""Width of printed text."""

import os
import shutil
import sys

__all__ = ["text_width"]


def text_width(default: int) -> int:
    """Return the columns of the terminal on stdout, or COLUMNS where that is set; else the default. COLUMNS=0 is
    ignored."""
    is_known = "COLUMNS" in os.environ or (sys.stdout is not None and sys.stdout.isatty())
    return shutil.get_terminal_size((default, 24)).columns if is_known else default
