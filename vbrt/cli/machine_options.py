"""Options that describe another machine's memory and speed, for commands that plan."""

import argparse
import re
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from vbrt.cli.options import memory_keys
from vbrt.config import Machine, VBConfig, assign, load_config, parse_budget
from vbrt.config.budgets import CONTEXT_BYTES
from vbrt.errors import VBError
from vbrt.estimation.advice.data_sheets import DataSheet, named_sheet
from vbrt.residency.byte_text import format_bytes

if TYPE_CHECKING:
    from vbrt.estimation.advice.machine_rates import Rates

__all__ = ["GpuSpeed", "Sizes", "add_machine", "gpu_share_of", "machine_of", "rate_of", "sizes_of", "speed_of"]

_RATE = re.compile(r"(\d+(?:\.\d+)?) ?(?:([MGT])i?B/s)?")
_TFLOPS = re.compile(r"(\d+(?:\.\d+)?) ?(?:([TP])(?:FLOPS|FLOP/s|flops))?")
_SCALES = {"M": 1e-3, "G": 1.0, "T": 1e3}

Sizes = dict[str, int | None]
"""flag -> bytes; 0 for "none", None where it was not given."""


def add_machine(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Add --gpu, --gpu-memory, --ram, --ssd and the rates of a GPU; return their group."""
    machine = parser.add_argument_group("another machine than this one")
    machine.add_argument("--gpu", metavar="NAME", help='its GPU: memory and speed from its data sheet, e.g. "RTX 3060"')
    machine.add_argument(
        "--gpu-memory",
        metavar="SIZE",
        help='most that the process takes of its GPU, pages and all else, e.g. 8GiB; "none" for no GPU',
    )
    machine.add_argument("--ram", metavar="SIZE", help="its free host memory")
    machine.add_argument("--ssd", metavar="SIZE", help="free space on its drive; switches the ssd tier on")
    machine.add_argument("--link", metavar="RATE", help="copies from its host memory to its GPU, pinned, e.g. 12GB/s")
    machine.add_argument("--memory", metavar="RATE", help="memory bandwidth of its GPU, e.g. 360GB/s")
    machine.add_argument("--tflops", metavar="RATE", help="dense bf16 products of its GPU with fp32 sums, e.g. 25.5")
    return machine


def sizes_of(args: argparse.Namespace) -> Sizes:
    """Return the sizes of the options; of a GPU, with CUDA's context.

    Raises VBError: not a size, too small for the context, or a GPU without a data sheet.
    """
    sizes = {
        flag: _size(getattr(args, flag.lstrip("-").replace("-", "_")), flag)
        for flag in ("--gpu-memory", "--ram", "--ssd")
    }
    share = sizes["--gpu-memory"]
    if args.gpu is not None and share is None:
        sizes["--gpu-memory"] = named_sheet(args.gpu).free_bytes + CONTEXT_BYTES
    elif share and share <= CONTEXT_BYTES:
        context = format_bytes(CONTEXT_BYTES)
        raise VBError(f"--gpu-memory {args.gpu_memory}: CUDA's context alone takes {context} of it; expected more")
    return sizes


def gpu_share_of(args: argparse.Namespace, config: VBConfig) -> VBConfig:
    """Return the config with the share of --gpu-memory, from which an estimate derives the budget, unless the config
    decides the budget, or does not run on one GPU for inference."""
    gpu, decided = config.tiers.gpu, config.gpu_memory is not None or config.budget is not None
    if args.gpu_memory in (None, "none") or decided or gpu.budget != "auto" or config.mode != "infer":
        return config
    if gpu.enabled is False or gpu.devices != "current":
        return config
    keys = {"gpu_memory": args.gpu_memory, "context": getattr(args, "context", None)}
    return assign(config, (), memory_keys(keys))


@dataclass(frozen=True, slots=True)
class GpuSpeed:
    """Speed of another machine's GPU as the options give it; each None where it was not given."""

    sheet: DataSheet | None
    given: dict[str, float]

    def __bool__(self) -> bool:
        return self.sheet is not None or bool(self.given)

    @property
    def link_gb_s(self) -> float | None:
        """H2D copies: as given, else of the data sheet."""
        return self.given.get("--link", None if self.sheet is None else self.sheet.link_gb_s)

    def rates(self, otherwise: "Rates | None" = None) -> "Rates | None":
        """Return the rates of the data sheet, else `otherwise`, else those that `vbrt tune --machine` has stored for a
        GPU, with what was given in their place; None: nothing was given.

        Raises VBError: some rates were given, and the rest is unknown.
        """
        from vbrt.estimation.advice.machine_rates import Rates, kept_rates, rates_of_sheet

        if not self:
            return None
        base = otherwise or kept_rates() if self.sheet is None else rates_of_sheet(self.sheet)
        named = {"--link": "link_gb_s", "--memory": "memory_gb_s", "--tflops": "tflops"}
        given = {named[flag]: value for flag, value in self.given.items()}
        if base is not None and base.link_gb_s:
            flags = ", ".join(flag.lstrip("-") for flag in self.given)
            return replace(base, **given, source=f"{base.source}, {flags} as given" if flags else base.source)
        missing = [flag for flag in named if flag not in self.given]
        if missing:
            raise VBError(
                f"{', '.join(self.given)}: the speed of a GPU is --link, --memory and --tflops; add "
                f"{' and '.join(missing)}, or name a GPU whose data sheet has the rest (--gpu)"
            )
        return Rates("a GPU", **given, source="as given")


def speed_of(args: argparse.Namespace) -> GpuSpeed:
    """Return the speed of the options. Raises VBError: not a rate, or a GPU without a data sheet."""
    given = {
        "--link": rate_of(args.link, "--link"),
        "--memory": rate_of(args.memory, "--memory"),
        "--tflops": _tflops(args.tflops),
    }
    sheet = None if args.gpu is None else named_sheet(args.gpu)
    return GpuSpeed(sheet, {flag: rate for flag, rate in given.items() if rate is not None})


def rate_of(text: str | None, flag: str) -> float | None:
    """Parse GB/s; None where it was not given. Raises VBError: not a rate."""
    match = _RATE.fullmatch((text or "").strip())
    if text is not None and (match is None or not float(match[1])):
        raise VBError(f"{flag} {text[:80]}: expected gigabytes a second, such as 50, 50GB/s or 1.8TB/s")
    return None if text is None else float(match[1]) * _SCALES[match[2] or "G"]


def _tflops(text: str | None) -> float | None:
    match = _TFLOPS.fullmatch((text or "").strip())
    if text is not None and (match is None or not float(match[1])):
        raise VBError(f"--tflops {text[:80]}: expected 10^12 operations a second, such as 25.5, 25.5TFLOPS or 2PFLOPS")
    return None if text is None else float(match[1]) * (1e3 if match[2] == "P" else 1.0)


def machine_of(sizes: Sizes, config: VBConfig) -> tuple[Machine, VBConfig]:
    """Return the machine of the options, and the config with an ssd tier if it has a drive."""
    from vbrt.model.machine_memory import this_machine

    if sizes["--ssd"] is not None:
        path = config.tiers.ssd.path or "~/.cache/vbrt/pages"
        config = load_config(config, tiers={"ssd": {"enabled": True, "path": path}})
    return _machine(this_machine(config), sizes), config


def _size(text: str | None, flag: str) -> int | None:
    """Parse a size in bytes; 0 for "none", None where it was not given."""
    if text is None:
        return None
    if text == "none" and flag == "--gpu-memory":
        return 0
    expected = "expected bytes, or a size such as 8GiB" + (', or "none"' if flag == "--gpu-memory" else "")
    try:
        budget = parse_budget(int(text) if text.isdecimal() else text, where=flag)
    except ValueError as error:  # ConfigError, or a number of thousands of digits
        raise VBError(f"{flag} {text[:80]}: {expected}") from error
    if budget.kind != "bytes":
        raise VBError(f"{flag} {text}: {expected}")
    return int(budget.amount)


def _machine(machine: Machine, sizes: Sizes) -> Machine:
    gpu, ram, ssd = sizes["--gpu-memory"], sizes["--ram"], sizes["--ssd"]
    if gpu is not None:
        machine = replace(machine, gpu_total_bytes=gpu or None, gpu_free_bytes=gpu - CONTEXT_BYTES if gpu else None)
    if ram is not None:
        machine = replace(machine, cpu_total_bytes=ram, cpu_available_bytes=ram)
    if ssd is not None:
        machine = replace(machine, ssd_free_bytes=ssd)
    return machine
