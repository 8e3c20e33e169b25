"""Files about a release say the same version and date, and the package's metadata is complete."""

import re
import tomllib

from tests.docs.pages import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]


def test_the_changelog_the_citation_and_the_metadata_agree():
    changes, citation = ((ROOT / name).read_text("utf-8") for name in ("CHANGELOG.md", "CITATION.cff"))
    released, date = re.search(r"^## \[([\d.]+)\] - ([\d-]+)$", changes, re.M).groups()
    assert released == PROJECT["version"]
    assert f"\nversion: {released}\n" in citation and f"\ndate-released: {date}\n" in citation
    assert f"license: {PROJECT['license']}\n" in citation


def test_triton_comes_with_torch_on_linux_and_with_vbrt_on_windows():
    named = [requirement for requirement in PROJECT["dependencies"] if "triton" in requirement]
    assert [requirement.partition(";")[2].strip() for requirement in named] == ["sys_platform == 'win32'"]
    assert PROJECT["optional-dependencies"]["cuda"] == ["triton>=3.6; sys_platform == 'linux'"]


def test_commands_and_files_that_contributors_are_told_of_exist():
    text = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    paths = re.findall(r"`?((?:scripts|docs|tests|benchmarks)/[\w./-]*)", text)
    assert len(paths) > 10 and [path for path in paths if not (ROOT / path.rstrip(".")).exists()] == []
