"""`vbrt bench`: measures attention kernels, torch.compile and memory options on this machine."""

import argparse
import contextlib
import json
from collections.abc import Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from vbrt.cli.options import add_command, add_model, integration, locate_model, numbers, positive
from vbrt.cli.plots import bars, check_plot
from vbrt.cli.screen import add_row, console_for_stdout, table_of, warnings_as_lines, working
from vbrt.errors import VBError
from vbrt.residency.byte_text import format_bytes

if TYPE_CHECKING:
    from torch import nn

    from vbrt.estimation.advice.option_measurements import Measured

__all__ = ["add"]

_LENGTHS = (256, 1024)  # attention lengths
_WHY = 44  # characters of a reason in the table; --json has all


def add(commands: argparse._SubParsersAction) -> None:
    """Add `vbrt bench` to the subparsers `commands` of the command line."""
    parser = add_command(
        commands,
        "bench",
        _bench,
        help="measure attention kernels, torch.compile or memory options on this machine",
        text="Medians\nafter a warm-up call, synchronized; the first call is separate.",
        examples="  vbrt bench attention --lengths 512,2048,8192 --plot attention.svg\n"
        "  vbrt bench compile ./Llama-3.2-1B --batch 4 --context 512\n"
        "  vbrt bench memory ./config.json --batch 2 --context 256\n",
    )
    parser.add_argument("what", choices=("attention", "compile", "memory"))
    add_model(
        parser,
        "of compile and memory: a model directory or config.json, of which the weights are random (default: a Llama of "
        "40 M parameters)",
        metavar="MODEL|HF_CONFIG",
        nargs="?",
    )
    parser.add_argument("--batch", type=positive, default=1, metavar="N", help="(1)")
    parser.add_argument("--context", type=positive, default=256, metavar="N", help="tokens of each (256)")
    parser.add_argument("--lengths", type=numbers, metavar="N,N", help="of attention (256,1024)")
    parser.add_argument("--heads", type=positive, default=16, metavar="N", help="of attention (16)")
    parser.add_argument("--width", type=positive, default=64, metavar="N", help="of a head (64)")
    parser.add_argument("--dtype", choices=("bfloat16", "float16", "float32"), default="bfloat16")
    parser.add_argument("--backward", action="store_true", help="of attention: with its backward pass")
    parser.add_argument("--times", type=positive, default=7, metavar="N", help="measured calls (7)")
    parser.add_argument("--json", action="store_true", help="the rows as JSON")
    parser.add_argument("--plot", metavar="FILE", type=Path, help="the rows as bars, .svg or .png; needs matplotlib")


def _check(args: argparse.Namespace) -> None:
    """Raise VBError for options of another measurement."""
    if args.what == "attention" and args.model is not None:
        raise VBError(f"bench attention takes no model; leave {args.model} out, and give --heads and --width")
    if args.what != "attention" and args.lengths is not None:
        raise VBError(f"bench {args.what}: --lengths applies to attention only; expected --context")
    if 0 in (args.lengths or ()):
        raise VBError("bench attention: a length of 0; expected 1 token or more")


def _bench(args: argparse.Namespace) -> int:
    _check(args)
    if args.plot is not None:
        check_plot(args.plot)
    if args.model is not None:
        locate_model(args, "config")
    with working("importing torch") as say, warnings_as_lines(), _unadvised(args):
        rows = []
        for row in _rows(args):
            say(f"measured {row.case}")
            rows.append(row)
    if args.json:
        print(json.dumps([asdict(row) for row in rows], indent=2))
    else:
        _show(rows)
    if args.plot is not None:
        _plot(rows, args.plot)
    return 0


def _unadvised(args: argparse.Namespace) -> "contextlib.AbstractContextManager[None]":
    return contextlib.nullcontext() if args.what == "attention" else integration("hf_configs").unadvised()


def _rows(args: argparse.Namespace) -> "Iterable[Measured]":
    import torch

    from vbrt.estimation.advice import option_measurements
    from vbrt.estimation.memory.task import Task

    dtype = getattr(torch, args.dtype)
    if args.what == "attention":
        sizes = {"batch": args.batch, "heads": args.heads, "width": args.width, "times": args.times}
        return option_measurements.attention(args.lengths or _LENGTHS, dtype=dtype, backward=args.backward, **sizes)
    if args.what == "compile":
        task = Task("prefill", args.batch, args.context)
        return option_measurements.compiling(_model(args.model, dtype), task, times=args.times)
    return option_measurements.memory(_model(args.model, torch.float32), Task("train", args.batch, args.context))


def _model(path: Path | None, dtype: object) -> "nn.Module":
    """Return a model with random weights on the measuring device."""
    import torch

    from vbrt.estimation.advice.option_measurements import device

    hf_configs = integration("hf_configs")
    if path is not None:
        model = hf_configs.meta_model(path)
    else:
        import transformers

        shape = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 8, "num_attention_heads": 8}
        with torch.device("meta"):
            model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=8192, **shape))
    config = model.config
    with torch.device(device()):
        return type(model)(config).to(dtype)


def _show(rows: "list[Measured]") -> None:
    table = table_of("", ">ms", ">of the first", ">peak", ">first call")
    known = next((row for row in rows if row.ms), None)
    for row in rows:
        if row.ms is None:
            add_row(table, row.case, "-", "", "", f"not available: {row.why}"[:_WHY])
        else:
            of = f"{row.ms / known.ms:.2f}×"
            add_row(table, row.case, f"{row.ms:.2f}", of, format_bytes(row.peak_bytes), f"{row.first_s:.2f} s")
    console_for_stdout().print(table)


def _plot(rows: "list[Measured]", path: Path) -> None:
    bars(path, [("", {row.case: {"ms": row.ms} for row in rows if row.ms is not None})], "ms, median")
