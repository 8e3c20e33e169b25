"""docs/environment.md has every environment variable that the package reads or sets, and no other."""

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
PAGE = (ROOT / "docs" / "environment.md").read_text("utf-8")
_NAME = re.compile(r"[A-Z][A-Z0-9]*(?:_[A-Z0-9]+)+|CC|CPATH|COLUMNS|RANK")
_READERS = ("environ", "environment", "_launched", "_ENVIRONMENT", "_ALLOCATOR")


def named_by(source: str) -> set[str]:
    """Names of variables in a file: VBRT_*, and words in capitals in statements that touch an environment."""
    found: set[str] = set()
    for node in ast.parse(source).body:
        words = {each.id for each in ast.walk(node) if isinstance(each, ast.Name)}
        words |= {each.attr for each in ast.walk(node) if isinstance(each, ast.Attribute)}
        texts = {
            each.value for each in ast.walk(node) if isinstance(each, ast.Constant) and isinstance(each.value, str)
        }
        found |= {text for text in texts if re.fullmatch("VBRT_[A-Z_]+", text)}
        if words.intersection(_READERS):
            found |= {text for text in texts if _NAME.fullmatch(text)}
    return found


def read() -> set[str]:
    sources = (path.read_text("utf-8") for path in (ROOT / "vbrt").rglob("*.py"))
    return set().union(*(named_by(source) for source in sources if re.search("environ|VBRT_", source)))


def of_scripts() -> set[str]:
    files = [ROOT / "hatch_build.py", *(path for path in (ROOT / "scripts").iterdir() if path.is_file())]
    return {name for path in files for name in re.findall("VBRT_[A-Z_]+", path.read_text("utf-8", "replace"))}


def test_the_page_has_every_variable_and_no_other():
    listed = {
        name
        for text in re.findall("`([^`]+)`", re.sub("(?s)```.*?```", "", PAGE))
        for name in _NAME.findall(text.partition("=")[0])
    }
    assert read() - listed == set()
    assert listed - read() - of_scripts() == set()


def test_a_variable_that_is_read_is_found():
    assert named_by('def f():\n    return os.environ.get("CC", "") or os.environ["SOME_THING"]') == {"CC", "SOME_THING"}
    assert named_by('_NAME = "VBRT_NEW"\nA = "NOT_ONE"') == {"VBRT_NEW"}
