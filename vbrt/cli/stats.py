"""`vbrt stats`: stats of the last `vbrt run` or `vbrt demo`, stored in a file."""

import argparse
import json
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vbrt.cli.options import add_command
from vbrt.cli.screen import complain, console_for_stdout
from vbrt.errors import MissingFileError, VBError
from vbrt.host.safe_files import expanded, home_folder, read_bounded, write_file
from vbrt.report.stats import Stats

__all__ = ["add", "keep_stats", "stats_path"]


def add(commands: Any) -> None:
    """Add `vbrt stats` to the subparsers `commands` of the command line."""
    parser = add_command(
        commands,
        "stats",
        _stats,
        help="show the stats of the last `vbrt run` or `vbrt demo`",
        examples="  vbrt stats\n  vbrt stats --json | jq .hit_rate\n"
        "  vbrt stats --experts model.layers.0.mlp.experts\n  vbrt stats saved.json\n",
    )
    parser.add_argument(
        "file",
        metavar="FILE",
        nargs="?",
        type=Path,
        help="JSON of Stats.to_dict() or of `vbrt run --json`; default: that of the last run",
    )
    parser.add_argument("--experts", metavar="LAYER", help="the routed experts of a layer, a row for each")
    parser.add_argument("--each", action="store_true", help="a row for every layer instead of one for each kind")
    parser.add_argument("--verbose", action="store_true", help="with captures, fusion, pages and loaded kernels")
    parser.add_argument("--json", action="store_true", help="as JSON")


def stats_path() -> Path:
    """Return the file of the last run's stats: $XDG_STATE_HOME/vbrt/last-stats.json, by default below
    ~/.local/state."""
    base = Path(os.environ.get("XDG_STATE_HOME", ""))
    if not base.is_absolute():  # unset, or invalid and so ignored, per the XDG base directory specification
        base = home_folder() / ".local/state"
    return base / "vbrt" / "last-stats.json"


def _stats(args: argparse.Namespace) -> int:
    path = args.file or stats_path()
    stats = _read_stats(path, given=args.file is not None)
    if args.experts:
        experts = stats.experts(args.experts)
        print(json.dumps([asdict(row) for row in experts.rows()], indent=2) if args.json else experts)
    elif args.json:
        print(json.dumps(stats.to_dict(), indent=2))
    else:
        console = console_for_stdout()
        table = stats.table(width=console.width, each=args.each, verbose=args.verbose)
        console.print(table, markup=False, highlight=False, soft_wrap=True)
    return 0


_MAX_STATS_BYTES = 256 << 20  # half a million layers


def _read_stats(path: Path, *, given: bool) -> Stats:
    try:
        data = json.loads(read_bounded(expanded(path), _MAX_STATS_BYTES).decode())
    except FileNotFoundError as error:
        hint = "expected JSON of Stats.to_dict()" if given else "`vbrt run` and `vbrt demo` leave their stats there"
        raise MissingFileError(f"{path}: no such file; {hint}") from error
    except OSError as error:
        raise VBError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise VBError(f"{path}: not valid JSON ({error}); expected that of Stats.to_dict()") from error
    if isinstance(data, dict) and "layers" not in data and "stats" in data:
        data = data["stats"]  # output of `vbrt run --json`
    try:
        return Stats.from_dict(data)
    except VBError as error:
        raise VBError(f"{path}: {error}") from error


def keep_stats(stats: Stats) -> None:
    """Store the stats for `vbrt stats`; an unwritable directory costs a warning, not the run."""
    path = stats_path()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_file(path, json.dumps(stats.to_dict()).encode(), mode=0o600)
    except OSError as error:
        complain("warning", f"{path}: the stats were not kept: {error.strerror or error}")
