"""`vbrt batch`: answer the prompts of a file, many at once, into a file that grows as they end."""

import argparse
import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

from vbrt.cli.open_model import add_talking, add_together, load_model, turn_of
from vbrt.cli.options import add_command, config_of, integration
from vbrt.cli.screen import complain, working
from vbrt.errors import VBError, describe_os_error

__all__ = ["add"]

_LONGEST_LINE = 64 << 20
_Turns = list[dict[str, str]]


def add(commands: Any) -> None:
    """Add `vbrt batch` to the subparsers `commands` of the command line."""
    parser = add_command(
        commands,
        "batch",
        _run,
        help="answer the prompts of a file, many at once, into another file",
        text='Each line of PROMPTS is\nJSON: a text, {"prompt": text} or {"messages": [{"role": ..., "content": '
        '...}]}, with an "id" if\nyou like (else the number of the line). Each answer becomes a line of OUT as it '
        "ends: id, text,\nnumbers of tokens, and whether it stopped or was cut. Called again, it goes on with what is "
        "missing.",
        examples="  vbrt batch ./Llama-3.1-8B-Instruct prompts.jsonl out.jsonl --gpu-memory 8GB\n"
        "  vbrt batch smollm2 prompts.jsonl out.jsonl --max-new-tokens 32 --sequences 16\n",
    )
    add_talking(parser, max_new_tokens=256, raw="prompts as they are")
    parser.add_argument("prompts", metavar="PROMPTS", type=Path, help="a file of JSON lines")
    parser.add_argument("out", metavar="OUT", type=Path, help="the file to write, or to go on with")
    add_together(parser)


def _run(args: argparse.Namespace) -> int:
    config_of(args)  # report its errors before any slow work
    asked = _prompts_of(args.prompts)
    done = _done_in(args.out, asked)
    left = {name: turns for name, turns in asked.items() if name not in done}
    if not left:
        complain("done", f"{args.out} has all {len(asked)} answers")
        return 0
    if done:
        complain("going on", f"{args.out} has {len(done)} of {len(asked)} answers")
    with _appending(args.out) as out:
        vb, tokenizer = load_model(args)
        with vb:
            return _answer(vb, tokenizer, left, out, args)


def _answer(vb: Any, tokenizer: Any, left: Mapping[str, _Turns], out: IO[bytes], args: argparse.Namespace) -> int:
    """Write an answer for each prompt; return 1 if some have none."""
    batches, text_generation = integration("batches"), integration("text_generation")
    conversation = text_generation.Conversation(vb, tokenizer, templated=not args.raw)
    prompts = {name: conversation.prompt_ids(turns) for name, turns in left.items()}
    begun, new, ended, failed = time.perf_counter(), 0, 0, 0
    try:
        with working(f"{len(prompts)} prompts") as say:
            many = batches.generate_many(vb, prompts, turn_of(args), args.sequences, kv_bits=args.kv or 16)
            for name, tokens, error in many:
                answer = {"error": error} if error else _told(conversation, tokens, args.max_new_tokens)
                _write(out, {"id": json.loads(name), "prompt_tokens": len(prompts[name]), **answer}, args.out)
                ended, new, failed = ended + 1, new + len(tokens), failed + bool(error)
                rate = new / (time.perf_counter() - begun)
                say(f"{ended} of {len(prompts)} answered, {rate:.0f} tokens/s")
    except KeyboardInterrupt:
        complain("interrupted", f"{ended} of {len(prompts)} are in {args.out}; the same command goes on")
        return 130
    seconds = time.perf_counter() - begun
    text = f"{ended} prompts, {new} tokens in {seconds:.1f} s, {new / seconds:.1f} tokens/s"
    complain("done", f"{text}; {failed} failed, see {args.out}: the same command tries them again" if failed else text)
    return 1 if failed else 0


def _told(conversation: Any, tokens: list[int], most: int) -> dict[str, Any]:
    finish = "length" if len(tokens) >= most else "stop"
    return {"text": conversation.text_of(tokens), "new_tokens": len(tokens), "finish": finish}


