"""`vbrt demo`: a language model run whole, and in a third of its memory by accelerate and by vbrt, in turns."""

import argparse
import contextlib
import importlib.util
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console

from vbrt.cli.options import add_command, add_config, integration, positive
from vbrt.cli.screen import add_row, complain, console_for_stdout, table_of
from vbrt.cli.stats import keep_stats
from vbrt.config import VBConfig, assign, load_config
from vbrt.errors import VBError
from vbrt.integrations.packaged_models import INSTALL, SMOLLM2, packaged_model
from vbrt.report.progress import Progress
from vbrt.report.stats import Stats
from vbrt.residency.plan import format_bytes

__all__ = ["add"]

_QUESTION = "What is the capital of France, and what is it known for?"
_WHOLE, _PEER, _EXACT, _FP4, _GIVEN = "whole", "accelerate", "vbrt exact", "vbrt fp4", "vbrt"
_SHARE = 3  # a third of the model
_GPU_PAGES = 0.65  # of that for pages, the rest for libraries' workspace
_WORKSPACE = 24 << 20  # of a process on a CPU: activations, threads, heap
_LEAST_PAGES = 0.2  # of what the embedding table leaves of a third, for small models
_ROOM = 3.5  # files of the model, of accelerate and of pages, in sizes of the model
_SMOLLM2_GB, _RANDOM_GB = 0.27, 0.5
_ROUNDS, _TURN = 3, 5  # turns of each contender, and their tokens
_COLD_ROUNDS, _COLD_TURN = 2, 4


def add(commands: Any) -> None:
    """Add `vbrt demo` to the subparsers `commands` of the command line."""
    parser = add_command(
        commands,
        "demo",
        _demo,
        help="run a language model in a third of its memory, beside the whole model and accelerate's offloading",
        text="Each runs in a\nprocess of its own, in turns; memory is what that process takes for the model. Files are "
        f"temporary.\nThe model is SmolLM2-135M-Instruct ({INSTALL.partition(' &&')[0]}).\n"
        "Exits with 1 if a result that should be the same is not.",
        examples="  vbrt demo\n  vbrt demo --gb 4 --directory /mnt/nvme\n  vbrt demo --config nf4\n",
    )
    parser.add_argument(
        "--gb", type=_size, help=f"a model of random weights of this size (default: SmolLM2, or {_RANDOM_GB:g})"
    )
    parser.add_argument("--tokens", type=positive, default=16, help="tokens of the answer (default: 16)")
    parser.add_argument("--directory", metavar="DIR", help="for temporary files (default: the system's)")
    add_config(parser, "two runs, one that keeps every bit and fp4")


