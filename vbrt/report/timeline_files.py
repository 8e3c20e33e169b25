"""Timelines as files: .html to look at, .json in Chrome's trace format."""

import json
import os
from pathlib import Path

from vbrt.errors import ConfigError
from vbrt.host.safe_files import check_writable, expanded
from vbrt.report.chrome_trace import chrome_trace
from vbrt.report.timeline import Timeline
from vbrt.report.timeline_page import html_page

__all__ = ["check_timeline_path", "write_timeline"]


def write_timeline(timeline: Timeline, path: Path) -> None:
    """Write a timeline into a file, in the format that its suffix names.

    Raises:
        ConfigError: another suffix, or the file cannot be written.
    """
    text = html_page(timeline) if _check_suffix(path) == ".html" else json.dumps(chrome_trace(timeline))
    try:
        path.write_text(text, "utf-8")
    except OSError as error:
        raise _unwritable(path, error) from error


def check_timeline_path(path: str | os.PathLike) -> Path:
    """Return the path of a timeline, without `~`, if it can be written.

    Raises:
        ConfigError: a suffix other than .html and .json, or a file that cannot be written.
    """
    try:
        target = expanded(path)
        _check_suffix(target)
        check_writable(target)
    except OSError as error:
        raise _unwritable(path, error) from error
    return target


def _check_suffix(path: Path) -> str:
    """Return ".html" or ".json"; raise ConfigError for anything else."""
    if path.suffix not in (".html", ".json"):
        raise ConfigError(
            f"timeline: {str(path)!r} ends in {path.suffix!r}; expected .html (to look at) or .json "
            "(Chrome's trace format)"
        )
    return path.suffix


def _unwritable(path: object, error: OSError) -> ConfigError:
    return ConfigError(
        f"timeline: cannot write {str(path)!r}: {error.strerror or error}; name a file in a directory "
        "that is there and can be written"
    )
