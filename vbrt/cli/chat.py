"""`vbrt chat`: a conversation with a causal language model, line by line."""

import argparse
import contextlib
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from vbrt.cli.open_model import add_talking, load_model, tokens_of, turn_of
from vbrt.cli.options import add_command, integration
from vbrt.cli.screen import complain, console_for_stdout, working
from vbrt.cli.stats import keep_stats
from vbrt.cli.token_stream import speaker_for
from vbrt.errors import VBError

if TYPE_CHECKING:
    from vbrt.integrations.text_generation import Conversation, Turn
    from vbrt.wrapper.wrapper import VBModelWrapper

__all__ = ["add"]

_HELP = "/reset forgets the conversation, /history shows it, /stats shows the counters, /exit or Ctrl-D ends"


def add(commands: Any) -> None:
    """Add `vbrt chat` to the subparsers `commands` of the command line."""
    parser = add_command(
        commands,
        "chat",
        _chat,
        help="talk with a causal language model",
        text="Lines from stdin; each is a turn, in the model's\nchat template, if it has one. Ctrl-C stops a reply, a "
        f"second one ends the program.\n{_HELP}.",
        examples="  vbrt chat smollm2\n"
        "  vbrt chat ./Llama-3.1-8B-Instruct\n"
        "  vbrt chat ./Llama-3.1-8B-Instruct --config exact --gpu-memory 8GB --context 8192\n"
        "  vbrt chat ./Llama-3.1-8B-exact --system 'You are brief.' --sample\n",
    )
    add_talking(parser, max_new_tokens=512)
    parser.add_argument("--system", metavar="TEXT", help="system message before the first turn")


def _chat(args: argparse.Namespace) -> int:
    vb, tokenizer = load_model(args)
    with vb:
        conversation = integration("text_generation").Conversation(vb, tokenizer, system=args.system)
        if not conversation.templated:
            complain("note", f"{args.name} has no chat template: the text so far is continued")
        if sys.stdin.isatty():
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401 - arrow keys and earlier lines in input()
            complain("note", _HELP)
        try:
            return _Session(vb, conversation, turn_of(args)).run()
        finally:
            keep_stats(vb.stats(experts=True))


class _Session:
    """Reads and answers lines until the end of input."""

    def __init__(self, vb: "VBModelWrapper", conversation: "Conversation", turn: "Turn") -> None:
        self._vb, self._conversation, self._turn = vb, conversation, turn
        self._commands: dict[str, Callable[[], object]] = {
            "/reset": conversation.reset,
            "/history": self._show_history,
            "/stats": lambda: console_for_stdout().print(vb.stats()),
            "/help": lambda: complain("note", _HELP),
        }

    def run(self) -> int:
        """Answer lines; return the exit code. Raises KeyboardInterrupt: a second Ctrl-C without a line in between."""
        stopped = False
        while True:
            try:
                line = input("> " if sys.stdin.isatty() else "").strip()
            except EOFError:
                return 0
            except KeyboardInterrupt:
                if stopped:
                    raise
                stopped = True
                sys.stdout.write("\n")
                complain("note", "Ctrl-C once more ends; so does Ctrl-D")
                continue
            if line in ("/exit", "/quit"):
                return 0
            stopped = bool(line) and self._answer(line)

    def _answer(self, line: str) -> bool:
        """Run a command, or send the line to the model; True if the reply was stopped."""
        if line.startswith("/"):
            command = self._commands.get(line)
            command() if command else complain("error", f"{line}: no such command; {_HELP}")
            return False
        try:
            with working("reading") as spinner, speaker_for(self._vb.stats, spinner, stoppable=True) as speaker:
                reply = self._conversation.say(line, self._turn, speaker)
        except VBError as error:
            complain("error", error)
            return False
        sys.stdout.write("\n")
        sys.stdout.flush()
        complain("stopped" if reply.stopped else "note", tokens_of(reply))
        return reply.stopped

    def _show_history(self) -> None:
        for turn in self._conversation.turns:
            print(f"{turn['role']}: {turn['content']}")
