"""The pages of documentation and the blocks of code in them, and how each kind of block is tried.

A page may begin with `<!-- setup: name -->`: a function of `tests/docs/setups.py` that puts tiny models under the names
that the page uses. Its blocks share one scope and one working directory, and run in order:

    ```python    runs
    ```sh        commands of vbrt run, in this process; others are looked up: is there such a script, such an option?
    ```toml      is taken for a config
    ```json      is parsed
    ```py        lines of other libraries: parsed only
    ```diff      lines of Python before and after: parsed only
    ```text      what somebody sees: nothing to try

A comment in the line above a fence says what differs, and why: `<!-- gpu: why -->` runs on a GPU only,
`<!-- parsed: why -->` not at all, `<!-- needs: package -->` where there is that package. A page without a setup has
nothing that runs, and may have no block of Python.
"""

import ast
import importlib.util
import json
import re
import shlex
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vbrt.cli import main as cli
from vbrt.config import load_config

__all__ = ["PAGES", "ROOT", "Block", "Page"]

ROOT = Path(__file__).parent.parent.parent
#: name -> path, of all pages that people write
PAGES = {
    str(path.relative_to(ROOT)): path for path in (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
}  # fmt: skip
_SETUP = re.compile(r"^<!-- setup: (\w+) -->$", re.M)
_FENCE = re.compile(r"(?:^<!-- (gpu|parsed|needs): ([^\n]+) -->\n)?^( *)```(\w*)[^\n]*\n(.*?)^\3```$", re.M | re.S)
_INDENTED = re.compile(r"(?<=\n\n)((?:    \S[^\n]*\n(?:    [^\n]*\n)*)+)")
_PROGRAMS = ("cd", "curl", "git", "pip", "python", "llama-cli", "echo", "kill", "ssh", "scripts/", "examples/")


@dataclass(frozen=True, slots=True)
class Block:
    """A fenced block.

    Attributes:
        mark: "gpu", "parsed", "needs", or "" for a block that runs anywhere.
        why: the reason of the mark, or the package.
        line: of the page, where its text begins.
    """

    language: str
    text: str
    line: int
    mark: str = ""
    why: str = ""

    def can_run(self, gpu: bool) -> bool:
        """True where there is what it needs."""
        if self.mark == "needs":
            return importlib.util.find_spec(self.why) is not None
        return self.mark != "parsed" and (gpu or self.mark != "gpu")


class Page:
    """A page and its blocks, in order."""

    def __init__(self, name: str) -> None:
        self.name, self._source = name, PAGES[name].read_text("utf-8")
        found = _SETUP.search(self._source)
        self.setup = found[1] if found else None
        self.blocks = [self._block(match) for match in _FENCE.finditer(self._source)]
        rest = _FENCE.sub(lambda match: "\n" * match[0].count("\n"), self._source)
        self.blocks += [
            Block(
                "sh", match[1].replace("\n    ", "\n").strip() + "\n", rest[: match.start()].count("\n") + 1, "parsed"
            )
            for match in _INDENTED.finditer(rest)
            if match[1].strip().startswith(("vbrt ", *_PROGRAMS))
        ]

    def _block(self, match: re.Match[str]) -> Block:
        line = self._source[: match.start(5)].count("\n")
        text = re.sub(f"^{match[3]}", "", match[5], flags=re.M)
        return Block(match[4], text, line, match[1] or "", match[2] or "")

    def where(self, block: Block) -> str:
        """Return where a block is, for messages."""
        return f"{self.name}:{block.line}"

    def run(self, scope: dict[str, Any], *, gpu: bool) -> None:
        """Try all blocks, in the working directory; what needs a GPU only if there is one."""
        for block in self.blocks:
            runs = self.setup is not None and block.can_run(gpu)
            match block.language:
                case "python" | "py":
                    self._python(block, scope if runs and block.language == "python" else None)
                case "sh":
                    for command in commands(block.text):
                        self._command(command, self.where(block), runs=runs)
                case "toml":
                    load_config(tomllib.loads(block.text))
                case "json":
                    json.loads(block.text if block.text.lstrip()[0] in "[{" else f"{{{block.text}}}")
                case "diff":  # before and after
                    for sign in "-+":
                        ast.parse("\n".join(line[2:] for line in block.text.splitlines() if line[0] == sign))
                case "text":
                    pass
                case other:
                    raise AssertionError(f"{self.where(block)}: a block of {other!r}; see tests/docs/pages.py")

    def _python(self, block: Block, scope: dict[str, Any] | None) -> None:
        code = "\n" * block.line + block.text  # tracebacks name the line of the page
        if scope is None:
            ast.parse(code, self.name)
        else:
            exec(compile(code, str(PAGES[self.name]), "exec"), scope)

    def _command(self, command: list[str], where: str, *, runs: bool) -> None:
        """Run a command of vbrt, or see that it could be run."""
        if command[0] == "vbrt":
            if runs:
                code = cli.main(command[1:])
                assert code == 0, f"{where}: {shlex.join(command)} exits with {code}"
            else:
                cli._parser().parse_args(command[1:])  # exits with 2 for options that are not there
        elif command[0].startswith("scripts/"):
            _check_script(command, where)
        elif command[0] == "python" and command[1].endswith(".py"):
            assert (ROOT / command[1]).exists(), f"{where}: there is no {command[1]}"
        else:
            assert command[0].startswith(_PROGRAMS), f"{where}: {command[0]}: what is this? see tests/docs/pages.py"


def commands(text: str) -> list[list[str]]:
    """Return the commands of a block of shell, word by word; of a pipe, each part."""
    found = []
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        words = words[1:] if words[:1] == ["$"] else words
        while words:
            end = words.index("|") if "|" in words else len(words)
            part, words = words[:end], words[end + 1 :]
            while part and re.fullmatch(r"[A-Z_]+=\S*", part[0]):
                part = part[1:]  # VARIABLE=value command
            found.append(part)
    return [command for command in found if command]


def _check_script(command: list[str], where: str) -> None:
    """The script exists, and the sources of scripts know each of its options."""
    script = ROOT / command[0]
    assert script.exists(), f"{where}: there is no {command[0]}"
    name = script.name.replace("-", "_").removesuffix(".py")
    sources = "".join(path.read_text("utf-8") for path in sorted((ROOT / "scripts").glob(f"{name}*")))
    sources += "".join(path.read_text("utf-8") for path in sorted((ROOT / "vbrt" / "cli").glob(f"{name}.py")))
    sources += (ROOT / "tests" / "cost.py").read_text("utf-8") if name == "test" else ""
    for word in command[1:]:
        option = word.partition("=")[0]
        known = option in sources or option.lstrip("-").replace("-", "_") in sources
        assert not word.startswith("--") or known, f"{where}: {command[0]} has no option {option}"
