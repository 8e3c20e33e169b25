"""`vbrt precision`: chooses lossless, 8-bit or 4-bit by layer, within a budget."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from vbrt.cli.options import add_command, add_config, check_config_file, config_of, integration, positive, write_config
from vbrt.cli.screen import console_for_stdout, working
from vbrt.config import VBConfig, parse_weights_budget
from vbrt.errors import VBError, describe_os_error
from vbrt.host.safe_files import read_bounded
from vbrt.integrations.model_paths import model_path

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

__all__ = ["add"]

_MAX_TEXT_BYTES = 64 << 20


def add(commands: argparse._SubParsersAction) -> None:
    """Add `vbrt precision` to the subparsers `commands` of the command line."""
    parser = add_command(
        commands,
        "precision",
        _precision,
        help="choose which layers are lossless, in 8 bits or in 4, within a budget",
        text="The model\nis loaded into host memory, and runs twice for each layer, on the GPU where there is one.",
        examples='  vbrt precision ./Llama-3.1-8B --budget "6 bits"\n'
        "  vbrt precision ./Llama-3.1-8B --budget 8GiB --text notes.txt --write my.toml\n"
        "  vbrt run ./Llama-3.1-8B --config my.toml\n",
    )
    parser.add_argument("model", metavar="MODEL_DIR", type=Path, help="a transformers model directory")
    parser.add_argument(
        "--budget", metavar="SIZE", help='of all pages: bits a weight ("6 bits"), or bytes ("8GiB"); or weights.budget'
    )
    parser.add_argument("--text", type=Path, metavar="FILE", help="measure on this text (default: the model's own)")
    parser.add_argument("--sequences", type=positive, default=8, metavar="N", help="of the text (8)")
    parser.add_argument("--length", type=positive, default=512, metavar="N", help="tokens of each (512)")
    parser.add_argument("--method", choices=("kl", "hessian"), default="kl", help="hessian is faster and rougher (kl)")
    parser.add_argument("--write", type=Path, metavar="FILE", help="write the config, with the reasons")
    add_config(parser)


def _precision(args: argparse.Namespace) -> int:
    config = config_of(args)
    _budget(args, config)
    if args.write is not None:
        check_config_file(args.write)  # before any slow work
    text = None if args.text is None else _text(args.text)
    model_path(args.model)  # before seconds of imports
    with working("importing torch and transformers") as say:
        from vbrt.estimation.precision.choose_precision import choose_precision

        causal = integration("causal_models")
        say(f"loading {args.model}")
        model, tokenizer = causal.load_dense(args.model)
        say.stop()  # measuring has its own bar
        sequences = None if text is None else _sequences(text, tokenizer, args)
        choice = choose_precision(model, sequences, args.budget, config, method=args.method)
    console_for_stdout().print(str(choice), soft_wrap=True, markup=False)
    if args.write is not None:
        write_config(args.write, choice.to_toml())
    return 0


def _budget(args: argparse.Namespace, config: VBConfig) -> None:
    """Check the budget before any slow work."""
    if args.budget is None and config.weights.budget is None:
        raise VBError('no budget: give --budget, bits a weight, e.g. "6 bits", or bytes, e.g. "8GiB"')
    parse_weights_budget(args.budget or config.weights.budget, where="--budget")


def _text(path: Path) -> str:
    try:
        return read_bounded(path, _MAX_TEXT_BYTES).decode("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = describe_os_error(error) if isinstance(error, OSError) else "it is not UTF-8"
        raise VBError(f"{path}: cannot be read: {reason}; expected a text file") from error


def _sequences(text: str, tokenizer: "PreTrainedTokenizerBase", args: argparse.Namespace) -> "list[torch.Tensor]":
    """Return a text's first sequences, as token ids [1, S]; the last may be shorter."""
    ids = tokenizer(text, return_tensors="pt", verbose=False)["input_ids"]
    return [part for part in ids.split(args.length, 1)[: args.sequences] if part.shape[1] > 1]
