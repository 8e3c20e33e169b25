"""What the site of mkdocs.yml has beside the files in docs/: the help of every command, the messages of all errors."""

import argparse
import importlib
import os
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from scripts.docs_errors import PAGE, with_lists
from vbrt.cli.main import COMMANDS

_HELP_GOES_HERE = "<!-- help of every command"


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """Return the page's text, with the commands' help or messages of errors where comments ask for them."""
    if page.file.src_uri == PAGE.name:
        return with_lists(markdown)
    before, mark, after = markdown.partition(_HELP_GOES_HERE)
    return before + commands_help() + after.partition("-->")[2] if mark else markdown


@patch.dict(os.environ, {"COLUMNS": "96", "NO_COLOR": "1"})  # what argparse wraps and colours by
def commands_help() -> str:
    """Return a section of Markdown for each command."""
    parser = argparse.ArgumentParser(prog="vbrt")
    commands = parser.add_subparsers()
    for command in COMMANDS:
        importlib.import_module(f"vbrt.cli.{command}").add(commands)
    return "\n\n".join(_section(name, command) for name, command in sorted(commands.choices.items()))


def _section(name: str, command: argparse.ArgumentParser) -> str:
    return f"## vbrt {name}\n\n```text\n{command.format_help()}```"
