"""Which test files a change touches, nearest first: edited, in the room of an edited file, importing an edited file.

    scripts/touched.py [BASE]      prints `path: reason` for each, and on stderr what was compared
    scripts/touched.py --others    all test files: after those, the others in an order that the commit draws

BASE is by default where HEAD left origin/main or main, else the commit before HEAD; a clone of one commit fetches one
more. Where there is nothing to compare with, every test file counts as touched.
"""

import ast
import hashlib
import subprocess
import sys
from collections.abc import Collection, Mapping
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
EVERYWHERE = ("pyproject.toml", "tests/conftest.py", "tests/cost.py", "tests/matrix.py")
FRONT_DOOR = "vbrt/__init__.py"  # names everything, so that importing it tells nothing
ROOMS = {"configs": "config", "docs": "docs", "examples": "docs"}  # folders that are another room's


def git(*arguments: str) -> str | None:
    """Return what git prints; None where it refuses."""
    done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False, timeout=60)
    return done.stdout.strip() if done.returncode == 0 else None


def find_base() -> tuple[str | None, str]:
    """Return the commit to compare with, if there is one, and how it was chosen."""
    head = git("rev-parse", "HEAD")
    for branch in ("origin/main", "main"):
        base = git("merge-base", "HEAD", branch)
        if base and base != head:
            return base, f"where HEAD left {branch}"
    if git("rev-parse", "--verify", "HEAD~1") is None:
        git("fetch", "--quiet", "--deepen=1")
    base = git("rev-parse", "--verify", "HEAD~1")
    return base, "the commit before HEAD" if base else "this clone has one commit and cannot fetch another"


def read_sources() -> dict[str, str]:
    """Return the text of each Python file by its path."""
    paths = (path for room in ("vbrt", "scripts", "tests") for path in sorted((ROOT / room).rglob("*.py")))
    return {path.relative_to(ROOT).as_posix(): path.read_text("utf-8") for path in paths}


def touched(changed: Collection[str], sources: Mapping[str, str]) -> dict[str, str]:
    """Return test file -> reason, nearest first."""
    tests = [path for path in sources if Path(path).name.startswith("test_")]
    reasons = {path: "edited" for path in tests if path in changed}
    for path in changed:
        near = tests if path in EVERYWHERE else _tests_of_room(path, tests)
        reasons |= {test: f"{path} is edited" for test in near if test not in reasons}
    imports = _imports(sources)
    reached, level = set(changed), set(changed) - {FRONT_DOOR}
    while level:
        further = {path: sorted(imports[path] & level) for path in sources if path not in reached}
        further = {path: targets for path, targets in further.items() if targets}
        reasons |= {p: f"imports {targets[0]}" for p, targets in further.items() if p in tests and p not in reasons}
        reached |= further.keys()
        level = further.keys() - {FRONT_DOOR}
    return reasons


def _tests_of_room(path: str, tests: Collection[str]) -> list[str]:
    """Return the tests of the innermost folder that mirrors the one `path` is in."""
    if Path(path).name.startswith("test_"):
        return []
    top, *folders = Path(path).parts[:-1] or ("",)
    folders = [ROOMS[top]] if top in ROOMS else folders if top in ("vbrt", "tests") else []
    for depth in range(len(folders), 0, -1):
        if near := [test for test in tests if test.startswith("/".join(["tests", *folders[:depth], ""]))]:
            return near
    return []


def _imports(sources: Mapping[str, str]) -> dict[str, set[str]]:
    """Return path -> paths that it imports, or starts as a script that it names."""
    by_name = {path.removesuffix(".py").removesuffix("/__init__").replace("/", "."): path for path in sources}
    found: dict[str, set[str]] = {}
    for path, text in sources.items():
        names: set[str] = set()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Import):
                names.update(alias.name for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module:
                names.update((node.module, *(f"{node.module}.{alias.name}" for alias in node.names)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.endswith(".py"):
                names.add(node.value.removesuffix(".py").replace("/", "."))  # "scripts/fuzz.py"
        found[path] = {by_name[name] for name in names if name in by_name} - {path}
    return found


def others(found: Collection[str], sources: Collection[str], commit: str) -> list[str]:
    """Return the test files that are not among those found, in an order that the commit draws."""
    left = (path for path in sources if Path(path).name.startswith("test_") and path not in found)
    return sorted(left, key=lambda path: hashlib.sha256(f"{commit} {path}".encode()).digest())


def main(arguments: list[str]) -> None:
    with_others = "--others" in arguments
    arguments = [argument for argument in arguments if argument != "--others"]
    base, chosen = (arguments[0], "as told") if arguments else find_base()
    sources, commit = read_sources(), git("rev-parse", "HEAD") or ""
    if base is None:
        print(f"touched: {chosen}: every test file counts", file=sys.stderr)
        found = dict.fromkeys(others((), sources, commit), "nothing to compare with")
    else:
        changed = (git("diff", "--name-only", base) or "").splitlines()
        print(f"touched: {len(changed)} files differ from {base[:12]} ({chosen})", file=sys.stderr)
        found = touched(changed, sources)
    if with_others:
        found |= dict.fromkeys(others(found, sources, commit), "by turns")
    for path, reason in found.items():
        print(f"{path}: {reason}")


if __name__ == "__main__":
    main(sys.argv[1:])