# -- files ------------------------------------------------------------------------------------------------------------


def _prompts_of(path: Path) -> dict[str, _Turns]:
    """Return the turns of each prompt, by its id as JSON. Raises VBError that names the line."""
    found: dict[str, _Turns] = {}
    lines: dict[str, int] = {}
    for number, value in _lines_of(path):
        name, turns = _prompt_of(value, number, path)
        if name in found:
            raise VBError(
                f"{path}:{number}: the id {name} is that of line {lines[name]}, too; expected ids of their own"
            )
        found[name], lines[name] = turns, number
    if not found:
        raise VBError(f"{path}: no prompts; expected a line of JSON for each")
    return found


def _prompt_of(value: Any, number: int, path: Path) -> tuple[str, _Turns]:
    where = f"{path}:{number}"
    if isinstance(value, str):
        value = {"prompt": value}
    if not isinstance(value, dict) or ("prompt" in value) == ("messages" in value):
        raise VBError(f'{where}: expected a text, {{"prompt": text}} or {{"messages": [...]}}')
    turns = value["messages"] if "messages" in value else [{"role": "user", "content": value["prompt"]}]
    texts = isinstance(turns, list) and all(
        isinstance(turn, dict) and all(isinstance(turn.get(key), str) for key in ("role", "content")) for turn in turns
    )
    if not texts or not turns or not any(turn["content"] for turn in turns):
        raise VBError(f'{where}: expected a prompt with text, or messages with a "role" and a "content" of text')
    name = value.get("id", number)
    if not isinstance(name, str | int) or isinstance(name, bool):
        raise VBError(f"{where}: the id is {json.dumps(name)}; expected a text or a whole number")
    return json.dumps(name), [{"role": turn["role"], "content": turn["content"]} for turn in turns]


def _lines_of(path: Path) -> Iterator[tuple[int, Any]]:
    """Yield the number and the value of each line of JSON that is not empty. Raises VBError that names the line."""
    try:
        with path.open("rb") as file:
            for number, line in enumerate(iter(lambda: file.readline(_LONGEST_LINE), b""), 1):
                if line.strip():
                    try:
                        yield number, json.loads(line)
                    except ValueError as error:
                        raise VBError(f"{path}:{number}: no JSON: {error}") from error
    except OSError as error:
        raise VBError(f"{path}: cannot be read: {describe_os_error(error)}") from error


def _done_in(path: Path, asked: Mapping[str, Any]) -> set[str]:
    """Return the ids that have an answer in a file of answers, after its broken last line is cut off."""
    if not path.exists():
        return set()
    _cut_broken_line(path)
    done = set()
    for number, value in _lines_of(path):
        name = json.dumps(value.get("id")) if isinstance(value, dict) else ""
        if name not in asked:
            raise VBError(f"{path}:{number}: no answer to these prompts; name another file, or remove this one")
        if "error" not in value:
            done.add(name)
    return done


def _cut_broken_line(path: Path) -> None:
    """Cut off a last line without an end, which a process that was killed has left."""
    try:
        with path.open("r+b") as file:
            data = file.read()
            end = data.rfind(b"\n") + 1
            if end < len(data):
                file.truncate(end)
    except OSError as error:
        raise VBError(f"{path}: cannot be written: {describe_os_error(error)}") from error


def _appending(path: Path) -> IO[bytes]:
    try:
        return path.open("ab", buffering=0)  # a buffer that a full drive has refused would be written again by close()
    except OSError as error:
        raise VBError(f"{path}: cannot be written: {describe_os_error(error)}") from error


def _write(out: IO[bytes], answer: Mapping[str, Any], path: Path) -> None:
    """Write one line. Raises VBError: the drive is full, or gone; the next call cuts off what there is of the line."""
    left = memoryview(json.dumps(answer, ensure_ascii=False).encode() + b"\n")
    try:
        while left:
            left = left[out.write(left) :]
    except OSError as error:
        raise VBError(
            f"{path}: {describe_os_error(error)}; what is in it stays, and the same command goes on"
        ) from error
