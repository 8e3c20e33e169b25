"""`vbrt convert`: a checkpoint into a save of planes, weight by weight, resumable."""

import argparse
import shlex
import sys
import time
from pathlib import Path
from typing import Any

from vbrt.cli.open_model import add_dtype, dtype_of, settled_config
from vbrt.cli.options import add_command, add_config, config_of, integration
from vbrt.cli.screen import complain, warnings_as_lines, working
from vbrt.integrations.model_paths import model_path
from vbrt.residency.plan import format_bytes

__all__ = ["add"]


def add(commands: Any) -> None:
    """Add `vbrt convert` to the subparsers `commands` of the command line."""
    parser = add_command(
        commands,
        "convert",
        _convert,
        help="write the planes of a checkpoint, for vbrt run, chat and load to start from",
        text="Weights are\nread, encoded and written one after the other; the model is never in memory as a whole. "
        "Interrupted\nor out of space, the same command resumes at the first unfinished file. Tokenizer and config "
        "are\ncopied along.",
        examples="  vbrt convert ./Llama-3.1-8B ./Llama-3.1-8B-exact --config exact\n"
        "  vbrt convert ./Qwen3-30B-A3B /nvme/qwen-fp4\n"
        "  vbrt convert ./Llama-3.1-8B-Q4_0.gguf ./Llama-3.1-8B-q4\n"
        "  vbrt run /nvme/qwen-fp4 'The sea is'\n",
    )
    parser.add_argument("model", metavar="MODEL", type=Path, help="a directory with config and weights, or a GGUF file")
    parser.add_argument("out", metavar="OUT", type=Path, help="a new directory, or that of an interrupted conversion")
    add_config(parser)
    add_dtype(parser)
    parser.add_argument(
        "--overwrite", action="store_true", help="start over, and replace an existing save once the new one is complete"
    )


def _convert(args: argparse.Namespace) -> int:
    config_of(args)  # report its errors before any slow work
    model_path(args.model)  # before seconds of imports
    with working("importing torch and transformers") as say:
        hf_configs = integration("hf_configs")
        from vbrt.saves.convert.convert import convert
        from vbrt.saves.load.sources import open_source

        say(f"reading {args.model}")
        model = hf_configs.meta_model(args.model, dtype_of(args))
        source = open_source(args.model)
        config = source.config(settled_config(args), {})
        companions = integration("causal_models").companions_of(args.model, model.config)
    start = time.perf_counter()
    try:
        with warnings_as_lines():
            out = convert(source, model, config, args.out, overwrite=args.overwrite, complete=companions)
    except KeyboardInterrupt:
        complain("note", f"finished files stay in {args.out}; the same command resumes there")
        raise
    written = sum(file.stat().st_size for file in out.glob("*.safetensors"))
    seconds = time.perf_counter() - start
    then = shlex.join(["vbrt", "run", str(out), "The sea is"])
    sys.stdout.write(f"{out}: {format_bytes(written)} of weights in {seconds:.1f} s; {then}\n")
    return 0
