"""`vbrt report`: measures this machine beside data sheet and cost model, as a table and as JSON to share."""

import argparse
import json
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from vbrt.cli.options import add_command, integration, writing
from vbrt.cli.screen import (
    add_row,
    complain,
    console_for_stdout,
    table_of,
    warnings_as_lines,
    without_warnings_of_wrap,
    working,
)
from vbrt.errors import VBError, describe_os_error
from vbrt.host.safe_files import check_writable, expanded, home_folder, write_file
from vbrt.residency.byte_text import format_bytes

if TYPE_CHECKING:
    from vbrt.estimation.advice.machine_report import Figure, MachineReport

__all__ = ["add"]


def add(commands: argparse._SubParsersAction) -> None:
    """Add `vbrt report` to the subparsers `commands` of the command line."""
    parser = add_command(
        commands,
        "report",
        _report,
        help="measure this machine: link, memory, kernels beside torch's, tokens of an 8B-shaped model",
        text="Each\nfigure is compared with its prediction: rates with the GPU's data sheet, all else with the cost "
        "model.\nTakes a minute, on an idle machine. Exits with 1 if something failed.",
        examples="  vbrt report\n  vbrt report --json report.json --drive /mnt/nvme\n  vbrt report --quick\n",
    )
    parser.add_argument("--quick", action="store_true", help="rates and a few linear layers only")
    parser.add_argument("--drive", metavar="DIR", type=Path, help="also measure the drive of this directory: 256 MiB")
    parser.add_argument(
        "--json",
        metavar="FILE",
        type=Path,
        help="also write all figures as JSON, to share: no name of host or user in it",
    )


def _report(args: argparse.Namespace) -> int:
    if args.json is not None:
        with writing("--json", args.json):
            check_writable(args.json)
    drive = None if args.drive is None else _drive(args.drive)
    with working("importing torch") as say, warnings_as_lines(), without_warnings_of_wrap():
        from vbrt.estimation.advice.machine_report import MachineReport, describe_machine, measure_machine

        report = MachineReport(describe_machine())
        for part in measure_machine(report, drive=drive, quick=args.quick):
            say(f"measuring {part}")
        if not args.quick:
            for part in _tokens(report):
                say(f"measuring {part}")
    _show(console_for_stdout(), report)
    if args.json is not None:
        with writing("--json", args.json):
            write_file(args.json, _to_share(report).encode())
    return int(any(figure.failed for figure in report.figures))


def _to_share(report: "MachineReport") -> str:
    """Return the report as JSON; in errors' texts the home directory, which names the user, is "~"."""
    text, home = json.dumps(report.to_dict(), indent=1), json.dumps(str(home_folder()))[1:-1]
    return text.replace(home, "~") if len(home) > 1 else text


def _drive(path: Path) -> Path:
    """Return the directory. Raises VBError: no file can be created in it."""
    try:
        path = expanded(path)
        with tempfile.TemporaryFile(dir=path):
            return path
    except OSError as error:
        raise VBError(
            f"--drive {path}: cannot be written: {describe_os_error(error)}; name a directory for a temporary file"
        ) from error


def _tokens(report: "MachineReport") -> Iterator[str]:
    """Measure tokens where transformers is installed; else note that it is not."""
    try:
        token_times = integration("token_times")
    except VBError as error:
        report.notes.append(f"tokens of an 8B-shaped model: not measured, {error}")
        return
    yield from token_times.measure_tokens(report)


# -- printing ---------------------------------------------------------------------------------------------------------


def _show(console: Console, report: "MachineReport") -> None:
    _show_machine(console, report)
    of = {part: [figure for figure in report.figures if figure.part == part] for part in _TABLES}
    for part, heads in _TABLES.items():
        measured = [figure for figure in of[part] if figure.value is not None]
        if measured:
            table = table_of(*heads)
            for figure in measured:
                add_row(table, *_ROWS[part](figure))
            console.print()
            console.print(table)
    for line in _remarks(report.figures):
        console.print(line, soft_wrap=True)
    console.print()
    for by in dict.fromkeys(figure.by for figure in report.figures if figure.by):
        console.print(f"predicted by the {by}; measured/predicted: ratio", style="dim", soft_wrap=True)
    if report.machine["computes_on"] == "gpu" and report.sheet is None:
        console.print("no data sheet of this GPU: its rates have no prediction", style="dim", soft_wrap=True)
    for note in report.notes:
        complain("note", note)


_SPEEDS = (">ours µs", ">torch µs", ">torch/ours", ">predicted µs", ">ratio")
_TABLES = {
    "rates": ("rates", ">measured", ">predicted", ">ratio"),
    "linear": ("linear layers in nvfp4, out x in", *_SPEEDS),
    "experts": ("routed experts in nvfp4, beside torch's expert by expert", *_SPEEDS),
    "token": ("a token of an 8B-shaped model", ">ms", ">tokens/s", ">predicted ms", ">ratio"),
}


def _show_machine(console: Console, report: "MachineReport") -> None:
    about = report.machine
    if about["computes_on"] == "gpu":
        major, minor = about["capability"]
        driver = f", driver {about['driver']}" if about["driver"] else ""
        memory = format_bytes(about["gpu_memory_bytes"])
        console.print(
            f"{about['gpu']}, sm_{major}{minor}, {about['multiprocessors']} multiprocessors, {memory}{driver}",
            soft_wrap=True,
        )
    memory = format_bytes(about["memory_bytes"])
    console.print(f"{about['cpu']}, {about['cores']} cores, {about['threads']} threads, {memory}", soft_wrap=True)
    used = ", ".join(f"{name} {version}" for name, version in about["versions"].items() if version)
    console.print(f"{about['system']}: {used}", soft_wrap=True)


def _rate_row(figure: "Figure") -> tuple[str, ...]:
    unit = f" {figure.unit}"
    predicted = "" if figure.predicted is None else _number(figure.predicted) + unit
    return figure.name, _number(figure.value) + unit, predicted, _ratio(figure)


def _speed_row(figure: "Figure") -> tuple[str, ...]:
    of = f"{figure.torch / figure.value:.2f}×"
    return figure.name, _number(figure.value), _number(figure.torch), of, _number(figure.predicted), _ratio(figure)


def _token_row(figure: "Figure") -> tuple[str, ...]:
    return figure.name, f"{figure.value:.2f}", f"{1e3 / figure.value:.1f}", f"{figure.predicted:.2f}", _ratio(figure)


_ROWS = {"rates": _rate_row, "linear": _speed_row, "experts": _speed_row, "token": _token_row}


def _remarks(figures: "Iterable[Figure]") -> Iterator[str]:
    for figure in figures:
        if figure.note:
            yield f"{figure.name}: {figure.note}"


def _number(value: float) -> str:
    return f"{value:.3g}" if value < 1000 else f"{value:,.0f}"


def _ratio(figure: "Figure") -> str:
    return "" if figure.ratio is None else f"{figure.ratio:.2f}"
