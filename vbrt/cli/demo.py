"""`vbrt demo`: a model run whole, and in a quarter of its memory by accelerate and by vbrt."""

import argparse
import contextlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from vbrt.cli.options import add_command, add_config, integration, positive
from vbrt.cli.screen import add_row, console_for_stdout, table_of
from vbrt.cli.stats import keep_stats
from vbrt.config import VBConfig, assign, load_config
from vbrt.errors import VBError
from vbrt.report.progress import Progress
from vbrt.report.stats import Stats
from vbrt.residency.plan import format_bytes

__all__ = ["add"]

_WHOLE, _PEER, _OURS = "whole", "accelerate", "vbrt"
_SHARE = 4  # a quarter of the model
_PAGES = {"cpu": 0.8, "gpu": 0.65}  # of that for pages, the rest for everything else: libraries' workspace on a GPU
_ROOM = 2.2  # files of the model and of pages, in sizes of the model


def add(commands: Any) -> None:
    """Add `vbrt demo` to the subparsers `commands` of the command line."""
    parser = add_command(
        commands,
        "demo",
        _demo,
        help="run a model in a quarter of its memory, beside the plain model and accelerate's offloading",
        text="Each runs in a\nprocess of its own; memory is what that process takes for the model. The files are "
        "temporary. Exits\nwith 1 if a result that should be the same is not.",
        examples="  vbrt demo\n  vbrt demo --gb 4 --directory /mnt/nvme\n  vbrt demo --config fp4\n",
    )
    parser.add_argument("--gb", type=_size, default=1.0, help="size of the model (default: 1)")
    parser.add_argument("--tokens", type=positive, default=12, help="tokens to generate (default: 12)")
    parser.add_argument("--directory", metavar="DIR", help="for temporary files (default: the system's)")
    add_config(parser, "cpu-ssd, on a GPU exact: both keep every bit")


def _size(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 < float(text) < 1e4:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text!r}; expected GB, such as 1 or 0.5")


@dataclass(slots=True)
class _Shown:
    """What the processes have found."""

    device: str
    threads: int
    model: dict[str, int]
    runs: dict[str, dict[str, Any]] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)

    @property
    def quarter(self) -> int:
        """Bytes that the offloaded and the wrapped model may take."""
        return self.model["bytes"] // _SHARE

    def same(self, run: str) -> bool:
        """True if a run computed the bits of the whole model."""
        return self.runs[run]["digest"] == self.runs[_WHOLE]["digest"]

    def memory(self, run: str) -> int:
        """Return the bytes that count: of the GPU if it computes."""
        return self.runs[run]["peak"]["gpu" if self.device != "cpu" else "resident"]


def _demo(args: argparse.Namespace) -> int:
    named = load_config(args.config) if args.config or args.settings else None
    config = assign(named, args.settings) if named is not None else None
    with _scratch(args) as scratch:
        shown = _run(args, config, scratch)
    console = console_for_stdout()
    failed = _print_runs(console, shown, config)
    stats = Stats.from_dict(shown.runs[_OURS]["stats"])
    console.print(f"\nwhat each tier did\n{stats.table(width=console.width)}", soft_wrap=True)
    keep_stats(stats)
    return int(failed)


@contextlib.contextmanager
def _scratch(args: argparse.Namespace) -> Iterator[Path]:
    """Make a directory for the files of the model and the pages. Raises VBError: no such place, or too little room."""
    try:
        with tempfile.TemporaryDirectory(prefix="vbrt-demo-", dir=args.directory) as directory:
            free, need = shutil.disk_usage(directory).free, _ROOM * args.gb * 1e9
            if free < need:
                raise VBError(
                    f"{directory}: {format_bytes(free)} free, the demo needs {format_bytes(need)}; "
                    "name another --directory, or a smaller model by --gb"
                )
            yield Path(directory)
    except OSError as error:
        raise VBError(f"{error.filename or args.directory}: {error.strerror}; name another --directory") from error


# -- running ----------------------------------------------------------------------------------------------------------


def _run(args: argparse.Namespace, config: VBConfig | None, scratch: Path) -> _Shown:
    """Write the model and run it in each way, one after the other."""
    absent = {} if importlib.util.find_spec("accelerate") else {_PEER: "not installed: pip install accelerate"}
    with Progress("demo", 3 + (not absent), unit="steps") as work:
        work.at(f"writing a model of {args.gb:g} GB")
        showcase = integration("showcase")
        import torch

        from vbrt.host import accelerator

        device = accelerator.TYPE if accelerator.is_used() else "cpu"
        made = showcase.make(scratch / "model", device, args.gb)
        shown = _Shown(device, torch.get_num_threads(), made, absent=absent)
        work.done()
        given = {"device": device, "directory": str(scratch / "model"), "tokens": args.tokens}
        ours = _config(config, shown, scratch / "pages")
        offload = {"budget": shown.quarter, "scratch": str(scratch / "offload")}
        for run, more in {_WHOLE: {}, _PEER: offload, _OURS: {"config": ours.to_dict()}}.items():
            if run in absent:
                continue
            work.at(run)
            try:
                shown.runs[run] = _ask({"run": run, **given, **more})
            except VBError as error:
                if run != _PEER:
                    raise
                absent[run] = str(error)  # the table says it
            work.done()
    return shown


