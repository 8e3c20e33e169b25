"""`vbrt run`: wrap a causal language model, continue a prompt, show the stats."""

import argparse
import contextlib
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vbrt.cli.open_model import add_talking, load_model, tokens_of, turn_of
from vbrt.cli.options import add_command, config_of, integration
from vbrt.cli.screen import console_for_stdout, working
from vbrt.cli.stats import keep_stats
from vbrt.cli.token_stream import Speaker, speaker_for
from vbrt.errors import VBError
from vbrt.report.timeline_files import check_timeline_path

if TYPE_CHECKING:
    from vbrt.wrapper.wrapper import VBModelWrapper

__all__ = ["add"]


def add(commands: Any) -> None:
    """Add `vbrt run` to the subparsers `commands` of the command line."""
    parser = add_command(
        commands,
        "run",
        _run,
        help="wrap a causal language model, continue a prompt, show the stats",
        text="Greedy;\nthe prompt goes through the model's chat template, if it has one. On a terminal a line below "
        "the\ntext shows the activity of each tier.",
        examples='  vbrt run smollm2 "What is the sea?"\n'
        '  vbrt run ./Llama-3.1-8B "The sea is" --gpu-memory 8GB\n'
        '  vbrt run Qwen/Qwen3-0.6B "The sea is"\n'
        '  vbrt run ./Llama-3.1-8B "The sea is" --config my.toml --max-new-tokens 200\n'
        '  vbrt run ./Llama-3.1-8B "The sea is" --set tiers.ssd.enabled=true --set tiers.ssd.path=/nvme\n'
        '  vbrt run ./Qwen3-30B-A3B "The sea is" --timeline run.html\n'
        "  echo The sea is | vbrt run ./Llama-3.1-8B - --json\n",
    )
    add_talking(parser, max_new_tokens=64, raw="the prompt as it is")
    parser.add_argument("prompt", help='the text to continue; "-" reads it from stdin')
    parser.add_argument(
        "--timeline", metavar="FILE", type=Path, help="record it as .html to look at, or .json to trace"
    )
    parser.add_argument("--json", action="store_true", help="text and stats as JSON")


def _run(args: argparse.Namespace) -> int:
    config_of(args)  # report its errors before reading stdin
    prompt = sys.stdin.read().rstrip("\n") if args.prompt == "-" else args.prompt
    if not prompt:
        raise VBError("the prompt is empty; expected some text to continue")
    if args.timeline:
        check_timeline_path(args.timeline)  # before any slow work
    vb, tokenizer = load_model(args)
    with vb:
        conversation = integration("text_generation").Conversation(vb, tokenizer, templated=not args.raw)
        before = "" if conversation.templated else prompt
        with working("generating") as spinner, _recording(vb, args.timeline):
            speaker = _Unheard() if args.json else speaker_for(vb.stats, spinner, before)
            with speaker:
                reply = conversation.say(prompt, turn_of(args), speaker)
        stats = vb.stats()
        keep_stats(vb.stats(experts=True))
    if args.json:
        print(json.dumps({"prompt": prompt, **asdict(reply), "stats": stats.to_dict()}, indent=2))
        return 0
    console = console_for_stdout()
    console.print(f"\n\n{tokens_of(reply)}\n")
    console.print(stats)
    return 0


class _Unheard(Speaker):
    def _show(self, text: str) -> None:
        pass


def _recording(vb: "VBModelWrapper", path: Path | None) -> contextlib.AbstractContextManager[object]:
    return vb.timeline(path) if path else contextlib.nullcontext()
