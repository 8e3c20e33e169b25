"""The command line."""

from vbrt.cli.main import main

__all__ = ["main"]