def _size(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 < float(text) < 1e4:
            return float(text)
    raise argparse.ArgumentTypeError(f"{text!r}; expected GB, such as 1 or 0.5")


def _demo(args: argparse.Namespace) -> int:
    named = load_config(args.config) if args.config or args.settings else None
    config = assign(named, args.settings) if named is not None else None
    gigabytes = _gigabytes(args.gb)
    with _scratch(args.directory, gigabytes or _SMOLLM2_GB) as scratch:
        shown = _run(scratch, gigabytes, args.tokens, config)
    failed = _print_runs(console_for_stdout(), shown)
    keep_stats(Stats.from_dict(shown.runs[shown.ours].stats))
    return int(failed)


def _gigabytes(asked: float | None) -> float | None:
    """Return the size of a random model; None for SmolLM2."""
    if asked is not None:
        return asked
    try:
        packaged_model(SMOLLM2)
    except VBError as error:
        complain("note", f"{error}; until then a model of random weights runs")
        return _RANDOM_GB
    if importlib.util.find_spec("gguf") is None:
        complain("note", f"{SMOLLM2} is read by the package gguf: {INSTALL}; until then a model of random weights runs")
        return _RANDOM_GB
    return None


@contextlib.contextmanager
def _scratch(directory: str | None, gigabytes: float) -> Iterator[Path]:
    """Make a directory for the files of the model and the pages. Raises VBError: no such place, or too little room."""
    try:
        with tempfile.TemporaryDirectory(prefix="vbrt-demo-", dir=directory) as made:
            free, need = shutil.disk_usage(made).free, _ROOM * gigabytes * 1e9
            if free < need:
                raise VBError(
                    f"{made}: {format_bytes(free)} free, the demo needs {format_bytes(need)}; "
                    "name another --directory, or a smaller model by --gb"
                )
            yield Path(made)
    except OSError as error:
        raise VBError(f"{error.filename or directory}: {error.strerror}; name another --directory") from error


# -- running ----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _Run:
    """Measurements of one contender: seconds to load, and of tokens, also cold; `kl` in nats a token."""

    lossless: bool
    load_s: float = 0.0
    tokens: list[int] = field(default_factory=list)
    digest: str = ""
    spans: list[float] = field(default_factory=list)
    cold: list[float] = field(default_factory=list)
    peak: dict[str, int] = field(default_factory=dict)
    stats: dict[str, Any] | None = None
    kl: float | None = None

    @property
    def token_s(self) -> float:
        """Median seconds of a token."""
        return statistics.median(self.spans)

    @property
    def cold_s(self) -> float | None:
        """Median seconds of a token whose weights the page cache does not have."""
        return statistics.median(self.cold) if self.cold else None


@dataclass(slots=True)
class _Shown:
    """Results of all contenders."""

    device: str
    threads: int
    model: dict[str, Any]
    ours: str  # the contender that the last line is about
    runs: dict[str, _Run] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    stays_cached: bool = False

    @property
    def budget(self) -> int:
        """Bytes that the offloaded and the wrapped model may take."""
        return self.model["bytes"] // _SHARE

    def same(self, run: str) -> bool:
        """True if a run computed the bits of the whole model."""
        return self.runs[run].digest == self.runs[_WHOLE].digest

    def memory(self, run: str) -> int:
        """Return the bytes that count: of the GPU if it computes."""
        return self.runs[run].peak["gpu" if self.device != "cpu" else "resident"]


def _run(scratch: Path, gigabytes: float | None, tokens: int, config: VBConfig | None) -> _Shown:
    """Write the model, and have the contenders run it in turns."""
    absent = {} if importlib.util.find_spec("accelerate") else {_PEER: "not installed: pip install accelerate"}
    ours = [_GIVEN] if config is not None else [_EXACT, _FP4]
    names = [name for name in (_WHOLE, _PEER, *ours) if name not in absent]
    with contextlib.ExitStack() as stack, Progress("demo", 5, unit="steps") as work:
        work.at("importing torch and transformers, decoding the model")
        processes = {name: stack.enter_context(_Process(name, scratch / f"{name}.log")) for name in names}
        showcase = integration("showcase")
        import torch

        from vbrt.host import accelerator

        device = accelerator.TYPE if accelerator.is_used() else "cpu"
        model = scratch / "model"
        made = showcase.make_random(model, device, gigabytes) if gigabytes else showcase.make_smollm2(model, _QUESTION)
        shown = _Shown(device, torch.get_num_threads(), made, ours[0], absent=absent)
        for name, process in processes.items():
            given, lossless = _given(name, shown, config, scratch / name)
            shown.runs[name] = _Run(lossless)
            process.say({"device": device, "directory": str(model), "prompt": made["prompt"], **given})
        turns = _Turns(processes, shown)
        turns.warm_up(scratch / "warm")
        work.done()
        _measure(shown, turns, scratch, tokens, work)
        if not gigabytes:
            shown.texts = {name: showcase.text_of(model, run.tokens) for name, run in shown.runs.items()}
    return shown


def _given(name: str, shown: _Shown, config: VBConfig | None, scratch: Path) -> tuple[dict[str, Any], bool]:
    """Return the arguments of a contender, and True if it is to give the whole model's bits."""
    if name == _WHOLE:
        return {"run": "whole"}, True
    if name == _PEER:
        return {"run": "accelerate", "budget": shown.budget, "scratch": str(scratch)}, False
    ours = _config(name, config, shown, scratch)
    return {"run": "vbrt", "config": ours.to_dict()}, ours.weights.lossless


def _config(name: str, config: VBConfig | None, shown: _Shown, pages: Path) -> VBConfig:
    """Return the config of one of ours: but for fp4, with room for a third of the model where it computes."""
    on_cpu = shown.device == "cpu"
    if name == _FP4:  # as much as 4 bits take
        return load_config("fp4", tiers={"gpu": {"enabled": not on_cpu}, "cpu": {"pinned": not on_cpu}})
    if not on_cpu:
        tiers = {"gpu": {"enabled": True, "budget": int(_GPU_PAGES * shown.budget)}, "ssd": {"enabled": False}}
        given = {} if config else {"weights": {"embeddings": True, "keep_head": False}}  # a fifth of a small model
        return load_config(config or "exact", tiers=tiers, **given)
    room = shown.budget - shown.model["table_bytes"]  # which stays: to write it as a page would double the peak
    tiers = {
        "gpu": {"enabled": False},
        "cpu": {"enabled": True, "budget": int(max(_LEAST_PAGES * room, room - _WORKSPACE)), "pinned": False},
        "ssd": {"enabled": True, "budget": "auto", "path": str(pages)},
    }
    return load_config(config or "cpu-ssd", tiers=tiers)  # a CPU multiplies dense weights fastest


class _Turns:
    """Asks contenders one after the other; accelerate's failure is its result, that of another an error."""

    def __init__(self, processes: dict[str, "_Process"], shown: _Shown) -> None:
        self._processes, self._shown = processes, shown

    def warm_up(self, scratch: Path) -> None:
        """Have all import and run what they need, at once."""
        for name, process in self._processes.items():
            process.say(["warm_up", {"directory": str(scratch / name)}])
        list(self._answers(list(self._processes)))

    def ask(self, names: list[str], method: str, **given: Any) -> Iterator[tuple[_Run, dict[str, Any]]]:
        """Yield the contenders' runs and answers. Raises VBError: a process ended."""
        for name in names:
            if name in self._shown.runs:
                self._processes[name].say([method, given])
                yield from self._answers([name])

    def _answers(self, names: list[str]) -> Iterator[tuple[_Run, dict[str, Any]]]:
        for name in names:
            try:
                found = self._processes[name].answer()
            except VBError as error:
                if name != _PEER:
                    raise
                self._shown.absent[name] = str(error)
                del self._shown.runs[name]
                continue
            yield self._shown.runs[name], found


def _measure(shown: _Shown, turns: _Turns, scratch: Path, tokens: int, work: Progress) -> None:
    names, logits, files = list(shown.runs), str(scratch / "logits.pt"), [str(scratch)]
    work.at("loading")
    for run, found in turns.ask(names, "load", directories=files):
        run.load_s = found["load_s"]
    work.done()
    work.at("answering")
    for name in names:  # the first pass learns the order of layers, or maps files
        for run, found in turns.ask([name], "answer", tokens=tokens, logits=logits if name == _WHOLE else ""):
            run.tokens, run.digest = found["tokens"], found["digest"]
    work.done()
    work.at("timing")
    for _ in range(_ROUNDS):
        for run, found in turns.ask(names, "time", tokens=_TURN):
            run.spans += found["spans"]
    work.done()
    work.at("timing with files read from the drive")
    answer = shown.runs[_WHOLE].tokens
    _end(turns, [_WHOLE], answer, logits)  # its mapping would keep the model's file in the page cache
    others = [name for name in names if name != _WHOLE]
    for _ in range(_COLD_ROUNDS if shown.device == "cpu" else 0):
        for run, found in turns.ask(others, "time_cold", tokens=_COLD_TURN, directories=files):
            run.cold += found["spans"] if found["is_cold"] else []
            shown.stays_cached |= not found["is_cold"]
    _end(turns, others, answer, logits)
    work.done()


def _end(turns: _Turns, names: list[str], answer: list[int], logits: str) -> None:
    for run, found in turns.ask(names, "end", tokens=answer, logits=logits):
        run.peak, run.stats, run.kl = found["peak"], found.get("stats"), found.get("kl")


class _Process:
    """A contender's process. A context manager: its end ends the process."""

    def __init__(self, name: str, errors: Path) -> None:
        waits = {"OMP_WAIT_POLICY": "passive"}  # threads that spin for work take the cores from those that read pages
        self._name, self._errors = name, errors
        with errors.open("wb") as stderr:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "vbrt.integrations.showcase"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                text=True,
                env=waits | dict(os.environ) | {"PYTHONWARNINGS": "ignore"},
            )

    def say(self, value: Any) -> None:
        """Send the arguments of its `Contender`, then [method, {arguments}]."""
        with contextlib.suppress(BrokenPipeError):  # `answer` says why
            self._process.stdin.write(json.dumps(value) + "\n")
            self._process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        """Return the next answer. Raises VBError: the process ended without one."""
        line = self._process.stdout.readline()
        if line:
            return json.loads(line)
        code = self._process.wait()
        lines = self._errors.read_text(errors="replace").splitlines()
        why = [line.strip() for line in lines if line.strip()][-1:]
        if code < 0:
            why = [f"signal {-code}"]
            why += ["the system was out of memory, it seems"] if code == -signal.SIGKILL else []
        raise VBError(f"the process for {self._name!r} ended: {'; '.join(why) or f'exit code {code}'}")

    def __enter__(self) -> "_Process":
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()  # it ends with its input
        try:
            self._process.wait(5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


# -- printing ---------------------------------------------------------------------------------------------------------


def _print_runs(console: Console, shown: _Shown) -> bool:
    """Print a row for each contender, and what follows; return True if bits that must agree do not."""
    size, count = format_bytes(shown.model["bytes"]), shown.model["parameters"] / 1e6
    where = "on the GPU" if shown.device != "cpu" else f"by {shown.threads} threads"
    console.print(f"{shown.model['name']}: {size}, {count:.0f} M weights, one token after the other {where}\n")
    _print_answers(console, shown)
    on_cpu = shown.device == "cpu"
    heads = ["", f">{'memory' if on_cpu else 'GPU memory'}", ">load s", ">ms a token", *[">cold"] * on_cpu, "answer"]
    table = table_of(*heads)
    for name in (*shown.runs, *shown.absent):
        title = name if name in (_WHOLE, _FP4) else f"{name}, {format_bytes(shown.budget)}"
        if name in shown.absent:
            add_row(table, title, *["–"] * (len(heads) - 2), shown.absent[name])
        else:
            add_row(table, title, *_cells(shown, name))
    console.print(table)
    for note in _notes(shown):
        console.print(note, soft_wrap=True)
    failed = any(run.lossless and not shown.same(name) for name, run in shown.runs.items())
    console.print(f"\n{_verdict(shown)}", style="bold red" if failed else "bold green", soft_wrap=True)
    return failed


def _print_answers(console: Console, shown: _Shown) -> None:
    if not shown.texts:
        return
    console.print(f"> {_QUESTION}")
    for text in dict.fromkeys(shown.texts.values()):
        who = ", ".join(name for name, said in shown.texts.items() if said == text)
        console.print(f"{text} …  [dim]({who})[/dim]", markup=True, soft_wrap=True)
    console.print()


def _cells(shown: _Shown, name: str) -> list[str]:
    run = shown.runs[name]
    cells = [format_bytes(shown.memory(name)), f"{run.load_s:.1f}", f"{run.token_s * 1e3:.0f}"]
    if shown.device == "cpu":
        cells.append("–" if run.cold_s is None else f"{run.cold_s * 1e3:.0f}")
    if name == _WHOLE:
        return [*cells, f"bits {run.digest[:12]}"]
    return [*cells, "the same bits" if shown.same(name) else _difference(run, shown.runs[_WHOLE].tokens)]


def _difference(run: _Run, whole: list[int]) -> str:
    at = next((at for at, (a, b) in enumerate(zip(run.tokens, whole, strict=True)) if a != b), None)
    parts = "the same tokens" if at is None else f"parts at token {at + 1}"
    return f"other bits, {parts}" + ("" if run.kl is None else f", KL {run.kl:.2g} nats a token")


def _notes(shown: _Shown) -> Iterator[str]:
    yield ""
    if shown.device == "cpu":
        yield "memory: the most that a process held for the model, pages mapped from files included"
        if shown.stays_cached:
            yield (
                "cold: not measured, the system keeps these files in memory; name a --directory on a drive, and be on "
                "Linux"
            )
        else:
            yield "cold: the files were evicted from the page cache before every token"
    yield f"ms: medians of {_ROUNDS} turns of {_TURN - 1} tokens; `vbrt stats` shows what each tier did"
    if _FP4 in shown.runs:
        yield (
            f"\nfp4: {shown.runs[_WHOLE].token_s / shown.runs[_FP4].token_s:.1f} times as fast as the whole model, in "
            f"{shown.memory(_FP4) / shown.memory(_WHOLE):.0%} of its memory, with weights rounded to 4 bits"
        )


def _verdict(shown: _Shown) -> str:
    """Say what vbrt takes of the memory and the time of the others, whichever is less."""
    ours, whole = shown.runs[shown.ours], shown.runs[_WHOLE]
    bits = "the same answer, bit for bit" if shown.same(shown.ours) else _difference(ours, whole.tokens)
    text = f"{shown.ours}: {bits}, in {shown.memory(shown.ours) / max(1, shown.memory(_WHOLE)):.0%} of the memory"
    peer = shown.runs.get(_PEER)
    if peer is None:
        return f"{text}, in {ours.token_s / whole.token_s:.1f} times the time of the whole model"
    share = ours.token_s / peer.token_s
    text += f", in {share:.2f} of accelerate's time"
    shares = [share]
    if ours.cold_s is not None and peer.cold_s is not None:
        shares.append(ours.cold_s / peer.cold_s)
        text += f" ({shares[1]:.2f} with cold files)"
    return text if max(shares) <= 1 else f"{text}: more, on this machine"
