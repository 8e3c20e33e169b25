"""`vbrt tune`: searches faster launch configurations on this machine's GPU, and stores them."""

import argparse
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from vbrt.cli.options import add_command, add_config, add_model, config_of, integration, locate_model, number, numbers
from vbrt.cli.rank_tables import measure_ranks
from vbrt.cli.screen import add_row, console_for_stdout, table_of, warnings_as_lines, working
from vbrt.errors import VBError, describe_os_error

if TYPE_CHECKING:
    from rich.console import Console

    from vbrt.kernels.cuda.tuning import Found

__all__ = ["add"]


def add(commands: Any) -> None:
    """Add `vbrt tune` to the subparsers `commands` of the command line."""
    parser = add_command(
        commands,
        "tune",
        _tune,
        help="search faster launch configurations on this machine's GPU, and store them",
        text="For the\nlayers and experts of a model in 4 and 8 bits; seconds a shape, on an idle GPU. No weights "
        "are\nneeded. Each result is kept as it comes, and later processes use it by themselves.\n\n"
        "R2 WK16 ahead: two tiles of rows a warp, 16 warps along K, the next tile is read ahead.\n"
        "64x128/2 r3: tokens by rows of a program, K in two parts, three stages in shared memory.\n"
        "G2: experts' pairs by 16. matmul: decoded, then the vendor's matmul.",
        examples="  vbrt tune ./Llama-3.1-8B\n"
        "  vbrt tune ./config.json --tokens 4 --set weights.format=mxfp4\n"
        "  vbrt tune --show\n"
        "  vbrt tune --machine\n"
        "  torchrun --nproc-per-node 2 -m vbrt tune --machine\n",
    )
    add_model(parser, "a transformers model directory, a config.json", metavar="MODEL|HF_CONFIG", nargs="?")
    add_config(parser)
    parser.add_argument(
        "--tokens",
        metavar="N,N",
        type=numbers,
        default=(1, 16, 64, 256),
        help="numbers of tokens, up to 4096; each stands for those down to half of it (1,16,64,256)",
    )
    parser.add_argument("--device", metavar="N", type=number, default=0, help="the CUDA device (0)")
    parser.add_argument(
        "--machine",
        action="store_true",
        help="measure this machine instead, for vbrt advise and plan: seconds; started by torchrun, its ranks together",
    )
    parser.add_argument(
        "--show",
        action="store_true",
        help="show the stored configurations and their file: of this GPU, or of all where there is none",
    )


_TUNE_LINE = "{:>14} {:6} {:>6} {:>13} {:>7} {:>13} {:>7} {:>6}"  # 79 columns


def _tune(args: argparse.Namespace) -> int:
    if args.machine:
        if args.show or args.model is not None:
            other = "--show" if args.show else args.model
            raise VBError(f"tune --machine measures this machine and nothing else; leave {other} out")
        return _measure_machine()
    config = config_of(args)
    if args.model is None and not args.show:
        raise VBError("tune: no model; expected a model directory or a config.json, or --show")
    if args.model is not None and not args.show:
        locate_model(args, "config")
    with working("importing torch") as say, warnings_as_lines():
        from vbrt.kernels.cuda import tuned_configs, tuning

        if args.show and not tuned_configs.has_device():
            say.stop()
            _show_all(tuned_configs)
            return 0
        tuning.check(args.tokens, args.device)
        if args.show:
            say.stop()
            _show_tuned(tuned_configs, args.device)
            return 0
        say("importing transformers")
        hf_configs = integration("hf_configs")
        from vbrt.model.planner import make_plan

        say(f"reading {args.model}")
        config = replace(config, gpu_memory=None, context=None)  # launches are of shapes, whatever the budget
        plan = make_plan(hf_configs.meta_model(args.model), config)
        say.stop()
        rows = _TuneRows(len(tuning.cases(plan, tokens=args.tokens, device=args.device)))
        try:
            tuning.tune(plan, tokens=args.tokens, device=args.device, report=rows)
        finally:  # also report an interrupted search
            rows.end(tuned_configs.tuning_file(args.device))
    return 0


