"""`vbrt run`: wrap a causal language model, continue a prompt, show the stats."""

import argparse
import contextlib
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vbrt.cli.options import add_command, add_config, config_of, integration, positive
from vbrt.cli.screen import Spinner, complain, console_for_stdout, without_warnings_of_wrap, working
from vbrt.cli.stats import keep_stats
from vbrt.errors import VBError
from vbrt.report.drawing import check_timeline_path

__all__ = ["add"]


def add(commands: Any) -> None:
    """Add `vbrt run` to the subparsers `commands` of the command line."""
    parser = add_command(
        commands,
        "run",
        _run,
        help="wrap a causal language model, continue a prompt, show the stats",
        text="Greedy, and the\nprompt is taken as it is.",
        examples='  vbrt run ./Llama-3.1-8B "The sea is"\n'
        '  vbrt run ./Llama-3.1-8B "The sea is" --config my.toml --max-new-tokens 200\n'
        '  vbrt run ./Llama-3.1-8B "The sea is" --set tiers.ssd.enabled=true --set tiers.ssd.path=/nvme\n'
        '  vbrt run ./Qwen3-30B-A3B "The sea is" --timeline run.html\n'
        "  echo The sea is | vbrt run ./Llama-3.1-8B - --json\n",
    )
    parser.add_argument("model", metavar="MODEL_DIR", type=Path, help="a directory with config, weights and tokenizer")
    parser.add_argument("prompt", help='the text to continue; "-" reads it from stdin')
    add_config(parser)
    parser.add_argument("--max-new-tokens", metavar="N", type=positive, default=64, help="stop after N tokens (64)")
    parser.add_argument(
        "--timeline", metavar="FILE", type=Path, help="record it as .html to look at, or .json to trace"
    )
    parser.add_argument("--json", action="store_true", help="text and stats as JSON")


def _run(args: argparse.Namespace) -> int:
    config = config_of(args)
    prompt = sys.stdin.read().rstrip("\n") if args.prompt == "-" else args.prompt
    if not prompt:
        raise VBError("the prompt is empty; expected some text to continue")
    if args.timeline:
        check_timeline_path(args.timeline)  # before anything takes time
    with working("importing torch and transformers") as say:
        huggingface = integration("huggingface")
        from vbrt.wrapper.wrap import wrap

        say(f"loading {args.model}")
        model, tokenizer = huggingface.load_causal_lm(args.model, warn=lambda text: complain("warning", text))
    with without_warnings_of_wrap():
        vb = wrap(model, config)
    for text in vb.plan.warnings:
        complain("warning", text)
    with vb:
        vb.materialize(progress=sys.stderr.isatty())
        with working("generating") as spinner:
            speak = None if args.json else _Speaker(prompt, spinner)
            with vb.timeline(args.timeline) if args.timeline else contextlib.nullcontext():
                reply = huggingface.generate(vb, tokenizer, prompt, max_new_tokens=args.max_new_tokens, say=speak)
        stats = vb.stats()
        keep_stats(vb.stats(experts=True))
    if args.json:
        print(json.dumps({"prompt": prompt, **asdict(reply), "stats": stats.to_dict()}, indent=2))
        return 0
    console = console_for_stdout()
    rate = reply.new_tokens / reply.seconds if reply.seconds else 0.0
    console.print(
        f"\n\n{reply.prompt_tokens} tokens read, {reply.new_tokens} written in {reply.seconds:.1f} s: "
        f"{rate:.1f} tokens/s\n"
    )
    console.print(stats)
    return 0


class _Speaker:
    """Writes text to stdout as it comes, after the prompt, and ends the spinner before the first piece."""

    def __init__(self, prompt: str, spinner: "Spinner") -> None:
        self._before, self._spinner = prompt, spinner

    def __call__(self, text: str) -> None:
        self._spinner.stop()
        sys.stdout.write(self._before + text)
        sys.stdout.flush()
        self._before = ""
