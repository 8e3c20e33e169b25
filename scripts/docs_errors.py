"""Every message with which vbrt raises an error on purpose, under its topic of docs/troubleshooting.md.

    python scripts/docs_errors.py                 messages that belong to no topic: none, and tests see to that
    python scripts/docs_errors.py "fit into"      messages with these words, and their topics

A topic is a section of the page. It says cause and remedy in words, and ends with a comment that has a regular
expression, in whose place the site has the list:

    <!-- messages: ConfigError config/ -->

A message belongs to the first topic whose expression is found in "Class module: message", such as "ConfigError
config/files: …: no such file; expected a TOML file". `…` stands for what is known only when it happens. The messages
come from the source.
"""

import ast
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from vbrt import errors

PAGE = ROOT / "docs" / "troubleshooting.md"
CLASSES = tuple(name for name in errors.__all__ if name.endswith("Error"))
_TOPIC = re.compile(r"<!-- messages: ([^\n]+) -->")
_LONGEST = 400


class Message(NamedTuple):
    """What is raised: the class's name, the module's path in vbrt/, the text."""

    raised: str
    module: str
    text: str

    def __str__(self) -> str:
        return f"{self.raised} {self.module}: {self.text}"


@cache
def messages(source: Path = ROOT / "vbrt") -> list[Message]:
    """Return all messages in the modules below a directory, sorted; names are looked up in their function."""
    found = set()
    for path in source.rglob("*.py"):
        module = str(path.relative_to(source).with_suffix(""))
        for scope, call in _calls(ast.parse(path.read_text("utf-8"))):
            found |= {Message(_name(call.func), module, text) for text in _texts(call.args[0], scope)}
    return sorted(found, key=lambda message: (message.raised, message.text))


def _calls(tree: ast.AST, scope: ast.AST | None = None) -> Iterator[tuple[ast.AST, ast.Call]]:
    """Yield each call of an error's class that has a message, with the function around it."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.Call) and _name(node.func) in CLASSES and node.args:
            yield scope or tree, node
        yield from _calls(node, node if isinstance(node, ast.FunctionDef) else scope or tree)


def _name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""


def _texts(node: ast.expr, scope: ast.AST) -> list[str]:
    """Return what the expression of a message may say."""
    if isinstance(node, ast.IfExp):
        return [*_texts(node.body, scope), *_texts(node.orelse, scope)]
    if isinstance(node, ast.Name):
        assigned = [
            one.value
            for one in ast.walk(scope)
            if isinstance(one, ast.Assign) and any(_name(target) == node.id for target in one.targets)
        ]
        return [text for value in assigned for text in _texts(value, ast.Module([], []))] or ["…"]
    return [_pattern(node)]


def _pattern(node: ast.expr) -> str:
    """Return a string expression with `…` for what it takes from elsewhere."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return re.sub("…+", "…", "".join(map(_pattern, parts)))
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return _pattern(left) + _pattern(right)
    return "…"


def by_topic(page: str, found: list[Message]) -> tuple[dict[str, list[Message]], list[Message]]:
    """Return the messages of each topic of a page, by its expression, and those that belong to none."""
    topics: dict[str, list[Message]] = {expression: [] for expression in _TOPIC.findall(page)}
    left = []
    for message in found:
        mine = next((topic for topic in topics if re.search(topic, str(message))), None)
        (left if mine is None else topics[mine]).append(message)
    return topics, left


def with_lists(page: str) -> str:
    """Return the page with a list of messages in the place of each topic's expression."""
    topics, _ = by_topic(page, messages())
    return _TOPIC.sub(lambda match: "".join(_rows(topics[match[1]])), page)


def _rows(found: list[Message]) -> Iterator[str]:
    """One bullet for each text."""
    for raised, text in dict.fromkeys((message.raised, message.text) for message in found):
        line = " ".join(text.split())
        if not re.search("[a-z]", line):
            continue  # put together elsewhere, from messages that are listed, or of names alone
        line = line if len(line) <= _LONGEST else line[:_LONGEST].rpartition(" ")[0] + " …"
        ticks = "``" if "`" in line else "`"
        yield f"- {raised}: {ticks}{line}{ticks}\n"


def main(words: str = "") -> int:
    """Print the messages with these words and their topics, or those without a topic; 1 if there are some of these."""
    page = PAGE.read_text("utf-8")
    topics, left = by_topic(page, messages())
    for title, expression in re.findall(r"^## ([^\n]+)\n(?:(?!^## ).)*?" + _TOPIC.pattern, page, re.M | re.S):
        shown = [f"  {message}" for message in topics[expression] if words and words in message.text]
        print(*([title, *shown] if shown else []), sep="\n", end="\n" if shown else "")
    for message in left:
        print(f"no topic of {PAGE.name} for: {message}", file=sys.stderr)
    return 1 if left else 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:2]))
