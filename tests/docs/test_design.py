"""The design page and the packages' docstrings name files that exist, and packages in the order of their imports."""

import ast
import re

import pytest

from tests.docs.pages import ROOT

PACKAGE = ROOT / "vbrt"
DESIGN = (ROOT / "docs" / "design.md").read_text("utf-8")
PACKAGES = sorted(path for path in PACKAGE.rglob("__init__.py") if path.parent != PACKAGE)
#: room -> its sub-packages, as the page's table has them
ORDER = {
    room: re.findall(r"`(\w+)`", packages)
    for room, packages in re.findall(r"^\| `(\w+)` \|[^|]*\| (`[^|]+) \|$", DESIGN, re.M)
}  # fmt: skip


def missing(text, *bases):
    """Backticked paths of Python files that lie below none of the folders."""
    paths = re.findall(r"`([\w./-]+\.py)`", text)
    return [path for path in paths if not any((base / path).is_file() for base in bases)]


def test_every_python_file_that_the_design_page_names_exists():
    assert "`layers/weights/state.py`" in DESIGN
    assert missing(DESIGN, PACKAGE, ROOT) == []


@pytest.mark.parametrize("path", PACKAGES, ids=lambda path: str(path.parent.relative_to(PACKAGE)))
def test_every_python_file_that_a_package_names_exists(path):
    text = ast.get_docstring(ast.parse(path.read_text("utf-8"))) or ""
    assert missing(text, path.parent, PACKAGE, ROOT) == []


def test_a_file_that_does_not_exist_is_found():
    assert missing("`layers/weight.py`, `layers/weights/state.py`", PACKAGE) == ["layers/weight.py"]


def test_the_table_has_every_sub_package():
    there = {path.parent.relative_to(PACKAGE).parts for path in PACKAGES}
    assert {(room, package) for room in ORDER for package in ORDER[room]} == {
        parts for parts in there if len(parts) == 2
    }


@pytest.mark.parametrize("room", ORDER)
def test_sub_packages_import_from_those_before_them(room):
    for at, package in enumerate(ORDER[room]):
        source = "".join(path.read_text("utf-8") for path in sorted((PACKAGE / room / package).rglob("*.py")))
        imported = set(re.findall(rf"^\s*from vbrt\.{room}\.(\w+)", source, re.M)) & set(ORDER[room])
        assert imported <= set(ORDER[room][: at + 1]), package
