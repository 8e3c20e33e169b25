"""Options that describe another machine's memory, for commands that plan."""

import argparse
from dataclasses import replace

from vbrt.config import Machine, VBConfig, load_config, parse_budget
from vbrt.errors import VBError

__all__ = ["Sizes", "add_machine", "machine_of", "sizes_of"]

Sizes = dict[str, int | None]
"""flag -> bytes; 0 for "none", None where it was not given."""


def add_machine(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Add --gpu-memory, --ram and --ssd; return their group."""
    machine = parser.add_argument_group("another machine than this one")
    machine.add_argument("--gpu-memory", metavar="SIZE", help='free memory of its GPU, e.g. 8GiB; "none" for no GPU')
    machine.add_argument("--ram", metavar="SIZE", help="its free host memory")
    machine.add_argument("--ssd", metavar="SIZE", help="free space on its drive; switches the ssd tier on")
    return machine


def sizes_of(args: argparse.Namespace) -> Sizes:
    """Return the sizes of the options. Raises VBError: not a size."""
    return {
        flag: _size(getattr(args, flag.lstrip("-").replace("-", "_")), flag)
        for flag in ("--gpu-memory", "--ram", "--ssd")
    }


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
        machine = replace(machine, gpu_total_bytes=gpu or None, gpu_free_bytes=gpu or None)
    if ram is not None:
        machine = replace(machine, cpu_total_bytes=ram, cpu_available_bytes=ram)
    if ssd is not None:
        machine = replace(machine, ssd_free_bytes=ssd)
    return machine
