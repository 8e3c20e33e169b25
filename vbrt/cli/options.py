"""Options shared by commands, and their parsers."""

import argparse
import contextlib
import importlib
import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

from vbrt.cli.screen import complain, warnings_as_lines
from vbrt.config import VBConfig, assign, load_config, preset_names
from vbrt.errors import VBError, describe_os_error
from vbrt.host.safe_files import check_writable, write_file
from vbrt.integrations.model_paths import model_path

__all__ = [
    "add_budget",
    "add_command",
    "add_config",
    "add_gpu_memory",
    "add_model",
    "check_config_file",
    "config_of",
    "integration",
    "locate_model",
    "memory_keys",
    "number",
    "numbers",
    "positive",
    "write_config",
    "writing",
]


def add_command(
    commands: Any, name: str, run: Callable[[argparse.Namespace], int], *, help: str, examples: str, text: str = ""
) -> argparse.ArgumentParser:
    """Add a command carried out by `run`; return its parser, for further arguments."""
    parser = commands.add_parser(
        name,
        help=help,
        description=f"{help[0].upper()}{help[1:]}. {text}".strip(),
        epilog=f"examples:\n{examples}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(command=run)
    parser._negative_number_matcher = re.compile(r"-\d")  # "-8GiB" is an option's value, to be refused as such
    return parser


def add_model(parser: argparse.ArgumentParser, what: str, *, metavar: str = "MODEL", nargs: str | None = None) -> None:
    """Add the positional argument of a model, `what` it may be here, and --revision."""
    parser.add_argument(
        "model",
        metavar=metavar,
        nargs=nargs,
        help=f"{what}; or a model of the Hugging Face Hub: ORG/NAME, or ORG/NAME:Q4_K_M for a GGUF file in it",
    )
    parser.add_argument("--revision", metavar="NAME", help="branch, tag or commit of a model of the Hub (main)")


def locate_model(args: argparse.Namespace, need: str = "weights") -> None:
    """Replace `args.model` by its path, and fetch a model of the Hub that is not here; `args.name` is what was typed.

    Args:
        need: as for `hub_models.located`: "weights", "headers" or "config".
    """
    args.name = args.model
    if os.path.lexists(args.model) and args.revision is None:
        args.model = model_path(args.model)  # no library has to say so
        return
    try:
        with warnings_as_lines():
            found = integration("hub_models").located(args.model, revision=args.revision, need=need)
        args.model = model_path(found)
    except KeyboardInterrupt:
        complain("note", "what was fetched is kept; the same command resumes")
        raise


def add_config(parser: argparse.ArgumentParser, default: str = "fp4") -> None:
    """Add --config and --set; `default` is for the help."""
    presets = ", ".join(preset_names())
    parser.add_argument(
        "--config", metavar="PRESET|FILE", help=f"a preset ({presets}) or a TOML file; default: {default}"
    )
    parser.add_argument(
        "--set",
        metavar="KEY=VALUE",
        dest="settings",
        action="append",
        default=[],
        help="change one key of it, e.g. tiers.gpu.budget=8GiB or weights.format=nf4; repeatable",
    )


def add_budget(parser: argparse.ArgumentParser) -> None:
    """Add --budget."""
    parser.add_argument(
        "--budget",
        metavar="SIZE",
        dest="tier_budget",
        help="most bytes of pages in the tier that computes: 6GiB, 40%% (default: auto)",
    )


def add_gpu_memory(
    parser: argparse.ArgumentParser, context: str = "tokens to have room for with --gpu-memory (2048)"
) -> None:
    """Add --gpu-memory and --context, for commands that run a model here; `context` is for the help."""
    parser.add_argument(
        "--gpu-memory",
        metavar="SIZE",
        help="most that this process takes of the GPU, pages and all else: 12GB, 90%%; an estimate gives the budget",
    )
    parser.add_argument("--context", metavar="N", type=positive, help=context)


def config_of(args: argparse.Namespace, base: VBConfig | None = None) -> VBConfig:
    """Return the config of --config (else `base`), --budget, --gpu-memory where it is about this machine, and --set."""
    given = {"budget": getattr(args, "tier_budget", None)}
    if not hasattr(args, "ram"):  # else the memory of another machine: see `machine_options`
        given |= {key: getattr(args, key, None) for key in ("gpu_memory", "context")}
    return assign(load_config(args.config or base), args.settings, memory_keys(given))


def memory_keys(given: Mapping[str, object]) -> dict[str, object]:
    """Return keys of a config for sizes on a command line; those that were not given are left out."""
    return {
        key: int(value) if isinstance(value, str) and value.isdecimal() else value
        for key, value in given.items()
        if value is not None
    }


def check_config_file(path: Path) -> None:
    """Raise VBError: a config cannot be written there."""
    with writing("--write", path):
        check_writable(path)


def write_config(path: Path, text: str) -> None:
    """Write a config as TOML. Raises VBError: it cannot be written."""
    with writing("--write", path):
        write_file(path, text.encode())


@contextlib.contextmanager
def writing(flag: str, path: Path) -> Iterator[None]:
    """Turn an OSError of the block into a VBError with flag and path."""
    try:
        yield
    except OSError as error:
        raise VBError(
            f"{flag} {path}: cannot be written: {describe_os_error(error)}; name a file in a directory that is there "
            "and can be written"
        ) from error


def positive(text: str) -> int:
    """Parse a whole number, 1 or more."""
    if not text.isascii() or not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}; expected a whole number, 1 or more")
    return int(text)


def number(text: str) -> int:
    """Parse a whole number, 0 or more."""
    if not text.isascii() or not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r}; expected a whole number")
    return int(text)


def numbers(text: str) -> tuple[int, ...]:
    """Parse comma-separated whole numbers."""
    return tuple(number(part) for part in text.split(","))


def integration(name: str) -> ModuleType:
    """Import a module of vbrt.integrations; raise VBError with the package to install where transformers is missing."""
    try:
        return importlib.import_module(f"vbrt.integrations.{name}")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] not in ("transformers", "huggingface_hub"):
            raise
        raise VBError(f"this command needs transformers ({error}); pip install 'vbrt[hf]'") from error