def _measure_machine() -> int:
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        measure_ranks(console_for_stdout())
        return 0
    with working("importing torch") as say:
        from vbrt.estimation.advice.machine_rates import keep_rates, measure_rates, rates_file

        say.stop()  # measuring has its own bar
        found = measure_rates()
    console = console_for_stdout()
    link = f"link {found.link_gb_s:.1f} GB/s, " if found.link_gb_s else ""
    console.print(f"{found.name}: {link}memory {found.memory_gb_s:.0f} GB/s")
    console.print(
        f"products {found.tflops:.3g} TFLOP/s, {found.launch_us:.1f} µs a launch, drive {found.drive_gb_s:.1f} GB/s"
    )
    if found.few_tflops:
        few = f"{found.few_tflops:.3g} TFLOP/s, with 4-bit matrices {found.few_decoded_tflops:.3g}"
        console.print(f"products of few rows, as of experts in prompts: {few}")
    if found.link_gb_s:
        console.print(f"weights computed by the CPU where they lie: {found.experts_gb_s:.1f} GB/s of their pages")
    try:
        keep_rates(found)
    except OSError as error:
        raise VBError(f"{rates_file()}: the rates were not kept: {describe_os_error(error)}") from error
    console.print(f"kept in {rates_file()}", soft_wrap=True)
    return 0


class _TuneRows:
    """Writes a line per result as it arrives."""

    def __init__(self, todo: int) -> None:
        self._todo, self._console, self._done = todo, console_for_stdout(), 0

    def __call__(self, found: "Found") -> None:
        if not self._done:
            self._line("out x in", "format", "tokens", "table", "µs", "found", "µs", "gain")
        case, same = found.case, found.launch == found.table
        self._line(
            f"{case.n} x {case.k}",
            case.format,
            case.tokens,
            _launch(found.table),
            f"{found.table_us:.2f}",
            "same" if same else _launch(found.launch),
            f"{found.us:.2f}",
            "" if same else f"{100 * (found.table_us / found.us - 1):.1f} %",
        )
        self._done += 1

    def end(self, path: Path) -> None:
        if self._done:
            self._console.print(f"\n{self._done} of {self._todo} kept in {path}", soft_wrap=True)

    def _line(self, *cells: object) -> None:
        self._console.print(_TUNE_LINE.format(*cells).rstrip(), soft_wrap=True)


def _launch(launch: Any) -> str:
    """A configuration in at most 13 columns."""
    fields = launch._asdict()
    if "prefetch" in fields:
        return f"R{launch.row_tiles} WK{launch.k_warps}{' ahead' if launch.prefetch else ''}"
    if "groups" in fields:
        return f"R{launch.row_tiles} G{launch.groups} WK{launch.k_warps}"
    if "side_by_side" in fields:
        return f"R{launch.row_tiles} WK{launch.k_warps} +{launch.ahead}"
    if "splits" in fields:
        rows = 16 * launch.warps * fields.get("row_tiles", 1)
        return f"{launch.tokens}x{rows}/{launch.splits} r{launch.ring}"
    if "ordered" in fields:
        return f"{launch.tokens}x128{' perm' if launch.ordered else ''}"
    return f"{launch.block} pairs" if fields else "matmul"


_UNITS = {
    "linear": (16, 128),
    "table": (16, 64),
    "table wide": (16, 64),
    "whole": (16, 64),
}  # outputs and inputs that a key counts


def _show_tuned(tuned_configs: ModuleType, device: int) -> None:
    """Show the stored configurations of a device, for shapes in whole tiles; of experts by the numbers of their key."""
    path, kept = tuned_configs.tuning_file(device), tuned_configs.tuned(device)
    console = console_for_stdout()
    _print_launches(console, kept)
    what = f"{len(kept)} kept in" if path.exists() else "nothing is kept yet; it would be in"
    console.print(f"{what} {path}", soft_wrap=True)


def _show_all(tuned_configs: ModuleType) -> None:
    """Show the stored configurations of every GPU, where none is at hand."""
    console, found = console_for_stdout(), tuned_configs.stored()
    for path, identity, kept in found:
        console.print(f"{identity['gpu']}, Triton {identity['triton']}")
        _print_launches(console, kept)
        console.print(f"{len(kept)} kept in {path}", soft_wrap=True)
    if not found:
        console.print(f"nothing is kept yet; it would be in {tuned_configs.tuning_folder()}", soft_wrap=True)


def _print_launches(console: "Console", kept: Mapping[tuple[Any, ...], Any]) -> None:
    if kept:
        table = table_of("family", ">tokens or pairs, up to", ">shape", "configuration")
        for (family, tokens, *shape), launch in sorted(kept.items(), key=lambda item: item[0]):
            numbers = (number * unit for number, unit in zip(shape, _UNITS.get(family, [1] * len(shape)), strict=True))
            add_row(table, family, f"{tokens}", " x ".join(map(str, numbers)), _launch(launch))
        console.print(table)
        console.print()