def _ask(asked: dict[str, Any]) -> dict[str, Any]:
    """Have a process of its own run the model, and return what it found. Raises VBError: it ended without an answer."""
    waits = {"OMP_WAIT_POLICY": "passive"}  # threads that spin for work take the cores from those that read pages
    command = [sys.executable, "-m", "vbrt.integrations.showcase", json.dumps(asked)]
    environment = waits | dict(os.environ) | {"PYTHONWARNINGS": "ignore"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode == 0:
        return json.loads(done.stdout.splitlines()[-1])
    why = [line.strip() for line in done.stderr.splitlines() if line.strip()][-1:]
    if done.returncode < 0:
        why = [f"signal {-done.returncode}"]
        why += ["the system was out of memory, it seems"] if done.returncode == -signal.SIGKILL else []
    raise VBError(f"the process for {asked['run']!r} ended: {'; '.join(why) or f'exit code {done.returncode}'}")


def _config(config: VBConfig | None, shown: _Shown, pages: Path) -> VBConfig:
    """Return the config with room for a quarter of the model where it computes, all else below."""
    budget = int(_PAGES["cpu" if shown.device == "cpu" else "gpu"] * shown.quarter)
    if shown.device != "cpu":
        tiers = {"gpu": {"enabled": True, "budget": budget}, "cpu": {"enabled": True}, "ssd": {"enabled": False}}
        config = config or load_config("exact", compute={"captures": False})  # recorded steps round otherwise
    else:
        tiers = {
            "gpu": {"enabled": False},
            "cpu": {"enabled": True, "budget": budget, "pinned": False},
            "ssd": {"enabled": True, "budget": "auto", "path": str(pages)},
        }
    return load_config(config or "cpu-ssd", tiers=tiers)


# -- printing ---------------------------------------------------------------------------------------------------------


def _print_runs(console: Console, shown: _Shown, config: VBConfig | None) -> bool:
    """Print a row for each way to run the model, and what follows; return True if bits that must agree do not."""
    size, count = format_bytes(shown.model["bytes"]), shown.model["parameters"] / 1e6
    where = "on the GPU" if shown.device != "cpu" else f"by {shown.threads} threads"
    console.print(f"a Llama of {size}, {count:.0f} M random weights, one token after the other {where}\n")
    memory = "GPU memory" if shown.device != "cpu" else "memory"
    table = table_of("", f">{memory}", ">of it mapped", ">load s", ">ms a token", "logits")
    for run, name in _names(shown).items():
        if run in shown.absent:
            add_row(table, name, "–", "–", "–", "–", shown.absent[run])
        else:
            _add_run(table, name, shown, run)
    console.print(table)
    lossless = config is None or config.weights.lossless
    failed = lossless and not shown.same(_OURS)
    console.print(f"\n{_verdict(shown)}", style="bold red" if failed else "bold green", soft_wrap=True)
    if shown.device == "cpu":
        console.print(
            "memory: the most that was resident for the model. What is mapped from its files the system may drop\n"
            "and read again; files that were just written are read from the system's cache, not from the drive.",
            soft_wrap=True,
        )
    return failed


def _names(shown: _Shown) -> dict[str, str]:
    quarter = format_bytes(shown.quarter)
    return {_WHOLE: "the whole model", _PEER: f"accelerate, {quarter}", _OURS: f"vbrt, {quarter}"}


def _add_run(table: Any, name: str, shown: _Shown, run: str) -> None:
    found = shown.runs[run]
    digest = found["digest"][:12]
    bits = digest if run == _WHOLE else f"{digest}, {'the same bits' if shown.same(run) else 'other bits'}"
    peak = found["peak"]
    mapped = format_bytes(peak["mapped"]) if shown.device == "cpu" and "mapped" in peak else "–"
    times = (f"{found['load_s']:.1f}", f"{found['token_s'] * 1e3:.0f}")
    add_row(table, name, format_bytes(shown.memory(run)), mapped, *times, bits)


def _verdict(shown: _Shown) -> str:
    """Say what vbrt takes of the memory and the time of the others, whichever is less."""
    ours, whole = shown.runs[_OURS], shown.runs[_WHOLE]
    share = shown.memory(_OURS) / max(1, shown.memory(_WHOLE))
    bits = "bit for bit" if shown.same(_OURS) else _agreeing(ours["tokens"], whole["tokens"])
    slower = ours["token_s"] / whole["token_s"]
    text = f"vbrt: {share:.0%} of the memory, the same answer {bits}, {slower:.1f} times the time of the whole model"
    if not shown.same(_OURS):
        text = text.replace("the same answer ", "")
    if _PEER in shown.runs:
        gain = shown.runs[_PEER]["token_s"] / ours["token_s"]
        text += f"; accelerate takes {gain:.1f} times as long as vbrt"
        text += "" if gain >= 1 else ": less, on this machine"
    return text


def _agreeing(one: list[int], other: list[int]) -> str:
    same = next((at for at, (a, b) in enumerate(zip(one, other, strict=True)) if a != b), len(one))
    return f"other bits, the first {same} of {len(one)} tokens the same"
